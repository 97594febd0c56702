// kernels.cu: the CUDA backend: kernels, and the functions that fill the table of backend.h.   MIT licence, see
// LICENSE.
//
// CONTENTS
//   1. BASICS      what differs between nvcc and the simulator; small device functions
//   2. MATMUL      activations, few rows (_vec), many rows (_mm)
//   3. ATTEND      the cache, attention
//   4. ROWS        everything that works on rows by themselves
//   5. BACKEND     memory, launches, graphs
//   6. OPERATIONS  the table
//
// CONVENTIONS
//   - A kernel takes one struct, its arguments. Operations do not launch; they append to a list, which runs when the
//   host
//     wants something (put, get, copy, sync). A list that comes a second time becomes a CUDA graph, so a decode step is
//     one launch: its arguments hold no position.
//   - Integer products equal the CPU's bit for bit: the same activations, exact sums in a block, the same order of the
//     eight partial sums (chapter QUANTS of engine.cpp). So do float products, with their sixteen. A result never
//     depends on how many rows are in the call.
//   - Everything is compiled by nvcc with -fmad=false, and by g++ through tests/cusim. Fused operations are written
//   out.
#include "backend.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define LAUNCH(kernel, grid, block, shared, stream, args) kernel<<<grid, block, shared, stream>>>(args)
#define DYN_SHARED(T, name)                                                                                            \
    extern __shared__ __align__(16) unsigned char dynamic_shared[];                                                    \
    T *name = reinterpret_cast<T *>(dynamic_shared)
#else
#include "tests/cusim/cusim.h"
#endif

namespace {

// ---------------------------------------------------------------------------------------------------
// 1. BASICS

enum { ALL = -1 }; // every lane of a warp

#define DEVICE static __device__ __forceinline__

// The columns of the format table for templates.
template <int TYPE> struct traits;
#define TRAITS_ROW(name, id, block, bytes, sub, act, mins)                                                             \
    template <> struct traits<id> {                                                                                    \
        enum { BLOCK = block, BYTES = bytes, SUB = sub, ACT = act, MINS = mins };                                      \
    };
Q_FORMATS(TRAITS_ROW)
#undef TRAITS_ROW

DEVICE float warp_sum(float v) {
    for (int i = 16; i > 0; i /= 2)
        v += __shfl_xor_sync(uint32_t(ALL), v, i);
    return v;
}

DEVICE float half_at(const uint8_t *p) { return __half2float(*reinterpret_cast<const __half *>(p)); }

// N words from an address that is a multiple of 2. Up to 3 bytes on either side are read as well.
template <int N> DEVICE void load_words(const uint8_t *p, int *w) {
    const uint32_t shift = uint32_t(reinterpret_cast<uintptr_t>(p) & 3) * 8;
    const uint32_t *from = reinterpret_cast<const uint32_t *>(reinterpret_cast<uintptr_t>(p) & ~uintptr_t(3));
    uint32_t low = __ldg(from);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const uint32_t high = __ldg(from + i + 1);
        w[i] = int(__funnelshift_r(low, high, shift));
        low = high;
    }
}

// a - b in each byte, for bytes below 128, without borrowing from the next.
DEVICE int byte_minus(int a, int b) { return int(((uint32_t(a) | 0x80808080u) - uint32_t(b)) ^ 0x80808080u); }

// e^x as the CPU backend computes it.
DEVICE float exact_exp(float x) {
    const float round = 12582912.0f;
    x = x > 89.0f ? 89.0f : x;
    x = x < -105.0f ? -105.0f : x;
    const float shifted = fmaf(x, 1.44269504f, round), n = __fadd_rn(shifted, -round);
    const float r = fmaf(n, 1.90465421e-09f, fmaf(n, -0.693147182f, x));
    float p = fmaf(r, 1.39269268e-3f, 8.36377405e-3f);
    p = fmaf(r, p, 4.16665487e-2f);
    p = fmaf(r, p, 0.166665733f);
    p = fmaf(r, p, 0.5f);
    p = fmaf(r * r, p, r) + 1.0f;
    const uint32_t whole = __float_as_uint(shifted) - __float_as_uint(round), half = uint32_t(int(whole) >> 1);
    return p * __uint_as_float((half + 127) << 23) * __uint_as_float((whole - half + 127) << 23);
}

DEVICE float exact_tanh(float x) {
    const float a = fabsf(x), z = x * x;
    float p = fmaf(z, -6.09670812e-3f, 2.09971741e-2f);
    p = fmaf(z, p, -5.38509078e-2f);
    p = fmaf(z, p, 0.133327693f);
    p = fmaf(z, p, -0.333333284f);
    const float large = 1.0f - 2.0f / (exact_exp(a + a) + 1.0f);
    return a <= 0.625f ? x * fmaf(z, p, 1.0f) : copysignf(large, x);
}

// ---------------------------------------------------------------------------------------------------
// 2. MATMUL
//
// Quantized weights. Four lanes share a block, eight blocks are in work at a time, so the lanes of quarter g hold the
// partial sum p[g] of the CPU's order, and a butterfly over the quarters is its tree. The _mm kernel, for many rows,
// keeps weights and activations of 256 values of K in shared memory as bytes, and all eight partial sums of its
// outputs in registers.
//
// Float weights: sixteen lanes hold the sixteen partial sums, each for a tile of outputs.

enum { VEC_WARPS = 4, MM_ROWS = 64, MM_X = 32, MM_THREADS = 512, MM_FROM = 9, MAX_ITEMS = 3 };

// A row of activations: int8 [n_in], float dx [n_block], int16 sums of 16 values each [n_in / 16].
struct act_layout {
    int d_at, s_at, stride, n_block;
};

struct quantize_args {
    const float *x;
    uint8_t *out;
    act_layout act;
    int n_rows, n_in, n_unit; // units: blocks of all rows of all groups
    int64_t ld_x;
};

// A warp per block.
template <int BLOCK> static __global__ __launch_bounds__(128) void quantize(quantize_args a) {
    enum { N = BLOCK / 32 }; // consecutive values of a lane
    const int lane = threadIdx.x & 31, unit = int(blockIdx.x) * VEC_WARPS + int(threadIdx.x >> 5);
    if (unit >= a.n_unit)
        return;
    const int b = unit % a.act.n_block, row = unit / a.act.n_block, k = b * BLOCK + lane * N;
    const float *x = a.x + row % a.n_rows * a.ld_x + int64_t(row / a.n_rows) * a.n_in + k;
    float v[N];
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        v[i] = x[i];
        amax = max(amax, __float_as_uint(v[i]) & 0x7fffffffu);
    }
    for (int i = 16; i > 0; i /= 2)
        amax = max(amax, __shfl_xor_sync(uint32_t(ALL), amax, i));
    const float top = __uint_as_float(amax);
    float dx = __uint_as_float(0x7fc00000u), factor = 0.0f;
    if (amax < 0x7f800000u) {
        const bool zero = top < 7.888609052210118e-31f; // 2^-100
        dx = zero ? 0.0f : __fdiv_rn(top, 127.0f);
        factor = zero ? 0.0f : __fdiv_rn(127.0f, top);
    }
    uint8_t *out = a.out + int64_t(row) * a.act.stride;
    int sum = 0;
    uint32_t packed[N == 1 ? 1 : 2] = {};
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int q = factor == 0.0f ? 0 : __float2int_rn(__fmul_rn(v[i], factor));
        sum += q;
        packed[i / 4] |= uint32_t(q & 255) << (i % 4 * 8);
    }
    if (N == 1)
        out[k] = uint8_t(packed[0]);
    else
        *reinterpret_cast<uint2 *>(out + k) = make_uint2(packed[0], packed[N == 1 ? 0 : 1]);
    enum { LANES = 16 / N }; // that share a sum
    for (int i = LANES / 2; i > 0; i /= 2)
        sum += __shfl_xor_sync(uint32_t(ALL), sum, i);
    if (lane % LANES == 0)
        *reinterpret_cast<int16_t *>(out + a.act.s_at + (k / 16) * 2) = int16_t(sum);
    if (lane == 0)
        *reinterpret_cast<float *>(out + a.act.d_at + b * 4) = dx;
}

// A quarter of a block, unpacked: WORDS words of four quants each, which meet the activations' words word_at(part, i);
// the integer scales and minima of the sub-blocks that it has.
template <int TYPE> struct quarter {
    typedef traits<TYPE> T;
    enum { WORDS = T::BLOCK / 16, SUBS = T::BLOCK == 256 ? 64 / T::SUB : 1 };
    int w[WORDS], sc[SUBS], mn[SUBS];
    float d, dmin;

    DEVICE int word_at(int part, int i) {
        return T::BLOCK == 256 ? part * 16 + i : TYPE == TYPE_Q4_0 ? part + i * 4 : part * 2 + i;
    }
    __device__ __forceinline__ void load(const uint8_t *at, int part) {
        if constexpr (TYPE == TYPE_Q8_0) {
            load_words<2>(at + 2 + part * 8, w);
            d = half_at(at);
        } else if constexpr (TYPE == TYPE_Q4_0) {
            int v;
            load_words<1>(at + 2 + part * 4, &v);
            for (int i = 0; i < 2; i++)
                w[i] = byte_minus(v >> (i * 4) & 0x0f0f0f0f, 0x08080808);
            d = half_at(at);
        } else if constexpr (TYPE == TYPE_Q4_K || TYPE == TYPE_Q5_K) {
            const uint4 head = __ldg(reinterpret_cast<const uint4 *>(at)); // d, dmin, twelve bytes of scales and minima
            const uint4 *q = reinterpret_cast<const uint4 *>(at + (TYPE == TYPE_Q4_K ? 16 : 48) + part * 32);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint4 v = __ldg(q + h);
                const uint32_t n[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    w[h * 4 + i] = int(n[i] & 0x0f0f0f0fu);
                    w[h * 4 + i + 8] = int(n[i] >> 4 & 0x0f0f0f0fu);
                }
                if constexpr (TYPE == TYPE_Q5_K) {
                    const uint4 f = __ldg(reinterpret_cast<const uint4 *>(at + 16) + h);
                    const uint32_t m[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const uint32_t fifth = m[i] >> (part * 2);
                        w[h * 4 + i] |= int(fifth << 4 & 0x10101010u);
                        w[h * 4 + i + 8] |= int(fifth << 3 & 0x10101010u);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int bit = (part & 1) * 16 + i * 8;
                if (part < 2) {
                    sc[i] = int(head.y >> bit & 63u);
                    mn[i] = int(head.z >> bit & 63u);
                } else {
                    sc[i] = int((head.w >> bit & 15u) | (head.y >> bit >> 6 & 3u) << 4);
                    mn[i] = int((head.w >> bit >> 4 & 15u) | (head.z >> bit >> 6 & 3u) << 4);
                }
            }
            d = __half2float(__ushort_as_half(uint16_t(head.x)));
            dmin = __half2float(__ushort_as_half(uint16_t(head.x >> 16)));
        } else if constexpr (TYPE == TYPE_Q6_K) {
            const int odd = part & 1, half = part >> 1;
            int two[8], scales;
            load_words<16>(at + half * 64, w);
            load_words<8>(at + 128 + half * 32, two);
            load_words<1>(at + 192 + part * 4, &scales);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const uint32_t high = uint32_t(two[i & 7]) >> (odd * 4 + (i >> 3) * 2) & 0x03030303u;
                w[i] = byte_minus(int((uint32_t(w[i]) >> (odd * 4) & 0x0f0f0f0fu) | high << 4), 0x20202020);
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
                sc[i] = (signed char)(scales >> (i * 8));
            d = half_at(at + 208);
        } else { // any other format, through the shared text
#pragma unroll
            for (int i = 0; i < WORDS; i++) {
                uint32_t v = 0;
                for (int j = 0; j < 4; j++)
                    v |= uint32_t(q_quant(TYPE, at, word_at(part, i) * 4 + j) & 255) << (j * 8);
                w[i] = int(v);
            }
            for (int i = 0; i < SUBS && T::BLOCK == 256; i++) {
                sc[i] = q_sub_scale(TYPE, at, part * SUBS + i);
                mn[i] = q_sub_min(TYPE, at, part * SUBS + i);
            }
            d = q_d(TYPE, at);
            dmin = q_dmin(TYPE, at);
        }
    }
    // Products with the same quarter of a block of activations.
    __device__ __forceinline__ int dot(const uint8_t *x, int part) const {
        int sum = 0;
        if constexpr (T::BLOCK == 32 && TYPE != TYPE_Q4_0) {
            const int2 v = *reinterpret_cast<const int2 *>(x + part * 8);
            sum = __dp4a(w[1], v.y, __dp4a(w[0], v.x, 0));
        } else if constexpr (T::BLOCK == 32) {
            for (int i = 0; i < 2; i++)
                sum = __dp4a(w[i], *reinterpret_cast<const int *>(x + word_at(part, i) * 4), sum);
        } else {
            enum { PER = T::SUB / 16 }; // groups of four words in a sub-block
            const int4 *v = reinterpret_cast<const int4 *>(x + part * 64);
#pragma unroll
            for (int s = 0; s < SUBS; s++) {
                int sub = 0;
#pragma unroll
                for (int i = s * PER; i < s * PER + PER; i++) {
                    const int4 u = v[i];
                    sub = __dp4a(w[i * 4], u.x, __dp4a(w[i * 4 + 1], u.y, sub));
                    sub = __dp4a(w[i * 4 + 2], u.z, __dp4a(w[i * 4 + 3], u.w, sub));
                }
                sum += sc[s] * sub;
            }
        }
        return sum;
    }
    // The part of the minima: of this quarter, or, where the block has one minimum, of the whole block.
    __device__ __forceinline__ int minimum(const int16_t *sums, int part) const {
        if constexpr (T::BLOCK == 32)
            return sums[0] + sums[1];
        int sum = 0;
        for (int s = 0; s < SUBS; s++) {
            const int16_t *of = sums + part * 4 + s * (T::SUB / 16);
            sum += mn[s] * (T::SUB == 16 ? of[0] : of[0] + of[T::SUB / 16 - 1]);
        }
        return sum;
    }
};

// One weight of a launch; up to three with the same rows of x share one.
struct matmul_item {
    const uint8_t *w;
    float *y;
    const float *bias;
    int64_t row_bytes;
    int n_out, ld_y, accumulate, first_tile;
};

struct matmul_args {
    const uint8_t *x; // activations, or floats
    int64_t x_group;  // bytes from group to group
    int64_t x_stride; // bytes from row to row
    act_layout act;
    int n_rows, n_in, n_group, n_item;
    matmul_item item[MAX_ITEMS];
};

// Which weight, group and first row a block works on, `rows` weight rows being a tile.
struct matmul_tile {
    matmul_item m;
    int group, first;
};

DEVICE matmul_tile find_tile(const matmul_args &a, int rows) {
    matmul_tile t;
    t.m = a.item[0];
#pragma unroll
    for (int i = 1; i < MAX_ITEMS; i++)
        if (i < a.n_item && int(blockIdx.x) >= a.item[i].first_tile)
            t.m = a.item[i];
    const int tile = int(blockIdx.x) - t.m.first_tile, per_group = (t.m.n_out + rows - 1) / rows;
    t.group = tile / per_group;
    t.first = tile % per_group * rows;
    return t;
}

DEVICE void put_result(const matmul_item &m, int group, int row, int t, float r) {
    const int64_t at = int64_t(group) * m.n_out + row;
    float *y = m.y + int64_t(t) * m.ld_y + at;
    const float v = m.bias ? r + m.bias[at] : r;
    *y = m.accumulate ? *y + v : v;
}

// A warp per weight row, C rows of x.
template <int TYPE, int C> static __global__ __launch_bounds__(VEC_WARPS * 32) void matmul_vec(matmul_args a) {
    typedef traits<TYPE> T;
    const matmul_tile tile = find_tile(a, VEC_WARPS);
    const int lane = threadIdx.x & 31, part = lane & 3, row = tile.first + int(threadIdx.x >> 5);
    if (row >= tile.m.n_out)
        return;
    const int t0 = int(blockIdx.y) * C, n_block = a.act.n_block;
    const uint8_t *w = tile.m.w + (int64_t(tile.group) * tile.m.n_out + row) * tile.m.row_bytes;
    // Rows beyond the last one repeat it. Offsets, since eight pointers would take sixteen registers.
    const uint8_t *x = a.x + tile.group * a.x_group + t0 * a.x_stride;
    int row_at[C];
    float p[C];
#pragma unroll
    for (int c = 0; c < C; c++) {
        row_at[c] = min(c, a.n_rows - 1 - t0) * a.act.stride;
        p[c] = 0.0f;
    }
#pragma unroll(T::BLOCK == 32 ? 4 : 1)
    for (int b0 = 0; b0 < n_block; b0 += 8) {
        const bool live = b0 + (lane >> 2) < n_block;
        const int b = live ? b0 + (lane >> 2) : n_block - 1;
        quarter<TYPE> q;
        q.load(w + int64_t(b) * T::BYTES, part);
#pragma unroll
        for (int c = 0; c < C; c++) {
            if (C > 4 && T::BLOCK == 256 && c == C / 2)
                __syncwarp(); // so that the compiler does not load all rows of x at once, for which registers are too
                              // few
            const uint8_t *xc = x + row_at[c];
            int dot = q.dot(xc + b * T::BLOCK, part), low = 0;
            dot += __shfl_xor_sync(uint32_t(ALL), dot, 1);
            dot += __shfl_xor_sync(uint32_t(ALL), dot, 2);
            if (T::MINS) {
                low = q.minimum(reinterpret_cast<const int16_t *>(xc + a.act.s_at) + b * (T::BLOCK / 16), part);
                if (T::BLOCK == 256) {
                    low += __shfl_xor_sync(uint32_t(ALL), low, 1);
                    low += __shfl_xor_sync(uint32_t(ALL), low, 2);
                }
            }
            if (live) {
                const float dx = reinterpret_cast<const float *>(xc + a.act.d_at)[b];
                p[c] = fmaf(q.d * dx, float(dot), p[c]);
                if (T::MINS)
                    p[c] = fmaf(T::BLOCK == 32 ? q.dmin * dx : -(q.dmin * dx), float(low), p[c]);
            }
        }
    }
#pragma unroll
    for (int c = 0; c < C; c++) {
        for (int i = 16; i >= 4; i /= 2)
            p[c] += __shfl_xor_sync(uint32_t(ALL), p[c], i);
        if (lane == 0 && t0 + c < a.n_rows)
            put_result(tile.m, tile.group, row, t0 + c, p[c]);
    }
}

template <int TYPE> DEVICE float float_at(const uint8_t *w, int64_t k) {
    if constexpr (TYPE == TYPE_F32)
        return __ldg(reinterpret_cast<const float *>(w) + k);
    else if constexpr (TYPE == TYPE_F16)
        return __half2float(reinterpret_cast<const __half *>(w)[k]);
    else
        return __uint_as_float(uint32_t(__ldg(reinterpret_cast<const uint16_t *>(w) + k)) << 16);
}

// Sixteen lanes for R weight rows and C rows of x.
template <int TYPE, int R, int C>
static __global__ __launch_bounds__(VEC_WARPS * 32) void matmul_floats(matmul_args a) {
    const matmul_tile tile = find_tile(a, VEC_WARPS * 2 * R);
    const int lane = threadIdx.x & 15, first = tile.first + int(threadIdx.x >> 4) * R, t0 = int(blockIdx.y) * C;
    const uint8_t *w[R];
    const float *x[C];
    float p[R][C];
#pragma unroll
    for (int r = 0; r < R; r++) {
        w[r] = tile.m.w + (int64_t(tile.group) * tile.m.n_out + min(first + r, tile.m.n_out - 1)) * tile.m.row_bytes;
        for (int c = 0; c < C; c++)
            p[r][c] = 0.0f;
    }
#pragma unroll
    for (int c = 0; c < C; c++)
        x[c] = reinterpret_cast<const float *>(a.x + tile.group * a.x_group + min(t0 + c, a.n_rows - 1) * a.x_stride);
#pragma unroll(R == 1 ? 8 : 2)
    for (int k = lane; k < a.n_in; k += 16) {
        float v[C];
#pragma unroll
        for (int c = 0; c < C; c++)
            v[c] = x[c][k];
#pragma unroll
        for (int r = 0; r < R; r++) {
            const float u = float_at<TYPE>(w[r], k);
#pragma unroll
            for (int c = 0; c < C; c++)
                p[r][c] = fmaf(u, v[c], p[r][c]);
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int c = 0; c < C; c++) {
            for (int i = 8; i > 0; i /= 2)
                p[r][c] += __shfl_xor_sync(uint32_t(ALL), p[r][c], i);
            if (lane == 0 && first + r < tile.m.n_out && t0 + c < a.n_rows)
                put_result(tile.m, tile.group, first + r, t0 + c, p[r][c]);
        }
}

// What a block of the _mm kernel has in shared memory. Rows of quants are 16 bytes longer than 256, so that they start
// in different banks.
template <int TYPE> struct mm_space {
    typedef traits<TYPE> T;
    enum { NB = 256 / T::BLOCK, SUBS = T::BLOCK == 256 ? 256 / T::SUB : 1, LD = 68, MINS = T::MINS };
    int ws[MM_ROWS][LD], xs[MM_X][LD];
    float wd[MM_ROWS][NB], xd[MM_X][NB], wm[MM_ROWS][MINS ? NB : 1];
    int16_t sums[MM_X][MINS ? 16 : 1];
    signed char sc[MM_ROWS][SUBS], mn[MM_ROWS][MINS ? SUBS : 1];
};

// 64 weight rows, 32 rows of x; a thread has 2 times 2 outputs.
template <int TYPE> static __global__ __launch_bounds__(MM_THREADS, 1) void matmul_mm(matmul_args a) {
    typedef traits<TYPE> T;
    typedef mm_space<TYPE> S;
    enum { NB = S::NB, SUBS = S::SUBS, R = 2, C = 2, STEP = MM_ROWS / R };
    DYN_SHARED(S, s);
    const matmul_tile tile = find_tile(a, MM_ROWS);
    const int tid = int(threadIdx.x), tx = tid & 15, ty = tid >> 4, t0 = int(blockIdx.y) * MM_X;
    const uint8_t *w = tile.m.w + int64_t(tile.group) * tile.m.n_out * tile.m.row_bytes;
    const uint8_t *x = a.x + tile.group * a.x_group;
    float p[R][C][8] = {};
    for (int b0 = 0; b0 < a.act.n_block; b0 += NB) {
        const int left = min(int(NB), a.act.n_block - b0);
        for (int u = tid; u < MM_ROWS * NB * 4; u += MM_THREADS) {
            const int part = u & 3, b = (u >> 2) % NB, r = u / (4 * NB);
            if (b >= left)
                continue;
            quarter<TYPE> q;
            q.load(w + min(tile.first + r, tile.m.n_out - 1) * tile.m.row_bytes + int64_t(b0 + b) * T::BYTES, part);
#pragma unroll
            for (int i = 0; i < q.WORDS; i++)
                s->ws[r][b * (T::BLOCK / 4) + q.word_at(part, i)] = q.w[i];
            if (part == 0) {
                s->wd[r][b] = q.d;
                if (T::MINS)
                    s->wm[r][b] = q.dmin;
            }
            for (int i = 0; i < q.SUBS && T::BLOCK == 256; i++) {
                s->sc[r][part * q.SUBS + i] = (signed char)(q.sc[i]);
                if (T::MINS)
                    s->mn[r][part * q.SUBS + i] = (signed char)(q.mn[i]);
            }
        }
        for (int u = tid; u < MM_X * 16; u += MM_THREADS) {
            const int i = u & 15, t = u >> 4;
            const uint8_t *from = x + min(t0 + t, a.n_rows - 1) * a.x_stride;
            if (i * 16 < left * T::BLOCK) {
                reinterpret_cast<int4 *>(s->xs[t])[i] =
                    reinterpret_cast<const int4 *>(from + int64_t(b0) * T::BLOCK)[i];
                if (T::MINS)
                    s->sums[t][i] = reinterpret_cast<const int16_t *>(from + a.act.s_at)[b0 * (T::BLOCK / 16) + i];
            }
            if (i < left)
                s->xd[t][i] = reinterpret_cast<const float *>(from + a.act.d_at)[b0 + i];
        }
        __syncthreads(); // mm: the tiles are there
#pragma unroll
        for (int b = 0; b < NB; b++) {
            if (b >= left)
                break;
            int dot[R][C] = {}, low[R][C] = {};
#pragma unroll
            for (int i_sub = 0; i_sub < SUBS; i_sub++) {
                enum { PER = T::BLOCK / SUBS / 16 };
                int sub[R][C] = {};
#pragma unroll
                for (int i = 0; i < PER; i++) {
                    const int at = b * (T::BLOCK / 16) + i_sub * PER + i;
                    int4 v[C];
                    for (int c = 0; c < C; c++)
                        v[c] = reinterpret_cast<const int4 *>(s->xs[tx + c * 16])[at];
#pragma unroll
                    for (int r = 0; r < R; r++) {
                        const int4 u = reinterpret_cast<const int4 *>(s->ws[ty + r * STEP])[at];
#pragma unroll
                        for (int c = 0; c < C; c++) {
                            sub[r][c] = __dp4a(u.x, v[c].x, __dp4a(u.y, v[c].y, sub[r][c]));
                            sub[r][c] = __dp4a(u.z, v[c].z, __dp4a(u.w, v[c].w, sub[r][c]));
                        }
                    }
                }
#pragma unroll
                for (int c = 0; c < C; c++) {
                    int sum = 0;
                    for (int i = 0; i < PER && T::MINS; i++)
                        sum += s->sums[tx + c * 16][b * (T::BLOCK / 16) + i_sub * PER + i];
#pragma unroll
                    for (int r = 0; r < R; r++) {
                        dot[r][c] += T::BLOCK == 256 ? s->sc[ty + r * STEP][i_sub] * sub[r][c] : sub[r][c];
                        if (T::MINS)
                            low[r][c] += T::BLOCK == 256 ? s->mn[ty + r * STEP][i_sub] * sum : sum;
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int c = 0; c < C; c++) {
                    // Which register is known when compiling: where tiles are one block, the partial sums move on.
                    float *f = p[r][c], v = f[NB == 8 ? b : 0];
                    const float dx = s->xd[tx + c * 16][b];
                    v = fmaf(s->wd[ty + r * STEP][b] * dx, float(dot[r][c]), v);
                    if (T::MINS) {
                        const float m = s->wm[ty + r * STEP][b] * dx;
                        v = fmaf(T::BLOCK == 32 ? m : -m, float(low[r][c]), v);
                    }
                    if (NB == 8) {
                        f[b] = v;
                    } else {
#pragma unroll
                        for (int i = 0; i < 7; i++)
                            f[i] = f[i + 1];
                        f[7] = v;
                    }
                }
        }
        __syncthreads(); // mm: the tiles may be written again
    }
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int c = 0; c < C; c++) {
            float *f = p[r][c];
            for (int n = a.act.n_block; NB == 1 && n % 8 != 0; n++) { // the first one back to its place
                const float first = f[0];
#pragma unroll
                for (int i = 0; i < 7; i++)
                    f[i] = f[i + 1];
                f[7] = first;
            }
            const float v = ((f[0] + f[4]) + (f[2] + f[6])) + ((f[1] + f[5]) + (f[3] + f[7]));
            if (tile.first + ty + r * STEP < tile.m.n_out && t0 + tx + c * 16 < a.n_rows)
                put_result(tile.m, tile.group, tile.first + ty + r * STEP, t0 + tx + c * 16, v);
        }
}

// ---------------------------------------------------------------------------------------------------
// 3. ATTEND
//
// Pages of 128 tokens, an online softmax per page. Every SPLIT_TOKENS tokens, counted from position 0, a new split
// starts; splits are merged in ascending order. Few rows: a block per split, and attend_merge. Many rows: a block walks
// through its splits and merges them itself, in the same order, with the same bits.

enum { SPLIT_PAGES = 2, SPLIT_TOKENS = SPLIT_PAGES * PAGE_TOKENS, ATTEND_THREADS = 128, ATTEND_WARPS = 4 };
enum { MAX_HEAD_DIM = 1024, MERGE_ROWS = 8 };

struct cache_args {
    uint8_t *pool;
    const int *pos, *seq, *table;
    uint64_t page_bytes, k_offset, v_offset, k_row_bytes, v_row_bytes;
    int table_len, n_head_kv, dim_k, dim_v, shared, pad;
};

struct kv_put_args {
    cache_args c;
    const float *k, *v;
    int64_t ld_k, ld_v;
};

// Stores dim values from lane to lane, 32 at a time.
template <int TYPE> DEVICE void put_row(uint8_t *y, const float *x, int dim, int warp, int lane) {
    for (int d0 = warp * 32; d0 < dim; d0 += ATTEND_WARPS * 32) {
        const bool there = d0 + lane < dim;
        const float v = there ? x[d0 + lane] : 0.0f;
        if constexpr (TYPE == TYPE_F16) {
            if (there)
                reinterpret_cast<__half *>(y)[d0 + lane] = __float2half_rn(v);
        } else { // the rule stands in chapter CPU of engine.cpp
            uint32_t amax = __float_as_uint(v) & 0x7fffffffu;
            for (int i = 16; i > 0; i /= 2)
                amax = max(amax, __shfl_xor_sync(uint32_t(ALL), amax, i));
            uint32_t d = __half_as_ushort(__float2half_rn(__fdiv_rn(__uint_as_float(amax), 127.0f)));
            const bool bad = d >= 0x7c00u;
            float q = d == 0 || bad ? 0.0f : v * __fdiv_rn(1.0f, __half2float(__ushort_as_half(uint16_t(d))));
            q = q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q;
            uint8_t *block = y + d0 / 32 * 34;
            block[2 + lane] = uint8_t(__float2int_rn(q));
            if (lane == 0)
                *reinterpret_cast<uint16_t *>(block) = uint16_t(bad ? 0x7e00u : d);
        }
    }
}

// A block per row and KV head.
template <int TYPE> static __global__ __launch_bounds__(ATTEND_THREADS) void kv_put(kv_put_args a) {
    const int h = int(blockIdx.x), t = int(blockIdx.y), warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int pos = a.c.pos[t];
    const int64_t id = a.c.table[int64_t(a.c.seq[t]) * a.c.table_len + pos / PAGE_TOKENS];
    uint8_t *page = a.c.pool + uint64_t(id) * a.c.page_bytes;
    const uint64_t slot = uint64_t(h) * PAGE_TOKENS + pos % PAGE_TOKENS;
    put_row<TYPE>(page + a.c.k_offset + slot * a.c.k_row_bytes, a.k + t * a.ld_k + int64_t(h) * a.c.dim_k, a.c.dim_k,
                  warp, lane);
    if (!a.c.shared)
        put_row<TYPE>(page + a.c.v_offset + slot * a.c.v_row_bytes, a.v + t * a.ld_v + int64_t(h) * a.c.dim_v,
                      a.c.dim_v, warp, lane);
}

struct attend_args {
    cache_args c;
    const float *q, *sinks;
    float *y, *part; // part: states [n_rows, n_head, n_split, dim_v + 2], or null
    int64_t ld_q, ld_y;
    int n_rows, n_head, group, window, n_split, lanes_k, lanes_v, pad;
    float scale, softcap;
};

// Values d to d + 7 of a row; 0 beyond its end.
template <int TYPE> DEVICE void load_row8(const uint8_t *row, int d, int dim, float *out) {
    if constexpr (TYPE == TYPE_Q8_0) { // rows end with whole blocks
        const uint8_t *block = row + d / 32 * 34;
        const float scale = half_at(block);
        const uint16_t *q = reinterpret_cast<const uint16_t *>(block + 2 + d % 32);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out[i * 2] = scale * float((signed char)(q[i] & 255));
            out[i * 2 + 1] = scale * float((signed char)(q[i] >> 8));
        }
    } else if (d + 8 <= dim && (reinterpret_cast<uintptr_t>(row) & 15) == 0) {
        const uint4 v = *reinterpret_cast<const uint4 *>(row + d * 2);
        const uint32_t u[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out[i * 2] = __half2float(__ushort_as_half(uint16_t(u[i])));
            out[i * 2 + 1] = __half2float(__ushort_as_half(uint16_t(u[i] >> 16)));
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            out[i] = d + i < dim ? half_at(row + (d + i) * 2) : 0.0f;
    }
}

// The factors that bring a total and a split's part to their common maximum. Empty ones (l 0) count nothing.
DEVICE void merge_factors(float total_m, float total_l, float m, float l, float *a, float *b) {
    const float top = m > total_m ? m : total_m;
    *a = total_l == 0.0f ? 0.0f : exact_exp(total_m - top);
    *b = l == 0.0f ? 0.0f : exact_exp(m - top);
    if (total_l == 0.0f)
        *b = 1.0f;
    else if (l == 0.0f)
        *a = 1.0f;
}

DEVICE float finish_value(const attend_args &a, int h, float m, float l, float acc) {
    if (l == 0.0f)
        return 0.0f;
    float scale = 1.0f;
    if (a.sinks) {
        const float sink = a.sinks[h], top = sink > m ? sink : m;
        scale = exact_exp(m - top);
        l = fmaf(l, scale, exact_exp(sink - top));
    }
    return acc * scale / l;
}

// What a block has in shared memory for its NQ query rows.
template <int NQ> struct attend_space {
    float score[NQ][PAGE_TOKENS];
    float m[NQ], l[NQ], rescale[NQ], total_m[NQ], total_l[NQ];
    float query[1]; // [NQ, dim_k rounded up to 8], total [NQ, dim_v], parts [key groups, NQ, dim_v]
};

// The block's query rows: NQ consecutive ones of all rows' heads of one KV head.
template <int TYPE, int NQ> static __global__ __launch_bounds__(ATTEND_THREADS, 3) void attend(attend_args a) {
    DYN_SHARED(attend_space<NQ>, w);
    const int tid = int(threadIdx.x), warp = tid >> 5, lane = tid & 31, kv = int(blockIdx.y);
    const int first = int(blockIdx.x) * NQ, n = min(int(NQ), a.n_rows * a.group - first);
    const int dim_k = a.c.dim_k, dim_v = a.c.dim_v, pad_k = (dim_k + 7) & ~7;
    float *query = w->query, *total = query + NQ * pad_k, *parts = total + NQ * dim_v;
    const int lanes_v = a.lanes_v, key_groups = ATTEND_THREADS / lanes_v, kg = tid / lanes_v, d_v = tid % lanes_v * 8;
    for (int i = tid; i < NQ * pad_k; i += ATTEND_THREADS) {
        const int q = i / pad_k, d = i % pad_k, t = (first + q) / a.group, h = kv * a.group + (first + q) % a.group;
        query[i] = q < n && d < dim_k ? a.q[t * a.ld_q + int64_t(h) * dim_k + d] : 0.0f;
    }
    for (int i = tid; i < NQ * dim_v; i += ATTEND_THREADS)
        total[i] = 0.0f;
    if (tid < NQ)
        w->total_m[tid] = -INFINITY, w->total_l[tid] = 0.0f;

    // Query rows of one sequence after the other: nearly always that is one turn.
    for (int begin = 0, end; begin < n; begin = end) {
        const int seq = a.c.seq[(first + begin) / a.group];
        int from = 0x7fffffff, to = -1, pos[NQ]; // positions that any of them sees
        end = n;
#pragma unroll
        for (int q = 0; q < NQ; q++) {
            pos[q] = -1;
            const int t = (first + q) / a.group;
            if (q < begin || q >= end)
                continue;
            if (a.c.seq[t] != seq) {
                end = q;
                continue;
            }
            pos[q] = a.c.pos[t];
            from = min(from, a.window > 0 ? max(0, pos[q] - a.window + 1) : 0);
            to = max(to, pos[q]);
        }
        int split = from / SPLIT_TOKENS, last_split = to / SPLIT_TOKENS;
        if (a.part) {
            if (int(blockIdx.z) < split || int(blockIdx.z) > last_split)
                continue;
            split = last_split = int(blockIdx.z);
        }
        for (; split <= last_split; split++) {
            float acc[NQ][8] = {};
            __syncthreads(); // attend: the split before is merged, the queries are there
            if (tid < NQ)
                w->m[tid] = -INFINITY, w->l[tid] = 0.0f;
            const int last_page = min(to / PAGE_TOKENS, split * SPLIT_PAGES + SPLIT_PAGES - 1);
            for (int page = max(from / PAGE_TOKENS, split * SPLIT_PAGES); page <= last_page; page++) {
                const int base = page * PAGE_TOKENS;
                const int lo = max(from - base, 0), hi = min(to - base + 1, int(PAGE_TOKENS));
                const int64_t id = a.c.table[int64_t(seq) * a.c.table_len + page];
                const uint8_t *rows = a.c.pool + uint64_t(id) * a.c.page_bytes;
                const uint64_t ld_v = a.c.shared ? a.c.k_row_bytes : a.c.v_row_bytes;
                const uint8_t *k = rows + a.c.k_offset + uint64_t(kv) * PAGE_TOKENS * a.c.k_row_bytes;
                const uint8_t *v = a.c.shared ? k : rows + a.c.v_offset + uint64_t(kv) * PAGE_TOKENS * ld_v;

                // Scores: lanes_k lanes per key.
                const int keys = 32 / a.lanes_k;
                for (int i0 = lo + warp * keys; i0 < hi; i0 += ATTEND_WARPS * keys) {
                    const int i = min(i0 + lane / a.lanes_k, hi - 1);
                    float s[NQ] = {};
#pragma unroll 1
                    for (int d = lane % a.lanes_k * 8; d < dim_k; d += a.lanes_k * 8) {
                        float u[8];
                        load_row8<TYPE>(k + i * a.c.k_row_bytes, d, dim_k, u);
#pragma unroll
                        for (int q = 0; q < NQ; q++)
#pragma unroll
                            for (int j = 0; j < 8; j++)
                                s[q] = fmaf(u[j], query[q * pad_k + d + j], s[q]);
                    }
#pragma unroll
                    for (int q = 0; q < NQ; q++) {
                        for (int j = a.lanes_k / 2; j > 0; j /= 2)
                            s[q] += __shfl_xor_sync(uint32_t(ALL), s[q], j);
                        s[q] *= a.scale;
                        if (a.softcap > 0)
                            s[q] = a.softcap * exact_tanh(s[q] / a.softcap);
                        if (lane % a.lanes_k == 0 && i0 + lane / a.lanes_k < hi)
                            w->score[q][i] = s[q];
                    }
                }
                __syncthreads(); // attend: the page's scores are there

                // Softmax: a warp per query row, four slots per lane.
#pragma unroll
                for (int q = 0; q < NQ; q++) {
                    if (q % ATTEND_WARPS != warp)
                        continue;
                    const int q_lo = a.window > 0 ? max(pos[q] - a.window + 1 - base, 0) : 0;
                    const int q_hi = min(pos[q] + 1 - base, int(PAGE_TOKENS));
                    float m = w->m[q], sum = 0.0f;
                    const float before = m;
                    for (int i = lane; i < PAGE_TOKENS; i += 32)
                        if (i >= q_lo && i < q_hi)
                            m = fmaxf(m, w->score[q][i]);
                    for (int i = 16; i > 0; i /= 2)
                        m = fmaxf(m, __shfl_xor_sync(uint32_t(ALL), m, i));
                    for (int i = lane; i < PAGE_TOKENS; i += 32)
                        if (i >= q_lo && i < q_hi) {
                            const float e = exact_exp(w->score[q][i] - m);
                            w->score[q][i] = e;
                            sum += e;
                        }
                    sum = warp_sum(sum);
                    __syncwarp(); // all lanes have read the old maximum
                    if (lane == 0) {
                        const float r = q_lo < q_hi ? exact_exp(before - m) : 1.0f;
                        w->rescale[q] = r;
                        w->m[q] = m;
                        w->l[q] = fmaf(w->l[q], r, sum);
                    }
                }
                __syncthreads(); // attend: the page's weights are there

                // Values: lanes_v threads per key, keys dealt out by slot, so that a sum's order is its own.
                if (d_v < dim_v) {
#pragma unroll
                    for (int q = 0; q < NQ; q++)
#pragma unroll
                        for (int j = 0; j < 8; j++)
                            acc[q][j] *= w->rescale[q];
#pragma unroll 2
                    for (int i = lo / key_groups * key_groups + kg; i < hi; i += key_groups) {
                        if (i < lo)
                            continue;
                        float u[8];
                        load_row8<TYPE>(v + i * ld_v, d_v, dim_v, u);
#pragma unroll
                        for (int q = 0; q < NQ; q++)
                            if (base + i <= pos[q] && (a.window <= 0 || base + i > pos[q] - a.window)) {
                                const float e = w->score[q][i];
#pragma unroll
                                for (int j = 0; j < 8; j++)
                                    acc[q][j] = fmaf(e, u[j], acc[q][j]);
                            }
                    }
                }
                __syncthreads(); // attend: scores and maxima may be written again
            }

            // The split's end: the key groups' sums are added in ascending order.
            if (d_v < dim_v)
#pragma unroll
                for (int q = 0; q < NQ; q++)
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        if (d_v + j < dim_v)
                            parts[(kg * NQ + q) * dim_v + d_v + j] = acc[q][j];
            __syncthreads(); // attend: the parts are there
            for (int i = tid; i < (end - begin) * dim_v; i += ATTEND_THREADS) {
                const int q = begin + i / dim_v, d = i % dim_v, t = (first + q) / a.group;
                float sum = parts[q * dim_v + d];
                for (int g = 1; g < key_groups; g++)
                    sum += parts[(g * NQ + q) * dim_v + d];
                if (a.part) {
                    const int h = kv * a.group + (first + q) % a.group;
                    float *state = a.part + ((int64_t(t) * a.n_head + h) * a.n_split + split) * (dim_v + 2);
                    state[2 + d] = sum;
                    if (d == 0)
                        state[0] = w->m[q], state[1] = w->l[q];
                } else {
                    float f, g;
                    merge_factors(w->total_m[q], w->total_l[q], w->m[q], w->l[q], &f, &g);
                    total[q * dim_v + d] = fmaf(total[q * dim_v + d], f, sum * g);
                }
            }
            __syncthreads(); // attend: the totals are merged
            if (!a.part && tid >= begin && tid < end) {
                float f, g;
                merge_factors(w->total_m[tid], w->total_l[tid], w->m[tid], w->l[tid], &f, &g);
                w->total_l[tid] = fmaf(w->total_l[tid], f, w->l[tid] * g);
                w->total_m[tid] = fmaxf(w->total_m[tid], w->m[tid]);
            }
        }
    }
    if (a.part)
        return;
    __syncthreads(); // attend: the last maxima are there
    for (int i = tid; i < n * dim_v; i += ATTEND_THREADS) {
        const int q = i / dim_v, d = i % dim_v, t = (first + q) / a.group, h = kv * a.group + (first + q) % a.group;
        a.y[t * a.ld_y + int64_t(h) * dim_v + d] = finish_value(a, h, w->total_m[q], w->total_l[q], total[i]);
    }
}

// A block per row and head.
static __global__ __launch_bounds__(ATTEND_THREADS) void attend_merge(attend_args a) {
    const int h = int(blockIdx.x), t = int(blockIdx.y), pos = a.c.pos[t], dim = a.c.dim_v;
    const int split0 = a.window > 0 ? max(0, pos - a.window + 1) / SPLIT_TOKENS : 0;
    for (int d = int(threadIdx.x); d < dim; d += ATTEND_THREADS) {
        const float *state = a.part + ((int64_t(t) * a.n_head + h) * a.n_split + split0) * (dim + 2);
        float m = -INFINITY, l = 0.0f, acc = 0.0f;
        for (int split = split0; split <= pos / SPLIT_TOKENS; split++, state += dim + 2) {
            float f, g;
            merge_factors(m, l, state[0], state[1], &f, &g);
            acc = fmaf(acc, f, state[2 + d] * g);
            l = fmaf(l, f, state[1] * g);
            m = fmaxf(m, state[0]);
        }
        a.y[t * a.ld_y + int64_t(h) * dim + d] = finish_value(a, h, m, l, acc);
    }
}

// ---------------------------------------------------------------------------------------------------
// 4. ROWS

enum { ROW_THREADS = 256 };

struct embed_args {
    const uint8_t *w;
    float *y;
    const int *token;
    uint64_t row_bytes;
    int n, n_vocab;
    float scale;
    int pad;
};

// A token outside the vocabulary, which the host does not let pass, becomes NaN.
template <int TYPE> static __global__ __launch_bounds__(ROW_THREADS) void embed(embed_args a) {
    typedef traits<TYPE> T;
    const int k = int(blockIdx.x) * ROW_THREADS + int(threadIdx.x), t = int(blockIdx.y), token = a.token[t];
    if (k >= a.n)
        return;
    float v = __uint_as_float(0x7fc00000u);
    if (token >= 0 && token < a.n_vocab)
        v = q_value(TYPE, a.w + uint64_t(token) * a.row_bytes + uint64_t(k / T::BLOCK) * T::BYTES, k % T::BLOCK);
    a.y[int64_t(t) * a.n + k] = a.scale != 1.0f ? v * a.scale : v;
}

struct rows_args {
    const float *x;
    float *y;
    const int *from;
    int64_t n;
};

static __global__ __launch_bounds__(ROW_THREADS) void rows(rows_args a) {
    const int64_t k = int64_t(blockIdx.x) * ROW_THREADS + threadIdx.x, i = blockIdx.y;
    if (k < a.n)
        a.y[i * a.n + k] = a.x[a.from[i] * a.n + k];
}

struct norm_args {
    const float *x, *w;
    float *y;
    int64_t ld_x, ld_y;
    int n, n_part, n_unit, kind;
    float eps;
    int pad;
};

DEVICE float norm_value(const norm_args &a, float x, float r, int k) {
    return a.kind == 0 ? x * r : a.kind == 1 ? x * r * a.w[k] : x * r * (1.0f + a.w[k]);
}

// THREADS (32 or more) per part of a row. The sum's order depends on n only, which chooses THREADS.
template <int THREADS> static __global__ __launch_bounds__(THREADS == 32 ? 128 : THREADS) void norm(norm_args a) {
    __shared__ float sums[THREADS / 32];
    const int per_block = THREADS == 32 ? 4 : 1, tid = int(threadIdx.x) % THREADS;
    const int unit = int(blockIdx.x) * per_block + int(threadIdx.x) / THREADS;
    if (unit >= a.n_unit)
        return;
    const int64_t t = unit / a.n_part, at = int64_t(unit % a.n_part) * a.n;
    const float *x = a.x + t * a.ld_x + at;
    float *y = a.y + t * a.ld_y + at, sum = 0.0f;
    for (int k = tid; k < a.n; k += THREADS)
        sum = fmaf(x[k], x[k], sum);
    sum = warp_sum(sum);
    if (THREADS > 32) {
        if (tid % 32 == 0)
            sums[tid / 32] = sum;
        __syncthreads(); // norm: the warps' sums are there
        sum = 0.0f;
        for (int i = 0; i < THREADS / 32; i++)
            sum += sums[i];
    }
    const float r = __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(sum, float(a.n)) + a.eps));
    for (int k = tid; k < a.n; k += THREADS)
        y[k] = norm_value(a, x[k], r, k);
}

// Queries and keys rotate in one launch.
struct rope_item {
    float *x;
    int64_t ld_x;
    int n_head, first_block;
};
struct rope_args {
    const float *rotary;
    rope_item item[2];
    int head_dim, first, half, pairing, n_item;
    float sign;
};

static __global__ __launch_bounds__(ROW_THREADS) void rope(rope_args a) {
    const rope_item m = a.n_item > 1 && int(blockIdx.x) >= a.item[1].first_block ? a.item[1] : a.item[0];
    const int i = (int(blockIdx.x) - m.first_block) * ROW_THREADS + int(threadIdx.x), t = int(blockIdx.y);
    if (i >= m.n_head * a.half)
        return;
    const int pair = i % a.half, at = a.pairing ? pair : pair * 2, other = a.pairing ? a.half : 1;
    float *x = m.x + t * m.ld_x + int64_t(i / a.half) * a.head_dim + a.first + at;
    const float *cs = a.rotary + (int64_t(t) * a.half + pair) * 2;
    const float u = x[0], v = x[other], c = cs[0], s = a.sign * cs[1];
    x[0] = fmaf(u, c, -(v * s));
    x[other] = fmaf(u, s, v * c);
}

struct glu_args {
    const float *gate, *up;
    float *y;
    int64_t ld_gate, ld_up, ld_y;
    int n, kind;
    float clamp_gate, clamp_up;
};

static __global__ __launch_bounds__(ROW_THREADS) void glu(glu_args a) {
    const int k = int(blockIdx.x) * ROW_THREADS + int(threadIdx.x);
    const int64_t t = blockIdx.y;
    if (k >= a.n)
        return;
    float g = a.gate[t * a.ld_gate + k], u = a.up[t * a.ld_up + k];
    g = a.clamp_gate > 0 && g > a.clamp_gate ? a.clamp_gate : g;
    u = a.clamp_up > 0 && u > a.clamp_up ? a.clamp_up : u;
    u = a.clamp_up > 0 && u < -a.clamp_up ? -a.clamp_up : u;
    const float e = a.kind == 0 ? -g : a.kind == 1 ? -1.59576912f * fmaf(0.044715f * g * g, g, g) : -1.702f * g;
    a.y[t * a.ld_y + k] = __fdiv_rn(g, 1.0f + exact_exp(e)) * (a.kind == 2 ? u + 1.0f : u);
}

struct add_args {
    const float *x;
    float *y;
    int64_t n;
};

static __global__ __launch_bounds__(ROW_THREADS) void add(add_args a) {
    const int64_t i = int64_t(blockIdx.x) * ROW_THREADS + threadIdx.x;
    if (i < a.n)
        a.y[i] += a.x[i];
}

// ---------------------------------------------------------------------------------------------------
// 5. BACKEND

enum { ARG_BYTES = 288, MAX_LAUNCHES = 2048, MAX_GRAPHS = 8, GRAPH_FROM = 8, MAX_READS = 64 };
enum { STAGING = 8 << 20, STAGING_PIECE = 1 << 20, WEIGHT_PAD = 16 };
const uint64_t SPLIT_BYTES = 96 << 20; // of the states of attention's splits

// A kernel and its arguments, comparable byte by byte.
struct launch_record {
    void (*run)(const launch_record &, cudaStream_t);
    void (*kernel)();
    const char *name;
    unsigned grid_x, grid_y, grid_z, block;
    uint64_t shared;
    alignas(16) uint8_t args[ARG_BYTES];
};
static_assert(sizeof(matmul_args) <= ARG_BYTES && sizeof(attend_args) <= ARG_BYTES, "");

template <class A> static void run_record(const launch_record &r, cudaStream_t stream) {
    A args;
    memcpy(static_cast<void *>(&args), r.args, sizeof args);
    void (*kernel)(A) = reinterpret_cast<void (*)(A)>(r.kernel);
    LAUNCH(kernel, dim3(r.grid_x, r.grid_y, r.grid_z), dim3(r.block), size_t(r.shared), stream, args);
}

// A list of launches that was seen, and the graph that it became when it was seen again.
struct launch_graph {
    launch_record *list;
    int n;
    uint64_t hash, used;
    cudaGraphExec_t exec;
};

struct cuda_allocation {
    uint8_t *data;
    uint64_t bytes;
    bool counted;
};

struct pending_read {
    void *to;
    const uint8_t *from;
    uint64_t bytes;
};

// Which activations lie in the scratch space.
struct quantized_x {
    const uint8_t *x;
    int block, n_rows, n_in, n_group, ld_x;
};

struct cuda_backend {
    int device = 0;
    cudaStream_t stream = nullptr;
    launch_record *list = nullptr; // [MAX_LAUNCHES]
    int n_list = 0;
    int open_matmul = -1, open_rope = -1; // the list's last record, when it may take another operand
    launch_graph graphs[MAX_GRAPHS] = {};
    uint64_t clock = 0;
    uint8_t *staging = nullptr; // page-locked
    uint64_t staged = 0;        // bytes of it in use
    pending_read reads[MAX_READS];
    int n_reads = 0;
    uint8_t *scratch = nullptr;
    uint64_t scratch_bytes = 0;
    quantized_x quantized = {};
    std::vector<cuda_allocation> allocations;
    std::atomic<uint64_t> allocated{0};
    bool failed = false, no_memory = false;
    char message[256] = {}, reported[256] = {};
};

static cuda_backend *self(backend *be) { return reinterpret_cast<cuda_backend *>(be); }

template <class T> static T *at(mem m) {
    return m.handle ? reinterpret_cast<T *>(static_cast<uint8_t *>(m.handle) + m.offset) : nullptr;
}

static void latch(cuda_backend *be, bool no_memory, const char *what, const char *why) {
    if (be->failed)
        return;
    be->failed = true, be->no_memory = no_memory;
    snprintf(be->message, sizeof be->message, "CUDA: %s: %s", what, why);
}

// True when the call went well.
static bool check(cuda_backend *be, cudaError_t e, const char *what) {
    if (e == cudaSuccess)
        return true;
    latch(be, e == cudaErrorMemoryAllocation, what, cudaGetErrorString(e));
    cudaGetLastError(); // so that it is not taken for a later call's
    return false;
}

static void run_list(cuda_backend *be) {
    for (int i = 0; i < be->n_list; i++) {
        be->list[i].run(be->list[i], be->stream);
        if (!check(be, cudaGetLastError(), be->list[i].name))
            return;
    }
}

static uint64_t hash_list(const launch_record *list, int n) {
    uint64_t h = 14695981039346656037u;
    const uint8_t *p = reinterpret_cast<const uint8_t *>(list);
    for (size_t i = 0; i < size_t(n) * sizeof *list; i += 8) {
        uint64_t word;
        memcpy(&word, p + i, 8);
        h = (h ^ word) * 1099511628211u;
        h ^= h >> 29;
    }
    return h;
}

static void drop_graph(launch_graph &g) {
    if (g.exec)
        cudaGraphExecDestroy(g.exec);
    free(g.list);
    g = {};
}

static void make_graph(cuda_backend *be, launch_graph &g) {
    cudaGraph_t graph = nullptr;
    if (!check(be, cudaStreamBeginCapture(be->stream, cudaStreamCaptureModeThreadLocal), "capturing a step"))
        return;
    run_list(be);
    if (!check(be, cudaStreamEndCapture(be->stream, &graph), "capturing a step") || !graph)
        return;
    if (!check(be, cudaGraphInstantiate(&g.exec, graph, 0), "making a graph"))
        g.exec = nullptr;
    cudaGraphDestroy(graph);
}

// Hands the list to the device. A list that was seen before, with equal arguments, is one launch of a graph.
static void flush(cuda_backend *be) {
    check(be, cudaSetDevice(be->device), "choosing the device"); // a property of the calling thread
    const int n = be->n_list;
    be->open_matmul = be->open_rope = -1;
    be->quantized = {};
    if (n == 0)
        return;
    launch_graph *found = nullptr, *oldest = &be->graphs[0];
    if (n >= GRAPH_FROM) {
        const uint64_t hash = hash_list(be->list, n);
        for (launch_graph &g : be->graphs) {
            if (g.n == n && g.hash == hash && !memcmp(g.list, be->list, size_t(n) * sizeof *g.list))
                found = &g;
            if (g.used < oldest->used)
                oldest = &g;
        }
        if (!found) {
            drop_graph(*oldest);
            oldest->list = static_cast<launch_record *>(malloc(size_t(n) * sizeof *be->list));
            if (oldest->list) {
                memcpy(static_cast<void *>(oldest->list), be->list, size_t(n) * sizeof *be->list);
                oldest->n = n, oldest->hash = hash, oldest->used = ++be->clock;
            }
        } else {
            found->used = ++be->clock;
            if (!found->exec)
                make_graph(be, *found);
        }
    }
    if (found && found->exec)
        check(be, cudaGraphLaunch(found->exec, be->stream), "launching a step");
    else
        run_list(be);
    be->n_list = 0;
}

// Waits for the device; what was read reaches its place.
static void settle(cuda_backend *be) {
    const bool ok = check(be, cudaStreamSynchronize(be->stream), "waiting for the device");
    for (int i = 0; i < be->n_reads; i++)
        if (ok)
            memcpy(be->reads[i].to, be->reads[i].from, be->reads[i].bytes);
    be->n_reads = 0;
    be->staged = 0;
}

// Room in the staging memory, which is free again when the device has caught up.
static uint8_t *stage(cuda_backend *be, uint64_t bytes) {
    if (be->staged + bytes > STAGING || be->n_reads == MAX_READS)
        settle(be);
    uint8_t *p = be->staging + be->staged;
    be->staged += (bytes + 63) & ~uint64_t(63);
    return p;
}

// Appends a launch. `args` has no padding that is not zero.
template <class A> static launch_record *append(cuda_backend *be, const char *name, void (*kernel)(A), dim3 grid,
                                                int block, const A &args, uint64_t shared = 0) {
    static_assert(sizeof(A) <= ARG_BYTES, "a launch record holds the arguments");
    if (grid.x == 0 || grid.y == 0 || grid.z == 0)
        return nullptr;
    if (grid.y > 65535 || grid.z > 65535) {
        latch(be, false, name, "too many rows for one call");
        return nullptr;
    }
    if (be->n_list == MAX_LAUNCHES)
        flush(be);
    be->open_matmul = be->open_rope = -1;
    launch_record &r = be->list[be->n_list++];
    memset(static_cast<void *>(&r), 0, sizeof r);
    r.run = run_record<A>;
    r.kernel = reinterpret_cast<void (*)()>(kernel);
    r.name = name;
    r.grid_x = grid.x, r.grid_y = grid.y, r.grid_z = grid.z, r.block = unsigned(block), r.shared = shared;
    memcpy(r.args, &args, sizeof args);
    return &r;
}

static unsigned blocks(int64_t n, int64_t per) { return unsigned((n + per - 1) / per); }

// --- memory

static uint8_t *device_alloc(cuda_backend *be, uint64_t bytes, bool counted) {
    void *p = nullptr;
    cudaSetDevice(be->device);
    try {
        be->allocations.reserve(be->allocations.size() + 1);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
    if (cudaMalloc(&p, bytes ? bytes : 1) != cudaSuccess) {
        cudaGetLastError();
        return nullptr;
    }
    be->allocations.push_back({static_cast<uint8_t *>(p), bytes, counted});
    if (counted)
        be->allocated += bytes;
    return static_cast<uint8_t *>(p);
}

static cuda_allocation *find_allocation(cuda_backend *be, const void *p) {
    for (cuda_allocation &a : be->allocations)
        if (a.data == p)
            return &a;
    return nullptr;
}

static void device_free(cuda_backend *be, const void *p) {
    if (cuda_allocation *a = find_allocation(be, p)) {
        flush(be);
        check(be, cudaFree(a->data), "freeing memory");
        be->allocated -= a->counted ? a->bytes : 0;
        *a = be->allocations.back();
        be->allocations.pop_back();
    }
}

static mem cuda_alloc(backend *b, uint64_t bytes) {
    cuda_backend *be = self(b);
    uint8_t *p = device_alloc(be, bytes, true);
    if (p)
        check(be, cudaMemsetAsync(p, 0, bytes, be->stream), "clearing memory");
    return {p, 0};
}

static mem cuda_grow(backend *b, mem m, uint64_t, uint64_t bytes) {
    cuda_backend *be = self(b);
    const cuda_allocation *found = find_allocation(be, m.handle);
    if (!found)
        return {};
    const cuda_allocation old = *found;
    if (bytes <= old.bytes)
        return m;
    flush(be);
    uint8_t *p = device_alloc(be, bytes, true);
    if (!p)
        return {};
    check(be, cudaMemcpyAsync(p, old.data, old.bytes, cudaMemcpyDeviceToDevice, be->stream), "growing memory");
    check(be, cudaMemsetAsync(p + old.bytes, 0, bytes - old.bytes, be->stream), "growing memory");
    device_free(be, old.data);
    return {p, m.offset};
}

static void cuda_free(backend *b, mem m) { device_free(self(b), m.handle); }

// Copies to the device, piece by piece through page-locked memory: filling one piece overlaps sending another.
static void upload(cuda_backend *be, uint8_t *to, const void *from, uint64_t bytes) {
    for (uint64_t done = 0; done < bytes;) {
        const uint64_t n = bytes - done < STAGING_PIECE ? bytes - done : uint64_t(STAGING_PIECE);
        uint8_t *p = stage(be, n);
        memcpy(p, static_cast<const uint8_t *>(from) + done, n);
        if (!check(be, cudaMemcpyAsync(to + done, p, n, cudaMemcpyHostToDevice, be->stream), "copying to the device"))
            return;
        done += n;
    }
}

static mem cuda_weights(backend *b, const void *host, uint64_t bytes) {
    cuda_backend *be = self(b);
    uint8_t *p = device_alloc(be, bytes + WEIGHT_PAD, false);
    if (p)
        upload(be, p, host, bytes);
    return {p, 0};
}

static void cuda_put(backend *b, mem to, const void *from, uint64_t bytes) {
    cuda_backend *be = self(b);
    flush(be);
    upload(be, at<uint8_t>(to), from, bytes);
}

// The bytes are there after the next sync.
static void cuda_get(backend *b, void *to, mem from, uint64_t bytes) {
    cuda_backend *be = self(b);
    flush(be);
    for (uint64_t done = 0; done < bytes;) {
        const uint64_t n = bytes - done < STAGING_PIECE ? bytes - done : uint64_t(STAGING_PIECE);
        uint8_t *p = stage(be, n);
        if (!check(be, cudaMemcpyAsync(p, at<uint8_t>(from) + done, n, cudaMemcpyDeviceToHost, be->stream),
                   "copying from the device"))
            return;
        be->reads[be->n_reads++] = {static_cast<uint8_t *>(to) + done, p, n};
        done += n;
    }
}

static void cuda_copy(backend *b, mem to, mem from, uint64_t bytes) {
    cuda_backend *be = self(b);
    flush(be);
    check(be, cudaMemcpyAsync(at<uint8_t>(to), at<uint8_t>(from), bytes, cudaMemcpyDeviceToDevice, be->stream),
          "copying on the device");
}

static int32_t cuda_reserve(backend *b, uint64_t bytes) {
    cuda_backend *be = self(b);
    if (bytes <= be->scratch_bytes)
        return 0;
    uint8_t *p = device_alloc(be, bytes, true);
    if (!p)
        return 1;
    device_free(be, be->scratch);
    be->scratch = p, be->scratch_bytes = bytes;
    return 0;
}

// An operation's scratch space. Allocates only where nothing was reserved.
static uint8_t *scratch(cuda_backend *be, uint64_t bytes) {
    if (cuda_reserve(reinterpret_cast<backend *>(be), bytes)) {
        latch(be, true, "the operations' scratch space", "out of memory");
        return nullptr;
    }
    return be->scratch;
}

static uint64_t cuda_allocated(backend *b) { return self(b)->allocated.load(); }

static const char *cuda_sync(backend *b, int32_t *no_memory) {
    cuda_backend *be = self(b);
    flush(be);
    settle(be);
    *no_memory = be->no_memory;
    const bool failed = be->failed;
    memcpy(be->reported, be->message, sizeof be->reported);
    be->failed = be->no_memory = false;
    return failed ? be->reported : nullptr;
}

// ---------------------------------------------------------------------------------------------------
// 6. OPERATIONS

struct format_row {
    int type, block, bytes, act;
};
#define FORMAT_ROW(name, id, block, bytes, sub, act, mins) {id, block, bytes, act},
static const format_row formats[] = {Q_FORMATS(FORMAT_ROW)};
#undef FORMAT_ROW

static const format_row *find_format(int type) {
    for (const format_row &f : formats)
        if (f.type == type)
            return &f;
    return nullptr;
}

static act_layout act_plan(int block, int n_in) {
    act_layout a;
    a.n_block = n_in / block;
    a.d_at = (n_in + 15) & ~15;
    a.s_at = a.d_at + ((a.n_block * 4 + 15) & ~15);
    a.stride = (a.s_at + n_in / 16 * 2 + 15) & ~15;
    return a;
}

static uint64_t act_bytes(const matmul_op *op, const format_row &f) {
    return f.act == ACT_F32
               ? 0
               : uint64_t(op->n_group) * uint64_t(op->n_rows) * uint64_t(act_plan(f.block, op->n_in).stride);
}

static uint64_t cuda_matmul_scratch(backend *, const matmul_op *op, const mat *w) {
    const format_row *f = find_format(w->type);
    return f ? act_bytes(op, *f) : 0;
}

// The kernel for a format and a number of rows, how many weight rows and rows of x a block takes, its threads.
struct matmul_choice {
    void (*kernel)(matmul_args);
    int rows, n_x, threads;
    uint64_t shared;
};

template <int TYPE> static matmul_choice choose_matmul(int n_rows) {
    if constexpr (traits<TYPE>::BLOCK == 1) {
        if (n_rows == 1)
            return {matmul_floats<TYPE, 1, 1>, VEC_WARPS * 2, 1, VEC_WARPS * 32, 0};
        if (n_rows < MM_FROM)
            return {matmul_floats<TYPE, 1, 4>, VEC_WARPS * 2, 4, VEC_WARPS * 32, 0};
        return {matmul_floats<TYPE, 4, 4>, VEC_WARPS * 8, 4, VEC_WARPS * 32, 0};
    } else {
        if (n_rows == 1)
            return {matmul_vec<TYPE, 1>, VEC_WARPS, 1, VEC_WARPS * 32, 0};
        if (n_rows <= 4)
            return {matmul_vec<TYPE, 4>, VEC_WARPS, 4, VEC_WARPS * 32, 0};
        if (n_rows < MM_FROM)
            return {matmul_vec<TYPE, 8>, VEC_WARPS, 8, VEC_WARPS * 32, 0};
        return {matmul_mm<TYPE>, MM_ROWS, MM_X, MM_THREADS, sizeof(mm_space<TYPE>)};
    }
}

static matmul_choice choose_matmul(int type, int n_rows) {
#define CHOOSE(name, id, block, bytes, sub, act, mins)                                                                 \
    case id:                                                                                                           \
        return choose_matmul<id>(n_rows);
    switch (type) { Q_FORMATS(CHOOSE) }
#undef CHOOSE
    return {};
}

// The rows of x as activations in the scratch space; those that are there already stay.
static bool quantize_x(cuda_backend *be, const matmul_op *op, const format_row &f, const uint8_t *x, matmul_args &a) {
    const act_layout act = act_plan(f.block, op->n_in);
    uint8_t *out = scratch(be, act_bytes(op, f));
    if (!out)
        return false;
    const quantized_x want = {x, f.block, op->n_rows, op->n_in, op->n_group, op->ld_x};
    const quantized_x &have = be->quantized;
    if (have.x != want.x || have.block != want.block || have.n_rows != want.n_rows || have.n_in != want.n_in ||
        have.n_group != want.n_group || have.ld_x != want.ld_x) {
        quantize_args q = {};
        q.x = reinterpret_cast<const float *>(x), q.out = out, q.act = act;
        q.n_rows = op->n_rows, q.n_in = op->n_in, q.ld_x = op->ld_x;
        q.n_unit = op->n_group * op->n_rows * act.n_block;
        append(be, "quantize", f.block == 32 ? quantize<32> : quantize<256>, dim3(blocks(q.n_unit, VEC_WARPS)), 128, q);
        be->quantized = want;
    }
    a.x = out, a.act = act, a.x_stride = act.stride, a.x_group = int64_t(op->n_rows) * act.stride;
    return true;
}

static bool overlap(const void *p, int64_t n, const void *q, int64_t m) {
    const uintptr_t a = reinterpret_cast<uintptr_t>(p), b = reinterpret_cast<uintptr_t>(q);
    return a < b + uintptr_t(m) && b < a + uintptr_t(n);
}

static void cuda_matmul(backend *b, const matmul_op *op, mem y, const mat *w, mem x, mem bias) {
    cuda_backend *be = self(b);
    const format_row *f = find_format(w->type);
    if (!f || op->n_in % f->block != 0)
        return latch(be, false, "matmul", "the weight's format does not fit");
    if (op->n_rows <= 0 || op->n_out <= 0 || op->n_group <= 0)
        return;
    const matmul_choice c = choose_matmul(w->type, op->n_rows);
    const uint8_t *from = at<const uint8_t>(x);
    const int64_t x_bytes = int64_t(op->n_rows) * op->ld_x * 4, y_bytes = int64_t(op->n_rows) * op->ld_y * 4;
    matmul_args a;
    memset(static_cast<void *>(&a), 0, sizeof a);
    a.x = from, a.x_stride = int64_t(op->ld_x) * 4, a.x_group = int64_t(op->n_in) * 4;
    if (f->act != ACT_F32 && !quantize_x(be, op, *f, from, a))
        return;
    a.n_rows = op->n_rows, a.n_in = op->n_in, a.n_group = op->n_group, a.n_item = 1;
    matmul_item &m = a.item[0];
    m.w = at<const uint8_t>(w->data), m.y = at<float>(y), m.bias = op->has_bias ? at<const float>(bias) : nullptr;
    m.row_bytes = int64_t(w->row_bytes), m.n_out = op->n_out, m.ld_y = op->ld_y, m.accumulate = op->accumulate;
    const unsigned tiles = blocks(op->n_out, c.rows) * unsigned(op->n_group);

    // A second or third weight with the same rows of x joins the launch before. No result depends on it.
    const bool private_y = !overlap(m.y, y_bytes, from, x_bytes);
    if (be->open_matmul >= 0 && private_y) {
        launch_record &r = be->list[be->open_matmul];
        matmul_args old;
        memcpy(static_cast<void *>(&old), r.args, sizeof old);
        bool joins = r.kernel == reinterpret_cast<void (*)()>(c.kernel) && old.n_item < MAX_ITEMS && old.x == a.x &&
                     old.x_stride == a.x_stride && old.n_rows == a.n_rows && old.n_in == a.n_in &&
                     old.n_group == a.n_group;
        for (int i = 0; i < old.n_item && joins; i++)
            joins = !overlap(m.y, y_bytes, old.item[i].y, int64_t(old.n_rows) * old.item[i].ld_y * 4);
        if (joins) {
            m.first_tile = int(r.grid_x);
            old.item[old.n_item++] = m;
            r.grid_x += tiles;
            memcpy(r.args, &old, sizeof old);
            return;
        }
    }
    append(be, "matmul", c.kernel, dim3(tiles, blocks(op->n_rows, c.n_x)), c.threads, a, c.shared);
    if (private_y)
        be->open_matmul = be->n_list - 1;
    else
        be->quantized = {};
}

// What follows another operation's launch: the activations in the scratch space are no longer known to be current.
template <class A> static void operate(backend *b, const char *name, void (*kernel)(A), dim3 grid, int block,
                                       const A &args, uint64_t shared = 0) {
    append(self(b), name, kernel, grid, block, args, shared);
    self(b)->quantized = {};
}

static void cuda_embed(backend *b, const embed_op *op, mem y, const mat *w, const step *st) {
    const format_row *f = find_format(w->type);
    if (!f || op->n % f->block != 0)
        return latch(self(b), false, "embed", "the weight's format does not fit");
    void (*kernel)(embed_args) = nullptr;
#define CHOOSE(name, id, block, bytes, sub, act, mins) kernel = w->type == id ? embed<id> : kernel;
    Q_FORMATS(CHOOSE)
#undef CHOOSE
    embed_args a = {};
    a.w = at<const uint8_t>(w->data), a.y = at<float>(y), a.token = at<const int>(st->token);
    a.row_bytes = w->row_bytes, a.n = op->n, a.n_vocab = w->n_out, a.scale = op->scale;
    operate(b, "embed", kernel, dim3(blocks(op->n, ROW_THREADS), unsigned(op->n_rows)), ROW_THREADS, a);
}

static void cuda_rows(backend *b, const rows_op *op, mem y, mem x, const step *st) {
    const rows_args a = {at<const float>(x), at<float>(y), at<const int>(st->out_row), op->n};
    operate(b, "rows", rows, dim3(blocks(op->n, ROW_THREADS), unsigned(op->n_rows)), ROW_THREADS, a);
}

static void cuda_norm(backend *b, const norm_op *op, mem y, mem x, mem w) {
    norm_args a = {};
    a.x = at<const float>(x), a.w = at<const float>(w), a.y = at<float>(y);
    a.ld_x = op->ld_x, a.ld_y = op->ld_y, a.n = op->n, a.n_part = op->n_part, a.n_unit = op->n_rows * op->n_part;
    a.kind = op->weight_kind, a.eps = op->eps;
    if (op->n <= 512)
        operate(b, "norm", norm<32>, dim3(blocks(a.n_unit, 4)), 128, a);
    else
        operate(b, "norm", norm<ROW_THREADS>, dim3(unsigned(a.n_unit)), ROW_THREADS, a);
}

static void cuda_rope(backend *b, const rope_op *op, mem x, const step *st) {
    cuda_backend *be = self(b);
    rope_args a;
    memset(static_cast<void *>(&a), 0, sizeof a);
    a.rotary = at<const float>(st->rotary[op->table]);
    a.head_dim = op->head_dim, a.first = op->first, a.half = op->n_rot / 2, a.pairing = op->pairing, a.n_item = 1;
    a.sign = op->inverse ? -1.0f : 1.0f;
    a.item[0] = {at<float>(x), op->ld_x, op->n_head, 0};
    const dim3 grid(blocks(int64_t(op->n_head) * a.half, ROW_THREADS), unsigned(op->n_rows));
    if (be->open_rope >= 0) { // keys join the queries' launch
        launch_record &r = be->list[be->open_rope];
        rope_args old;
        memcpy(static_cast<void *>(&old), r.args, sizeof old);
        if (old.n_item == 1 && old.rotary == a.rotary && old.head_dim == a.head_dim && old.first == a.first &&
            old.half == a.half && old.pairing == a.pairing && old.sign == a.sign && r.grid_y == grid.y &&
            !overlap(old.item[0].x, old.item[0].ld_x * grid.y * 4, a.item[0].x, a.item[0].ld_x * grid.y * 4)) {
            old.item[1] = a.item[0];
            old.item[1].first_block = int(r.grid_x);
            old.n_item = 2;
            r.grid_x += grid.x;
            memcpy(r.args, &old, sizeof old);
            be->open_rope = -1;
            return;
        }
    }
    operate(b, "rope", rope, grid, ROW_THREADS, a);
    be->open_rope = be->n_list - 1;
}

static cache_args cache_of(const seg *sg, const step *st, int n_head_kv, int dim_k, int dim_v, int shared) {
    cache_args c;
    memset(static_cast<void *>(&c), 0, sizeof c);
    c.pool = at<uint8_t>(sg->pool), c.pos = at<const int>(st->pos), c.seq = at<const int>(st->seq);
    c.table = at<const int>(st->table[sg->table]), c.table_len = st->table_len;
    c.page_bytes = sg->page_bytes, c.k_offset = sg->k_offset, c.v_offset = sg->v_offset;
    c.k_row_bytes = sg->k_row_bytes, c.v_row_bytes = sg->v_row_bytes;
    c.n_head_kv = n_head_kv, c.dim_k = dim_k, c.dim_v = dim_v, c.shared = shared;
    return c;
}

static bool cache_type(int type) { return type == TYPE_F16 || type == TYPE_Q8_0; }

static void cuda_kv_put(backend *b, const kv_put_op *op, const seg *sg, mem k, mem v, const step *st) {
    if (!cache_type(sg->type) || op->type != sg->type || sg->ratio > 1)
        return latch(self(b), false, "kv_put", "f16 or q8_0 rows, one per token, only");
    kv_put_args a = {cache_of(sg, st, op->n_head_kv, op->dim_k, op->dim_v, op->shared), at<const float>(k),
                     at<const float>(v), op->ld_k, op->ld_v};
    operate(b, "kv_put", sg->type == TYPE_F16 ? kv_put<TYPE_F16> : kv_put<TYPE_Q8_0>,
            dim3(unsigned(op->n_head_kv), unsigned(op->n_rows)), ATTEND_THREADS, a);
}

static int lanes_for(int dim, int most) { // of eight values each
    int n = 1;
    while (n < most && n * 8 < dim)
        n *= 2;
    return n;
}

static uint64_t split_states(const attend_op *op, int64_t n_tokens) { // bytes for one row
    const uint64_t n = uint64_t((n_tokens > op->bucket ? n_tokens : op->bucket) + SPLIT_TOKENS - 1) / SPLIT_TOKENS;
    return n < 2 ? 0 : n * uint64_t(op->n_head) * uint64_t(op->dim_v + 2) * 4;
}

// Rows that splits are computed apart for: never more for more rows.
static int merge_rows(uint64_t row_bytes) {
    for (int n = MERGE_ROWS; n > 1; n--)
        if (row_bytes * unsigned(n) <= SPLIT_BYTES)
            return n;
    return 1;
}

static uint64_t cuda_attend_scratch(backend *, const attend_op *op, const seg *, int64_t n_tokens) {
    const uint64_t row = split_states(op, n_tokens);
    const int most = merge_rows(row);
    return row * uint64_t(op->n_rows < most ? op->n_rows : most);
}

static void cuda_attend(backend *b, const attend_op *op, mem y, mem q, const seg sg[2], mem sinks, const step *st) {
    cuda_backend *be = self(b);
    if (op->n_seg != 1 || !cache_type(sg[0].type) || sg[0].ratio > 1 || sg[0].row_ids.handle)
        return latch(be, false, "attend", "one segment of f16 or q8_0 rows, one per token, only");
    if (op->dim_k > MAX_HEAD_DIM || op->dim_v > MAX_HEAD_DIM)
        return latch(be, false, "attend", "heads of at most 1024 values only");
    if (op->n_rows <= 0)
        return;
    attend_args a;
    memset(static_cast<void *>(&a), 0, sizeof a);
    a.c = cache_of(sg, st, op->n_head_kv, op->dim_k, op->dim_v, op->shared);
    a.q = at<const float>(q), a.sinks = op->has_sinks ? at<const float>(sinks) : nullptr, a.y = at<float>(y);
    a.ld_q = op->ld_q, a.ld_y = op->ld_y, a.n_rows = op->n_rows, a.n_head = op->n_head;
    a.group = op->n_head / op->n_head_kv, a.window = op->window, a.n_split = 1;
    a.lanes_k = lanes_for(op->dim_k, 32), a.lanes_v = lanes_for(op->dim_v, ATTEND_THREADS);
    a.scale = op->scale, a.softcap = op->softcap;
    const uint64_t row = split_states(op, 0);
    if (row && op->n_rows <= merge_rows(row)) {
        a.n_split = int((uint64_t(op->bucket) + SPLIT_TOKENS - 1) / SPLIT_TOKENS);
        a.part = reinterpret_cast<float *>(scratch(be, row * uint64_t(op->n_rows)));
        if (!a.part)
            return;
    }
    const bool one = a.n_rows * a.group == 1 || op->dim_k > 512 || op->dim_v > 512;
    const int nq = one ? 1 : 4, key_groups = ATTEND_THREADS / a.lanes_v;
    const uint64_t floats = uint64_t(nq) * uint64_t((op->dim_k + 7) / 8 * 8 + op->dim_v + key_groups * op->dim_v);
    const dim3 grid(blocks(int64_t(a.n_rows) * a.group, nq), unsigned(op->n_head_kv), unsigned(a.n_split));
    const uint64_t shared = (one ? sizeof(attend_space<1>) : sizeof(attend_space<4>)) + floats * 4;
    if (sg[0].type == TYPE_F16)
        operate(b, "attend", one ? attend<TYPE_F16, 1> : attend<TYPE_F16, 4>, grid, ATTEND_THREADS, a, shared);
    else
        operate(b, "attend", one ? attend<TYPE_Q8_0, 1> : attend<TYPE_Q8_0, 4>, grid, ATTEND_THREADS, a, shared);
    if (a.part)
        operate(b, "attend_merge", attend_merge, dim3(unsigned(op->n_head), unsigned(op->n_rows)), ATTEND_THREADS, a);
}

static void cuda_glu(backend *b, const glu_op *op, mem y, mem gate, mem up) {
    glu_args a = {};
    a.gate = at<const float>(gate), a.up = at<const float>(up), a.y = at<float>(y);
    a.ld_gate = op->ld_gate, a.ld_up = op->ld_up, a.ld_y = op->ld_y, a.n = op->n, a.kind = op->kind;
    a.clamp_gate = op->clamp_gate, a.clamp_up = op->clamp_up;
    operate(b, "glu", glu, dim3(blocks(op->n, ROW_THREADS), unsigned(op->n_rows)), ROW_THREADS, a);
}

static void cuda_add(backend *b, const add_op *op, mem y, mem x) {
    const add_args a = {at<const float>(x), at<float>(y), int64_t(op->n_rows) * op->n};
    operate(b, "add", add, dim3(blocks(a.n, ROW_THREADS)), ROW_THREADS, a);
}

// In the order of backend.h. What no supported architecture needs yet is null.
static const backend_ops cuda_table = {
    cuda_alloc, cuda_grow,           cuda_free,           cuda_weights, cuda_put,       cuda_get,
    cuda_copy,  cuda_matmul_scratch, cuda_attend_scratch, cuda_reserve, cuda_allocated, cuda_sync,
    cuda_embed, cuda_rows,           cuda_norm,           cuda_matmul,
    nullptr, // matmul_id
    cuda_rope,  cuda_kv_put,         cuda_attend,         cuda_glu,     cuda_add,
    nullptr, // scale
    nullptr, // route
    nullptr, // mix
    nullptr, // topk
    nullptr, // pool
    nullptr, // index
    nullptr, // requant
    nullptr, // hc_split
    nullptr, // hc_pre
    nullptr, // hc_post
};

} // namespace

const backend_ops *cuda_backend_ops(void) { return &cuda_table; }

int cuda_devices(cuda_device *out, int most) {
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    for (int i = 0; i < n && i < most; i++) {
        cudaDeviceProp p;
        out[i] = {};
        if (cudaGetDeviceProperties(&p, i) != cudaSuccess)
            continue;
        memcpy(out[i].name, p.name, sizeof out[i].name - 1);
        out[i].major = p.major, out[i].minor = p.minor, out[i].memory = p.totalGlobalMem;
    }
    return n;
}

void cuda_close(backend *b) {
    if (!b)
        return;
    cuda_backend *be = self(b);
    cudaSetDevice(be->device);
    if (be->stream)
        cudaStreamSynchronize(be->stream);
    for (launch_graph &g : be->graphs)
        drop_graph(g);
    for (const cuda_allocation &a : be->allocations)
        cudaFree(a.data);
    if (be->staging)
        cudaFreeHost(be->staging);
    if (be->stream)
        cudaStreamDestroy(be->stream);
    free(be->list);
    delete be;
}

backend *cuda_open(int device, char *error, size_t cap) {
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || device < 0 || device >= n) {
        cudaGetLastError();
        snprintf(error, cap, "CUDA device %d: %s", device, e != cudaSuccess ? cudaGetErrorString(e) : "there is none");
        return nullptr;
    }
    cuda_backend *be = new (std::nothrow) cuda_backend;
    if (be) {
        be->device = device;
        be->list = static_cast<launch_record *>(malloc(MAX_LAUNCHES * sizeof *be->list));
    }
    if (!be || !be->list) {
        snprintf(error, cap, "out of memory");
        delete be;
        return nullptr;
    }
    void *staging = nullptr;
    e = cudaSetDevice(device);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithFlags(&be->stream, cudaStreamNonBlocking);
    if (e == cudaSuccess)
        e = cudaMallocHost(&staging, STAGING);
    be->staging = static_cast<uint8_t *>(staging);
    if (e != cudaSuccess) {
        snprintf(error, cap, "CUDA device %d: %s", device, cudaGetErrorString(e));
        cudaGetLastError();
        cuda_close(reinterpret_cast<backend *>(be));
        return nullptr;
    }
    return reinterpret_cast<backend *>(be);
}
