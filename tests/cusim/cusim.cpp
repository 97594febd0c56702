// cusim.cpp: the scheduler of the fibers, device memory, streams and graphs: the part of the CUDA runtime that
// kernels.cu calls, linked in its place. Work on a stream waits until something waits for it, so that a buffer that is
// used again too early shows.
#include "cusim.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <sys/mman.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define ASAN 1
#else
#define ASAN 0
#endif

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

#if defined(CUSIM_TSAN) // the kernels are compiled with the thread sanitizer, this file without
extern "C" {
void *__tsan_get_current_fiber();
void *__tsan_create_fiber(unsigned);
void __tsan_switch_to_fiber(void *, unsigned);
void __tsan_acquire(void *);
void __tsan_release(void *);
void AnnotateIgnoreReadsBegin(const char *, int);
void AnnotateIgnoreReadsEnd(const char *, int);
void AnnotateIgnoreWritesBegin(const char *, int);
void AnnotateIgnoreWritesEnd(const char *, int);
}
struct tsan_ignore {
    tsan_ignore() { AnnotateIgnoreReadsBegin("", 0), AnnotateIgnoreWritesBegin("", 0); }
    ~tsan_ignore() { AnnotateIgnoreWritesEnd("", 0), AnnotateIgnoreReadsEnd("", 0); }
};
#define TS(x) x
#else
#define TS(x)
#endif

extern "C" char __start_cusim_shared[] __attribute__((weak)), __stop_cusim_shared[] __attribute__((weak));

#if !defined(__x86_64__)
#error "the simulator switches fibers on x86-64 only"
#endif
extern "C" void cusim_switch(void **save, void *to);
asm(R"(
.text
.globl cusim_switch
.type cusim_switch,@function
cusim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cusim_switch,.-cusim_switch
)");

namespace cusim {

enum state { READY, AT_BARRIER, IN_COLLECTIVE, DONE };
static const char *const state_names[] = {"ready", "__syncthreads", "a warp collective", "done"};
static const char *const operation_names[] = {"shuffle", "__syncwarp"};

struct fiber {
    context c;
    void *sp;
    char *stack;
    state st;
    int lane, warp;
    operation op;
    uint32_t mask;
    void *tsan;
};

// Lanes of a warp that wait for each other.
struct lane_group {
    uint32_t mask, arrived;
    operation op;
    void *data[32];
    combine_fn combine;
};
struct warp {
    lane_group group[32];
    int n_group;
    uint32_t live;
    int generation; // of its __syncwarps
    char sync[2];
};

static const size_t STACK = 128 * 1024;

context *current;
faults fault;
counters count;
// Never freed: fibers outlive static destructors.
static std::vector<fiber *> &fibers = *new std::vector<fiber *>;
static std::vector<warp> &warps = *new std::vector<warp>;
static std::vector<int> &order = *new std::vector<int>;
static std::mt19937 random_lanes;
static char order_kind = 'f'; // fwd, rev, or s: shuffled
static const std::function<void()> *thread_body;
static void *main_sp;
static int live, at_barrier, generation; // of the block's barriers
// What the thread sanitizer orders barriers by. Two take turns: who is quick may be at the next barrier before another
// has left this one, and must not seem ordered before it.
static char barrier_sync[2] __attribute__((unused));
static char *shared_memory;
static size_t shared_size;
static const char *kernel_name = "";
static void *tsan_main __attribute__((unused));

void fail(const char *format, ...) {
    va_list a;
    va_start(a, format);
    fprintf(stderr, "cusim: kernel %s", kernel_name);
    if (current)
        fprintf(stderr, " block (%u,%u,%u) thread (%u,%u,%u)", current->block.x, current->block.y, current->block.z,
                current->thread.x, current->thread.y, current->thread.z);
    fprintf(stderr, ": ");
    vfprintf(stderr, format, a);
    fprintf(stderr, "\n");
    abort();
}

void set_order(const char *s) {
    order_kind = s && *s == 'r' ? 'r' : s && *s >= '0' && *s <= '9' ? 's' : 'f';
    if (order_kind == 's')
        random_lanes.seed(unsigned(atoi(s)));
}

#if ASAN
static const void *main_stack;
static size_t main_stack_size;
#endif

static void to_main() {
    fiber *f = current->self;
    TS(__tsan_switch_to_fiber(tsan_main, 1));
#if ASAN
    void *fake;
    __sanitizer_start_switch_fiber(f->st == DONE ? nullptr : &fake, main_stack, main_stack_size);
#endif
    cusim_switch(&f->sp, main_sp);
#if ASAN
    __sanitizer_finish_switch_fiber(fake, &main_stack, &main_stack_size);
#endif
}

static void finish_group(warp &w, int warp_no, int i) {
    lane_group g = w.group[i];
    w.group[i] = w.group[--w.n_group];
    w.generation += g.op == SYNCWARP;
    g.combine(g.data, g.arrived);
    for (int l = 0; l < 32; l++)
        if (g.arrived >> l & 1)
            fibers[size_t(warp_no * 32 + l)]->st = READY;
}

void collective(operation op, uint32_t mask, void *data, combine_fn combine) {
    TS(tsan_ignore ignore);
    fiber *f = current->self;
    warp &w = warps[size_t(f->warp)];
    if (!(mask >> f->lane & 1))
        fail("%s: lane %d is not in its own mask %08x", operation_names[op], f->lane, mask);
    int found = -1;
    for (int i = 0; i < w.n_group; i++) {
        if (w.group[i].mask == mask)
            found = i;
        else if (w.group[i].mask & mask)
            fail("%s: mask %08x overlaps the waiting mask %08x", operation_names[op], mask, w.group[i].mask);
    }
    if (found < 0) {
        found = w.n_group++;
        w.group[found] = lane_group{mask, 0, op, {}, combine};
    }
    lane_group &g = w.group[found];
    if (g.op != op || g.combine != combine)
        fail("lanes of one mask execute different collectives: %s and %s", operation_names[op], operation_names[g.op]);
    g.arrived |= 1u << f->lane;
    g.data[f->lane] = data;
    char *sync __attribute__((unused)) = &w.sync[w.generation & 1];
    if (op == SYNCWARP) {
        TS(__tsan_release(sync));
    }
    f->st = IN_COLLECTIVE, f->op = op, f->mask = mask;
    if (g.arrived == (mask & w.live))
        finish_group(w, f->warp, found);
    while (f->st != READY)
        to_main();
    if (op == SYNCWARP) {
        TS(__tsan_acquire(sync));
    }
}

static void release_barrier() {
    at_barrier = 0;
    generation++;
    for (fiber *f : fibers)
        if (f->st == AT_BARRIER)
            f->st = READY;
}

void barrier() {
    TS(tsan_ignore ignore);
    fiber *f = current->self;
    char *sync __attribute__((unused)) = &barrier_sync[generation & 1];
    TS(__tsan_release(sync));
    f->st = AT_BARRIER;
    if (++at_barrier == live)
        release_barrier();
    else
        to_main();
    TS(__tsan_acquire(sync));
}

void *dynamic_shared() { return shared_memory; }

static void fiber_entry() {
#if ASAN
    __sanitizer_finish_switch_fiber(nullptr, &main_stack, &main_stack_size);
#endif
    fiber *f = current->self;
    TS(__tsan_acquire(&tsan_main));
    (*thread_body)();
    f->st = DONE;
    live--;
    warp &w = warps[size_t(f->warp)];
    w.live &= ~(1u << f->lane);
    for (int i = 0; i < w.n_group; i++)
        if (w.group[i].arrived == (w.group[i].mask & w.live))
            finish_group(w, f->warp, i--);
    if (live && at_barrier == live)
        release_barrier();
    TS(__tsan_release(&main_sp));
    to_main();
    abort();
}

static fiber *make_fiber() {
    fiber *f = new fiber{};
    void *p = mmap(nullptr, STACK + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || mprotect(p, 4096, PROT_NONE))
        fail("no memory for a stack");
    f->stack = static_cast<char *>(p) + 4096;
    TS(f->tsan = __tsan_create_fiber(0));
    return f;
}

static void start_fiber(fiber *f, unsigned i, dim3 b, dim3 g, uint3 block) {
    f->c = context{{i % b.x, i / b.x % b.y, i / (b.x * b.y)}, block, b, g, f};
    f->st = READY;
    f->lane = int(i & 31), f->warp = int(i >> 5);
    warps[size_t(f->warp)].live |= 1u << f->lane;
#if ASAN
    __asan_unpoison_memory_region(f->stack + STACK - 4096, 4096); // frames that the fiber before left there at its end
#endif
    void **sp = reinterpret_cast<void **>(f->stack + STACK - 64);
    *--sp = nullptr;
    *--sp = reinterpret_cast<void *>(fiber_entry);
    for (int k = 0; k < 6; k++)
        *--sp = nullptr;
    f->sp = sp;
}

static void resume(fiber *f) {
    current = &f->c;
    TS(__tsan_switch_to_fiber(f->tsan, 1));
#if ASAN
    void *fake;
    __sanitizer_start_switch_fiber(&fake, f->stack, STACK);
#endif
    cusim_switch(&main_sp, f->sp);
#if ASAN
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
    current = nullptr;
}

[[noreturn]] static void deadlock(int n) {
    for (int i = 0, shown = 0; i < n && shown < 40; i++) {
        const fiber *f = fibers[size_t(i)];
        if (f->st == DONE)
            continue;
        shown++;
        fprintf(stderr, "  thread (%u,%u,%u) waits in %s", f->c.thread.x, f->c.thread.y, f->c.thread.z,
                state_names[f->st]);
        if (f->st == IN_COLLECTIVE)
            fprintf(stderr, ", %s of mask %08x", operation_names[f->op], f->mask);
        fprintf(stderr, "\n");
    }
    fail("no thread can go on: a barrier or collective that not all reach");
}

static void run_block(dim3 b, dim3 g, uint3 block) {
    const int n = int(b.x * b.y * b.z);
    if (__start_cusim_shared)
        memset(__start_cusim_shared, 0xff, size_t(__stop_cusim_shared - __start_cusim_shared));
    memset(shared_memory, 0xff, shared_size);
    warps.resize(size_t(n + 31) / 32);
    for (warp &w : warps)
        w.n_group = 0, w.live = 0;
    live = n, at_barrier = 0;
    while (int(fibers.size()) < n)
        fibers.push_back(make_fiber());
    order.resize(size_t(n));
    for (int i = 0; i < n; i++) {
        start_fiber(fibers[size_t(i)], unsigned(i), b, g, block);
        order[size_t(i)] = order_kind == 'r' ? n - 1 - i : i;
    }
    TS(tsan_main = __tsan_get_current_fiber());
    TS(__tsan_release(&tsan_main));
    while (live) {
        bool any = false;
        if (order_kind == 's')
            std::shuffle(order.begin(), order.end(), random_lanes);
        for (int i : order)
            if (fibers[size_t(i)]->st == READY)
                any = true, resume(fibers[size_t(i)]);
        if (!any && live)
            deadlock(n);
    }
    TS(__tsan_acquire(&main_sp));
}

// ---- device memory

struct allocation {
    size_t size, mapped;
    char *base;
};
static std::map<char *, allocation> &allocations = *new std::map<char *, allocation>;
static std::deque<std::function<void()>> &queue = *new std::deque<std::function<void()>>;
static std::deque<std::function<void()>> *capture; // where work goes instead while a graph is captured
static cudaError_t last_error, lost;
static int unlocked;

static const bool protect = !ASAN;

static void set_protection(int access) {
    for (auto &a : allocations)
        if (a.second.mapped)
            mprotect(a.second.base, a.second.mapped, access);
}

struct unlock_memory {
    unlock_memory() {
        if (unlocked++ == 0 && protect)
            set_protection(PROT_READ | PROT_WRITE);
    }
    ~unlock_memory() {
        if (--unlocked == 0 && protect)
            set_protection(PROT_NONE);
    }
};

static bool on_device(const void *p, size_t n) {
    auto it = allocations.upper_bound(static_cast<char *>(const_cast<void *>(p)));
    if (it == allocations.begin())
        return false;
    --it;
    return static_cast<const char *>(p) + n <= it->first + it->second.size;
}

static void flush() {
    unlock_memory unlock;
    while (!queue.empty()) {
        auto f = std::move(queue.front());
        queue.pop_front();
        f();
    }
}

static cudaError_t failed(cudaError_t e) { return last_error = e; }

static cudaError_t enqueue(std::function<void()> f) {
    if (lost)
        return lost;
    (capture ? *capture : queue).push_back(std::move(f));
    return cudaSuccess;
}

static void run_kernel(const char *name, dim3 g, dim3 b, size_t shared, const std::function<void()> &thread) {
    kernel_name = name;
    free(shared_memory);
    const size_t room = (shared + 1023) / 1024 * 1024 + 1024;
    shared_memory = static_cast<char *>(aligned_alloc(1024, room));
    shared_size = shared;
#if ASAN
    __asan_poison_memory_region(shared_memory + shared, room - shared);
#endif
    thread_body = &thread;
    for (unsigned z = 0; z < g.z; z++)
        for (unsigned y = 0; y < g.y; y++)
            for (unsigned x = 0; x < g.x; x++)
                run_block(b, g, uint3{x, y, z});
#if ASAN
    __asan_unpoison_memory_region(shared_memory, room);
#endif
}

void launch(const char *name, dim3 g, dim3 b, size_t shared, cudaStream_t, std::function<void()> thread) {
    if (!b.x || !b.y || !b.z || b.x * b.y * b.z > 1024 || b.z > 64 || !g.x || !g.y || !g.z || g.y > 65535 ||
        g.z > 65535 || g.x > 0x7fffffffu || shared > 48 * 1024) {
        fprintf(stderr, "cusim: %s: a device refuses grid (%u,%u,%u), block (%u,%u,%u), %zu bytes\n", name, g.x, g.y,
                g.z, b.x, b.y, b.z, shared);
        failed(cudaErrorInvalidConfiguration);
        return;
    }
    count.launches++;
    if (fault.launch && --fault.launch == 0)
        lost = cudaErrorLaunchFailure;
    if (lost) {
        failed(lost);
        return;
    }
    enqueue([=, thread = std::move(thread)] { run_kernel(name, g, b, shared, thread); });
}

} // namespace cusim

struct CUgraph_st {
    std::deque<std::function<void()>> work;
};
struct CUgraphExec_st {
    std::deque<std::function<void()>> work;
};

using namespace cusim;

extern "C" {

cudaError_t cudaMalloc(void **p, size_t n) {
    if (lost)
        return lost;
    if (fault.alloc && --fault.alloc == 0)
        return failed(cudaErrorMemoryAllocation);
    const size_t room = (n + 255) / 256 * 256;
    char *user;
    if (protect) { // the end lies before a page that is never accessible
        const size_t mapped = (room + 4095) / 4096 * 4096;
        void *base = mmap(nullptr, mapped + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base == MAP_FAILED || mprotect(static_cast<char *>(base) + mapped, 4096, PROT_NONE))
            return failed(cudaErrorMemoryAllocation);
        memset(base, 0xff, mapped);
        user = static_cast<char *>(base) + mapped - room;
        allocations[user] = {n, mapped, static_cast<char *>(base)};
        if (!unlocked)
            mprotect(base, mapped, PROT_NONE);
    } else {
        user = static_cast<char *>(aligned_alloc(256, room ? room : 256));
        memset(user, 0xff, room);
        allocations[user] = {n, 0, user};
#if ASAN
        __asan_poison_memory_region(user + n, room - n);
#endif
    }
    *p = user;
    count.allocations++;
    return cudaSuccess;
}

cudaError_t cudaFree(void *p) {
    if (!p)
        return cudaSuccess;
    flush();
    auto it = allocations.find(static_cast<char *>(p));
    if (it == allocations.end())
        return failed(cudaErrorInvalidValue);
    if (it->second.mapped)
        munmap(it->second.base, it->second.mapped + 4096);
    else {
#if ASAN
        __asan_unpoison_memory_region(p, (it->second.size + 255) / 256 * 256);
#endif
        free(p);
    }
    allocations.erase(it);
    count.allocations--;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind kind, cudaStream_t) {
    const bool to_device = kind != cudaMemcpyDeviceToHost, from_device = kind != cudaMemcpyHostToDevice;
    if (on_device(to, n) != to_device || on_device(from, n) != from_device) {
        fprintf(stderr, "cusim: a copy of %zu bytes, kind %d: not inside one allocation of that side\n", n, int(kind));
        return failed(cudaErrorInvalidValue);
    }
    return enqueue([=] { memmove(to, from, n); });
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t) {
    if (!on_device(p, n))
        return failed(cudaErrorInvalidValue);
    return enqueue([=] { memset(p, value, n); });
}

cudaError_t cudaMallocHost(void **p, size_t n) {
    *p = malloc(n);
    return *p ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void *p) {
    free(p);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) {
    count.syncs++;
    flush();
    return lost;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) {
    *s = reinterpret_cast<cudaStream_t>(uintptr_t(1));
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
    flush();
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    if (capture || lost)
        return failed(capture ? cudaErrorIllegalState : lost);
    capture = new std::deque<std::function<void()>>;
    count.captures++;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *graph) {
    if (!capture)
        return failed(cudaErrorIllegalState);
    *graph = lost ? nullptr : new CUgraph_st{std::move(*capture)};
    delete capture;
    capture = nullptr;
    return lost;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long) {
    *exec = new CUgraphExec_st{graph->work};
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
    count.graph_launches++;
    return enqueue([work = exec->work] {
        for (auto &f : work)
            f();
    });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    delete exec;
    return cudaSuccess;
}

cudaError_t cudaGetLastError() {
    const cudaError_t e = last_error;
    last_error = lost;
    return e;
}
const char *cudaGetErrorString(cudaError_t e) {
    return e == cudaErrorMemoryAllocation ? "out of memory"
           : e == cudaErrorLaunchFailure  ? "unspecified launch failure"
                                          : "an error of the simulator";
}
cudaError_t cudaGetDeviceCount(int *n) {
    *n = fault.no_device ? 0 : 1;
    return fault.no_device ? cudaErrorInsufficientDriver : cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    if (fault.launch < 0)
        lost = last_error = cudaSuccess, fault.launch = 0;
    return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    memset(static_cast<void *>(p), 0, sizeof *p);
    strcpy(p->name, "simulated device");
    p->major = 8, p->minor = 9, p->multiProcessorCount = 1, p->totalGlobalMem = size_t(1) << 30;
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = *total = size_t(1) << 30;
    return cudaSuccess;
}
}

namespace {
const bool order_from_environment = (set_order(getenv("CUSIM_ORDER")), true);
}
