// cusim.h: what kernels.cu needs to be compiled as ordinary C++ and to run on the processor, for tests. Each CUDA
// thread is a fiber; a block's fibers run on one thread of the operating system, one block after the other.
//
// What it finds: a missing barrier (by the order of lanes, CUSIM_ORDER=fwd|rev|a number, and by clang's thread
// sanitizer), shared memory that is read before it is written (it is filled with NaN), device memory that the host
// touches (it is protected), divergent barriers and shuffles (a message and abort), launches that a device refuses, and
// with the address sanitizer every access outside an allocation. What it cannot find: races between blocks, weak
// memory, what registers and time cost.
#ifndef CUSIM_H
#define CUSIM_H

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "control.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#undef __global__
#undef __shared__
#undef __device__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#define __global__ __attribute__((unused))
#define __device__
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#if defined(__SANITIZE_ADDRESS__)
#define __shared__ static // red zones around each array
#else
#define __shared__ static __attribute__((section("cusim_shared"))) // filled with NaN before each block
#endif
#define CUSIM_NO_TSAN __attribute__((no_sanitize("thread")))

namespace cusim {

struct fiber;
struct context {
    uint3 thread, block;
    dim3 block_dim, grid_dim;
    fiber *self;
};
extern context *current; // of the CUDA thread that runs

enum operation { SHUFFLE, SYNCWARP };
typedef void (*combine_fn)(void *lane[32], uint32_t mask);

void collective(operation, uint32_t mask, void *data, combine_fn); // returns when all live lanes of mask are there
void barrier();
void *dynamic_shared();
void launch(const char *name, dim3 grid, dim3 block, size_t shared, cudaStream_t, std::function<void()> thread);
[[noreturn]] void fail(const char *format, ...);

inline int lane() { return int(current->thread.x + current->block_dim.x * current->thread.y) & 31; }

template <class T> struct shuffle_slot {
    T value, out;
    int from;
};

template <class T> CUSIM_NO_TSAN T shuffle(uint32_t mask, T value, int from) {
    shuffle_slot<T> slot{value, value, from};
    collective(SHUFFLE, mask, &slot, [](void *l[32], uint32_t m) CUSIM_NO_TSAN {
        for (int i = 0; i < 32; i++)
            if (m >> i & 1) {
                shuffle_slot<T> *s = static_cast<shuffle_slot<T> *>(l[i]);
                if (l[s->from])
                    s->out = static_cast<shuffle_slot<T> *>(l[s->from])->value;
                else // a lane that is not there: undefined
                    memset(static_cast<void *>(&s->out), 0xff, sizeof(T));
            }
    });
    return slot.out;
}

template <class TO, class FROM> TO bits(FROM f) {
    static_assert(sizeof(TO) == sizeof(FROM), "");
    TO t;
    memcpy(&t, &f, sizeof t);
    return t;
}

} // namespace cusim

#define threadIdx (cusim::current->thread)
#define blockIdx (cusim::current->block)
#define blockDim (cusim::current->block_dim)
#define gridDim (cusim::current->grid_dim)

#define LAUNCH(kernel, grid, block, shared, stream, args)                                                              \
    cusim::launch(#kernel, grid, block, shared, stream, [kernel, args] { kernel(args); })
#define DYN_SHARED(T, name) T *name = static_cast<T *>(cusim::dynamic_shared())

inline void __syncthreads() { cusim::barrier(); }
inline void __syncwarp(uint32_t mask = ~0u) {
    char c;
    cusim::collective(cusim::SYNCWARP, mask, &c, [](void **, uint32_t) {});
}
template <class T> T __shfl_sync(uint32_t mask, T v, int from) { return cusim::shuffle(mask, v, from & 31); }
template <class T> T __shfl_xor_sync(uint32_t mask, T v, int x) { return cusim::shuffle(mask, v, cusim::lane() ^ x); }

inline float __uint_as_float(uint32_t u) { return cusim::bits<float>(u); }
inline uint32_t __float_as_uint(float f) { return cusim::bits<uint32_t>(f); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline int __float2int_rn(float f) { return int(lrintf(f)); }
template <class T> T __ldg(const T *p) { return *p; }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t s) {
    return uint32_t((uint64_t(high) << 32 | low) >> (s & 31));
}
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8)
        c += int8_t(a >> i) * int8_t(b >> i);
    return c;
}
inline int __vsub4(int a, int b) { // bytes, each by itself
    uint32_t r = 0;
    for (int i = 0; i < 32; i += 8)
        r |= uint32_t(uint8_t((a >> i) - (b >> i))) << i;
    return int(r);
}
template <class T> T max(T a, T b) { return a < b ? b : a; }
template <class T> T min(T a, T b) { return b < a ? b : a; }

#endif
