// engine: a single-file local inference engine.   MIT licence, see LICENSE.
//
// Maps a GGUF weight file, runs RoPE transformer layers on it and turns text into text. The public C API
// is engine.h; the program around it is cli.cpp. To embed: g++ -O3 tool.cpp engine.cpp (C++17 or newer,
// POSIX). Nothing but the C++ standard library and POSIX is needed, and the library never prints.
//
// CONTENTS
//   1. BASICS     errors, log, memory, clock, floating-point mode, threads
//   2. QUANTS     weight formats and their order of operations
//   3. FILES      GGUF, JSON
//   4. VOCAB      tokenizers and detokenizer
//   5. TEMPLATE   the Jinja subset of chat templates
//   6. MODEL      architectures, hyper-parameters, weight binding
//   7. CPU        the operations on the CPU
//   9. CACHE      pages of keys and values
//   10. FORWARD   tokens to logits, once for all backends
//   11. SAMPLER   logits to a token
//   12. SESSION   one timeline, and the loop that generates text
//   13. API       engine.h
//
// CONVENTIONS
//   - Strictly bottom-up: nothing is used before it is defined, and there are no forward declarations.
//   - Everything is static but the API. A zero-initialised struct means defaults.
//   - Error is thrown at load time, for bad input and for I/O, and is caught in chapter API only. The
//     token loop does not throw.
//   - Matrices are [n_out, n_in], y = W x. Shapes stand in comments, outermost dimension first.
//   - The plain C++ version of an operation defines its result bit for bit. The SIMD versions equal it
//     exactly. The orders of addition are written down in chapters QUANTS and CPU.

// The floating-point rules are the source's own, so that a bare `g++ -O3` gives the same bits as the Makefile:
// a product and a sum are fused only where std::fma or a fused intrinsic says so.
#if defined(__FAST_MATH__)
#error "engine.cpp defines its results bit for bit and cannot be compiled with -ffast-math"
#endif
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized" // g++ 12 sees _mm512_undefined() in its own headers
#endif

#include "engine.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cfenv>
#include <charconv>
#include <climits>
#include <cmath>
#include <condition_variable>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <initializer_list>
#include <locale.h>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <unordered_map>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "engine.cpp maps little-endian files in place and needs a little-endian machine"
#endif

#include "backend.h"

namespace {

// ---------------------------------------------------------------------------------------------------
// 1. BASICS
//
// Errors, the log, memory, a byte cursor, the clock, the floating-point mode, the thread pool, a hash, and
// elementary functions: what every later chapter leans on. Knows nothing of models or files. Invariant: nothing here
// prints, exits or aborts.
// ---------------------------------------------------------------------------------------------------

using std::size_t;
using std::string;
using std::string_view;
using std::vector;

// The one exception type. `code` is one of ENGINE_E*; `msg` is for people: it names file, field and reason.
struct Error {
    int code;
    string msg;
};

__attribute__((format(printf, 1, 0))) static string vstrf(const char *fmt, va_list args) {
    va_list again;
    va_copy(again, args);
    int n = vsnprintf(nullptr, 0, fmt, again);
    va_end(again);
    string s(n > 0 ? size_t(n) : 0, '\0');
    if (n > 0)
        vsnprintf(&s[0], s.size() + 1, fmt, args);
    return s;
}

__attribute__((format(printf, 1, 2))) static string strf(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    string s = vstrf(fmt, args);
    va_end(args);
    return s;
}

[[noreturn, gnu::format(printf, 2, 3)]] static void fail(int code, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    string s = vstrf(fmt, args);
    va_end(args);
    throw Error{code, std::move(s)};
}

// Names from a file are untrusted bytes; messages show them cut to 64 bytes, with anything that is not
// printable ASCII as '?'.
static string show(string_view s) {
    string out(s.substr(0, 64));
    for (char &c : out)
        if (c < 0x20 || c > 0x7e)
            c = '?';
    return s.size() > 64 ? out + "..." : out;
}

static std::mutex log_mutex; // guards the two that belong together
static engine_log_fn log_fn = nullptr;
static void *log_user = nullptr;

// level: ENGINE_LOG_INFO or ENGINE_LOG_WARN. Without a callback the text goes nowhere.
__attribute__((format(printf, 2, 3))) static void log_msg(int level, const char *fmt, ...) {
    engine_log_fn fn;
    void *user;
    {
        std::lock_guard<std::mutex> lock(log_mutex);
        fn = log_fn, user = log_user;
    }
    if (!fn)
        return;
    va_list args;
    va_start(args, fmt);
    string s = vstrf(fmt, args);
    va_end(args);
    fn(user, level, s.c_str());
}

static double now_seconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// Zeroed, page-aligned bytes that the kernel provides when they are first touched.
struct buffer {
    uint8_t *data = nullptr;
    size_t size = 0;

    buffer() = default;
    buffer(size_t bytes, const char *what) : size(bytes) {
        if (!bytes)
            return;
        void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED)
            fail(ENGINE_ENOMEM, "out of memory: %s needs %.1f MiB", what, double(bytes) / (1 << 20));
        data = static_cast<uint8_t *>(p);
    }
    buffer(buffer &&o) noexcept : data(o.data), size(o.size) { o.data = nullptr, o.size = 0; }
    buffer &operator=(buffer &&o) noexcept {
        std::swap(data, o.data);
        std::swap(size, o.size);
        return *this;
    }
    ~buffer() {
        if (data)
            munmap(data, size);
    }
};

// Reads little-endian values from bytes that are not trusted: every read is checked first, so a claimed
// length can never allocate or reach beyond the end.
struct cursor {
    const uint8_t *base;
    uint64_t size;
    uint64_t at;
    string file; // for messages

    uint64_t left() const { return size - at; }

    const uint8_t *take(uint64_t n, const char *what) {
        if (n > left())
            fail(ENGINE_EFORMAT, "%s: file ends inside %s: %llu bytes needed at offset %llu, %llu left", file.c_str(),
                 what, (unsigned long long)n, (unsigned long long)at, (unsigned long long)left());
        const uint8_t *p = base + at;
        at += n;
        return p;
    }
    template <class T> T get(const char *what) {
        T v;
        memcpy(&v, take(sizeof v, what), sizeof v);
        return v;
    }
};

struct utf8_char {
    uint32_t code;
    int length; // bytes; of what is no valid character: its maximal subpart, at least 1
    bool valid;
    bool cut; // the bytes end inside what may yet become a valid character
};

// The character at p < end, by the table of well-formed byte sequences in the Unicode standard.
static inline utf8_char next_char(const char *p, const char *end) {
    const uint32_t b = uint8_t(*p);
    if (b < 0x80)
        return {b, 1, true, false};
    const int more = b >= 0xc2 && b <= 0xdf ? 1 : b >= 0xe0 && b <= 0xef ? 2 : b >= 0xf0 && b <= 0xf4 ? 3 : 0;
    uint32_t code = b & (0x3fu >> more);
    uint32_t low = b == 0xe0 ? 0xa0 : b == 0xf0 ? 0x90 : 0x80, high = b == 0xed ? 0x9f : b == 0xf4 ? 0x8f : 0xbf;
    for (int i = 1; i <= more; i++) {
        if (p + i == end)
            return {0, i, false, true};
        const uint32_t c = uint8_t(p[i]);
        if (c < low || c > high)
            return {0, i, false, false};
        code = code << 6 | (c & 0x3f);
        low = 0x80, high = 0xbf;
    }
    return {code, more + 1, more > 0, false};
}

// Round to nearest, denormals kept, for as long as it lives; the caller's mode comes back afterwards.
struct fp_mode {
    fenv_t saved;
    fp_mode() {
        fegetenv(&saved);
        fesetround(FE_TONEAREST);
#if defined(__x86_64__)
        _mm_setcsr(0x1f80); // all exceptions masked, nearest, no flush to zero
#endif
    }
    ~fp_mode() { fesetenv(&saved); }
    fp_mode(const fp_mode &) = delete;
};

// Cores that this process may use: its affinity mask, and a container's quota.
static int usable_cores() {
    int n = int(std::thread::hardware_concurrency());
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        n = CPU_COUNT(&set);
    if (FILE *f = fopen("/sys/fs/cgroup/cpu.max", "r")) {
        long long quota, period;
        if (fscanf(f, "%lld %lld", &quota, &period) == 2 && quota > 0 && period > 0)
            n = std::min<int>(n, int(std::max(1LL, quota / period)));
        fclose(f);
    }
#endif
    return std::min(std::max(n, 1), 512);
}

// Bytes of memory of this machine, or of the container that the process is in.
static int64_t physical_memory() {
    int64_t bytes = int64_t(sysconf(_SC_PHYS_PAGES)) * int64_t(sysconf(_SC_PAGESIZE));
    if (FILE *f = fopen("/sys/fs/cgroup/memory.max", "r")) {
        long long limit;
        if (fscanf(f, "%lld", &limit) == 1 && limit > 0)
            bytes = std::min<int64_t>(bytes, limit);
        fclose(f);
    }
    return bytes;
}

// Tells the processor that this is a spin loop.
static inline void spin_pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// `size` workers, the calling thread being worker 0. A worker spins for some tens of microseconds after
// its work, which covers the gaps inside a decode step, then sleeps: an idle pool costs nothing.
struct thread_pool {
    using task = void (*)(void *arg, int worker);
    const int size;

    explicit thread_pool(int n_threads) : size(n_threads) {
        // The host's signal handlers run on the host's threads: workers are started with all signals blocked.
        sigset_t all, old;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old);
        string failure;
        try {
            for (int w = 1; w < size; w++)
                threads.emplace_back([this, w] { work(w); });
        } catch (const std::exception &e) {
            failure = e.what();
        }
        pthread_sigmask(SIG_SETMASK, &old, nullptr);
        if (!failure.empty()) {
            stop_all();
            fail(ENGINE_ENOMEM, "cannot start %d threads: %s", size, failure.c_str());
        }
    }
    ~thread_pool() { stop_all(); }
    thread_pool(const thread_pool &) = delete;

    // Calls fn(arg, w) once for each worker w and returns when all are done. One caller at a time.
    void run(task fn, void *arg) {
        current_fn = fn, current_arg = arg;
        running.store(size - 1);
        generation.fetch_add(1);
        if (sleepers.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex);
            wake.notify_all();
        }
        fn(arg, 0);
        for (int i = 0; running.load() > 0; i++)
            i < SPIN ? spin_pause() : std::this_thread::yield();
    }

  private:
    static constexpr int SPIN = 2000;
    task current_fn = nullptr;
    void *current_arg = nullptr;
    std::atomic<uint64_t> generation{0};
    std::atomic<int> running{0}, sleepers{0};
    std::atomic<bool> stopping{false};
    std::mutex mutex;
    std::condition_variable wake;
    vector<std::thread> threads;

    void work(int worker) {
        fp_mode mode;
        for (uint64_t seen = 0;;) {
            for (int i = 0; i < SPIN && generation.load() == seen; i++)
                spin_pause();
            if (generation.load() == seen) {
                std::unique_lock<std::mutex> lock(mutex);
                sleepers.fetch_add(1);
                wake.wait(lock, [&] { return generation.load() != seen; });
                sleepers.fetch_sub(1);
            }
            seen++;
            if (stopping.load())
                return;
            current_fn(current_arg, worker);
            running.fetch_sub(1);
        }
    }
    void stop_all() {
        stopping.store(true);
        generation.fetch_add(1);
        {
            std::lock_guard<std::mutex> lock(mutex);
            wake.notify_all();
        }
        for (std::thread &t : threads)
            t.join();
    }
};

// body(begin, end, worker) over [0, n) in pieces of `grain`, taken from a counter so that a slow worker
// takes fewer. Which worker takes which piece varies; results must not depend on it.
template <class F> static void parallel(thread_pool &pool, int64_t n, int64_t grain, F &&body) {
    if (pool.size == 1 || n <= grain) {
        if (n > 0)
            body(int64_t(0), n, 0);
        return;
    }
    struct shared {
        std::atomic<int64_t> next{0};
        int64_t n, grain;
        F *body;
    } s;
    s.n = n, s.grain = grain, s.body = &body;
    pool.run(
        [](void *arg, int worker) {
            shared &s = *static_cast<shared *>(arg);
            for (int64_t i; (i = s.next.fetch_add(s.grain)) < s.n;)
                (*s.body)(i, std::min(i + s.grain, s.n), worker);
        },
        &s);
}

// SHA-256 (FIPS 180-4), for the names of cache pages, fingerprints and checksums: what is equal by it is equal.
struct digest {
    uint8_t b[32];
    bool operator==(const digest &o) const { return memcmp(b, o.b, sizeof b) == 0; }
};
struct sha256 {
    uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint64_t bytes = 0;
    uint8_t tail[64];

    sha256 &add(const void *data, size_t n) {
        const uint8_t *p = static_cast<const uint8_t *>(data);
        size_t used = size_t(bytes % 64);
        bytes += n;
        if (used) {
            const size_t take = std::min(n, 64 - used);
            memcpy(tail + used, p, take);
            p += take, n -= take, used += take;
            if (used < 64)
                return *this;
            block(tail);
        }
        for (; n >= 64; p += 64, n -= 64)
            block(p);
        if (n)
            memcpy(tail, p, n);
        return *this;
    }
    // The bytes of a number or a digest, little-endian like everything that this program runs on.
    template <class T> sha256 &value(const T &v) { return add(&v, sizeof v); }
    digest finish() {
        const uint64_t bits = bytes * 8;
        const uint8_t one = 0x80, zeros[64] = {};
        add(&one, 1);
        add(zeros, size_t((56 + 64 - bytes % 64) % 64));
        uint8_t length[8];
        for (int i = 0; i < 8; i++)
            length[i] = uint8_t(bits >> (56 - 8 * i));
        add(length, 8);
        digest d;
        for (int i = 0; i < 32; i++)
            d.b[i] = uint8_t(h[i / 4] >> (24 - i % 4 * 8));
        return d;
    }

  private:
    void block(const uint8_t *p) {
        static const uint32_t k[64] = {
            0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
            0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
            0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
            0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
            0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
            0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
            0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
            0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
        const auto turn = [](uint32_t x, int n) { return x >> n | x << (32 - n); };
        uint32_t w[64], s[8];
        for (int i = 0; i < 16; i++)
            w[i] = uint32_t(p[4 * i]) << 24 | uint32_t(p[4 * i + 1]) << 16 | uint32_t(p[4 * i + 2]) << 8 | p[4 * i + 3];
        for (int i = 16; i < 64; i++)
            w[i] = w[i - 16] + w[i - 7] + (turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >> 3) +
                   (turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >> 10);
        memcpy(s, h, sizeof s);
        const auto round = [&](int a, int i) { // the eight words turn by index, so that none is moved
            const auto at = [&](int n) -> uint32_t & { return s[(a + n) & 7]; };
            const uint32_t x = at(0), e = at(4);
            const uint32_t t =
                at(7) + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & at(5)) ^ (~e & at(6))) + k[i] + w[i];
            at(3) += t;
            at(7) = t + (turn(x, 2) ^ turn(x, 13) ^ turn(x, 22)) + ((x & at(1)) ^ (x & at(2)) ^ (at(1) & at(2)));
        };
        for (int i = 0; i < 64; i += 8) {
            round(0, i), round(7, i + 1), round(6, i + 2), round(5, i + 3);
            round(4, i + 4), round(3, i + 5), round(2, i + 6), round(1, i + 7);
        }
        for (int i = 0; i < 8; i++)
            h[i] += s[i];
    }
};

// exp, log, sin and cos in double from +, *, fma and rounding alone, so that every C library gives the same
// bits. Within about 2 units in the last place.
static double exact_exp(double x) {
    if (!(x > -708))
        return x != x ? x : 0;
    if (x > 709)
        return HUGE_VAL;
    const double k = std::nearbyint(x * 1.4426950408889634);
    const double r = std::fma(k, -1.9082149292705877e-10, std::fma(k, -0.6931471803691238, x));
    double sum = 1; // Taylor, |r| <= 0.347
    for (int n = 14; n > 0; n--)
        sum = std::fma(sum, r / n, 1);
    return std::ldexp(sum, int(k));
}
static double exact_log(double x) { // x > 0
    int e;
    double m = std::frexp(x, &e);
    if (m < 0.7071067811865476)
        m *= 2, e--;
    const double t = (m - 1) / (m + 1), t2 = t * t;
    double sum = 0; // 2 artanh(t), |t| <= 0.172
    for (int n = 23; n > 0; n -= 2)
        sum = std::fma(sum, t2, 1.0 / n);
    return std::fma(2 * t, sum, double(e) * 0.6931471805599453);
}
static void exact_sin_cos(double x, double *s, double *c) { // |x| < 2^30
    const double k = std::nearbyint(x * 0.6366197723675814);
    double r = std::fma(k, -1.5707963267948966, x); // pi/2 in two parts
    r = std::fma(k, -6.123233995736766e-17, r);
    const double r2 = r * r;
    double sn = 1, cs = 1; // Taylor, |r| <= 0.786
    for (int n = 16; n > 0; n -= 2) {
        sn = std::fma(sn, -r2 / (n * (n + 1)), 1);
        cs = std::fma(cs, -r2 / (n * (n - 1)), 1);
    }
    sn *= r;
    const int64_t quadrant = int64_t(k) & 3;
    *s = quadrant & 1 ? cs : sn;
    *c = quadrant & 1 ? sn : cs;
    if (quadrant & 2)
        *s = -*s;
    if (quadrant == 1 || quadrant == 2)
        *c = -*c;
}

// ---------------------------------------------------------------------------------------------------
// 2. QUANTS
//
// The formats of weights and the conversions between floats. The formats themselves, layouts and decoding,
// stand once in shaders/quants.h, which the GPU backends share; this chapter makes the C++ table of it,
// decodes whole rows, and writes down the order of operations of every product. Knows nothing of files
// or processors. Invariant: plain C++ gives the same bits as any instruction set.
//
// ORDER OF OPERATIONS. A product of a weight row with an activation row has exactly one value per format;
// every kernel of the CPU equals it bit for bit. All floats are f32, all roundings to nearest even, fma is
// fused, every other product and sum is rounded by itself.
//
// Activations, once per row and kind (ACT_Q8_32: blocks of 32; ACT_Q8_256: blocks of 256):
//     amax = max |x_i|, compared as bit patterns, so that a NaN wins
//     amax not finite:  dx = NaN, all q_i = 0
//     amax < 2^-100:    dx = 0,   all q_i = 0
//     else              dx = amax / 127,  q_i = nearest even of x_i * (127 / amax), an int8 in [-127, 127]
//
// Weights, per block b of the row: quants w_i, d, dmin or m as in shaders/quants.h; sub-blocks s have integer
// sc_s and mn_s. dot and sum run over a block's (or sub-block's) values in exact int32 arithmetic. Eight partial
// sums p[0..7] start at +0; block b changes p[b % 8], blocks ascending, and where two lines stand, in that order:
//
//     Q4_0  Q5_0  Q8_0        p = fma(d * dx, dot(w, q), p)
//     IQ4_NL  MXFP4           the same; MXFP4: w doubled, d = 2^(e - 128)
//     Q4_1  Q5_1              p = fma(d * dx, dot(w, q), p)
//                             p = fma(m * dx, sum(q), p)
//     Q3_K  Q6_K  (s of 16)   p = fma(d * dx, SUM_s sc_s * dot_s(w, q), p)
//     IQ4_XS      (s of 32)   the same
//     Q2_K        (s of 16)   p = fma(d * dx, SUM_s sc_s * dot_s(w, q), p)
//     Q4_K  Q5_K  (s of 32)   p = fma(-(dmin * dx), SUM_s mn_s * sum_s(q), p)
//
//     result = ((p0 + p4) + (p2 + p6)) + ((p1 + p5) + (p3 + p7))
//
// The integers are converted to f32 with rounding: SUM_s can pass 2^24 (it stays below 2^31).
//
//     F32  F16  BF16          w_k widened to f32; sixteen partial sums from +0:
//                             p[k % 16] = fma(w_k, x_k, p[k % 16]), k ascending
//
//     r_i = p_i + p_(i+8);  result = ((r0 + r4) + (r2 + r6)) + ((r1 + r5) + (r3 + r7))
//
// The last two lines are the sixteen-sum rule, which other reductions over a row use as well.
// ---------------------------------------------------------------------------------------------------

struct format {
    const char *name; // "Q4_K"
    int type;         // TYPE_*, the id in a file
    int block;        // values per block
    int bytes;        // per block
    int sub;          // values per sub-block
    int act;          // ACT_*: the activations it is multiplied with
    bool mins;        // values have an offset: Q4_1, Q5_1, Q2_K, Q4_K, Q5_K
};

#define FORMAT_ROW(name, id, block, bytes, sub, act, mins) {#name, id, block, bytes, sub, act, mins != 0},
static const format formats[] = {Q_FORMATS(FORMAT_ROW)};
#undef FORMAT_ROW

// Null when the type is not one of ours.
static const format *find_format(int type) {
    for (const format &f : formats)
        if (f.type == type)
            return &f;
    return nullptr;
}

// Bytes of a row of n values, n a multiple of f.block and no more than a file can hold.
static uint64_t row_bytes(const format &f, uint64_t n) { return n / uint64_t(f.block) * uint64_t(f.bytes); }

static float half_to_float(uint16_t h) { return q_half(h); }

static uint32_t float_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

// Nearest even, whatever the processor's rounding mode; too large becomes infinity; a NaN stays one, made quiet.
static uint16_t float_to_half(float f) {
    uint32_t u = float_bits(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000)
        return uint16_t(sign | 0x7e00 | (a >> 13 & 0x3ff));
    if (a >= 0x477ff000) // 65520, half way from the largest half to the next power of two
        return uint16_t(sign | 0x7c00);
    if (a < 0x33000000) // 2^-25, half the smallest one
        return uint16_t(sign);
    bool denormal = a < 0x38800000; // 2^-14
    uint32_t m = denormal ? (a & 0x7fffff) | 0x800000 : a - (112u << 23);
    uint32_t shift = denormal ? 126 - (a >> 23) : 13;
    uint32_t r = m >> shift, rest = m & ((1u << shift) - 1), middle = 1u << (shift - 1);
    return uint16_t(sign | (r + (rest > middle || (rest == middle && (r & 1)))));
}

// The scale and the offset are read once per sub-block; the value is the same as q_value's.
template <int TYPE, int BLOCK, int BYTES, int SUB>
static void decode_blocks(const uint8_t *row, float *out, int64_t n) {
    for (int64_t b = 0; b < n / BLOCK; b++, row += BYTES)
        for (int s = 0; s < BLOCK / SUB; s++) {
            if (BLOCK == 1) {
                *out++ = q_value(TYPE, row, 0);
                continue;
            }
            float scale = q_scale(TYPE, row, s), offset = q_offset(TYPE, row, s);
            for (int i = s * SUB; i < (s + 1) * SUB; i++)
                *out++ = q_compose(scale, q_quant(TYPE, row, i), offset);
        }
}

// n values, a multiple of the format's block. The type is one that find_format knows.
static void decode_row(int type, const uint8_t *row, float *out, int64_t n) {
#define DECODE_CASE(name, id, block, bytes, sub, act, mins)                                                            \
    case id:                                                                                                           \
        decode_blocks<id, block, bytes, sub>(row, out, n);                                                             \
        break;
    switch (type) { Q_FORMATS(DECODE_CASE) }
#undef DECODE_CASE
}

// ---------------------------------------------------------------------------------------------------
// 3. FILES
//
// GGUF model files, versions 2 and 3, in one part or several: the metadata (typed, checked values) and a
// table of tensors that point into the mapped bytes. Nothing is copied: names, strings and weights are
// views into the file. Knows nothing of what keys or tensors mean, but for general.alignment and split.*.
// Invariant: once open_model_file has returned, every view lies inside the file, so later chapters index
// without looking back; and a claimed count or length was compared with the bytes that are left before
// anything was allocated or skipped for it.
// ---------------------------------------------------------------------------------------------------

// What a getter asks for: any type of the kind will do.
enum meta_kind { KIND_INT, KIND_FLOAT, KIND_BOOL, KIND_STRING, KIND_ARRAY };
static const char *const meta_kind_names[] = {"an integer", "a float", "a bool", "a string", "an array"};

// Value types of metadata in the order of the file's numbers: name, name in messages, kind, bytes (0: not fixed).
#define META_TYPE_LIST(X)                                                                                              \
    X(U8, "u8", KIND_INT, 1)                                                                                           \
    X(I8, "i8", KIND_INT, 1)                                                                                           \
    X(U16, "u16", KIND_INT, 2)                                                                                         \
    X(I16, "i16", KIND_INT, 2)                                                                                         \
    X(U32, "u32", KIND_INT, 4)                                                                                         \
    X(I32, "i32", KIND_INT, 4)                                                                                         \
    X(F32, "f32", KIND_FLOAT, 4)                                                                                       \
    X(BOOL, "bool", KIND_BOOL, 1)                                                                                      \
    X(STRING, "string", KIND_STRING, 0)                                                                                \
    X(ARRAY, "array", KIND_ARRAY, 0)                                                                                   \
    X(U64, "u64", KIND_INT, 8)                                                                                         \
    X(I64, "i64", KIND_INT, 8)                                                                                         \
    X(F64, "f64", KIND_FLOAT, 8)

#define META_ENUM(id, name, kind, bytes) META_##id,
enum meta_type { META_TYPE_LIST(META_ENUM) META_TYPES };
#undef META_ENUM

struct meta_type_info {
    const char *name;
    meta_kind kind;
    int bytes; // of one value; 0: not fixed
};
#define META_ROW(id, name, kind, bytes) {name, kind, bytes},
static const meta_type_info meta_types[META_TYPES] = {META_TYPE_LIST(META_ROW)};
#undef META_ROW

struct meta_value {
    string_view key;
    const uint8_t *data; // the value's bytes in the file: a string's characters, an array's first item
    uint64_t bytes;      // of data
    uint64_t count;      // items of an array, else 1
    int type;            // meta_type
    int item;            // meta_type of an array's items, else the same as type
};

// Unaligned little-endian values of a type that the caller has checked. A u64 beyond int64_t reads as its largest
// value, which no range check of a caller lets pass.
static int64_t meta_int(int type, const uint8_t *p) {
    uint64_t v = 0;
    memcpy(&v, p, size_t(meta_types[type].bytes));
    switch (type) {
    case META_I8:
        return int8_t(v);
    case META_I16:
        return int16_t(v);
    case META_I32:
        return int32_t(v);
    case META_U64:
        return int64_t(std::min(v, uint64_t(INT64_MAX)));
    default:
        return int64_t(v);
    }
}

static double meta_float(int type, const uint8_t *p) {
    float f;
    double d;
    if (type == META_F64)
        return memcpy(&d, p, sizeof d), d;
    return memcpy(&f, p, sizeof f), double(f);
}

// An array whose items have been checked to be of the kind that was asked for; empty when the key is absent.
// The accessors are total: index below count is the only duty of the caller.
struct meta_array {
    int type = META_U8; // of the items
    uint64_t count = 0;
    const uint8_t *data = nullptr; // null: no such key

    int64_t int_at(uint64_t i) const { return meta_int(type, data + i * uint64_t(meta_types[type].bytes)); }
    double float_at(uint64_t i) const { return meta_float(type, data + i * uint64_t(meta_types[type].bytes)); }

    // Strings have no index in the file, so they are walked: for (string_view s : array). Lengths were checked
    // when the file was opened.
    struct iterator {
        const uint8_t *at;
        uint64_t left;

        uint64_t length() const {
            uint64_t n;
            memcpy(&n, at, sizeof n);
            return n;
        }
        string_view operator*() const { return {reinterpret_cast<const char *>(at + 8), size_t(length())}; }
        iterator &operator++() {
            at += 8 + length();
            left--;
            return *this;
        }
        bool operator!=(const iterator &o) const { return left != o.left; }
    };
    iterator begin() const { return {data, count}; }
    iterator end() const { return {nullptr, 0}; }
};

// The value for people: numbers and strings as they are, arrays as "[n items]".
static string meta_text(const meta_value &v) {
    switch (meta_types[v.type].kind) {
    case KIND_INT:
        if (v.type == META_U64) {
            uint64_t n;
            memcpy(&n, v.data, sizeof n);
            return std::to_string(n);
        }
        return std::to_string(meta_int(v.type, v.data));
    case KIND_FLOAT: { // a short text that reads back as the same value
        double d = meta_float(v.type, v.data);
        for (int digits = 6;; digits++) {
            string s = strf("%.*g", digits, d);
            double back = strtod(s.c_str(), nullptr);
            if (digits == 17 || (v.type == META_F32 ? float(back) == float(d) : back == d)) {
                std::replace(s.begin(), s.end(), ',', '.'); // the host program's locale may want a comma
                return s;
            }
        }
    }
    case KIND_BOOL:
        return *v.data ? "true" : "false";
    case KIND_STRING:
        return string(reinterpret_cast<const char *>(v.data), size_t(v.bytes));
    default:
        return strf("[%llu items]", (unsigned long long)v.count);
    }
}

struct tensor_info {
    string_view name;
    int type;            // a format's type, or one of the integer types of plain_types
    int n_dims;          // 1 ... 4
    uint64_t dims[4];    // dims[0] = row length; unused = 1
    const uint8_t *data; // bytes of weights in the file, aligned to general.alignment
    uint64_t bytes;
};

// One error message has 256 bytes in all: of a long path its end says enough, and control characters do not go in.
static string show_path(const string &path) {
    string out = path.size() <= 80 ? path : "..." + path.substr(path.size() - 77);
    for (char &c : out)
        if (uint8_t(c) < 0x20 || c == 0x7f)
            c = '?';
    return out;
}

struct model_file {
    string path;
    vector<meta_value> keys;       // in file order; of the first part
    vector<tensor_info> tensors;   // in file order, part after part
    vector<buffer> parts;          // the bytes, mapped or read; empty when somebody else owns them
    vector<uint32_t> key_index;    // keys by name
    vector<uint32_t> tensor_index; // tensors by name

    const tensor_info *find(string_view name) const {
        auto it = std::lower_bound(tensor_index.begin(), tensor_index.end(), name,
                                   [this](uint32_t i, string_view n) { return tensors[i].name < n; });
        return it != tensor_index.end() && tensors[*it].name == name ? &tensors[*it] : nullptr;
    }
    const meta_value *meta(string_view key) const {
        auto it = std::lower_bound(key_index.begin(), key_index.end(), key,
                                   [this](uint32_t i, string_view k) { return keys[i].key < k; });
        return it != key_index.end() && keys[*it].key == key ? &keys[*it] : nullptr;
    }

    // Error "PATH: KEY: reason".
    [[noreturn, gnu::format(printf, 3, 4)]] void bad(string_view key, const char *fmt, ...) const {
        va_list args;
        va_start(args, fmt);
        string reason = vstrf(fmt, args);
        va_end(args);
        fail(ENGINE_EFORMAT, "%s: %s: %s", show_path(path).c_str(), show(key).c_str(), reason.c_str());
    }

    // Typed values. With get_ a missing key gives the fallback, with need_ it is an Error; a value of another kind
    // or outside its range always is.
    int64_t get_int(string_view key, int64_t fallback, int64_t lo, int64_t hi) const {
        const meta_value *v = typed(key, KIND_INT);
        return v ? in_range(*v, lo, hi) : fallback;
    }
    int64_t need_int(string_view key, int64_t lo, int64_t hi) const {
        return in_range(needed(key, typed(key, KIND_INT)), lo, hi);
    }
    double get_float(string_view key, double fallback) const {
        const meta_value *v = typed(key, KIND_FLOAT);
        return v ? finite(*v) : fallback;
    }
    bool get_bool(string_view key, bool fallback) const {
        const meta_value *v = typed(key, KIND_BOOL);
        return v ? *v->data != 0 : fallback;
    }
    string_view get_string(string_view key, string_view fallback) const {
        const meta_value *v = typed(key, KIND_STRING);
        return v ? string_view(reinterpret_cast<const char *>(v->data), size_t(v->bytes)) : fallback;
    }
    string_view need_string(string_view key) const {
        needed(key, meta(key));
        return get_string(key, {});
    }
    // items: KIND_INT, KIND_FLOAT, KIND_BOOL or KIND_STRING.
    meta_array get_array(string_view key, meta_kind items) const {
        const meta_value *v = typed(key, KIND_ARRAY);
        if (!v)
            return {};
        if (meta_types[v->item].kind != items)
            bad(key, "is an array of %s, expected %s in each item", meta_types[v->item].name, meta_kind_names[items]);
        return {v->item, v->count, v->data};
    }
    meta_array need_array(string_view key, meta_kind items) const {
        needed(key, meta(key));
        return get_array(key, items);
    }

    // Asks the kernel to read the weights ahead. A cold file may keep the caller waiting for the disk, so this is
    // for the moment when they are about to be used, not for a look at the metadata.
    void read_ahead() const {
        for (const buffer &b : parts)
            madvise(b.data, b.size, MADV_WILLNEED);
    }

    // Builds the two indexes; a name that is there twice is an Error. Sorting, not hashing: no choice of names makes
    // it slow.
    void index() {
        auto key_name = [this](uint32_t i) { return keys[i].key; };
        auto tensor_name = [this](uint32_t i) { return tensors[i].name; };
        sort_index(key_index, keys.size(), key_name, "key");
        sort_index(tensor_index, tensors.size(), tensor_name, "tensor");
    }

  private:
    const meta_value *typed(string_view key, meta_kind kind) const {
        const meta_value *v = meta(key);
        if (v && meta_types[v->type].kind != kind)
            bad(key, "has type %s, expected %s", meta_types[v->type].name, meta_kind_names[kind]);
        return v;
    }
    const meta_value &needed(string_view key, const meta_value *v) const {
        if (!v)
            bad(key, "is missing");
        return *v;
    }
    int64_t in_range(const meta_value &v, int64_t lo, int64_t hi) const {
        int64_t n = meta_int(v.type, v.data);
        if (n < lo || n > hi)
            bad(v.key, "is %s, expected %lld ... %lld", meta_text(v).c_str(), (long long)lo, (long long)hi);
        return n;
    }
    double finite(const meta_value &v) const {
        double d = meta_float(v.type, v.data);
        if (!std::isfinite(d))
            bad(v.key, "is %s, expected a finite number", meta_text(v).c_str());
        return d;
    }
    template <class F> void sort_index(vector<uint32_t> &order, size_t n, F name, const char *what) {
        order.resize(n);
        for (size_t i = 0; i < n; i++)
            order[i] = uint32_t(i);
        std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return name(a) < name(b); });
        for (size_t i = 1; i < n; i++)
            if (name(order[i - 1]) == name(order[i]))
                bad(name(order[i]), "this %s is in the file twice", what);
    }
};

// Tells one model from another without reading all of it: a hash over everything before the tensors' data, the first
// bytes of each tensor, and the sizes of the files.
static digest fingerprint(const model_file &f) {
    sha256 hash;
    for (const buffer &part : f.parts) {
        size_t head = part.size;
        for (const tensor_info &t : f.tensors)
            if (t.bytes && t.data >= part.data && t.data < part.data + part.size)
                head = std::min(head, size_t(t.data - part.data));
        hash.value(uint64_t(part.size)).add(part.data, head);
    }
    for (const tensor_info &t : f.tensors)
        hash.add(t.data, size_t(std::min<uint64_t>(t.bytes, 64)));
    return hash.finish();
}

// What GGML numbers besides the formats of chapter QUANTS. Integers are tables that some models carry; the others are
// named so that a message can name them.
struct plain_type {
    uint32_t type;
    const char *name;
    int bytes; // of one value; 0: not supported
};
static const plain_type plain_types[] = {
    {24, "I8", 1},    {25, "I16", 2},     {26, "I32", 4},    {27, "I64", 8},     {28, "F64", 8},   {9, "Q8_1", 0},
    {15, "Q8_K", 0},  {16, "IQ2_XXS", 0}, {17, "IQ2_XS", 0}, {18, "IQ3_XXS", 0}, {19, "IQ1_S", 0}, {21, "IQ3_S", 0},
    {22, "IQ2_S", 0}, {29, "IQ1_M", 0},   {34, "TQ1_0", 0},  {35, "TQ2_0", 0},   {40, "NVFP4", 0},
};
static const uint32_t removed_types[] = {4, 5, 31, 32, 33, 36, 37, 38}; // once in GGML, no longer defined there

// Limits. They bound the memory that the tables take (about 20 MiB) and are far beyond any model.
static const uint64_t MAX_KEYS = 1 << 16, MAX_KEY_LENGTH = 65535;
static const uint64_t MAX_TENSORS = 1 << 17, MAX_TENSOR_NAME = 256;
// The specification wants a multiple of 8, so that every element of every type is aligned. No kernel relies on it.
static const int64_t MIN_ALIGNMENT = 8, MAX_ALIGNMENT = 1 << 20;
static const int MAX_PARTS = 99999; // five digits in the names

// Tells people what they have when it is not a GGUF file.
static void check_magic(cursor &c) {
    struct other {
        const char *start, *what;
    };
    static const other others[] = {
        {"FUGG", "a byte-swapped GGUF file"},
        {"GGJT", "an old GGML file; convert it to GGUF"},
        {"TJGG", "an old GGML file; convert it to GGUF"},
        {"GGML", "an old GGML file; convert it to GGUF"},
        {"LMGG", "an old GGML file; convert it to GGUF"},
        {"GGMF", "an old GGML file; convert it to GGUF"},
        {"FMGG", "an old GGML file; convert it to GGUF"},
        {"VERS", "text, perhaps a Git LFS pointer instead of the model that it stands for"},
        {"<!DO", "a web page, not a model"},
        {"<HTM", "a web page, not a model"},
        {"PK\x03\x04", "a ZIP archive, perhaps a PyTorch checkpoint; convert it to GGUF"},
    };
    string start(reinterpret_cast<const char *>(c.take(4, "the magic")), 4);
    if (start == "GGUF")
        return;
    string upper = start;
    for (char &ch : upper)
        ch = ch >= 'a' && ch <= 'z' ? char(ch - 32) : ch;
    for (const other &o : others)
        if (upper == o.start)
            fail(ENGINE_EFORMAT, "%s: magic: this is %s", c.file.c_str(), o.what);
    if (c.size > 8 && c.base[8] == '{')
        fail(ENGINE_EFORMAT, "%s: magic: this looks like a safetensors file, not GGUF", c.file.c_str());
    fail(ENGINE_EFORMAT, "%s: magic: not a GGUF file; it starts with \"%s\"", c.file.c_str(), show(start).c_str());
}

static void check_version(cursor &c) {
    uint32_t v = c.get<uint32_t>("the version");
    if (v == 2 || v == 3)
        return;
    const char *file = c.file.c_str();
    if (v && (v & 0xffff) == 0)
        fail(ENGINE_EUNSUPPORTED, "%s: version 0x%08x: a big-endian file; only little-endian ones are read", file, v);
    if (v < 2)
        fail(ENGINE_EUNSUPPORTED, "%s: version %u unsupported; versions 2 and 3 are read", file, v);
    fail(ENGINE_EUNSUPPORTED, "%s: version %u is newer than versions 2 and 3, which are read", file, v);
}

// A count of things that take at least `least` bytes each.
static uint64_t read_count(cursor &c, const char *what, uint64_t least, uint64_t limit) {
    uint64_t n = c.get<uint64_t>(what);
    if (n > limit)
        fail(ENGINE_EFORMAT, "%s: %s: is %llu, more than %llu", c.file.c_str(), what, (unsigned long long)n,
             (unsigned long long)limit);
    if (n > c.left() / least)
        fail(ENGINE_EFORMAT, "%s: %s: is %llu, but only %llu bytes follow; the file is cut off or damaged",
             c.file.c_str(), what, (unsigned long long)n, (unsigned long long)c.left());
    return n;
}

static string_view read_name(cursor &c, const char *what, uint64_t limit) {
    uint64_t n = c.get<uint64_t>(what);
    if (n == 0)
        fail(ENGINE_EFORMAT, "%s: %s: is empty", c.file.c_str(), what);
    if (n > limit)
        fail(ENGINE_EFORMAT, "%s: %s: is %llu bytes long, more than %llu", c.file.c_str(), what, (unsigned long long)n,
             (unsigned long long)limit);
    return {reinterpret_cast<const char *>(c.take(n, what)), size_t(n)};
}

static void check_bools(const cursor &c, const meta_value &v) {
    for (uint64_t i = 0; i < v.bytes; i++)
        if (v.data[i] > 1)
            fail(ENGINE_EFORMAT, "%s: %s: a bool has the value %d", c.file.c_str(), show(v.key).c_str(), v.data[i]);
}

// Sets data, bytes and, for an array, count and item; leaves the cursor behind the value.
static void read_value(cursor &c, meta_value &v) {
    string key = show(v.key);
    const char *file = c.file.c_str(), *what = key.c_str();
    uint32_t type = c.get<uint32_t>(what), item = type;
    if (type >= META_TYPES)
        fail(ENGINE_EFORMAT, "%s: %s: value type %u is unknown", file, what, type);
    if (type == META_ARRAY)
        item = c.get<uint32_t>(what);
    if (item >= META_TYPES)
        fail(ENGINE_EFORMAT, "%s: %s: item type %u is unknown", file, what, item);
    v.type = int(type), v.item = int(item), v.count = 1;
    if (v.type == META_ARRAY) {
        v.count = c.get<uint64_t>(what);
        if (v.item == META_ARRAY)
            fail(ENGINE_EUNSUPPORTED, "%s: %s: arrays of arrays are not supported", file, what);
        uint64_t least = v.item == META_STRING ? 8 : uint64_t(meta_types[v.item].bytes);
        if (v.count > c.left() / least)
            fail(ENGINE_EFORMAT, "%s: %s: an array of %llu items does not fit into the %llu bytes that are left", file,
                 what, (unsigned long long)v.count, (unsigned long long)c.left());
    }
    v.data = c.base + c.at;
    if (v.item != META_STRING)
        c.take(v.count * uint64_t(meta_types[v.item].bytes), what);
    else if (v.type == META_STRING) {
        v.bytes = c.get<uint64_t>(what);
        v.data = c.take(v.bytes, what);
        return;
    } else
        for (uint64_t i = 0; i < v.count; i++)
            c.take(c.get<uint64_t>(what), what);
    v.bytes = uint64_t(c.base + c.at - v.data);
    if (v.item == META_BOOL)
        check_bools(c, v);
}

// The size of a tensor's values, which also checks its type and shape.
static uint64_t tensor_bytes(const cursor &c, const tensor_info &t, uint32_t type) {
    string shown = show(t.name);
    const char *file = c.file.c_str(), *name = shown.c_str();
    uint64_t block = 1, bytes = 0;
    if (const format *f = type <= INT_MAX ? find_format(int(type)) : nullptr)
        block = uint64_t(f->block), bytes = uint64_t(f->bytes);
    for (const plain_type &p : plain_types)
        if (p.type == type) {
            bytes = uint64_t(p.bytes);
            if (!bytes)
                fail(ENGINE_EUNSUPPORTED, "%s: tensor %s: type %u (%s) is not supported", file, name, type, p.name);
        }
    for (uint32_t removed : removed_types)
        if (removed == type)
            fail(ENGINE_EUNSUPPORTED, "%s: tensor %s: type %u was removed from GGML", file, name, type);
    if (!bytes)
        fail(ENGINE_EFORMAT, "%s: tensor %s: type %u is unknown", file, name, type);
    for (int d = 0; d < t.n_dims; d++)
        if (t.dims[d] == 0)
            fail(ENGINE_EFORMAT, "%s: dimension %d of %s is zero", file, d, name);
    if (t.dims[0] % block)
        fail(ENGINE_EFORMAT, "%s: tensor %s: row length %llu is no multiple of %s's block %llu", file, name,
             (unsigned long long)t.dims[0], find_format(int(type))->name, (unsigned long long)block);
    bool wraps = __builtin_mul_overflow(t.dims[0] / block, bytes, &bytes);
    for (int d = 1; d < 4; d++)
        wraps |= __builtin_mul_overflow(bytes, t.dims[d], &bytes);
    if (wraps || bytes > uint64_t(INT64_MAX))
        fail(ENGINE_EFORMAT, "%s: tensor %s: the size of %llu x %llu x %llu x %llu values overflows", file, name,
             (unsigned long long)t.dims[0], (unsigned long long)t.dims[1], (unsigned long long)t.dims[2],
             (unsigned long long)t.dims[3]);
    return bytes;
}

// Everything but where the data is; returns its offset in the data section.
static uint64_t read_tensor(cursor &c, tensor_info &t) {
    t.name = read_name(c, "tensor name", MAX_TENSOR_NAME);
    string what = "tensor " + show(t.name);
    uint32_t n_dims = c.get<uint32_t>(what.c_str());
    if (n_dims < 1 || n_dims > 4)
        fail(ENGINE_EFORMAT, "%s: %s: has %u dimensions, expected 1 ... 4", c.file.c_str(), what.c_str(), n_dims);
    t.n_dims = int(n_dims);
    for (int d = 0; d < 4; d++)
        t.dims[d] = d < t.n_dims ? c.get<uint64_t>(what.c_str()) : 1;
    uint32_t type = c.get<uint32_t>(what.c_str());
    t.bytes = tensor_bytes(c, t, type);
    t.type = int(type);
    return c.get<uint64_t>(what.c_str());
}

// Tensors lie inside the file, aligned, and do not overlap. `start`: of the data section, in the file.
static void place_tensors(const cursor &c, vector<tensor_info> &tensors, const vector<uint64_t> &offsets,
                          uint64_t start, uint64_t alignment) {
    const char *file = c.file.c_str();
    uint64_t last = start;
    for (size_t i = 0; i < tensors.size(); i++) {
        tensor_info &t = tensors[i];
        string name = show(t.name);
        if (offsets[i] % alignment)
            fail(ENGINE_EFORMAT, "%s: tensor %s: offset %llu is no multiple of the alignment %llu", file, name.c_str(),
                 (unsigned long long)offsets[i], (unsigned long long)alignment);
        uint64_t end;
        if (__builtin_add_overflow(offsets[i], start, &end) || __builtin_add_overflow(end, t.bytes, &end))
            fail(ENGINE_EFORMAT, "%s: tensor %s: offset %llu and size %llu overflow", file, name.c_str(),
                 (unsigned long long)offsets[i], (unsigned long long)t.bytes);
        if (end > c.size)
            fail(ENGINE_EFORMAT, "%s: tensor %s ends at %llu, file has %llu bytes; it is cut off or damaged", file,
                 name.c_str(), (unsigned long long)end, (unsigned long long)c.size);
        t.data = c.base + start + offsets[i];
        last = std::max(last, end);
    }
    vector<uint32_t> order(tensors.size());
    for (size_t i = 0; i < order.size(); i++)
        order[i] = uint32_t(i);
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return offsets[a] < offsets[b]; });
    for (size_t i = 1; i < order.size(); i++) {
        const tensor_info &a = tensors[order[i - 1]], &b = tensors[order[i]];
        if (a.data + a.bytes > b.data)
            fail(ENGINE_EFORMAT, "%s: tensor %s: overlaps tensor %s", file, show(b.name).c_str(), show(a.name).c_str());
    }
    if (c.size > last && c.size - last > alignment)
        log_msg(ENGINE_LOG_WARN, "%s: %llu bytes after the last tensor are ignored", file,
                (unsigned long long)(c.size - last));
}

// One part, from bytes that the caller keeps for as long as the result lives.
static model_file parse_gguf(const uint8_t *data, uint64_t size, const string &path) {
    model_file f;
    f.path = path;
    cursor c{data, size, 0, show_path(path)};
    check_magic(c);
    check_version(c);
    // The least that a tensor takes: name, n_dims, one dimension, type, offset. A key: name, type, one byte.
    uint64_t n_tensors = read_count(c, "tensor count", (8 + 1) + 4 + 8 + 4 + 8, MAX_TENSORS);
    uint64_t n_keys = read_count(c, "key count", (8 + 1) + 4 + 1, MAX_KEYS);

    f.keys.resize(size_t(n_keys));
    for (meta_value &v : f.keys) {
        v.key = read_name(c, "key", MAX_KEY_LENGTH);
        read_value(c, v);
    }
    f.tensors.resize(size_t(n_tensors));
    vector<uint64_t> offsets(f.tensors.size());
    for (size_t i = 0; i < offsets.size(); i++)
        offsets[i] = read_tensor(c, f.tensors[i]);
    f.index();

    static const char *const key = "general.alignment";
    const meta_value *v = f.meta(key);
    if (v && v->type != META_U32)
        f.bad(key, "has type %s, expected u32", meta_types[v->type].name);
    int64_t alignment = f.get_int(key, 32, MIN_ALIGNMENT, MAX_ALIGNMENT);
    if (alignment & (alignment - 1))
        f.bad(key, "is %lld, expected a power of two", (long long)alignment);
    uint64_t mask = uint64_t(alignment) - 1;
    place_tensors(c, f.tensors, offsets, (c.at + mask) & ~mask, uint64_t(alignment));
    return f;
}

// The bytes of a whole file: mapped, or read into memory. A mapping is kept in a buffer too, as both end in munmap.
static buffer load_file(const string &path, bool no_mmap) {
    struct descriptor {
        int fd;
        ~descriptor() {
            if (fd >= 0)
                close(fd);
        }
    };
    string shown = show_path(path);
    const char *file = shown.c_str();
    // O_NONBLOCK: opening a FIFO must not wait for a writer. It means nothing for regular files.
    descriptor d{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    struct stat st;
    if (d.fd < 0 || fstat(d.fd, &st) < 0)
        fail(ENGINE_EIO, "%s: cannot open: %s", file, strerror(errno));
    if (S_ISDIR(st.st_mode))
        fail(ENGINE_EIO, "%s: cannot open: is a directory", file);
    if (!S_ISREG(st.st_mode))
        fail(ENGINE_EIO, "%s: cannot open: is not a regular file", file);
    if (st.st_size == 0)
        fail(ENGINE_EFORMAT, "%s: the file is empty", file);
    if (uint64_t(st.st_size) > SIZE_MAX / 2)
        fail(ENGINE_EIO, "%s: cannot open: too large for this machine's addresses", file);
    size_t size = size_t(st.st_size);
    if (!no_mmap) {
        buffer b;
        void *p = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, d.fd, 0);
        if (p == MAP_FAILED)
            fail(ENGINE_EIO, "%s: cannot map: %s (it may still be read: no_mmap)", file, strerror(errno));
        b.data = static_cast<uint8_t *>(p), b.size = size;
        return b;
    }
    buffer b(size, file);
    for (size_t at = 0; at < size;) {
        ssize_t n = read(d.fd, b.data + at, std::min(size - at, size_t(1) << 30));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            fail(ENGINE_EIO, "%s: cannot read at byte %zu: %s", file, at, strerror(errno));
        if (n == 0)
            fail(ENGINE_EIO, "%s: cannot read: ended at byte %zu of %zu", file, at, size);
        at += size_t(n);
    }
    return b;
}

// The name of part `no` (from 0) of `count`, made from the name of part `from`; "" when that one is not named so.
static string part_path(const string &path, int from, int no, int count) {
    string tail = strf("-%05d-of-%05d.gguf", from + 1, count);
    if (path.size() < tail.size() || path.compare(path.size() - tail.size(), tail.size(), tail) != 0)
        return "";
    return path.substr(0, path.size() - tail.size()) + strf("-%05d-of-%05d.gguf", no + 1, count);
}

// Adds the tensors of the other parts of a split model. That it is one stands in the metadata: names do not count.
static void open_parts(model_file &f, int count, bool no_mmap) {
    int no = int(f.need_int("split.no", 0, count - 1));
    if (no != 0) {
        string first = show(part_path(f.path.substr(f.path.rfind('/') + 1), no, 0, count));
        f.bad("split.no", "this is part %d of %d; open the first part%s%s", no + 1, count, first.empty() ? "" : ", ",
              first.c_str());
    }
    if (part_path(f.path, 0, 0, count).empty())
        f.bad("split.count",
              "the other %d parts cannot be found, as the file's name does not end in -00001-of-%05d.gguf", count - 1,
              count);
    for (int i = 1; i < count; i++) {
        string path = part_path(f.path, 0, i, count);
        if (access(path.c_str(), F_OK) < 0)
            fail(ENGINE_EIO, "%s: part %d of %d of the model is missing", show_path(path).c_str(), i + 1, count);
        buffer bytes = load_file(path, no_mmap);
        model_file part = parse_gguf(bytes.data, bytes.size, path);
        part.need_int("split.no", i, i);
        part.need_int("split.count", count, count);
        if (f.tensors.size() + part.tensors.size() > MAX_TENSORS)
            part.bad("tensor count", "the parts hold more than %llu tensors", (unsigned long long)MAX_TENSORS);
        f.tensors.insert(f.tensors.end(), part.tensors.begin(), part.tensors.end());
        f.parts.push_back(std::move(bytes));
    }
    int64_t total = f.need_int("split.tensors.count", 0, INT64_MAX);
    if (uint64_t(total) != f.tensors.size())
        f.bad("split.tensors.count", "is %lld, but the %d parts hold %zu tensors", (long long)total, count,
              f.tensors.size());
    f.index();
}

// Opens a model of one part, or of several when `path` is the first of them.
static model_file open_model_file(const char *path, bool no_mmap) {
    if (!path || !*path)
        fail(ENGINE_EINVAL, "path: is empty");
    buffer bytes = load_file(path, no_mmap);
    model_file f = parse_gguf(bytes.data, bytes.size, path);
    f.parts.push_back(std::move(bytes));
    int count = int(f.get_int("split.count", 0, 0, MAX_PARTS)); // 0 is what is left in a merged file
    if (count > 1)
        open_parts(f, count, no_mmap);
    return f;
}

// ---- JSON ----------------------------------------------------------------------------------------------------------
// Strict RFC 8259: configurations, tokenizers, tensor headers, and what callers pass as JSON.

// clang-format off
enum json_kind : uint8_t { JSON_NULL, JSON_BOOL, JSON_INT, JSON_FLOAT, JSON_STRING, JSON_ARRAY, JSON_OBJECT };
static const char *const json_kind_names[] = {
    "null", "a bool", "an integer", "a float", "a string", "an array", "an object"};
// clang-format on
static const int JSON_MAX_DEPTH = 256;

// What an array or object holds stands right behind it, of an object key and value in turn:
//     for (const json_value *v = array.begin(); v != array.end(); v = v->next())
//     for (const json_value *key = object.begin(); key != object.end(); key = key[1].next())
struct json_value {
    json_kind kind = JSON_NULL;
    uint32_t n = 0; // string: bytes; array: items; object: members
    union {
        int64_t i; // integer, bool
        double f;
        const char *chars; // string: UTF-8, NULs allowed
        size_t extent;     // array, object: how many values this one and those inside are
    };

    json_value() : i(0) {}
    explicit json_value(string_view s) : kind(JSON_STRING), n(uint32_t(s.size())), chars(s.data()) {}
    json_value(json_kind container, uint32_t count, size_t values) : kind(container), n(count), extent(values) {}

    string_view text() const { return kind == JSON_STRING ? string_view(chars, n) : string_view(); }
    const json_value *begin() const { return this + 1; }
    const json_value *end() const { return next(); }
    const json_value *next() const { return this + (kind >= JSON_ARRAY ? extent : 1); }
    // The member of an object, or null.
    const json_value *find(string_view name) const {
        for (const json_value *key = begin(); kind == JSON_OBJECT && key != end(); key = key[1].next())
            if (key->text() == name)
                return key + 1;
        return nullptr;
    }
};

// Strings without escapes point into the text that was read.
struct json_document {
    vector<json_value> values;
    vector<char> unescaped; // the other strings

    json_document() = default;
    json_document(json_document &&) = default;
    const json_value &root() const { return values[0]; }
};

// The C locale, whatever the host program has set, for as long as it lives.
struct plain_locale {
    const locale_t plain = newlocale(LC_ALL_MASK, "C", locale_t(0));
    const locale_t saved = plain ? uselocale(plain) : locale_t(0);
    ~plain_locale() {
        if (plain)
            uselocale(saved), freelocale(plain);
    }
};

struct json_reader {
    const string_view s;
    const int code; // of errors
    const string what;
    size_t at = 0;
    json_document doc;
    uint32_t open[JSON_MAX_DEPTH]; // the arrays and objects that the reader is in
    int depth = 0;

    [[noreturn, gnu::format(printf, 3, 4)]] void bad(size_t where, const char *fmt, ...) const {
        va_list args;
        va_start(args, fmt);
        const string reason = vstrf(fmt, args);
        va_end(args);
        const string_view before = s.substr(0, where), line = before.substr(before.rfind('\n') + 1);
        const auto column = std::count_if(line.begin(), line.end(), [](char c) { return (uint8_t(c) & 0xc0) != 0x80; });
        fail(code, "%s: line %lld, column %lld: %s", what.c_str(),
             1 + (long long)std::count(before.begin(), before.end(), '\n'), 1 + (long long)column, reason.c_str());
    }
    char now() const { return at < s.size() ? s[at] : 0; }
    void blanks() {
        while (now() == ' ' || now() == '\n' || now() == '\r' || now() == '\t')
            at++;
    }
    [[noreturn]] void expected(const char *thing) const {
        if (at == s.size())
            bad(at, "expected %s, but the text ends", thing);
        bad(at, "expected %s, found '%s'", thing, show(s.substr(at, 1)).c_str());
    }
    void need(char c, const char *thing) {
        if (now() != c)
            expected(thing);
        at++;
    }

    // Room for all values and unescaped strings at once: growing would take twice the memory, and move the strings.
    // Where this stops early the text is wrong, and reading it stops as well.
    void reserve() {
        size_t n_values = 1, n_bytes = 0;
        int nesting = 0;
        bool separated = false;
        for (size_t i = 0; i < s.size() && nesting <= JSON_MAX_DEPTH; i++) {
            const char c = s[i];
            const bool separator = c == ',' || c == ':', opens = c == '[' || c == '{';
            if (c == ' ' || c == '\n' || c == '\r' || c == '\t')
                continue;
            if (separator && separated)
                break;
            separated = separator;
            n_values += separator || opens;
            nesting += opens ? 1 : c == ']' || c == '}' ? -1 : 0;
            if (c == '"') {
                const size_t from = i;
                bool escapes = false;
                while (++i < s.size() && s[i] != '"')
                    if (s[i] == '\\')
                        escapes = true, i++;
                n_bytes += escapes ? i - from : 0;
            }
        }
        doc.values.reserve(n_values);
        doc.unescaped.reserve(n_bytes);
    }
    // Four hexadecimal digits.
    uint32_t hex(size_t from) const {
        uint32_t v = 0;
        for (size_t i = from; i < from + 4; i++) {
            const char c = i < s.size() ? s[i] : 0, letter = char(c | 32);
            if ((c < '0' || c > '9') && (letter < 'a' || letter > 'f'))
                bad(from - 2, "\\u needs four hexadecimal digits");
            v = v * 16 + uint32_t(c <= '9' ? c - '0' : letter - 'a' + 10);
        }
        return v;
    }
    // The escape at i, a backslash; returns where it ends.
    size_t escape(size_t i) {
        static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
        const char c = i + 1 < s.size() ? s[i + 1] : 0;
        if (c != 'u') {
            const char *known = c ? strchr(from, c) : nullptr;
            if (!known)
                bad(i, "unknown escape in a string");
            doc.unescaped.push_back(to[known - from]);
            return i + 2;
        }
        uint32_t u = hex(i + 2);
        const bool pair = u >= 0xd800 && u < 0xdc00 && s.compare(std::min(i + 6, s.size()), 2, "\\u") == 0;
        const uint32_t low = pair ? hex(i + 8) : 0;
        if (u >= 0xd800 && u < 0xe000 && (low < 0xdc00 || low >= 0xe000))
            bad(i, "\\u escape of half a surrogate pair");
        if (pair)
            u = 0x10000 + ((u - 0xd800) << 10) + (low - 0xdc00);
        const int more = u < 0x80 ? 0 : u < 0x800 ? 1 : u < 0x10000 ? 2 : 3;
        static const uint8_t lead[] = {0, 0xc0, 0xe0, 0xf0};
        doc.unescaped.push_back(char(lead[more] | u >> 6 * more));
        for (int k = more - 1; k >= 0; k--)
            doc.unescaped.push_back(char(0x80 | (u >> 6 * k & 63)));
        return i + (pair ? 12 : 6);
    }
    void string_value() {
        const size_t begin = at + 1, kept = doc.unescaped.size();
        size_t i = begin, from = begin; // from: what is not yet copied
        bool escapes = false;
        const auto copy = [&] { doc.unescaped.insert(doc.unescaped.end(), s.begin() + from, s.begin() + i); };
        for (;;) {
            const uint8_t c = i < s.size() ? uint8_t(s[i]) : 0;
            if (i == s.size())
                bad(at, "a string is not closed");
            if (c < 0x20)
                bad(i, "a control character in a string is not escaped");
            if (c == '"')
                break;
            if (c == '\\') {
                copy();
                from = i = escape(i);
                escapes = true;
            } else if (c < 0x80) {
                i++;
            } else {
                const utf8_char u = next_char(s.data() + i, s.data() + s.size());
                if (!u.valid)
                    bad(i, "the text is not valid UTF-8");
                i += size_t(u.length);
            }
        }
        if (escapes)
            copy();
        doc.values.push_back(json_value(escapes ? string_view(doc.unescaped.data() + kept, doc.unescaped.size() - kept)
                                                : s.substr(begin, i - begin)));
        at = i + 1;
    }
    void number() {
        const size_t begin = at;
        const auto digits = [&] {
            if (now() < '0' || now() > '9')
                expected("a digit");
            while (now() >= '0' && now() <= '9')
                at++;
        };
        bool whole = true;
        at += now() == '-';
        now() == '0' ? void(at++) : digits();
        if (now() == '.')
            whole = false, at++, digits();
        if ((now() | 32) == 'e') {
            whole = false, at++;
            at += now() == '-' || now() == '+';
            digits();
        }
        json_value v;
        v.kind = JSON_INT;
        if (!whole || std::from_chars(s.data() + begin, s.data() + at, v.i).ec != std::errc()) {
            const plain_locale c;
            v.kind = JSON_FLOAT;
            v.f = strtod(string(s.substr(begin, at - begin)).c_str(), nullptr);
            if (!std::isfinite(v.f))
                bad(begin, "the number is too large");
        }
        doc.values.push_back(v);
    }
    // Whether it opened an array or object, whose content comes next.
    bool value() {
        static const struct {
            string_view name;
            json_kind kind;
            int64_t i;
        } words[] = {{"null", JSON_NULL, 0}, {"true", JSON_BOOL, 1}, {"false", JSON_BOOL, 0}};
        const char c = now();
        if (c == '[' || c == '{') {
            if (depth == JSON_MAX_DEPTH)
                bad(at, "nested more than %d deep", JSON_MAX_DEPTH);
            open[depth++] = uint32_t(doc.values.size());
            doc.values.push_back({c == '[' ? JSON_ARRAY : JSON_OBJECT, 0, 0});
            at++;
            return true;
        }
        if (c == '"')
            return string_value(), false;
        if (c == '-' || (c >= '0' && c <= '9'))
            return number(), false;
        for (const auto &w : words)
            if (s.compare(at, w.name.size(), w.name) == 0) {
                json_value v;
                v.kind = w.kind, v.i = w.i;
                doc.values.push_back(v);
                at += w.name.size();
                return false;
            }
        expected("a value");
    }
    // Sorting, not hashing: no choice of names makes it slow. Most keys differ in their first bytes.
    void check_keys(const json_value &object) const {
        struct key_start {
            uint64_t bytes;
            uint32_t at;
        };
        const auto text = [this](const key_start &k) { return doc.values[k.at].text(); };
        vector<key_start> keys;
        keys.reserve(object.n);
        for (const json_value *key = object.begin(); key != object.end(); key = key[1].next()) {
            uint64_t bytes = 0;
            memcpy(&bytes, key->chars, std::min<size_t>(key->n, 8));
            keys.push_back({bytes, uint32_t(key - doc.values.data())});
        }
        std::sort(keys.begin(), keys.end(), [&](const key_start &a, const key_start &b) {
            return a.bytes != b.bytes ? a.bytes < b.bytes : text(a) < text(b);
        });
        for (size_t i = 1; i < keys.size(); i++)
            if (text(keys[i]) == text(keys[i - 1]))
                bad(at, "the object that ends here has the key '%s' twice", show(text(keys[i])).c_str());
    }
    void close() {
        json_value &v = doc.values[open[--depth]];
        v.extent = doc.values.size() - open[depth];
        if (v.kind == JSON_OBJECT && v.n > 1)
            check_keys(v);
        at++;
    }
    void run() {
        if (s.size() > UINT32_MAX)
            fail(code, "%s: %zu bytes of JSON are more than can be read", what.c_str(), s.size());
        reserve();
        for (bool first = true;;) { // first: nothing yet in the innermost array or object, or nothing at all
            blanks();
            if (depth) {
                json_value &v = doc.values[open[depth - 1]];
                const bool object = v.kind == JSON_OBJECT;
                if (now() == (object ? '}' : ']')) {
                    close();
                    first = false;
                    continue;
                }
                if (!first) {
                    need(',', object ? "',' or '}'" : "',' or ']'");
                    blanks();
                }
                v.n++;
                if (object) {
                    if (now() != '"')
                        expected("a key in quotes");
                    string_value();
                    blanks();
                    need(':', "':'");
                    blanks();
                }
            } else if (!first)
                break;
            first = value();
        }
        if (at < s.size())
            expected("the end of the text");
    }
};

// `what` begins the message of an error, and `code` is its code. The result points into the text.
static json_document parse_json(string_view text, int code, const string &what) {
    json_reader r{text, code, what, 0, {}, {}, 0};
    r.run();
    return std::move(r.doc);
}

// ---------------------------------------------------------------------------------------------------
// 4. VOCAB
//
// Text to token ids and back, from the file's tokenizer.ggml.* keys: SentencePiece-style vocabularies
// ("llama") and byte-level BPE ("gpt2") with hand-written pre-tokenizers. The reference is Hugging Face's
// tokenizers, in their "legacy" mode for SentencePiece: a space is put before every piece of raw text,
// after a special token too. Knows nothing of models or templates. Invariant: any bytes can be tokenized,
// and what was not asked to be parsed for special tokens never becomes a control token.
// ---------------------------------------------------------------------------------------------------

// What a character is: its general category, White_Space, and membership in the sets that pre-tokenizers name.
static constexpr int CH_L = 1, CH_M = 2, CH_N = 4, CH_P = 8, CH_S = 16, CH_SPACE = 32;
static constexpr int CH_BLANK = 64, CH_BREAK = 128, CH_ALPHA = 256, CH_DIGIT = 512, CH_PUNCT = 1024, CH_SIGN = 2048;
static constexpr int CH_KANA = 4096, CH_HANGUL = 8192, CH_CASED = 16384, CH_WIDE = 32768;

// L, M, N, P, S: general categories; W: White_Space; O: the rest. Each letter is followed by the length of its run of
// code points, in ascending order from 0; a run without one has length 1.
// ---- generated by tools/make_unicode.mjs from Unicode 17.0 ----
static const char unicode_runs[] =
    "O9W5O18WP3SP6SP4N10P2S3P2L26P3SPSL26PSPSO6WO26WPS5PS2LPSOS4N2SLP2SNLPN3PL23SL31SL458S4L12S14L5S7LSLS17M112L5SL2"
    "O2L4PLO4S2LPL3OLOL20OL83SL139SM7L166OL38O2LP6L41P2O2S3OM45PMPM2PM2PMO8L27O4L4P2O17S3P2SP2S2M11POP3L43M21N10P4L2M"
    "L99PLM7OSM6L2M2SM4L2N10L3S2LP14O2LML30M27O2L89M11LO14N10L33M9L2SP3LO2MS2L22M4LM9LM3LM5O2P15OL25M3O2POL11O5L24SL7"
    "O7M9L42M24OM33L54M3LM18LM7L10M2P2N10PL16M3OL8O2L2O2L22OL7OLO3L4O2MLM7O2M2O2M3LO8MO4L2OL3M2O2N10L2S2N6S2LPMO2M3O"
    "L6O4L2O2L22OL7OL2OL2OL2O2MOM5O4M2O2M3O3MO7L4OLO7N10M2L3MPO10M3OL9OL3OL22OL7OL2OL5O2MLM8OM3OM3O2LO15L2M2O2N10PSO7"
    "LM6OM3OL8O2L2O2L22OL7OL2OL5O2MLM7O2M2O2M3O7M3O4L2OL3M2O2N10SLN6O10MLOL6O3L3OL4O3L2OLOL2O3L2O3L3O3L12O4M5O3M3OM4"
    "O2LO6MO14N13S8O5M5L8OL3OL23OL16O2MLM7OM3OM4O7M2OL3OL2O2L2M2O2N10O7PN7SLM3PL8OL3OL23OL10OL5O2MLM7OM3OM4O7M2O5L3O"
    "L2M2O2N10OL2MO12M4L9OL3OL41M2LM7OM3OM4LSO4L3MN7L3M2O2N19SL6OM3OL18O3L24OL9OLO2L7O3MO4M6OMOM8O6N10O2M2PO12L48ML2"
    "M7O4SL7M8PN10P2O37L2OLOL5OL24OLOL10ML2M9LO2L5OLOM7ON10O2L4O32LS3P15SPS3M2S6N20SMSMSMP4M2L8OL36O4M20PM2L5M11OM36O"
    "S8MS6OS2P5S4P2O37L43M20LN10P6L6M4L4M3LM3L2M7L3M4L13M12LMN10M4S2L38OLO5LO2L43PL333OL4O2L7OLOL4O2L41OL4O2L33OL4O2"
    "L7OLOL4O2L15OL57OL4O2L67O2M3P9N20O3L16S10O6L86O2L6O2PL620SPL17WL26P2O3L75P3N3L8O7L18M4O9L19M3P2O9L18M2O12L13OL3O"
    "M2O12L52M32P3LP3SLMO2N10O6N10O6P11M3OMN10O6L89O7L5M2L34MLO5L70O10L31OM12O4M12O4SO3P2N10L30O2L5O11L44O4L26O6N11O3"
    "S34L23M5O2P2L53M10OM29O2MN10O6N10O6P7LP6O2M46O2M12O20M5L47M17L8OP2N10P7S10M9S9P3M3L30M13L2N10L44M14O8P4L36M20O3"
    "P5N10O3L3N10L36P2L11O5L43O2L3P8O8M3PM21L4ML6ML2M3LO5L192M64L278O2L6O2L38O2L6O2L8OLOLOLOL31O2L53OL7SLS3L3OL7S3L4"
    "O2L6OS3L13S3O2L3OL7S2OW11O5P24W2O5WP20SP13SP12WO16NLO2N6S3P2LN10S3P2OL13O3S34O14M33O15S2LS4LS2L10SLS3L5S6LSLSLS"
    "L4SL11S2L4S5L5S4LSN51L2N5S2O4S376P4S29P2S255O22S11O21N60S78N22S616P14N30S49P2S31P10S403P22S63P4S32P2S374O2S138"
    "L229S6L4M3L2O5P4NP2L38OLO5LO2L56O7LPO14ML23O9L7OL7OL7OL7OL7OL7OL7OL7OM32P47LP32S2P12O34S26OS89O12S214O26S16WP3S"
    "L2NP10S2P12SN9M6PL5S2N3L2PS2OL86O2M2S2L3PL90PL4O5L43OL94OS2N4S10L32S38O9SL16S31ON10S30N8SN15S32N10S39N15S320"
    "L6592S64L22157O3S55O9L46P2L269P3L16N10L2O20L47M4PM10PL31M2L70N10M2P6O8S23L9S2L103S2L82O20L17ML3ML4ML23M5S4MO3N6"
    "S4O6L52P4O8M2L50M18O8P2N10O6M18L6P3LPL2MN10L28M8P2L23M13O11PL29O3M4L47M14P13OLN10O4P2L5ML10N10L5OL41M14O9L3ML8M2"
    "O2N10O2P4L23S3LM3L50MLM3L2M2L5M2LMLO24L3P2L11M5P2L3M2O10L6O2L6O2L6O9L7OL7OL43SL14S2O4L115M8PM2O2N10O6L11172O12"
    "L23O4L49O8452L366O2L106O38L7O12L5O5LML10SL13OL5OLOL2OL2OL108S33L363P2S16L64S2L54S8O32L12S4M16P10O6M16P35OP14SPS3"
    "OPSP2O4L5OL135O4P3SP6SP4N10P2S3P2L26P3SPSL26PSPSP7L89O3L6O2L6O2L6O2L3O3S7OS7O13S2O2L12OL26OL19OL2OL15O2L14O34"
    "L123O5P3O4N45O3S9N57S17N2S3OS13O3SO47S45MO130L29O3L49O15MN27O4L32N4O9L20NL8NO5L38M5O5L30OPL36O4L8PN5O42L158O2N10"
    "O6L36O4L36O4L40O8L52O11PL11OL15OL7OL2OL11OL15OL7OL2O3L52O12L311O9L22O10L8O24L6OL42OL9O69L6O2LOL44OL2O3LO2L23OPN8"
    "L23S2N7L31O8N9O48L19OL2O5N5L22N6O3PL26O5PL26O38L56O4N2L2N16O2N46LM3OM2O5M4L4OL3OL29O2M3O4MN9O7P9O7L29N2PL29N3O32"
    "L8SL28M2O4N5P7O9L54O3P7L22O2N8L19O5N8L18O7P4O12N7O80L73O55L51O13L51O7N6L36M4O8N10O6N10L28O3M5PL23O8S2O208N31OL42"
    "OM2PO2L2O16L6O8PS8O33M6L29N10LO8L22M11N4P5O22L18M4P4O38L21N7O20L23O9M3L53M15P7O4N30ML2M2LO9M4L45M11P2OP4MO13L25"
    "O7N10O6M3L36M14ON10P4LM2LO8L35MP2LO9M3L48M14L4P4M4PM2N10LPLP3ON20O11L18OL25M12P6ML2MO62L7OLOL4OL15OL10PO6L47M12"
    "O5N10O6M4OL8O2L2O2L22OL7OL2OL5OM2LM7O2M2O2M3O2LO6MO5L5M2O2M7O3M5O11L10OLO2LOL38OLM9OMO2MOM4OM5LMLP2OP2O8M2O29L53"
    "M18L4P5N10P2OPML3O30L48M20L2PLO8N10O166L47M7O2M9P23L4M2O34L48M17P3LO11N10O6P13O19L43M13LPO6N10O6N20O28L27O2M15O4"
    "N12P3SL7O185L44M15PO100L64N19O12L8O2LO2L8OL2OL24M6OM2O2M4LMLM2P3O9N10O70L8O2L39M7O2M7LPLMO27LM10L40M7LM4P8MO8L"
    "M11L46M16P3LP5O13L73O7P10O86M8O88L33PO14N10O6L9OL37M8OM8LP5O10N29O3P2L30O2M22OM14O73L7OL2OL38M6O3MOM2OM7LMO8N10"
    "O6L6OL2OL32M5OM2OM5LO7N10O6L44O4N10O246L19M4P2O7M2LML13OL34M7O3M5P13N10MO85LO15N21S29O13PL922O102N111OP5O11L196"
    "O2636L97P2O13L1072O16ML6M15O10L3995O5L583O6841L30M18N10O1734L569O7L31ON10O4P2L79ON10O6L30O2M5PO10L48M7P5S4L4PS"
    "O10N10ON7OL21O5L19O432L45P3N10O198L64N23P4O5L25O2L25O44L75O4MLM55O7M4L13O64L2PLMO11M2L2N3O9L7382O41L32O97L115"
    "O8701L4OL7OL2OL291O15LO29L3O2LO14L4O8L396O2308L107O5L13O3L9O7L10O2SM2PO3936S240N10S3O3S436O6S23O15S17O15M46O2M23"
    "O9S116O60S246O10S39O2S60M5S3M6O8M8S2M7S30M4S61O21S66M3SO122N20O12N20O12S87O9N25O135L85OL71OL2O2LO2L2O2L4OL12OLO"
    "L7OL65OL4O2L8OL7OL28OL4OL5OLO3L7OL340O2L25SL25SL31SL25SL31SL25SL31SL25SL31SL25SL8O2N50S512M55S4M50S8MS14MS2P5O15"
    "M5OM15O1104L31O6L6O213M7OM17O2M7OM2OM5O5L62O33MO112L45O3M7L7O2N10O4LSO320L30MO17L44M4N10O5SO464L28M4N10O214L30M2"
    "LN10O4PO192L31OL3ML2ML7M2L5MO8L2O224L7OL4OL2OL15OL197O2N9M7O41L68M7LO4N10O4P2O785N59SN3SN4O76N45SN15O194L4OL27O"
    "L2OLO2LOL10OL4OLOLO6LO4LOLOLOL3OL2OLO2LOLOLOLOLOL2OLO2L4OL7OL4OL4OLOL10OL17O5L3OL5OL17O52S2O270S44O4S100O12S15O2"
    "S15OS15OS37O10N13S161O56S29O13S44O4S9O7S2O14S6O154S985O3S17O3S13O3S218O6S12O4SO15S12O4S56O8S10O6S40O8S30O2S12O4"
    "S2O14S9O39S344O8S14O2S13O3S11O3S57OSO4S16O2S12O4S10O7S147OS92N10SO1029L42720O32L4382O2L5774O2L7473O15L622O2466"
    "L542O1506L4939O5L8490O707718M240O196112";
static const char cased_letters_set[] =
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943";
// ---- end of generated tables ----

// The other sets, in the notation of a bracket expression. The last four are as published with the tokenizers.
static const struct {
    int bit;
    const char *set;
} char_sets[] = {
    {CH_BLANK, " "},
    {CH_BREAK, "\r\n"},
    {CH_ALPHA, "A-Za-z"},
    {CH_DIGIT, "0-9"},
    {CH_PUNCT, "!-/:-@[-`{-~"},
    {CH_SIGN, "$+<=>^~|"},
    {CH_KANA, "\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff"},
    {CH_HANGUL, "\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff"},
    {CH_WIDE, "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"},
    {CH_CASED, cased_letters_set},
};

// Passes on whole characters only. What can never become one turns into U+FFFD, one for each maximal subpart.
struct utf8_gate {
    string held; // the start of a character, at most 3 bytes

    string push(string_view bytes) {
        string in = std::move(held), out;
        in.append(bytes);
        held.clear();
        for (const char *p = in.data(), *end = p + in.size(); p < end;) {
            const utf8_char c = next_char(p, end);
            if (c.cut) {
                held.assign(p, end);
                break;
            }
            out.append(c.valid ? string_view(p, size_t(c.length)) : "\ufffd");
            p += c.length;
        }
        return out;
    }
    string finish() {
        const bool cut = !held.empty();
        held.clear();
        return cut ? "\ufffd" : "";
    }
};

// The bits of every code point, from the texts above.
static const uint16_t *char_table() {
    static const vector<uint16_t> table = [] {
        vector<uint16_t> t(0x110000);
        size_t code = 0;
        for (const char *p = unicode_runs; *p;) {
            static const char names[] = "LMNPSW";
            const char *name = strchr(names, *p++);
            size_t run = 0;
            for (; *p >= '0' && *p <= '9'; p++)
                run = run * 10 + size_t(*p - '0');
            for (run = std::max(run, size_t(1)); run; run--)
                t[code++] = name ? uint16_t(1 << (name - names)) : 0;
        }
        for (auto &s : char_sets)
            for (const char *p = s.set, *end = p + strlen(p); p < end;) {
                const utf8_char from = next_char(p, end);
                utf8_char to = from;
                p += from.length;
                if (*p == '-') {
                    to = next_char(p + 1, end);
                    p += 1 + to.length;
                }
                for (uint32_t c = from.code; c <= to.code; c++)
                    t[c] = uint16_t(t[c] | s.bit);
            }
        return t;
    }();
    return table.data();
}

// ---- pre-tokenizers: how text is cut into words before merging ----
//
// A pre-tokenizer is a list of stages, and a stage a list of rules: the alternatives of a regular expression, in order.
// Each stage cuts every piece that the one before has left: what a rule matches and what lies between matches become
// pieces. A rule sees its piece only, so the end of the piece is the end of the text to it.

struct char_set {
    int mask;  // of CH_*
    bool none; // the characters that have none of the bits, else those that have any

    bool has(int bits) const { return ((bits & mask) != 0) != none; }
};
static constexpr char_set any(int mask) { return {mask, false}; }
static constexpr char_set none(int mask) { return {mask, true}; }

enum rule_kind {
    MAYBE,    // lead? body{min,max} tail*
    LED,      // lead body{min,max} tail*
    SHORT,    // 's|'t|'re|'ve|'m|'ll|'d
    SHORT_I,  // the same in any case
    BREAKS,   // \s*[\r\n]+
    GAP,      // \s+(?!\S)
    TRAILING, // \s+$
};
struct rule {
    rule_kind kind;
    char_set lead, body;
    int min, max;
    char_set tail;
};
static constexpr int MANY = INT_MAX;
static constexpr rule simple_rule(rule_kind kind) { return {kind, any(0), any(0), 0, 0, any(0)}; }
static constexpr rule run_of(char_set body, int min, int max) { return {MAYBE, any(0), body, min, max, any(0)}; }
static constexpr rule led_run(char_set lead, char_set body) { return {MAYBE, lead, body, 1, MANY, any(0)}; }

static constexpr rule spaces_rule = run_of(any(CH_SPACE), 1, MANY);
static constexpr rule gpt2_rules[] = {
    simple_rule(SHORT),
    led_run(any(CH_BLANK), any(CH_L)),
    led_run(any(CH_BLANK), any(CH_N)),
    led_run(any(CH_BLANK), none(CH_SPACE | CH_L | CH_N)),
    simple_rule(GAP),
    spaces_rule,
};
static constexpr rule llama3_rules[] = {
    simple_rule(SHORT_I),
    led_run(none(CH_BREAK | CH_L | CH_N), any(CH_L)),
    run_of(any(CH_N), 1, 3),
    {MAYBE, any(CH_BLANK), none(CH_SPACE | CH_L | CH_N), 1, MANY, any(CH_BREAK)},
    simple_rule(BREAKS),
    simple_rule(GAP),
    spaces_rule,
};
static constexpr rule qwen2_rules[] = {
    llama3_rules[0], llama3_rules[1], run_of(any(CH_N), 1, 1), llama3_rules[3],
    llama3_rules[4], llama3_rules[5], llama3_rules[6],
};
static constexpr rule deepseek3_rules[] = {
    {LED, any(CH_PUNCT), any(CH_ALPHA), 1, MANY, any(0)},
    led_run(none(CH_BREAK | CH_L | CH_P | CH_S), any(CH_L | CH_M)),
    {MAYBE, any(CH_BLANK), any(CH_P | CH_S), 1, MANY, any(CH_BREAK)},
    simple_rule(BREAKS),
    simple_rule(GAP),
    spaces_rule,
};
static constexpr rule one_break[] = {run_of(any(CH_BREAK), 1, 1)};
static constexpr rule one_number[] = {run_of(any(CH_N), 1, 1)};
static constexpr rule three_numbers[] = {run_of(any(CH_N), 1, 3)};
static constexpr rule numbers[] = {run_of(any(CH_N), 1, MANY)};
static constexpr rule three_digits[] = {run_of(any(CH_DIGIT), 3, 3)};
static constexpr rule han_kana[] = {run_of(any(CH_KANA), 1, MANY)};
static constexpr rule han_hangul[] = {run_of(any(CH_HANGUL), 1, MANY)};
static constexpr rule letters[] = {led_run(any(CH_SPACE), any(CH_L))};
static constexpr rule cased_letters[] = {led_run(any(CH_SPACE), any(CH_CASED))};
static constexpr rule punctuation[] = {led_run(any(CH_SPACE), any(CH_P))};
static constexpr rule wide_punctuation[] = {led_run(any(CH_SPACE), any(CH_WIDE))};
static constexpr rule signs[] = {run_of(any(CH_P | CH_SIGN), 1, MANY)};
static constexpr rule trailing_spaces[] = {simple_rule(TRAILING)};

struct stage {
    const rule *rules = nullptr;
    int n = 0;

    constexpr stage() = default;
    template <int N> constexpr stage(const rule (&r)[N]) : rules(r), n(N) {}
};
struct pre_tokenizer {
    const char *name; // the value of tokenizer.ggml.pre
    bool whole_words; // a word that is a token is taken as it is, whatever the merges say
    bool add_bos;     // when the file does not say
    stage stages[7];  // up to the first without rules
};
// "default" is also what a file without the key means; it is what llama.cpp does with such files.
static const pre_tokenizer pre_tokenizers[] = {
    {"default", false, false, {signs, gpt2_rules, numbers, three_digits}},
    {"gpt-2", false, false, {gpt2_rules}},
    {"phi-2", false, false, {gpt2_rules}},
    {"llama-bpe", true, true, {llama3_rules}},
    {"llama3", true, true, {llama3_rules}},
    {"llama-v3", true, true, {llama3_rules}},
    {"qwen2", false, false, {qwen2_rules}},
    {"deepseek-r1-qwen", false, false, {qwen2_rules}},
    {"smollm", false, false, {one_number, gpt2_rules}},
    {"starcoder", false, false, {one_number, gpt2_rules}},
    {"deepseek-llm", false, false, {one_break, cased_letters, wide_punctuation, trailing_spaces, han_hangul, numbers}},
    {"deepseek-coder", false, false, {one_break, letters, punctuation, han_hangul, one_number}},
    {"joyai-llm", false, false, {three_numbers, han_kana, deepseek3_rules}},
    {"deepseek-v3", false, false, {three_numbers, han_kana, deepseek3_rules}},
};

// The bits of the character at p. What is no valid character has none.
static inline int bits_at(const uint16_t *table, const char *p, const char *end, int &length) {
    if (uint8_t(*p) < 0x80) {
        length = 1;
        return table[uint8_t(*p)];
    }
    const utf8_char c = next_char(p, end);
    length = c.length;
    return c.valid ? table[c.code] : 0;
}

// Moves p behind at most `max` characters of the set; returns how many there were.
static int take(const uint16_t *table, const char_set &set, const char *&p, const char *end, int max) {
    int n = 0;
    for (int length; n < max && p < end && set.has(bits_at(table, p, end, length)); n++)
        p += length;
    return n;
}

// The end of a short form such as 're at p, or null. U+017F is an s to a regular expression that ignores case.
static const char *match_short(const char *p, const char *end, bool any_case) {
    auto letter = [&]() -> char {
        const char c = p < end ? *p++ : '\0';
        if (any_case && c == '\xc5' && p < end && *p == '\xbf')
            return p++, 's';
        return any_case && c >= 'A' && c <= 'Z' ? char(c + 32) : c;
    };
    if (letter() != '\'')
        return nullptr;
    const char a = letter();
    if (a == 's' || a == 't' || a == 'm' || a == 'd')
        return p;
    const char b = letter();
    return ((a == 'r' || a == 'v') && b == 'e') || (a == 'l' && b == 'l') ? p : nullptr;
}

// The end of the rule's match that starts at p, or null. `again`: the rule matches nowhere between p and there.
static const char *match_rule(const rule &r, const uint16_t *table, const char *p, const char *end,
                              const char *&again) {
    const char *const start = p;
    if (r.kind == SHORT || r.kind == SHORT_I)
        return match_short(p, end, r.kind == SHORT_I);
    if (r.kind == MAYBE || r.kind == LED) {
        if (!take(table, r.lead, p, end, 1) || take(table, r.body, p, end, r.max) < r.min) {
            p = start;
            if (r.kind == LED || take(table, r.body, p, end, r.max) < r.min)
                return nullptr;
        }
        take(table, r.tail, p, end, MANY);
        return p;
    }
    const char *last = p, *after_break = nullptr; // of the run of white space at p
    for (int bits, length; p < end && ((bits = bits_at(table, p, end, length)) & CH_SPACE); p += length) {
        last = p;
        if (bits & CH_BREAK)
            after_break = p + length;
    }
    if (r.kind == BREAKS)
        return after_break;
    if (p == end && p > start)
        return p;
    if (r.kind == GAP)
        return last > start ? last : nullptr;
    again = p;
    return nullptr;
}

// Calls word(p, end) for each word of [p, end), in order.
template <class F>
static void split_words(const stage *s, const uint16_t *table, const char *p, const char *end, F &&word) {
    if (!s->n) {
        word(p, end);
        return;
    }
    const char *gap = p;
    while (p < end) {
        const char *match = nullptr, *again = p;
        for (int i = 0; i < s->n && !match; i++)
            match = match_rule(s->rules[i], table, p, end, again);
        if (!match) {
            p = std::max(p + next_char(p, end).length, again);
            continue;
        }
        if (gap < p)
            split_words(s + 1, table, gap, p, word);
        split_words(s + 1, table, p, match, word);
        gap = p = match;
    }
    if (gap < end)
        split_words(s + 1, table, gap, end, word);
}

// ---- the vocabulary ----

// tokenizer.ggml.token_type
enum token_type : uint8_t { TOKEN_NORMAL = 1, TOKEN_UNKNOWN, TOKEN_CONTROL, TOKEN_USER, TOKEN_UNUSED, TOKEN_BYTE };

// What two adjacent tokens merge into. The lowest rank goes first.
struct merged {
    int32_t into; // -1: nothing
    uint32_t rank;
};
static constexpr merged no_merge = {-1, 0};
struct merge_rule {
    int32_t left, right; // left < 0: a free slot of the table
    merged result;
};

// No longer token is looked for in a text, and in SentencePiece none is made by merging, which bounds the work.
static constexpr size_t MAX_MATCH = 256;
// Far beyond any vocabulary; the table of rules takes at most 64 MiB.
static constexpr uint64_t MAX_MERGES = 1 << 21;

struct vocab {
    int n = 0;                            // tokens
    int32_t bos = -1, eos = -1, unk = -1; // -1: none
    bool add_bos = false, add_eos = false;
    string describe; // "spm", or "bpe " and the pre-tokenizer

    const pre_tokenizer *pre = nullptr; // null: SentencePiece-style
    bool space_prefix = false;          // a space goes before raw text; this and the next two are SentencePiece's
    bool squeeze_spaces = false;        // runs of spaces count as one, at the ends as none
    bool whole_text = false;            // some token reaches beyond a word's end, so words cannot be merged one by one
    const uint16_t *chars = nullptr;    // char_table()

    vector<char> arena;         // the bytes of all tokens
    vector<string_view> text;   // [n] into arena: as the token stands in text
    vector<uint8_t> type;       // [n] token_type
    vector<int32_t> ends;       // tokens that end a turn
    int32_t byte_id[256];       // the token of a single byte; -1: none
    uint64_t seed = 0;          // of both hash tables, so that no choice of names makes them slow
    vector<int32_t> pieces;     // the tokens that plain text may become, by hash of their bytes; -1: free
    vector<merge_rule> merges;  // BPE: by hash of left and right
    vector<uint32_t> rank;      // SentencePiece: [n] of the merge that makes the token
    vector<int32_t> matched;    // the tokens that are looked for in the text as they are, sorted by their bytes
    uint32_t matched_from[257]; // where those with first byte b start in `matched`
};

static uint64_t mix_hash(uint64_t h) {
    h *= 0x9e3779b97f4a7c15u;
    return h ^ h >> 29;
}

static uint64_t hash_bytes(string_view s, uint64_t seed) {
    uint64_t h = seed ^ s.size(), word = 0;
    for (; s.size() > 8; s.remove_prefix(8)) {
        memcpy(&word, s.data(), 8);
        h = mix_hash(h ^ word);
    }
    word = 0;
    memcpy(&word, s.data(), s.size());
    return mix_hash(mix_hash(h ^ word));
}

// A power of two that keeps a table of n entries at most half full.
static size_t table_size(size_t n) {
    size_t size = 16;
    while (size < 2 * n)
        size *= 2;
    return size;
}

// The slot of the piece with these bytes, or the free one where it would go.
static size_t piece_slot(const vocab &v, string_view s) {
    const size_t mask = v.pieces.size() - 1;
    size_t i = size_t(hash_bytes(s, v.seed)) & mask;
    while (v.pieces[i] >= 0 && v.text[size_t(v.pieces[i])] != s)
        i = (i + 1) & mask;
    return i;
}

static int32_t find_piece(const vocab &v, string_view s) { return v.pieces[piece_slot(v, s)]; }

static size_t merge_slot(const vocab &v, int32_t left, int32_t right) {
    const size_t mask = v.merges.size() - 1;
    size_t i = size_t(mix_hash(mix_hash(v.seed ^ (uint64_t(left) << 32 | uint64_t(right))))) & mask;
    while (v.merges[i].left >= 0 && (v.merges[i].left != left || v.merges[i].right != right))
        i = (i + 1) & mask;
    return i;
}

// SentencePiece merges any neighbours that together are a token, so that its rules need no table.
static merged find_merge(const vocab &v, int32_t left, int32_t right) {
    if (v.pre)
        return v.merges[merge_slot(v, left, right)].result;
    const string_view a = v.text[size_t(left)], b = v.text[size_t(right)];
    char both[MAX_MATCH];
    if (a.size() + b.size() > sizeof both)
        return no_merge;
    memcpy(both, a.data(), a.size());
    memcpy(both + a.size(), b.data(), b.size());
    const int32_t into = find_piece(v, {both, a.size() + b.size()});
    return into < 0 ? no_merge : merged{into, v.rank[size_t(into)]};
}

// ---- loading ----

static const char KEY_TOKENS[] = "tokenizer.ggml.tokens", KEY_SCORES[] = "tokenizer.ggml.scores",
                  KEY_TYPES[] = "tokenizer.ggml.token_type", KEY_MERGES[] = "tokenizer.ggml.merges";

// How byte-level BPE writes bytes: some as the character of that number, the others as U+0100, U+0101 and so on.
struct byte_level {
    int byte_of[324]; // by code point; -1: stands for no byte

    byte_level() {
        std::fill(std::begin(byte_of), std::end(byte_of), -1);
        for (int b = 0, other = 256; b < 256; b++) {
            const bool own = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
            byte_of[own ? b : other++] = b;
        }
    }
    // The bytes that s stands for; what stands for none is taken as it is.
    string decode(string_view s) const {
        string out;
        for (const char *p = s.data(), *end = p + s.size(); p < end;) {
            const utf8_char c = next_char(p, end);
            if (c.valid && c.code < 324 && byte_of[c.code] >= 0)
                out += char(byte_of[c.code]);
            else
                out.append(p, size_t(c.length));
            p += c.length;
        }
        return out;
    }
};

static const string_view SPACE_MARK = "\u2581"; // SentencePiece's space

static string with_spaces(string_view s) {
    string out;
    for (size_t at; (at = s.find(SPACE_MARK)) != s.npos; s.remove_prefix(at + SPACE_MARK.size()))
        out.append(s.substr(0, at)) += ' ';
    return out.append(s);
}

// The value of "<0xA9>", or -1.
static int byte_token_value(string_view s) {
    static const string_view digits = "0123456789ABCDEF";
    if (s.size() != 6 || s.substr(0, 3) != "<0x" || s[5] != '>')
        return -1;
    const size_t high = digits.find(s[3]), low = digits.find(s[4]);
    return high == s.npos || low == s.npos ? -1 : int(high * 16 + low);
}

// Fills arena, text, type, pieces and byte_id. A file without types has normal tokens, but for SentencePiece's bytes.
static void load_tokens(vocab &v, const model_file &f) {
    const meta_array tokens = f.need_array(KEY_TOKENS, KIND_STRING), types = f.get_array(KEY_TYPES, KIND_INT);
    if (tokens.count < 1 || tokens.count > 1 << 28)
        f.bad(KEY_TOKENS, "has %llu entries, expected 1 ... %d", (unsigned long long)tokens.count, 1 << 28);
    v.n = int(tokens.count);
    auto check_count = [&](const char *key, const meta_array &a) {
        if (a.data && a.count != tokens.count)
            f.bad(key, "has %llu entries for %d tokens", (unsigned long long)a.count, v.n);
    };
    check_count(KEY_TYPES, types);
    check_count(KEY_SCORES, f.get_array(KEY_SCORES, KIND_FLOAT));
    v.pieces.assign(table_size(size_t(v.n)), -1);
    std::fill(std::begin(v.byte_id), std::end(v.byte_id), -1);
    size_t bytes = 0;
    for (string_view s : tokens)
        bytes += s.size();
    v.arena.reserve(bytes); // no token gets longer than it is in the file, so the views stay good
    v.text.reserve(size_t(v.n));
    v.type.reserve(size_t(v.n));

    const byte_level level;
    for (string_view s : tokens) {
        const size_t i = v.text.size();
        const int value = v.pre ? -1 : byte_token_value(s);
        const int64_t t = types.data ? types.int_at(i) : int64_t(value < 0 ? TOKEN_NORMAL : TOKEN_BYTE);
        if (t < 0 || t > TOKEN_BYTE)
            f.bad(KEY_TYPES, "entry %zu is %lld, expected 0 ... %d", i, (long long)t, int(TOKEN_BYTE));
        const bool normal = t <= TOKEN_NORMAL || (v.pre && t == TOKEN_BYTE);
        if (t == TOKEN_BYTE && !normal && value < 0)
            f.bad(KEY_TOKENS, "token %zu is of type byte, but its text is \"%s\", not <0x00> ... <0xFF>", i,
                  show(s).c_str());
        string text(s);
        if (v.pre && normal)
            text = level.decode(s);
        else if (!v.pre && (normal || t == TOKEN_USER))
            text = with_spaces(s);
        else if (t == TOKEN_BYTE)
            text = char(value);
        v.text.push_back({v.arena.data() + v.arena.size(), text.size()});
        v.type.push_back(normal ? uint8_t(TOKEN_NORMAL) : uint8_t(t));
        v.arena.insert(v.arena.end(), text.begin(), text.end());

        // Of equal tokens the first counts. Bytes that never stand in valid text may be there as added tokens, written
        // as the characters for them.
        if (normal && !text.empty()) {
            int32_t &slot = v.pieces[piece_slot(v, text)];
            slot = slot < 0 ? int32_t(i) : slot;
        }
        const string byte = v.pre && t == TOKEN_USER && s.size() == 2 ? level.decode(s) : text;
        int32_t &id = v.byte_id[byte.size() == 1 ? uint8_t(byte[0]) : 0];
        if (byte.size() == 1 && (v.pre ? normal || t == TOKEN_USER : t == TOKEN_BYTE) &&
            (id < 0 || (normal && v.type[size_t(id)] == TOKEN_USER)))
            id = int32_t(i);
    }
}

// Of two rules with the same pair the first counts.
static void load_bpe_merges(vocab &v, const model_file &f) {
    const meta_array merges = f.need_array(KEY_MERGES, KIND_STRING);
    if (merges.count > MAX_MERGES)
        f.bad(KEY_MERGES, "has %llu entries, more than %llu", (unsigned long long)merges.count,
              (unsigned long long)MAX_MERGES);
    v.merges.assign(table_size(size_t(merges.count)), {-1, -1, no_merge});
    const byte_level level;
    uint32_t rank = 0, used = 0;
    for (string_view s : merges) {
        const size_t space = s.find(' ', 1);
        if (space == s.npos || space + 1 == s.size())
            f.bad(KEY_MERGES, "entry %u is \"%s\", expected two tokens and a space between", rank, show(s).c_str());
        const string left = level.decode(s.substr(0, space)), right = level.decode(s.substr(space + 1));
        const merge_rule r = {find_piece(v, left), find_piece(v, right), {find_piece(v, left + right), rank++}};
        if (r.left < 0 || r.right < 0 || r.result.into < 0)
            continue;
        used++;
        merge_rule &slot = v.merges[merge_slot(v, r.left, r.right)];
        if (slot.left < 0)
            slot = r;
    }
    if (rank > used)
        log_msg(ENGINE_LOG_WARN, "%s: %s: %u of %u entries name no tokens and are ignored", show_path(f.path).c_str(),
                KEY_MERGES, rank - used, rank);
}

// Ranks in the order of falling scores.
static uint32_t score_rank(float score) {
    const uint32_t bits = float_bits(score + 0.0f); // -0 is 0
    return bits >> 31 ? bits : ~bits & 0x7fffffffu;
}

// The best score goes first.
static void load_spm_ranks(vocab &v, const model_file &f) {
    const meta_array scores = f.need_array(KEY_SCORES, KIND_FLOAT);
    v.rank.reserve(size_t(v.n));
    for (size_t id = 0; id < size_t(v.n); id++) {
        const string_view s = v.text[id];
        const float score = float(scores.float_at(id));
        if (std::isnan(score))
            f.bad(KEY_SCORES, "entry %zu is not a number", id);
        v.rank.push_back(score_rank(score));
        for (size_t i = 1; i < s.size() && s.size() <= MAX_MATCH && v.type[id] == TOKEN_NORMAL; i++)
            v.whole_text |= s[i] == ' ' && s[i - 1] != ' ';
    }
}

// A text such as <|im_start|>. A file may call it user-defined, yet a conversation's structure hangs on it.
static bool is_marker(string_view s) {
    for (string_view bar : {"|", "\uff5c"}) {
        const size_t n = bar.size();
        if (s.size() > 2 * n + 2 && s[0] == '<' && s.back() == '>' && s.substr(1, n) == bar &&
            s.substr(s.size() - 1 - n, n) == bar)
            return true;
    }
    return false;
}

static bool is_end(const vocab &v, int32_t id) { return std::find(v.ends.begin(), v.ends.end(), id) != v.ends.end(); }

// Whether this one of v.matched is looked for on request only; the others are part of how any text is spelled. What
// ends a turn is never spelled by chance, whatever type the file gives it.
static bool on_request(const vocab &v, int32_t id) {
    return v.type[size_t(id)] != TOKEN_USER || is_marker(v.text[size_t(id)]) || is_end(v, id);
}

static void index_matched(vocab &v) {
    for (int32_t id = 0; id < v.n; id++) {
        const uint8_t t = v.type[size_t(id)];
        const size_t size = v.text[size_t(id)].size();
        if ((t == TOKEN_CONTROL || t == TOKEN_UNKNOWN || t == TOKEN_USER) && size > 0 && size <= MAX_MATCH)
            v.matched.push_back(id);
    }
    auto text = [&v](int32_t id) { return v.text[size_t(id)]; };
    std::stable_sort(v.matched.begin(), v.matched.end(), [&](int32_t a, int32_t b) { return text(a) < text(b); });
    auto equal = [&](int32_t a, int32_t b) { return text(a) == text(b); };
    v.matched.erase(std::unique(v.matched.begin(), v.matched.end(), equal), v.matched.end());
    for (size_t b = 0, i = 0; b <= 256; b++) {
        while (i < v.matched.size() && uint8_t(text(v.matched[i])[0]) < b)
            i++;
        v.matched_from[b] = uint32_t(i);
    }
}

// Texts that end a turn in every model that has them as tokens; each stands between line breaks.
static const string_view end_texts =
    "\n</s>\n<|endoftext|>\n<|end_of_text|>\n<|im_end|>\n<|eot_id|>\n<|eom_id|>\n<|end|>\n<end_of_turn>\n"
    "<|end_of_turn|>\n<|EOT|>\n<EOT>\n<|END_OF_TURN_TOKEN|>\n<\uff5cend\u2581of\u2581sentence\uff5c>\n";

// The keys that name tokens, and what to add to a text.
static void load_special_ids(vocab &v, const model_file &f) {
    auto id_key = [&](const char *key) { return int32_t(f.get_int(key, -1, 0, v.n - 1)); };
    v.bos = id_key("tokenizer.ggml.bos_token_id");
    v.eos = id_key("tokenizer.ggml.eos_token_id");
    v.unk = id_key("tokenizer.ggml.unknown_token_id");
    for (int32_t id = 0; id < v.n && v.unk < 0; id++)
        if (v.type[size_t(id)] == TOKEN_UNKNOWN)
            v.unk = id;
    for (int32_t id : {v.eos, id_key("tokenizer.ggml.eot_token_id"), id_key("tokenizer.ggml.eom_token_id")})
        if (id >= 0)
            v.ends.push_back(id);
    for (int32_t id : v.matched)
        if (end_texts.find("\n" + string(v.text[size_t(id)]) + "\n") != end_texts.npos)
            v.ends.push_back(id);

    v.add_bos = f.get_bool("tokenizer.ggml.add_bos_token", !v.pre || v.pre->add_bos);
    v.add_eos = f.get_bool("tokenizer.ggml.add_eos_token", false);
    if ((v.add_bos && v.bos < 0) || (v.add_eos && v.eos < 0))
        log_msg(ENGINE_LOG_WARN,
                "%s: the vocabulary wants BOS or EOS added but does not say which token that is: none is",
                show_path(f.path).c_str());
    v.add_bos = v.add_bos && v.bos >= 0;
    v.add_eos = v.add_eos && v.eos >= 0;
}

static vocab load_vocab(const model_file &f) {
    vocab v;
    const string path = show_path(f.path);
    v.chars = char_table();
    v.seed = mix_hash(uint64_t(reinterpret_cast<uintptr_t>(&v)) ^ uint64_t(1e9 * now_seconds()));
    const string_view model = f.need_string("tokenizer.ggml.model");
    if (model != "llama" && model != "gpt2")
        fail(ENGINE_EUNSUPPORTED, "%s: tokenizer.ggml.model: \"%s\" is not supported; \"llama\" and \"gpt2\" are",
             path.c_str(), show(model).c_str());
    if (model == "gpt2") {
        const string_view name = f.get_string("tokenizer.ggml.pre", "default");
        for (const pre_tokenizer &p : pre_tokenizers)
            if (name == p.name)
                v.pre = &p;
        if (!v.pre)
            fail(ENGINE_EUNSUPPORTED, "%s: tokenizer.ggml.pre: the pre-tokenizer \"%s\" is not supported", path.c_str(),
                 show(name).c_str());
        if (!f.meta("tokenizer.ggml.pre"))
            log_msg(ENGINE_LOG_WARN, "%s: tokenizer.ggml.pre: is missing, so text is cut as \"default\" says",
                    path.c_str());
    }
    v.describe = v.pre ? strf("bpe %s", v.pre->name) : "spm";
    v.space_prefix = !v.pre && f.get_bool("tokenizer.ggml.add_space_prefix", true);
    v.squeeze_spaces = !v.pre && f.get_bool("tokenizer.ggml.remove_extra_whitespaces", false);
    load_tokens(v, f);
    v.pre ? load_bpe_merges(v, f) : load_spm_ranks(v, f);
    index_matched(v);
    load_special_ids(v, f);

    const auto missing = std::count(std::begin(v.byte_id), std::end(v.byte_id), -1);
    if (missing && v.unk < 0 && !v.pre)
        f.bad(KEY_TOKENS, "has no token for %d of 256 bytes, and no unknown token", int(missing));
    if (missing && v.unk < 0)
        log_msg(ENGINE_LOG_WARN, "%s: %s: no token for %d of 256 bytes, which vanish from texts", path.c_str(),
                KEY_TOKENS, int(missing));
    return v;
}

// ---- text to ids ----

// The pairs of a word that could merge: lowest rank first, then leftmost. A pair may be in it more than once. A long
// word has many pairs but few ranks, and new pairs mostly come in ascending order; so each rank keeps what came in
// order as a list, and only the rest as a heap.
struct merge_queue {
    void push(uint32_t rank, uint32_t at) {
        bucket &b = bucket_of(rank);
        if (b.empty())
            push_heap(ranks, rank);
        if (b.list.empty() || at >= b.list.back())
            b.list.push_back(at);
        else
            push_heap(b.heap, at);
    }
    bool pop(uint32_t &rank, uint32_t &at) {
        if (ranks.empty())
            return false;
        rank = ranks[0];
        bucket &b = bucket_of(rank);
        const bool from_list = b.taken < b.list.size() && (b.heap.empty() || b.list[b.taken] < b.heap[0]);
        at = from_list ? b.list[b.taken++] : pop_heap(b.heap);
        if (b.taken == b.list.size())
            b.list.clear(), b.taken = 0;
        if (b.empty())
            pop_heap(ranks);
        return true;
    }

  private:
    struct bucket {
        vector<uint32_t> list, heap; // positions
        size_t taken = 0;            // of list

        bool empty() const { return list.empty() && heap.empty(); }
    };
    vector<uint32_t> ranks; // a heap of those whose bucket is not empty
    std::unordered_map<uint32_t, bucket> buckets;
    bucket *recent = nullptr; // of recent_rank
    uint32_t recent_rank = 0;

    bucket &bucket_of(uint32_t rank) {
        if (!recent || rank != recent_rank)
            recent = &buckets[rank], recent_rank = rank;
        return *recent;
    }
    static bool later(uint32_t a, uint32_t b) { return a > b; }
    static void push_heap(vector<uint32_t> &h, uint32_t x) {
        h.push_back(x);
        std::push_heap(h.begin(), h.end(), later);
    }
    static uint32_t pop_heap(vector<uint32_t> &h) {
        const uint32_t x = h[0];
        std::pop_heap(h.begin(), h.end(), later);
        h.pop_back();
        return x;
    }
};

static void squeeze(string &s) {
    string out;
    for (char c : s)
        if (c != ' ' || (!out.empty() && out.back() != ' '))
            out += c;
    if (!out.empty() && out.back() == ' ')
        out.pop_back();
    s.swap(out);
}

// One call of tokenize.
struct speller {
    const vocab &v;
    vector<int32_t> &out;
    size_t start = 0; // in out: where this piece of raw text began

    speller(const vocab &vocabulary, vector<int32_t> &ids) : v(vocabulary), out(ids) {}

    // Appends the ids of raw text.
    void raw(string_view s) {
        start = out.size();
        if (s.empty())
            return;
        if (v.pre) {
            split_words(v.pre->stages, v.chars, s.data(), s.data() + s.size(), [this](const char *p, const char *end) {
                bpe_word({p, size_t(end - p)});
            });
            return;
        }
        string changed;
        if (v.squeeze_spaces || s.find(SPACE_MARK) != s.npos) {
            changed = with_spaces(s);
            if (v.squeeze_spaces)
                squeeze(changed);
            s = changed;
        }
        bool prefix = v.space_prefix;
        for (size_t n; !s.empty(); s.remove_prefix(n)) {
            n = v.whole_text ? s.size() : std::min(s.size(), s.find(' ', std::min(s.size(), s.find_first_not_of(' '))));
            spm_word(s.substr(0, n), prefix);
            prefix = false;
        }
    }

  private:
    static constexpr uint32_t NONE = UINT32_MAX;
    static constexpr size_t SHORT_WORD = 24; // symbols; up to this, looking through all pairs beats the queue

    vector<int32_t> symbol;      // of the word that is being merged
    vector<uint32_t> next, prev; // neighbours of a symbol
    vector<merged> rule;         // how a symbol merges with the next
    merge_queue queue;

    void bpe_word(string_view s) {
        const int32_t whole = v.pre->whole_words ? find_piece(v, s) : -1;
        if (whole >= 0) {
            out.push_back(whole);
            return;
        }
        for (char c : s)
            add(v.byte_id[uint8_t(c)], {&c, 1});
        merge();
    }

    // prefix: a space goes before it.
    void spm_word(string_view s, bool prefix) {
        if (prefix)
            add(find_piece(v, " "), " ");
        for (const char *p = s.data(), *end = p + s.size(); p < end;) {
            const string_view c(p, size_t(next_char(p, end).length));
            add(find_piece(v, c), c);
            p += c.size();
        }
        merge();
    }

    // Appends one symbol to the word; id -1, which nothing merges with, is spelled at once.
    void add(int32_t id, string_view bytes) {
        if (id >= 0) {
            symbol.push_back(id);
            return;
        }
        merge();
        spell(bytes);
    }

    // The tokens of single bytes, or else the unknown token, once for a run of such characters.
    void spell(string_view bytes) {
        for (char c : bytes)
            if (v.byte_id[uint8_t(c)] < 0) {
                if (v.unk >= 0 && (out.size() == start || out.back() != v.unk))
                    out.push_back(v.unk);
                return;
            }
        for (char c : bytes)
            out.push_back(v.byte_id[uint8_t(c)]);
    }

    // Looks up how symbol i merges with its right neighbour.
    void pair(uint32_t i) {
        rule[i] = next[i] < symbol.size() ? find_merge(v, symbol[i], symbol[next[i]]) : no_merge;
        if (rule[i].into >= 0 && symbol.size() > SHORT_WORD)
            queue.push(rule[i].rank, i);
    }

    // Sets i to the leftmost pair of the lowest rank; false when nothing merges any more.
    bool next_pair(uint32_t &i) {
        uint32_t rank = NONE;
        if (symbol.size() > SHORT_WORD) {
            while (queue.pop(rank, i))
                if (rule[i].into >= 0 && rule[i].rank == rank) // else it is out of date
                    return true;
            return false;
        }
        for (uint32_t j = 0; j < symbol.size(); j = next[j])
            if (rule[j].into >= 0 && rule[j].rank < rank)
                rank = rule[j].rank, i = j;
        return rank != NONE;
    }

    // Merges the word's symbols as far as the rules go, appends what they become and empties the word.
    void merge() {
        const auto n = uint32_t(symbol.size());
        next.resize(n), prev.resize(n), rule.resize(n);
        for (uint32_t i = 0; i < n; i++)
            next[i] = i + 1, prev[i] = i - 1;
        for (uint32_t i = 0; i < n; i++)
            pair(i);
        for (uint32_t i; next_pair(i);) {
            const uint32_t gone = next[i];
            symbol[i] = rule[i].into;
            rule[gone] = no_merge;
            next[i] = next[gone];
            if (next[i] < n)
                prev[next[i]] = i;
            pair(i);
            if (i > 0)
                pair(prev[i]);
        }
        for (uint32_t i = 0; i < n; i = next[i])
            out.push_back(symbol[i]);
        symbol.clear();
    }
};

// The longest of v.matched that stands at text[at] and may be matched there, or -1.
static int32_t match_special(const vocab &v, string_view text, size_t at, bool parse_special, const uint8_t *literal) {
    const uint8_t b = uint8_t(text[at]);
    size_t low = v.matched_from[b], high = v.matched_from[b + 1];
    int32_t best = -1;
    for (size_t n = 1; low < high && at + n <= text.size(); n++) {
        if (literal && (literal[at + n - 1] != 0) != (literal[at] != 0))
            break;
        // The tokens in [low, high) begin with the n bytes at `at`; one that ends there is the first of them.
        const int32_t first = v.matched[low];
        if (v.text[size_t(first)].size() == n) {
            if (!on_request(v, first) || (parse_special && !(literal && literal[at])))
                best = first;
            low++;
        }
        if (at + n == text.size())
            break;
        // Narrow the range to those that go on with the next byte, unless all do.
        const int next = uint8_t(text[at + n]);
        auto byte = [&](int32_t id) { return int(uint8_t(v.text[size_t(id)][n])); };
        if (low < high && byte(v.matched[low]) == next && byte(v.matched[high - 1]) == next)
            continue;
        auto below = [&](int limit) {
            const auto from = v.matched.begin() + std::ptrdiff_t(low), to = v.matched.begin() + std::ptrdiff_t(high);
            return size_t(std::partition_point(from, to, [&](int32_t id) { return byte(id) < limit; }) -
                          v.matched.begin());
        };
        const size_t first_above = below(next + 1);
        low = below(next), high = first_above;
    }
    return best;
}

// Appends the ids of `text`, without BOS and EOS. User-defined tokens are matched in any text, as Hugging Face does
// with added tokens; control tokens, and user-defined ones that are markers or end a turn, only with parse_special.
// `literal` is null or has a byte for each of text: what is not 0 there a user wrote, and in that nothing is matched on
// request. No match reaches over a change of it. What lies between matches is spelled as one piece, whatever `literal`
// says.
static void tokenize(const vocab &v, string_view text, bool parse_special, const uint8_t *literal,
                     vector<int32_t> &out) {
    if (text.size() > INT_MAX)
        fail(ENGINE_EINVAL, "text of %zu bytes: at most %d can be tokenized at once", text.size(), INT_MAX);
    speller s(v, out);
    size_t done = 0;
    for (size_t at = 0; at < text.size();) {
        const int32_t id = match_special(v, text, at, parse_special, literal);
        if (id < 0) {
            at++;
            continue;
        }
        s.raw(text.substr(done, at - done));
        out.push_back(id);
        done = at += v.text[size_t(id)].size();
    }
    s.raw(text.substr(done));
}

// ---- ids to text ----

// The raw bytes of a token, which may be a part of a character. Control and unknown tokens have none unless `special`.
static string_view token_bytes(const vocab &v, int32_t id, bool special) {
    if (id < 0 || id >= v.n)
        return {};
    const uint8_t t = v.type[size_t(id)];
    return !special && (t == TOKEN_CONTROL || t == TOKEN_UNKNOWN) ? string_view() : v.text[size_t(id)];
}

// The bytes of a whole text, without the spaces that tokenize puts before raw text. All ids are below v.n.
static string detokenize(const vocab &v, const int32_t *ids, size_t n, bool special) {
    string out;
    bool start = v.space_prefix; // raw text begins here
    for (size_t i = 0; i < n; i++) {
        string_view s = token_bytes(v, ids[i], special);
        const uint8_t t = v.type[size_t(ids[i])];
        const bool raw = t != TOKEN_CONTROL && t != TOKEN_USER;
        if (raw && start && !s.empty() && s[0] == ' ')
            s.remove_prefix(1);
        start = v.space_prefix && !raw;
        out.append(s);
    }
    return out;
}

// ---------------------------------------------------------------------------------------------------
// 5. TEMPLATE
//
// Chat templates: the part of the Jinja language that model files use, cut into tokens and interpreted
// with the settings that Hugging Face uses (trim_blocks, lstrip_blocks, no trailing newline). Values behave
// as Python's do: text is indexed by characters, and lists and dicts do not change after they are made.
// Knows nothing of tokens and models, and a template reaches no file, network or host function.
// Every byte of the output carries its provenance: whether a message brought it or the template wrote it.
// Invariant: a template of any content ends within its budget of steps, memory and depth.
// ---------------------------------------------------------------------------------------------------

constexpr size_t TPL_MAX_SOURCE = 256 << 10;  // bytes of template text; a token costs about 100 bytes
constexpr uint64_t TPL_MAX_STEPS = 2000000;   // values looked at, plus bytes moved / 32; longer conversations get more
constexpr uint64_t TPL_MAX_MEMORY = 16 << 20; // bytes of live values; longer conversations get more
constexpr size_t TPL_MAX_RANGE = 100000;      // items of range(); also Jinja's own sandbox limit
constexpr int TPL_MAX_DEPTH = 400;            // nesting of blocks, brackets and calls, and of lists in lists

[[noreturn, gnu::format(printf, 2, 3)]] static void tpl_bad(int line, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    string s = vstrf(fmt, args);
    va_end(args);
    throw Error{ENGINE_ETEMPLATE, strf("template line %d: ", line) + s};
}

// Marks of the bytes of a text. TPL_CONTENT alone tells whether a message's content reached the output at all.
enum : char { TPL_OURS = 0, TPL_GIVEN = 1, TPL_CONTENT = 2 };

struct tpl_text {
    string bytes, marks; // equally long
    tpl_text() = default;
    explicit tpl_text(string s, char mark = TPL_OURS) : bytes(std::move(s)), marks(bytes.size(), mark) {}

    size_t size() const { return bytes.size(); }
    tpl_text sub(size_t from, size_t n = string::npos) const {
        tpl_text t;
        t.bytes = bytes.substr(from, n), t.marks = marks.substr(from, n);
        return t;
    }
};

// clang-format off
enum tpl_kind : uint8_t { TPL_UNDEFINED, TPL_NONE, TPL_BOOL, TPL_INT, TPL_FLOAT, TPL_STRING, TPL_LIST, TPL_DICT,
                          TPL_NAMESPACE, TPL_LOOP, TPL_MACRO, TPL_FUNCTION };
static const char *const tpl_kind_names[] = {"undefined", "none", "bool", "int", "float", "string", "list", "dict",
                                             "namespace", "loop", "macro", "function"};
// clang-format on

struct tpl_value {
    struct heap {
        tpl_text text;            // string: itself; undefined: what is missing, for the message
        vector<tpl_value> items;  // list: items; dict, namespace: key, value, key, value ...; loop: {sequence}
        int depth = 0;            // of lists in lists, so that recursion over values is bounded
        bool parts = false;       // a message's content as a list, or one item of it
        uint64_t *live = nullptr; // the account that `charged` bytes go back to
        uint64_t charged = 0;
        ~heap() {
            if (live)
                *live -= charged;
        }
    };
    tpl_kind kind = TPL_UNDEFINED;
    int64_t i = 0; // bool, int; float: its bits; loop: index; macro, function: which
    std::shared_ptr<heap> h;

    const tpl_text &text() const { return h->text; }
    const string &bytes() const { return h->text.bytes; }
    const vector<tpl_value> &items() const { return h->items; }
    bool is_string() const { return kind == TPL_STRING; }
    bool is_dict() const { return kind == TPL_DICT || kind == TPL_NAMESPACE; }
    bool is_int() const { return kind == TPL_INT || kind == TPL_BOOL; }
    bool is_number() const { return is_int() || kind == TPL_FLOAT; }
    double number() const {
        double f = double(i);
        if (kind == TPL_FLOAT)
            memcpy(&f, &i, sizeof f);
        return f;
    }
    bool is_sequence() const { return is_string() || kind == TPL_LIST || kind == TPL_DICT || kind == TPL_UNDEFINED; }
    int64_t int_or(int64_t fallback) const { return is_int() ? i : fallback; }
    const char *kind_name() const { return tpl_kind_names[kind]; }
};

static tpl_value tpl_none() { return {TPL_NONE, 0, nullptr}; }
static tpl_value tpl_bool(bool b) { return {TPL_BOOL, b, nullptr}; }
static tpl_value tpl_int(int64_t i) { return {TPL_INT, i, nullptr}; }

// The budget of one rendering and the line where it stands; makes every value that lives on the heap.
struct tpl_run {
    uint64_t max_steps = 0, steps = 0; // see TPL_MAX_STEPS
    uint64_t max_live = 0, live = 0;   // bytes
    int depth = 0, line = 1;
    time_t now = 0;
    bool refused = false;         // by raise_exception
    vector<tpl_value> namespaces; // all that were made: they may contain themselves, so they end together

    ~tpl_run() {
        for (tpl_value &n : namespaces)
            n.h->items.clear();
    }
    void work(uint64_t n) {
        if ((steps += n) > max_steps)
            tpl_bad(line, "stopped after %llu steps", (unsigned long long)max_steps);
    }
    // Called before a text or list of `bytes` comes to be.
    void room(uint64_t bytes) {
        if (bytes > max_live || live + bytes > max_live)
            tpl_bad(line, "needs more than %llu bytes of memory", (unsigned long long)max_live);
    }
    void put(tpl_text &out, const tpl_text &t, size_t from = 0, size_t n = string::npos) {
        n = std::min(n, t.size() - from);
        work(n / 32);
        room(2 * (out.size() + n));
        out.bytes.append(t.bytes, from, n), out.marks.append(t.marks, from, n);
    }
    tpl_value make(tpl_kind kind, tpl_text text, vector<tpl_value> items = {}) {
        uint64_t cost = sizeof(tpl_value::heap) + 2 * text.size() + items.size() * sizeof(tpl_value);
        work(cost / 64);
        room(cost);
        tpl_value v{kind, 0, std::make_shared<tpl_value::heap>()};
        v.h->live = &live, v.h->charged = cost;
        live += cost;
        v.h->text = std::move(text), v.h->items = std::move(items);
        for (const tpl_value &item : v.items())
            if (item.h && item.kind != TPL_NAMESPACE)
                v.h->depth = std::max(v.h->depth, item.h->depth + 1);
        if (v.h->depth > TPL_MAX_DEPTH)
            tpl_bad(line, "lists nested more than %d deep", TPL_MAX_DEPTH);
        if (kind == TPL_NAMESPACE)
            namespaces.push_back(v);
        return v;
    }
    tpl_value text(tpl_text t) { return make(TPL_STRING, std::move(t)); }
    tpl_value text(string_view s, char mark = TPL_OURS) { return text(tpl_text(string(s), mark)); }
    tpl_value list(vector<tpl_value> items) { return make(TPL_LIST, {}, std::move(items)); }
    tpl_value missing(const string &what) { return make(TPL_UNDEFINED, tpl_text(what)); }
    // Undefined values may be asked about and printed; to compute with them is an error.
    void need_defined(const tpl_value &v) const {
        if (v.kind == TPL_UNDEFINED)
            tpl_bad(line, "%s", v.h ? v.bytes().c_str() : "value is undefined");
    }
};

// One step deeper into the source: recursion is bounded here.
struct tpl_level {
    tpl_run &r;
    const int saved;
    tpl_level(tpl_run &run, int line) : r(run), saved(run.line) {
        r.line = line;
        r.work(1);
        if (++r.depth > TPL_MAX_DEPTH)
            tpl_bad(line, "nested more than %d deep", TPL_MAX_DEPTH);
    }
    ~tpl_level() { r.depth--, r.line = saved; }
};

// Takes the first word off a list of words.
static string_view tpl_take_word(string_view &list) {
    string_view word = list.substr(0, list.find(' '));
    list.remove_prefix(std::min(list.size(), word.size() + 1));
    return word;
}
static bool tpl_has_word(string_view list, string_view word) {
    while (!list.empty())
        if (tpl_take_word(list) == word)
            return true;
    return false;
}

// ---- text: UTF-8 characters, white space, case, search -----------------------------------------------------------

static size_t tpl_char_bytes(string_view s, size_t at) {
    return size_t(next_char(s.data() + at, s.data() + s.size()).length);
}

// The bytes before character n.
static size_t tpl_offset(string_view s, int64_t n) {
    size_t at = 0;
    while (n-- > 0 && at < s.size())
        at += tpl_char_bytes(s, at);
    return at;
}

// Python's str.isspace().
static bool tpl_space(string_view c) {
    int length;
    const bool white = bits_at(char_table(), c.data(), c.data() + c.size(), length) & CH_SPACE;
    return white || (c[0] >= 0x1c && c[0] <= 0x1f);
}

// Only ASCII letters have a case here, which keeps texts and marks equally long.
enum tpl_case { TPL_LOWER, TPL_UPPER, TPL_CAPITAL, TPL_TITLE };
static tpl_value tpl_recase(tpl_run &r, const tpl_value &v, tpl_case mode) {
    tpl_text t = v.text();
    bool start = true; // of a word
    for (char &c : t.bytes) {
        bool letter = (c | 32) >= 'a' && (c | 32) <= 'z';
        if (letter)
            c = char(mode == TPL_UPPER || (mode != TPL_LOWER && start) ? c & ~32 : c | 32);
        start = mode == TPL_TITLE && !letter;
    }
    r.work(t.size() / 4);
    return r.text(std::move(t));
}

// Without a string as `set` white space goes, else every character that is in it.
static tpl_value tpl_strip(tpl_run &r, const tpl_value &v, const tpl_value &set, bool left, bool right) {
    const string_view s = v.bytes();
    size_t from = 0, to = s.size();
    auto drops = [&](size_t at, size_t n) {
        r.work(1 + (set.is_string() ? set.text().size() / 64 : 0));
        return set.is_string() ? set.bytes().find(s.substr(at, n)) != string::npos : tpl_space(s.substr(at, n));
    };
    for (size_t n; left && from < to && drops(from, n = tpl_char_bytes(s, from));)
        from += n;
    for (size_t at; right && to > from; to = at) {
        at = to - 1;
        while (at > from && to - at < 4 && (uint8_t(s[at]) & 0xc0) == 0x80)
            at--;
        if (!drops(at, to - at))
            break;
    }
    return r.text(v.text().sub(from, to - from));
}

// Every comparison is counted: a hostile pattern makes as many as the two lengths multiplied.
static size_t tpl_find(tpl_run &r, string_view s, string_view what, size_t from = 0) {
    uint64_t compared = 0;
    auto equal = [&](char a, char b) {
        if (++compared % 1024 == 0)
            r.work(1024 / 16);
        return a == b;
    };
    auto p = std::search(s.begin() + from, s.end(), what.begin(), what.end(), equal);
    r.work(1 + compared % 1024 / 16);
    return p != s.end() || what.empty() ? size_t(p - s.begin()) : string::npos;
}

static tpl_value tpl_replace(tpl_run &r, const tpl_value &v, const tpl_value &old, const tpl_value &with,
                             int64_t limit) {
    if (old.bytes().empty())
        tpl_bad(r.line, "replace: the text to replace is empty");
    tpl_text out;
    size_t at = 0;
    for (size_t hit; limit != 0 && (hit = tpl_find(r, v.bytes(), old.bytes(), at)) != string::npos; limit--) {
        r.put(out, v.text(), at, hit - at);
        r.put(out, with.text());
        at = hit + old.text().size();
    }
    r.put(out, v.text(), at);
    return r.text(std::move(out));
}

// Python's split: at a separator or, without a string as `sep`, at runs of white space. A limit of -1 is none.
static tpl_value tpl_split(tpl_run &r, const tpl_text &t, const tpl_value &sep, int64_t limit) {
    vector<tpl_value> parts;
    size_t from = 0, at = 0;
    uint64_t left = uint64_t(limit);
    if (sep.is_string()) {
        if (sep.bytes().empty())
            tpl_bad(r.line, "split: empty separator");
        for (; left-- && (at = tpl_find(r, t.bytes, sep.bytes(), from)) != string::npos; from = at + sep.text().size())
            parts.push_back(r.text(t.sub(from, at - from)));
        parts.push_back(r.text(t.sub(from)));
        return r.list(std::move(parts));
    }
    auto skip = [&](bool spaces) {
        for (size_t n; at < t.size() && (n = tpl_char_bytes(t.bytes, at)); at += n, r.work(1))
            if (tpl_space(string_view(t.bytes).substr(at, n)) != spaces)
                return;
    };
    for (skip(true); at < t.size(); skip(true)) {
        from = at;
        left-- ? skip(false) : void(at = t.size());
        parts.push_back(r.text(t.sub(from, at - from)));
    }
    return r.list(std::move(parts));
}

// ---- values: truth, equality, order, printing, access -------------------------------------------------------------

static bool tpl_truth(const tpl_value &v) {
    if (v.is_string())
        return v.text().size() > 0;
    if (v.kind == TPL_LIST || v.kind == TPL_DICT)
        return !v.items().empty();
    return v.is_number() ? v.number() != 0 : v.kind > TPL_NONE;
}

static bool tpl_equal(tpl_run &r, const tpl_value &a, const tpl_value &b) {
    r.work(1);
    if (a.is_int() && b.is_int())
        return a.i == b.i;
    if (a.is_number() && b.is_number())
        return a.number() == b.number();
    if (a.kind != b.kind || a.kind == TPL_UNDEFINED)
        return a.kind == b.kind;
    if (a.is_string()) {
        r.work(a.text().size() / 64);
        return a.bytes() == b.bytes();
    }
    if (a.h == b.h || (a.kind != TPL_LIST && a.kind != TPL_DICT))
        return a.h == b.h && a.i == b.i;
    const vector<tpl_value> &x = a.items(), &y = b.items();
    const size_t step = a.kind == TPL_DICT ? 2 : 1;
    bool same = x.size() == y.size();
    for (size_t i = 0; same && i < x.size(); i += step) {
        size_t k = step == 1 ? i : 0; // the entry of b with the same key
        while (step == 2 && k < y.size() && !tpl_equal(r, x[i], y[k]))
            k += 2;
        same = k < y.size() && tpl_equal(r, x[i + step - 1], y[k + step - 1]);
    }
    return same;
}

// Less than 0, 0, more than 0.
static int tpl_compare(tpl_run &r, const tpl_value &a, const tpl_value &b) {
    r.work(1);
    if (a.is_int() && b.is_int())
        return a.i < b.i ? -1 : a.i > b.i;
    if (a.is_number() && b.is_number())
        return a.number() < b.number() ? -1 : a.number() > b.number();
    r.need_defined(a), r.need_defined(b);
    if (!a.is_string() || !b.is_string())
        tpl_bad(r.line, "cannot order %s and %s", a.kind_name(), b.kind_name());
    r.work(std::min(a.text().size(), b.text().size()) / 64);
    return a.bytes().compare(b.bytes());
}

// The value of a dict's or namespace's key, or null.
static const tpl_value *tpl_lookup(tpl_run &r, const tpl_value &dict, const tpl_value &key) {
    for (size_t i = 0; i < dict.items().size(); i += 2)
        if (tpl_equal(r, dict.items()[i], key))
            return &dict.items()[i + 1];
    return nullptr;
}

static void tpl_dict_set(tpl_run &r, vector<tpl_value> &items, const tpl_value &key, const tpl_value &v) {
    if (key.kind > TPL_STRING)
        tpl_bad(r.line, "a %s cannot be a key", key.kind_name());
    for (size_t i = 0; i < items.size(); i += 2)
        if (tpl_equal(r, items[i], key)) {
            items[i + 1] = v;
            return;
        }
    items.push_back(key), items.push_back(v);
}

// What a `for` walks over: items, keys, characters.
static tpl_value tpl_sequence(tpl_run &r, const tpl_value &v) {
    vector<tpl_value> out;
    if (v.kind == TPL_LIST)
        return v;
    if (!v.is_sequence())
        tpl_bad(r.line, "%s is not iterable", v.kind_name());
    for (size_t i = 0; v.kind == TPL_DICT && i < v.items().size(); i += 2)
        out.push_back(v.items()[i]);
    for (size_t at = 0, n; v.is_string() && at < v.text().size(); at += n)
        out.push_back(r.text(v.text().sub(at, n = tpl_char_bytes(v.bytes(), at))));
    return r.list(std::move(out));
}

static int64_t tpl_count(tpl_run &r, const tpl_value &v) {
    if (!v.is_string())
        return int64_t(tpl_sequence(r, v).items().size());
    r.work(v.text().size() / 16);
    int64_t n = 0;
    for (size_t at = 0; at < v.text().size(); at += tpl_char_bytes(v.bytes(), at))
        n++;
    return n;
}

static bool tpl_contains(tpl_run &r, const tpl_value &v, const tpl_value &what) {
    if (v.is_dict())
        return tpl_lookup(r, v, what);
    if (v.is_string()) {
        if (!what.is_string())
            tpl_bad(r.line, "'in' a string needs a string, not %s", what.kind_name());
        return tpl_find(r, v.bytes(), what.bytes()) != string::npos;
    }
    tpl_value seq = tpl_sequence(r, v);
    return std::any_of(seq.items().begin(), seq.items().end(), [&](auto &item) { return tpl_equal(r, item, what); });
}

// As Python writes it: the fewest digits that give the number again.
static string tpl_float_text(double f) {
    const plain_locale c;
    char buf[40];
    int digits = 0;
    do
        snprintf(buf, sizeof buf, "%.*e", digits++, f);
    while (digits < 17 && strtod(buf, nullptr) != f);
    const int exponent = f == 0 ? 0 : atoi(strchr(buf, 'e') + 1);
    if (exponent >= -4 && exponent < 16)
        snprintf(buf, sizeof buf, "%.*f", std::max(digits - 1 - exponent, 1), f);
    return buf;
}

// Appends values as Python's repr() or as JSON. Text inside keeps its marks; punctuation counts as given.
struct tpl_writer {
    tpl_run &r;
    tpl_text &out;
    bool json;
    int64_t indent = -1; // spaces per level, or all on one line
    string comma = ", ", colon = ": ";

    void put(string_view s) { r.put(out, tpl_text(string(s), TPL_GIVEN)); }
    void quoted(const tpl_text &t) {
        bool single = t.bytes.find('\'') != string::npos && t.bytes.find('"') == string::npos;
        const char quote = json || single ? '"' : '\'', *const codes = "\n\r\t\b\f";
        size_t from = 0;
        put(string_view(&quote, 1));
        for (size_t i = 0; i < t.size(); i++) {
            char c = t.bytes[i];
            const char *code = c ? strchr(codes, c) : nullptr;
            string escape;
            if (c == quote || c == '\\')
                escape = {'\\', c};
            else if (code && (json || code < codes + 3))
                escape = {'\\', "nrtbf"[code - codes]};
            else if (uint8_t(c) < 0x20 || (c == 0x7f && !json))
                escape = strf(json ? "\\u%04x" : "\\x%02x", c);
            else
                continue;
            r.put(out, t, from, i - from);
            r.put(out, tpl_text(escape, t.marks[i]));
            from = i + 1;
        }
        r.put(out, t, from);
        put(string_view(&quote, 1));
    }
    void value(const tpl_value &v, int level) {
        r.work(1);
        if (v.is_string())
            return quoted(v.text());
        if (v.kind == TPL_NONE)
            return put(json ? "null" : "None");
        if (v.kind == TPL_BOOL)
            return put(json ? v.i ? "true" : "false" : v.i ? "True" : "False");
        if (v.is_int())
            return put(std::to_string(v.i));
        if (v.kind == TPL_FLOAT)
            return put(tpl_float_text(v.number()));
        if (json && v.kind != TPL_LIST && v.kind != TPL_DICT)
            tpl_bad(r.line, "tojson: a value of kind %s cannot become JSON", v.kind_name());
        if (v.kind != TPL_LIST && v.kind != TPL_DICT)
            return put(v.kind == TPL_UNDEFINED ? "Undefined" : strf("<%s>", v.kind_name()));
        if (v.h->parts && !json) // the template does not know parts, and would print Python's notation of them
            tpl_bad(r.line, "a content in parts is printed");
        const bool dict = v.kind == TPL_DICT, lines = indent >= 0 && !v.items().empty();
        auto newline = [&](int depth) { put("\n" + string(size_t(depth) * size_t(indent), ' ')); };
        put(dict ? "{" : "[");
        for (size_t i = 0; i < v.items().size(); i++) {
            bool key = dict && i % 2 == 0;
            if (json && key && !v.items()[i].is_string())
                tpl_bad(r.line, "tojson: a %s cannot be a key", v.items()[i].kind_name());
            if (i)
                put(dict && !key ? colon : comma);
            if (lines && (key || !dict))
                newline(level + 1);
            value(v.items()[i], level + 1);
        }
        if (lines)
            newline(level);
        put(dict ? "}" : "]");
    }
};

// What {{ v }} prints.
static tpl_value tpl_string(tpl_run &r, const tpl_value &v) {
    if (v.is_string())
        return v;
    tpl_text out;
    if (v.kind != TPL_UNDEFINED)
        tpl_writer{r, out, false}.value(v, 0);
    if (v.is_number() || v.kind == TPL_NONE)
        std::fill(out.marks.begin(), out.marks.end(), TPL_OURS);
    return r.text(std::move(out));
}

static tpl_value tpl_attribute(tpl_run &r, const tpl_value &v, const tpl_value &key) {
    r.need_defined(v);
    if (v.is_dict()) {
        if (const tpl_value *found = tpl_lookup(r, v, key))
            return *found;
    } else if (key.is_int() && (v.kind == TPL_LIST || v.is_string())) {
        const int64_t n = tpl_count(r, v), i = key.i < 0 ? key.i + n : key.i;
        const size_t at = v.is_string() && i < n ? tpl_offset(v.bytes(), i) : 0;
        if (i >= 0 && i < n)
            return v.is_string() ? r.text(v.text().sub(at, tpl_char_bytes(v.bytes(), at))) : v.items()[size_t(i)];
    } else if (v.kind == TPL_LOOP && key.is_string()) {
        const vector<tpl_value> &seq = v.items()[0].items();
        const int64_t n = int64_t(seq.size()), i = v.i;
        const std::pair<const char *, tpl_value> facts[] = {
            {"index", tpl_int(i + 1)},      {"index0", tpl_int(i)},       {"first", tpl_bool(i == 0)},
            {"last", tpl_bool(i == n - 1)}, {"revindex", tpl_int(n - i)}, {"revindex0", tpl_int(n - i - 1)},
            {"length", tpl_int(n)},
        };
        for (const auto &fact : facts)
            if (key.bytes() == fact.first)
                return fact.second;
        int64_t other = key.bytes() == "previtem" ? i - 1 : key.bytes() == "nextitem" ? i + 1 : n;
        if (other >= 0 && other < n)
            return seq[size_t(other)];
    }
    return r.missing(strf("'%s' has no attribute '%s'", v.kind_name(), show(tpl_string(r, key).bytes()).c_str()));
}

// "a.b" of a value, as selectattr and map name it.
static tpl_value tpl_path(tpl_run &r, tpl_value v, const tpl_value &path) {
    if (!path.is_string())
        return tpl_attribute(r, v, path);
    tpl_value parts = tpl_split(r, path.text(), r.text("."), -1);
    for (const tpl_value &part : parts.items())
        v = tpl_attribute(r, v, part);
    return v;
}

// path: an attribute of each item, or undefined.
static tpl_value tpl_join(tpl_run &r, const tpl_value &v, const tpl_value &glue, const tpl_value &path) {
    tpl_text out;
    tpl_value seq = tpl_sequence(r, v), between = tpl_string(r, glue);
    for (size_t i = 0; i < seq.items().size(); i++) {
        if (i)
            r.put(out, between.text());
        const tpl_value &item = seq.items()[i];
        r.put(out, tpl_string(r, path.kind == TPL_UNDEFINED ? item : tpl_path(r, item, path)).text());
    }
    return r.text(std::move(out));
}

static tpl_value tpl_slice(tpl_run &r, const tpl_value &v, const vector<tpl_value> &bounds) {
    r.need_defined(v);
    if (v.kind != TPL_LIST && !v.is_string())
        tpl_bad(r.line, "a %s cannot be sliced", v.kind_name());
    for (int k = 0; k < 3; k++)
        if (!bounds[k].is_int() && bounds[k].kind != TPL_NONE)
            tpl_bad(r.line, "a slice needs integers, not %s", bounds[k].kind_name());
    const int64_t n = tpl_count(r, v), step = std::clamp<int64_t>(bounds[2].int_or(1), -n - 1, n + 1);
    if (step == 0)
        tpl_bad(r.line, "the step of a slice is zero");
    auto bound = [&](const tpl_value &b, int64_t fallback) {
        int64_t i = std::clamp<int64_t>(b.int_or(fallback), -n - 1, n + 1);
        return b.kind == TPL_NONE ? i : std::clamp<int64_t>(i < 0 ? i + n : i, -(step < 0), n - (step < 0));
    };
    const int64_t from = bound(bounds[0], step < 0 ? n - 1 : 0), to = bound(bounds[1], step < 0 ? -1 : n);
    if (v.is_string() && step == 1) {
        size_t begin = tpl_offset(v.bytes(), from), end = tpl_offset(v.bytes(), std::max(from, to));
        return r.text(v.text().sub(begin, end - begin));
    }
    tpl_value seq = tpl_sequence(r, v);
    vector<tpl_value> items;
    for (int64_t i = from; step < 0 ? i > to : i < to; i += step)
        items.push_back(seq.items()[size_t(i)]);
    tpl_value list = r.list(std::move(items));
    return v.is_string() ? tpl_join(r, list, {}, {}) : list;
}

// + - * // % ** ~ of whole numbers, texts and lists. Chat templates have no fractions.
static tpl_value tpl_arithmetic(tpl_run &r, string_view op, const tpl_value &a, const tpl_value &b) {
    if (op == "~" || (op == "+" && a.is_string() && b.is_string())) {
        tpl_text out;
        r.put(out, tpl_string(r, a).text());
        r.put(out, tpl_string(r, b).text());
        return r.text(std::move(out));
    }
    r.need_defined(a), r.need_defined(b);
    if (op == "+" && a.kind == TPL_LIST && b.kind == TPL_LIST) {
        r.room((a.items().size() + b.items().size()) * sizeof a);
        vector<tpl_value> items = a.items();
        items.insert(items.end(), b.items().begin(), b.items().end());
        return r.list(std::move(items));
    }
    if (op == "*" && a.is_string() && b.is_int()) {
        tpl_text out;
        for (int64_t k = a.text().size() ? b.i : 0; k > 0; k--)
            r.put(out, a.text());
        return r.text(std::move(out));
    }
    if (!a.is_int() || !b.is_int() || op == "/")
        tpl_bad(r.line, "cannot apply '%.*s' to %s and %s", int(op.size()), op.data(), a.kind_name(), b.kind_name());
    if (b.i == 0 && (op == "//" || op == "%"))
        tpl_bad(r.line, "division by zero");
    int64_t out = 0;
    bool over = false;
    if (op == "+")
        over = __builtin_add_overflow(a.i, b.i, &out);
    else if (op == "-")
        over = __builtin_sub_overflow(a.i, b.i, &out);
    else if (op == "**") { // exact as far as a double counts
        const double power = std::pow(double(a.i), double(b.i));
        over = b.i < 0 || std::fabs(power) > 9e15;
        out = over ? 0 : int64_t(power);
    } else if (op == "*" || b.i == -1) { // a // -1 is a * -1, and a % -1 is 0
        over = op != "%" && __builtin_mul_overflow(a.i, b.i, &out);
    } else { // rounded down, and the remainder has the sign of b
        const bool down = a.i % b.i != 0 && (a.i < 0) != (b.i < 0);
        out = op == "//" ? a.i / b.i - down : a.i % b.i + (down ? b.i : 0);
    }
    if (over)
        tpl_bad(r.line, "overflow in '%.*s'", int(op.size()), op.data());
    return tpl_int(out);
}

// ---- what templates may call: filters, tests, methods, functions -----------------------------------------------

struct tpl_arg {
    string_view name; // empty: positional
    tpl_value v;
};
using tpl_args = vector<tpl_arg>;

enum { TPL_AS_FILTER = 1, TPL_AS_TEST = 2, TPL_OF_TEXT = 4, TPL_OF_DICT = 8, TPL_AS_FUNCTION = 16 };

struct tpl_builtin {
    const char *names; // with spaces between; null ends the table
    int roles;
    // Words: the type (a any, s string, i integer; a capital: required) and the name. "*": the function reads `all`.
    const char *params;
    tpl_value (*fn)(tpl_run &r, const tpl_value *a, const tpl_args &all); // a[0]: what it is applied to; then params
};

// Null when there is no such method; an unknown filter or test is an error.
static const tpl_builtin *tpl_find_builtin(int line, const tpl_builtin *table, int role, string_view name) {
    for (; table->names; table++)
        if ((table->roles & role) && tpl_has_word(table->names, name))
            return table;
    if (role == TPL_AS_TEST || role == TPL_AS_FILTER)
        tpl_bad(line, "no %s named '%s'", role == TPL_AS_TEST ? "test" : "filter", show(name).c_str());
    return nullptr;
}

static tpl_value tpl_call(tpl_run &r, const tpl_builtin &b, const tpl_value &self, const tpl_args &all) {
    tpl_value a[4];
    string_view names = b.names, params = b.params;
    const string callee(tpl_take_word(names));
    vector<bool> used(all.size(), params == "*");
    a[0] = self;
    for (size_t n = 1; !params.empty() && params != "*"; n++) {
        const string_view param = tpl_take_word(params);
        const string name(param.substr(1));
        const bool required = param[0] < 'a';
        bool given = false;
        for (size_t i = 0; i < all.size(); i++)
            if (all[i].name.empty() ? i + 1 == n : all[i].name == name)
                a[n] = all[i].v, used[i] = given = true;
        if (required && !given)
            tpl_bad(r.line, "%s: argument '%s' is missing", callee.c_str(), name.c_str());
        const char type = param[0] | 32;
        bool fits = type == 'a' || (type == 's' ? a[n].is_string() : a[n].is_int());
        if (!fits && (required || (given && a[n].kind != TPL_NONE)))
            tpl_bad(r.line, "%s: '%s' must be %s, not %s", callee.c_str(), name.c_str(),
                    type == 's' ? "a string" : "an integer", a[n].kind_name());
    }
    for (size_t i = 0; i < all.size(); i++)
        if (!used[i])
            tpl_bad(r.line, "%s: unexpected argument%s%s", callee.c_str(), all[i].name.empty() ? "" : " ",
                    show(all[i].name).c_str());
    return b.fn(r, a, all);
}

// map, select, reject, selectattr, rejectattr (`name`): what a filter makes of the items or of their attribute, or the
// items that pass or fail a test; without filter or test the item or attribute itself counts.
static tpl_value tpl_each(tpl_run &r, const tpl_builtin *table, string_view name, const tpl_value &v,
                          const tpl_args &all) {
    const bool map = name == "map", wanted = name[0] == 's', by_attribute = name.size() == strlen("selectattr");
    tpl_value path, other;
    tpl_args rest;
    for (const tpl_arg &arg : all)
        if (map && (arg.name == "attribute" || arg.name == "default"))
            (arg.name == "default" ? other : path) = arg.v;
        else if (by_attribute && path.kind == TPL_UNDEFINED)
            path = arg.v;
        else
            rest.push_back(arg);
    const bool takes_path = path.kind != TPL_UNDEFINED;
    if ((map && takes_path != rest.empty()) || (by_attribute && !takes_path))
        tpl_bad(r.line, "%s: a filter or an attribute must be named", string(name).c_str());
    const tpl_builtin *b = nullptr;
    if (!rest.empty()) {
        b = tpl_find_builtin(r.line, table, map ? TPL_AS_FILTER : TPL_AS_TEST, tpl_string(r, rest[0].v).bytes());
        rest.erase(rest.begin());
    }
    const tpl_value seq = tpl_sequence(r, v);
    vector<tpl_value> out;
    for (const tpl_value &item : seq.items()) {
        r.work(1);
        tpl_value result = takes_path ? tpl_path(r, item, path) : item;
        if (b)
            result = tpl_call(r, *b, result, rest);
        if (map)
            out.push_back(result.kind == TPL_UNDEFINED ? other : result);
        else if (tpl_truth(result) == wanted)
            out.push_back(item);
    }
    return r.list(std::move(out));
}

// Without regard to case unless asked. path: an attribute of each item, or undefined.
static tpl_value tpl_sort(tpl_run &r, const tpl_value &v, const tpl_value &path, bool reverse, bool case_sensitive) {
    const tpl_value seq = tpl_sequence(r, v);
    vector<std::pair<tpl_value, tpl_value>> rows; // key, item
    r.room(seq.items().size() * sizeof rows[0]);
    for (const tpl_value &item : seq.items()) {
        tpl_value key = path.kind == TPL_UNDEFINED ? item : tpl_path(r, item, path);
        rows.emplace_back(key.is_string() && !case_sensitive ? tpl_recase(r, key, TPL_LOWER) : key, item);
    }
    std::stable_sort(rows.begin(), rows.end(), [&](auto &a, auto &b) {
        return reverse ? tpl_compare(r, b.first, a.first) < 0 : tpl_compare(r, a.first, b.first) < 0;
    });
    vector<tpl_value> out;
    for (auto &row : rows)
        out.push_back(row.second);
    return r.list(std::move(out));
}

// items, keys and values of a dict; what: 0 pairs, 1 keys, 2 values.
static tpl_value tpl_dict_view(tpl_run &r, const tpl_value &v, size_t what) {
    vector<tpl_value> out;
    if (v.kind != TPL_DICT && v.kind != TPL_UNDEFINED)
        tpl_bad(r.line, "'items' needs a dict, not %s", v.kind_name());
    for (size_t i = 0; v.kind == TPL_DICT && i < v.items().size(); i += 2)
        out.push_back(what == 0 ? r.list({v.items()[i], v.items()[i + 1]}) : v.items()[i + what - 1]);
    return r.list(std::move(out));
}

// int() of Python: undefined when v neither is nor spells a whole number.
static tpl_value tpl_number(const tpl_value &v) {
    if (v.kind == TPL_FLOAT)
        return std::fabs(v.number()) < 9e18 ? tpl_int(int64_t(v.number())) : tpl_value();
    if (!v.is_string())
        return v.is_int() ? tpl_int(v.i) : tpl_value();
    const char *end = v.bytes().data() + v.text().size();
    int64_t i = 0;
    const auto read = std::from_chars(v.bytes().data(), end, i);
    return read.ec == std::errc() && read.ptr == end ? tpl_int(i) : tpl_value();
}

static tpl_value tpl_tojson(tpl_run &r, const tpl_value *a) {
    if (tpl_truth(a[1]))
        tpl_bad(r.line, "tojson: ensure_ascii is not supported");
    tpl_text out;
    tpl_writer w{r, out, true};
    w.indent = std::clamp<int64_t>(a[2].int_or(-1), -1, 64);
    w.comma = w.indent < 0 ? ", " : ",";
    if (a[3].kind != TPL_UNDEFINED && a[3].kind != TPL_NONE) {
        if (a[3].kind != TPL_LIST || a[3].items().size() != 2)
            tpl_bad(r.line, "tojson: separators must be two strings");
        w.comma = tpl_string(r, a[3].items()[0]).bytes(), w.colon = tpl_string(r, a[3].items()[1]).bytes();
    }
    w.value(a[0], 0);
    return r.text(std::move(out));
}

static tpl_value tpl_affix(tpl_run &r, const string &s, const string &affix, bool at_end) {
    r.work(affix.size() / 64);
    return tpl_bool(affix.size() <= s.size() &&
                    s.compare(at_end ? s.size() - affix.size() : 0, affix.size(), affix) == 0);
}

// The local time in the words of the C locale, whatever locale the host program has set.
static tpl_value tpl_strftime(tpl_run &r, const string &format) {
    for (size_t i = 0; (i = format.find('%', i)) != string::npos; i += 2) {
        i += format.compare(i + 1, 1, "-") == 0;
        if (i + 1 == format.size() || !format[i + 1] ||
            !strchr("aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZ%", format[i + 1]))
            tpl_bad(r.line, "strftime_now: unknown conversion in '%s'", show(format).c_str());
    }
    tm t;
    char buf[512];
    const plain_locale c;
    const size_t n = localtime_r(&r.now, &t) ? strftime(buf, sizeof buf, format.c_str(), &t) : 0;
    if (!n && !format.empty())
        tpl_bad(r.line, "strftime_now: '%s' gives no text or more than %zu bytes", show(format).c_str(), sizeof buf);
    return r.text(string_view(buf, n));
}

static tpl_value tpl_range(tpl_run &r, int64_t from, int64_t to, int64_t step) {
    if (step == 0)
        tpl_bad(r.line, "range: the step is zero");
    vector<tpl_value> out;
    for (bool over = false; !over && (step > 0 ? from < to : from > to);
         over = __builtin_add_overflow(from, step, &from)) {
        if (out.size() == TPL_MAX_RANGE)
            tpl_bad(r.line, "range of more than %zu items", TPL_MAX_RANGE);
        out.push_back(tpl_int(from));
    }
    return r.list(std::move(out));
}

// dict(), namespace()
static tpl_value tpl_make_dict(tpl_run &r, tpl_kind kind, const tpl_args &named) {
    vector<tpl_value> items;
    for (const tpl_arg &arg : named) {
        if (arg.name.empty())
            tpl_bad(r.line, "%s() takes named arguments only", tpl_kind_names[kind]);
        tpl_dict_set(r, items, r.text(arg.name), arg.v);
    }
    return r.make(kind, {}, std::move(items));
}

// clang-format off
#define TPL_ROW(ROLES, NAMES, PARAMS, RESULT)                                                                          \
    {NAMES, ROLES, PARAMS, []([[maybe_unused]] tpl_run &r, [[maybe_unused]] const tpl_value *a,                        \
                              [[maybe_unused]] const tpl_args &all) -> tpl_value { return RESULT; }},
#define TPL_TEST(NAMES, PARAMS, CONDITION) TPL_ROW(TPL_AS_TEST, NAMES, PARAMS, tpl_bool(CONDITION))
static const tpl_builtin tpl_builtins[] = {
    TPL_TEST("defined", "", a->kind != TPL_UNDEFINED)
    TPL_TEST("undefined", "", a->kind == TPL_UNDEFINED)
    TPL_TEST("none", "", a->kind == TPL_NONE)
    TPL_TEST("string", "", a->is_string())
    TPL_TEST("mapping", "", a->kind == TPL_DICT)
    TPL_TEST("sequence iterable", "", a->is_sequence())
    TPL_TEST("number", "", a->is_number())
    TPL_TEST("integer", "", a->kind == TPL_INT)
    TPL_TEST("float", "", a->kind == TPL_FLOAT)
    TPL_TEST("boolean", "", a->kind == TPL_BOOL)
    TPL_TEST("true", "", a->kind == TPL_BOOL && a->i)
    TPL_TEST("false", "", a->kind == TPL_BOOL && !a->i)
    TPL_TEST("callable", "", a->kind >= TPL_MACRO)
    TPL_TEST("odd", "", tpl_truth(tpl_arithmetic(r, "%", *a, tpl_int(2))))
    TPL_TEST("even", "", !tpl_truth(tpl_arithmetic(r, "%", *a, tpl_int(2))))
    TPL_TEST("divisibleby", "Anum", !tpl_truth(tpl_arithmetic(r, "%", *a, a[1])))
    TPL_TEST("in", "Aseq", tpl_contains(r, a[1], *a))
    TPL_TEST("eq equalto == sameas", "Aother", tpl_equal(r, *a, a[1]))
    TPL_TEST("ne !=", "Aother", !tpl_equal(r, *a, a[1]))
    TPL_TEST("lt lessthan <", "Aother", tpl_compare(r, *a, a[1]) < 0)
    TPL_TEST("le <=", "Aother", tpl_compare(r, *a, a[1]) <= 0)
    TPL_TEST("gt greaterthan >", "Aother", tpl_compare(r, *a, a[1]) > 0)
    TPL_TEST("ge >=", "Aother", tpl_compare(r, *a, a[1]) >= 0)

    TPL_ROW(TPL_AS_FILTER, "trim", "schars", tpl_strip(r, tpl_string(r, *a), a[1], true, true))
    TPL_ROW(TPL_AS_FILTER, "tojson", "aensure_ascii iindent aseparators", tpl_tojson(r, a))
    TPL_ROW(TPL_AS_FILTER, "length count", "", tpl_int(tpl_count(r, *a)))
    TPL_ROW(TPL_AS_FILTER, "join", "ad aattribute", tpl_join(r, *a, a[1], a[2]))
    TPL_ROW(TPL_AS_FILTER, "default d", "adefault_value aboolean",
        a->kind == TPL_UNDEFINED || (tpl_truth(a[2]) && !tpl_truth(*a)) ? a[1].kind ? a[1] : r.text("") : *a)
    TPL_ROW(TPL_AS_FILTER, "list", "", tpl_sequence(r, *a))
    TPL_ROW(TPL_AS_FILTER, "string safe", "", tpl_string(r, *a))
    TPL_ROW(TPL_AS_FILTER, "int", "adefault", tpl_number(*a).kind ? tpl_number(*a) : a[1].kind ? a[1] : tpl_int(0))
    TPL_ROW(TPL_AS_FILTER, "first", "", tpl_attribute(r, tpl_sequence(r, *a), tpl_int(0)))
    TPL_ROW(TPL_AS_FILTER, "last", "", tpl_attribute(r, tpl_sequence(r, *a), tpl_int(-1)))
    TPL_ROW(TPL_AS_FILTER, "select", "*", tpl_each(r, tpl_builtins, "select", *a, all))
    TPL_ROW(TPL_AS_FILTER, "reject", "*", tpl_each(r, tpl_builtins, "reject", *a, all))
    TPL_ROW(TPL_AS_FILTER, "selectattr", "*", tpl_each(r, tpl_builtins, "selectattr", *a, all))
    TPL_ROW(TPL_AS_FILTER, "rejectattr", "*", tpl_each(r, tpl_builtins, "rejectattr", *a, all))
    TPL_ROW(TPL_AS_FILTER, "map", "*", tpl_each(r, tpl_builtins, "map", *a, all))
    TPL_ROW(TPL_AS_FILTER, "sort", "areverse acase_sensitive aattribute",
        tpl_sort(r, *a, a[3], tpl_truth(a[1]), tpl_truth(a[2])))
    TPL_ROW(TPL_AS_FILTER, "dictsort", "", tpl_sort(r, tpl_dict_view(r, *a, 0), tpl_int(0), false, false))
    TPL_ROW(TPL_AS_FILTER, "reverse", "",
        tpl_slice(r, a->is_string() ? *a : tpl_sequence(r, *a), {tpl_none(), tpl_none(), tpl_int(-1)}))
    TPL_ROW(TPL_AS_FILTER, "abs", "", tpl_arithmetic(r, a->int_or(0) < 0 ? "-" : "+", tpl_int(0), *a))

    TPL_ROW(TPL_AS_FILTER | TPL_OF_TEXT, "upper", "", tpl_recase(r, tpl_string(r, *a), TPL_UPPER))
    TPL_ROW(TPL_AS_FILTER | TPL_OF_TEXT, "lower", "", tpl_recase(r, tpl_string(r, *a), TPL_LOWER))
    TPL_ROW(TPL_AS_FILTER | TPL_OF_TEXT, "capitalize", "", tpl_recase(r, tpl_string(r, *a), TPL_CAPITAL))
    TPL_ROW(TPL_AS_FILTER | TPL_OF_TEXT, "title", "", tpl_recase(r, tpl_string(r, *a), TPL_TITLE))
    TPL_ROW(TPL_AS_FILTER | TPL_OF_TEXT, "replace", "Aold Anew icount",
        tpl_replace(r, tpl_string(r, *a), tpl_string(r, a[1]), tpl_string(r, a[2]), a[3].int_or(-1)))
    TPL_ROW(TPL_OF_TEXT, "strip", "schars", tpl_strip(r, *a, a[1], true, true))
    TPL_ROW(TPL_OF_TEXT, "lstrip", "schars", tpl_strip(r, *a, a[1], true, false))
    TPL_ROW(TPL_OF_TEXT, "rstrip", "schars", tpl_strip(r, *a, a[1], false, true))
    TPL_ROW(TPL_OF_TEXT, "split", "ssep imaxsplit", tpl_split(r, a->text(), a[1], a[2].int_or(-1)))
    TPL_ROW(TPL_OF_TEXT, "startswith", "Sprefix", tpl_affix(r, a->bytes(), a[1].bytes(), false))
    TPL_ROW(TPL_OF_TEXT, "endswith", "Ssuffix", tpl_affix(r, a->bytes(), a[1].bytes(), true))
    TPL_ROW(TPL_OF_TEXT, "join", "Aiterable", tpl_join(r, a[1], *a, {}))

    TPL_ROW(TPL_AS_FILTER | TPL_OF_DICT, "items", "", tpl_dict_view(r, *a, 0))
    TPL_ROW(TPL_OF_DICT, "keys", "", tpl_dict_view(r, *a, 1))
    TPL_ROW(TPL_OF_DICT, "values", "", tpl_dict_view(r, *a, 2))
    TPL_ROW(TPL_OF_DICT, "get", "Akey adefault",
        tpl_lookup(r, *a, a[1]) ? *tpl_lookup(r, *a, a[1]) : a[2].kind ? a[2] : tpl_none())

    TPL_ROW(TPL_AS_FUNCTION, "raise_exception", "Amessage",
        (r.refused = true, tpl_bad(r.line, "%s", tpl_string(r, a[1]).bytes().c_str()), *a))
    TPL_ROW(TPL_AS_FUNCTION, "strftime_now", "Sformat", tpl_strftime(r, a[1].bytes()))
    TPL_ROW(TPL_AS_FUNCTION, "namespace", "*", tpl_make_dict(r, TPL_NAMESPACE, all))
    TPL_ROW(TPL_AS_FUNCTION, "dict", "*", tpl_make_dict(r, TPL_DICT, all))
    TPL_ROW(TPL_AS_FUNCTION, "range", "Istart istop istep",
        a[2].is_int() ? tpl_range(r, a[1].i, a[2].i, a[3].int_or(1)) : tpl_range(r, 0, a[1].i, 1))
    {nullptr, 0, nullptr, nullptr},
};
// clang-format on
#undef TPL_TEST
#undef TPL_ROW

// ---- source to tokens -------------------------------------------------------------------------------------------

enum tpl_token_kind { TPL_DATA, TPL_QUOTED, TPL_DIGITS, TPL_WORD, TPL_OP, TPL_END };

struct tpl_token {
    tpl_token_kind kind;
    int line;
    string_view text;
    tpl_value value; // quoted, digits
};

// A text that belongs to the template and not to a run.
static tpl_value tpl_constant_text(string s) {
    tpl_value v{TPL_STRING, 0, std::make_shared<tpl_value::heap>()};
    v.h->text = tpl_text(std::move(s));
    return v;
}

struct tpl_lexer {
    string_view src;
    vector<tpl_token> out;
    size_t at = 0, counted = 0;
    int line = 1;

    int line_here() {
        line += int(std::count(src.begin() + counted, src.begin() + at, '\n'));
        counted = at;
        return line;
    }
    bool sees(string_view s) const { return src.compare(at, s.size(), s) == 0; }
    static bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
    static bool is_digit(char c) { return c >= '0' && c <= '9'; }
    static bool is_word(char c) { return c == '_' || is_digit(c) || ((c | 32) >= 'a' && (c | 32) <= 'z'); }
    void add(tpl_token_kind kind, size_t n, tpl_value value = {}) {
        out.push_back({kind, line_here(), src.substr(at, n), std::move(value)});
        at += n;
    }
    // An unknown escape stays as it is, as in Python.
    tpl_value unescape(string_view s) {
        static const char from[] = "ntr\\'\"", to[] = "\n\t\r\\'\"", unsupported[] = "01234567abfvxuUN\n";
        string text;
        for (size_t i = 0; i < s.size(); i++) {
            const void *known = s[i] == '\\' ? memchr(from, s[i + 1], 6) : nullptr;
            if (s[i] == '\\' && memchr(unsupported, s[i + 1], 17))
                tpl_bad(line_here(), "the escape '\\%s' is not supported", show(s.substr(i + 1, 1)).c_str());
            text += known ? to[static_cast<const char *>(known) - from] : s[i];
            i += known != nullptr;
        }
        return tpl_constant_text(text);
    }
    // Behind a closing delimiter: the white space that goes with it. `control`: - or + before the delimiter.
    void closed(bool tag, char control) {
        if (control == '-')
            while (at < src.size() && is_space(src[at]))
                at++;
        else if (tag && control != '+' && sees("\n"))
            at++;
    }
    // The tokens up to the closing delimiter. Inside brackets a delimiter is none: {{ {'a': {}} }}.
    void expression(string_view end) {
        for (int nesting = 0;;) {
            while (at < src.size() && is_space(src[at]))
                at++;
            if (at == src.size())
                tpl_bad(line_here(), "the template ends inside a tag");
            const char c = src[at];
            const bool control = (c == '-' || (c == '+' && end == "%}")) && src.compare(at + 1, 2, end) == 0;
            if (nesting == 0 && (control || sees(end))) {
                at += control;
                add(TPL_OP, 2);
                return closed(end == "%}", control ? c : 0);
            }
            size_t n = 1;
            if (c == '"' || c == '\'') {
                while (at + n < src.size() && src[at + n] != c)
                    n += src[at + n] == '\\' ? 2 : 1;
                if (at + n >= src.size())
                    tpl_bad(line_here(), "a string is not closed");
                add(TPL_QUOTED, n + 1, unescape(src.substr(at + 1, n - 1)));
            } else if (is_word(c)) {
                while (at + n < src.size() && (is_word(src[at + n]) || (is_digit(c) && src[at + n] == '.')))
                    n++;
                tpl_value number;
                if (is_digit(c)) {
                    number = tpl_number(tpl_constant_text(string(src.substr(at, n))));
                    if (number.kind == TPL_UNDEFINED)
                        tpl_bad(line_here(), "bad number %s", show(src.substr(at, n)).c_str());
                }
                add(is_digit(c) ? TPL_DIGITS : TPL_WORD, n, number);
            } else {
                for (const char *two : {"//", "**", "==", "!=", "<=", ">="})
                    n = sees(two) ? 2 : n;
                if (n == 1 && !strchr("+-*/%~<>=()[]{}.,:|", c))
                    tpl_bad(line_here(), "unexpected character '%s'", show(src.substr(at, 1)).c_str());
                nesting += c == '(' || c == '[' || c == '{' ? 1 : c == ')' || c == ']' || c == '}' ? -1 : 0;
                if (nesting < 0)
                    tpl_bad(line_here(), "a bracket closes that was not opened");
                add(TPL_OP, n);
            }
        }
    }
    void run() {
        while (at < src.size()) {
            size_t open = at;
            while ((open = src.find('{', open)) != string::npos && src.find_first_of("{%#", open + 1) != open + 1)
                open++;
            size_t to = open = std::min(open, src.size());
            const char kind = open < src.size() ? src[open + 1] : 0, sign = open + 2 < src.size() ? src[open + 2] : 0;
            const bool minus = sign == '-', plus = sign == '+' && kind != '{';
            while (kind && minus && to > at && is_space(src[to - 1]))
                to--;
            if (!minus && !plus && (kind == '%' || kind == '#')) { // lstrip_blocks: the line's indentation goes
                size_t start = to;
                while (start > at && (src[start - 1] == ' ' || src[start - 1] == '\t'))
                    start--;
                if (start == 0 || src[start - 1] == '\n')
                    to = start;
            }
            if (to > at)
                add(TPL_DATA, to - at);
            if (!kind)
                break;
            at = open;
            if (kind == '#') {
                size_t end = src.find("#}", open + 2);
                if (end == string::npos)
                    tpl_bad(line_here(), "a comment is not closed");
                at = end + 2;
                closed(true, end > open + 2 ? src[end - 1] : 0);
                continue;
            }
            add(TPL_OP, 2);
            at += minus || plus;
            expression(kind == '{' ? "}}" : "%}");
        }
        at = src.size();
        out.push_back({TPL_END, line_here(), "end of the template", {}});
    }
};

// What the template's text is to the lexer: CR LF and CR are newlines, and the last one does not count.
static string tpl_source(string_view s) {
    if (s.size() > TPL_MAX_SOURCE)
        tpl_bad(1, "the template has %zu bytes, more than %zu", s.size(), TPL_MAX_SOURCE);
    string out;
    for (size_t i = 0; i < s.size(); i++)
        if (s[i] != '\r')
            out += s[i];
        else if (i + 1 == s.size() || s[i + 1] != '\n')
            out += '\n';
    if (!out.empty() && out.back() == '\n')
        out.pop_back();
    return out;
}

// ---- tokens at work ---------------------------------------------------------------------------------------------

// Computes while it reads: there is no tree. What must not be computed now (the branch not taken, the right side of an
// `and` that is decided, what follows a `break`) is read all the same with live() false, which also finds its errors
// of syntax; a loop or a macro goes back to the token where its body begins.
struct tpl_interpreter {
    struct variable {
        string_view name;
        tpl_value v;
    };
    const vector<tpl_token> &tokens;
    tpl_run r;
    size_t at = 0;
    bool on = true;             // false: in a branch that is not taken
    string_view leaving, ended; // "break" or "continue" up to the end of the body; the tag that ended the last block
    // Of a token, once known: where the block that begins here ends; where the `if` of the expression that begins here
    // is, or 1 when it has none.
    vector<size_t> memo;
    vector<size_t> macros; // where their parameters are
    // The variables of the template, then those of the loops and macros that run.
    vector<variable> variables;
    struct {
        size_t begin = 0, frame = 0,
               globals = 0; // `set` looks from `begin` on; a macro from `frame` on, then the globals
    } scope;
    tpl_text *out = nullptr;

    explicit tpl_interpreter(const vector<tpl_token> &t) : tokens(t), memo(t.size()) {}

    // The body of a loop, or of a macro, which has a frame of its own. Gives what leave() takes.
    auto enter(bool new_frame) {
        const auto saved = scope;
        scope.begin = variables.size();
        scope.globals = saved.begin ? saved.globals : scope.begin;
        scope.frame = new_frame ? scope.begin : saved.frame;
        return saved;
    }
    template <class S> void leave(const S &saved) {
        variables.resize(scope.begin);
        scope = saved;
    }
    variable *find(string_view name) {
        r.work(variables.size() / 16);
        for (size_t i = variables.size(); i-- > scope.frame;)
            if (variables[i].name == name)
                return &variables[i];
        for (size_t i = 0; i < std::min(scope.frame, scope.globals); i++)
            if (variables[i].name == name)
                return &variables[i];
        return nullptr;
    }
    void set(string_view name, tpl_value v) {
        r.work((variables.size() - scope.begin) / 16);
        for (size_t i = scope.begin; i < variables.size(); i++)
            if (variables[i].name == name) {
                variables[i].v = std::move(v);
                return;
            }
        variables.push_back({name, std::move(v)});
    }
    void assign(const vector<string_view> &names, const tpl_value &v) {
        if (names.size() == 1)
            return set(names[0], v);
        const tpl_value seq = tpl_sequence(r, v);
        if (seq.items().size() != names.size())
            tpl_bad(r.line, "cannot unpack %zu items into %zu names", seq.items().size(), names.size());
        for (size_t i = 0; i < names.size(); i++)
            set(names[i], seq.items()[i]);
    }
    void emit(const tpl_text &t) {
        r.put(*out, t);
        r.live += 2 * t.size(); // given back by capture()
    }
    // The text that a block prints, as a value.
    tpl_value capture(const tpl_token &tag, const char *end) {
        tpl_text text, *outer = out;
        out = &text;
        block(tag, end);
        out = outer;
        r.live -= 2 * text.size();
        return r.text(std::move(text));
    }

    bool live() const { return on && leaving.empty(); }
    const tpl_token &now() const { return tokens[at]; }
    const tpl_token &next() { return r.line = now().line, tokens[at++]; }
    bool is(string_view text) const { return (now().kind == TPL_WORD || now().kind == TPL_OP) && now().text == text; }
    bool take(string_view text) { return is(text) && (next(), true); }
    [[noreturn]] void unexpected(const char *expected) const {
        tpl_bad(now().line, "expected %s, found '%s'", expected,
                show(now().kind == TPL_QUOTED ? "a string" : now().text).c_str());
    }
    void need(const char *text) {
        if (!take(text))
            unexpected(strf("'%s'", text).c_str());
    }
    string_view name() {
        if (now().kind != TPL_WORD)
            unexpected("a name");
        return next().text;
    }
    // item() for each of the things between commas up to `end`; tells whether there was a comma.
    template <class F> bool commas(const char *end, F &&item) {
        bool comma = false;
        while (!take(end)) {
            item();
            if (take(","))
                comma = true;
            else if (!is(end))
                unexpected(strf("',' or '%s'", end).c_str());
        }
        return comma;
    }
    // What f() gives when `wanted`; else it only reads.
    template <class F> auto only(bool wanted, F &&f) {
        struct restore {
            bool &on;
            const bool saved;
            ~restore() { on = saved; }
        } back{on, on};
        on = on && wanted;
        return f();
    }

    tpl_value primary() {
        const tpl_token &t = now();
        if (t.kind == TPL_QUOTED || t.kind == TPL_DIGITS) {
            tpl_value v = next().value;
            for (; t.kind == TPL_QUOTED && now().kind == TPL_QUOTED; next())
                v = tpl_arithmetic(r, "~", v, now().value);
            return v;
        }
        if (t.kind == TPL_WORD) {
            next();
            if (tpl_has_word("true True false False", t.text))
                return tpl_bool((t.text[0] | 32) == 't');
            if (!live() || tpl_has_word("none None", t.text))
                return tpl_none();
            const variable *v = find(t.text);
            return v ? v->v : r.missing(strf("'%s' is undefined", show(t.text).c_str()));
        }
        vector<tpl_value> items;
        if (take("(") || take("[")) { // a tuple is a list here
            const bool comma = commas(t.text == "(" ? ")" : "]", [&] { items.push_back(expression()); });
            return t.text == "(" && items.size() == 1 && !comma ? items[0] : r.list(std::move(items));
        }
        need("{");
        commas("}", [&] {
            const tpl_value key = expression();
            need(":");
            tpl_dict_set(r, items, key, expression());
        });
        return r.make(TPL_DICT, {}, std::move(items));
    }
    // Behind "(".
    tpl_args arguments() {
        tpl_args args;
        commas(")", [&] {
            const bool named = now().kind == TPL_WORD && tokens[at + 1].kind == TPL_OP && tokens[at + 1].text == "=";
            const string_view n = named ? name() : "";
            at += named;
            args.push_back({n, expression()});
        });
        return args;
    }
    tpl_value call(const tpl_value &f, const tpl_args &args) {
        r.need_defined(f);
        if (f.kind == TPL_MACRO)
            return call_macro(macros[size_t(f.i)], args);
        if (f.kind != TPL_FUNCTION)
            tpl_bad(r.line, "a %s cannot be called", f.kind_name());
        return tpl_call(r, tpl_builtins[f.i], {}, args);
    }
    tpl_value call_method(const tpl_value &v, const tpl_value &name, const tpl_args &args) {
        const int role = v.is_string() ? TPL_OF_TEXT : v.kind == TPL_DICT ? TPL_OF_DICT : 0;
        if (const tpl_builtin *method = tpl_find_builtin(r.line, tpl_builtins, role, name.bytes()))
            return tpl_call(r, *method, v, args);
        const tpl_value f = tpl_attribute(r, v, name);
        if (f.kind == TPL_UNDEFINED)
            tpl_bad(r.line, "%s has no method '%s'", v.kind_name(), show(name.bytes()).c_str());
        return call(f, args);
    }
    tpl_value postfix(tpl_value v) {
        for (;;)
            if (take(".")) {
                const tpl_value key = now().kind == TPL_DIGITS ? next().value : r.text(name());
                if (key.is_string() && take("(")) {
                    const tpl_args args = arguments();
                    v = live() ? call_method(v, key, args) : tpl_none();
                } else
                    v = live() ? tpl_attribute(r, v, key) : tpl_none();
            } else if (take("(")) {
                const tpl_args args = arguments();
                v = live() ? call(v, args) : tpl_none();
            } else if (take("[")) {
                vector<tpl_value> bounds = {tpl_none(), tpl_none(), tpl_none()};
                size_t k = 0;
                for (;; k++) {
                    if (!is(":") && !(k && is("]")))
                        bounds[k] = expression();
                    if (k == 2 || !take(":"))
                        break;
                }
                need("]");
                v = !live() ? tpl_none() : k ? tpl_slice(r, v, bounds) : tpl_attribute(r, v, bounds[0]);
            } else
                return v;
    }
    // Behind "|" or "is".
    tpl_value builtin(const tpl_value &v, bool is_test) {
        const bool negated = is_test && take("not");
        const int line = now().line;
        const tpl_builtin *b = tpl_find_builtin(line, tpl_builtins, is_test ? TPL_AS_TEST : TPL_AS_FILTER, name());
        const bool word = now().kind == TPL_WORD && !tpl_has_word("else or and if is in not", now().text);
        tpl_args args;
        if (take("("))
            args = arguments();
        else if (is_test && (word || now().kind == TPL_QUOTED || now().kind == TPL_DIGITS || is("[") || is("{")))
            args.push_back({"", postfix(primary())});
        if (!live())
            return {};
        r.line = line;
        const tpl_value result = tpl_call(r, *b, v, args);
        return negated ? tpl_bool(!tpl_truth(result)) : result;
    }
    tpl_value unary() {
        int minus = 0;
        while (take("-"))
            minus++;
        tpl_value v = postfix(primary());
        for (; minus && live(); minus--)
            v = tpl_arithmetic(r, "-", tpl_int(0), v);
        for (bool is_test; (is_test = take("is")) || take("|");)
            v = builtin(v, is_test);
        return v;
    }
    // 1 or, 2 and, 4 comparison, 5 + -, 6 ~, 7 * / // %, 8 **; 3 is `not`; 0: no operator.
    int precedence() const {
        static const char *const levels[] = {"or", "and", "", "== != < <= > >= in", "+ -", "~", "* / // %", "**"};
        if (is("not") && tokens[at + 1].kind == TPL_WORD && tokens[at + 1].text == "in")
            return 4;
        for (int i = 0; i < 8 && (now().kind == TPL_WORD || now().kind == TPL_OP); i++)
            if (tpl_has_word(levels[i], now().text))
                return i + 1;
        return 0;
    }
    tpl_value operate(string_view op, const tpl_value &a, const tpl_value &b) {
        if (op == "in" || op == "not")
            return tpl_bool(tpl_contains(r, b, a) == (op == "in"));
        if (op == "==" || op == "!=")
            return tpl_bool(tpl_equal(r, a, b) == (op == "=="));
        if (op[0] != '<' && op[0] != '>')
            return tpl_arithmetic(r, op, a, b);
        const int c = tpl_compare(r, a, b);
        return tpl_bool(op == "<" ? c < 0 : op == "<=" ? c <= 0 : op == ">" ? c > 0 : c >= 0);
    }
    tpl_value binary(int least) {
        tpl_level l(r, now().line);
        tpl_value a = take("not") ? tpl_bool(!tpl_truth(binary(3))) : unary();
        bool compared = false;
        for (int p; (p = precedence()) >= least; compared = p == 4) {
            const string_view op = next().text; // "not" is "not in"
            at += op == "not";
            if (p == 4 && compared)
                tpl_bad(r.line, "a chain of comparisons is not supported");
            const bool wanted = p > 2 || tpl_truth(a) == (p == 2);
            const tpl_value b = only(wanted, [&] { return binary(p + 1); });
            if (wanted && live())
                a = p > 2 ? operate(op, a, b) : b;
        }
        return a;
    }
    tpl_value expression() {
        tpl_level l(r, now().line);
        const size_t from = at;
        const bool known = memo[from];
        if (!known) { // `a if b else c`: is there an `if`?
            only(false, [&] { return binary(1); });
            memo[from] = is("if") ? at : 1;
        }
        if (memo[from] == 1 && !known && !live())
            return {};
        if (memo[from] == 1)
            return at = from, binary(1);
        at = memo[from] + 1;
        const bool yes = tpl_truth(binary(1)) && live();
        const size_t behind = at;
        tpl_value v;
        if (yes)
            at = from, v = binary(1), at = behind;
        if (take("else")) {
            const tpl_value other = only(!yes, [&] { return expression(); });
            return yes ? v : other;
        }
        return yes ? v : r.missing("an inline 'if' without 'else' gave no value");
    }

    vector<string_view> targets() {
        vector<string_view> names = {name()};
        while (take(","))
            names.push_back(name());
        return names;
    }
    void run_if(const tpl_token &tag) {
        bool done = false;
        do {
            const bool yes = tpl_truth(only(!done, [&] { return expression(); })) && !done;
            only(yes, [&] { block(tag, "elif else endif"); });
            done |= yes;
        } while (ended == "elif");
        if (ended == "else")
            only(!done, [&] { block(tag, "endif"); });
    }
    void run_for(const tpl_token &tag) {
        const vector<string_view> names = targets();
        need("in");
        tpl_value seq = binary(1);
        const size_t condition = take("if") ? at : 0;
        if (condition)
            only(false, [&] { return expression(); });
        seq = live() ? tpl_sequence(r, seq) : r.list({});
        const size_t body = at;
        const auto saved = enter(false);
        vector<tpl_value> kept;
        for (size_t i = 0; condition && i < seq.items().size(); i++) {
            variables.resize(scope.begin);
            assign(names, seq.items()[i]);
            at = condition;
            if (tpl_truth(expression()))
                kept.push_back(seq.items()[i]);
        }
        if (condition)
            seq = r.list(std::move(kept));
        tpl_value loop = r.make(TPL_LOOP, {}, {seq});
        bool stop = false;
        for (size_t i = 0; i < seq.items().size() && !stop; i++) {
            variables.resize(scope.begin);
            loop.i = int64_t(i);
            set("loop", loop);
            assign(names, seq.items()[i]);
            at = body;
            block(tag, "else endfor");
            stop = leaving == "break";
            leaving = "";
        }
        leave(saved);
        const bool empty = seq.items().empty();
        at = empty ? body : at;
        if (empty)
            only(false, [&] { block(tag, "else endfor"); });
        if (ended == "else")
            only(empty, [&] { block(tag, "endfor"); });
    }
    void run_set(const tpl_token &tag) {
        const vector<string_view> names = targets();
        const string_view attribute = take(".") ? name() : "";
        tpl_value v;
        if (take("=")) {
            v = expression();
            vector<tpl_value> items = {v};
            while (take(","))
                items.push_back(expression());
            v = items.size() > 1 ? r.list(std::move(items)) : v;
            need("%}");
        } else
            v = capture(tag, "endset");
        if (live() && attribute.empty())
            assign(names, v);
        else if (live()) {
            const variable *target = find(names[0]);
            if (!target || target->v.kind != TPL_NAMESPACE)
                tpl_bad(tag.line, "'%s' is not a namespace", show(names[0]).c_str());
            const tpl_value holder = target->v;
            tpl_dict_set(r, holder.h->items, r.text(attribute), v);
        }
    }
    void run_macro(const tpl_token &tag) {
        const string_view macro = name();
        need("(");
        if (live()) {
            macros.push_back(at);
            set(macro, {TPL_MACRO, int64_t(macros.size()) - 1, nullptr});
        }
        only(false, [&] {
            commas(")", [&] {
                name();
                if (take("="))
                    expression();
            });
            block(tag, "endmacro");
        });
    }
    // A macro sees its parameters and the variables outside all loops.
    tpl_value call_macro(size_t params, const tpl_args &args) {
        const auto saved = enter(true);
        const size_t back = at;
        const string_view macro = tokens[params - 2].text;
        size_t n = 0, used = 0;
        at = params;
        commas(")", [&] {
            const string_view param = name();
            tpl_value v = r.missing(strf("parameter '%s' was not provided", show(param).c_str()));
            bool given = false;
            for (size_t i = 0; i < args.size(); i++)
                if (args[i].name.empty() ? i == n : args[i].name == param)
                    v = args[i].v, given = true, used++;
            if (take("=")) {
                const tpl_value other = only(!given, [&] { return expression(); });
                v = given ? v : other;
            }
            variables.push_back({param, std::move(v)});
            n++;
        });
        if (used != args.size())
            tpl_bad(r.line, "macro '%s': unexpected argument", show(macro).c_str());
        tpl_value v = capture(tokens[params - 2], "endmacro");
        at = back, leaving = "";
        leave(saved);
        return v;
    }
    // From the end of `tag` up to one of the tags `ends`, and with it if it is an end tag.
    void block(const tpl_token &tag, const char *ends) {
        tpl_level l(r, tag.line);
        const size_t begin = at;
        if (*ends)
            need("%}");
        for (;;) {
            if (!live() && memo[begin])
                at = memo[begin];
            const tpl_token &t = now();
            if (t.kind == TPL_END && *ends)
                tpl_bad(t.line, "'%s' of line %d is not closed", string(tag.text).c_str(), tag.line);
            if (t.kind == TPL_END)
                return;
            next();
            if (t.kind == TPL_DATA) {
                if (live())
                    emit(tpl_text(string(t.text)));
            } else if (t.text == "{{") {
                const tpl_value v = expression();
                if (live())
                    emit(tpl_string(r, v).text());
                need("}}");
            } else {
                const size_t end = at - 1;
                const tpl_token &inner = now();
                name();
                if (tpl_has_word(ends, inner.text)) {
                    memo[begin] = end;
                    ended = inner.text;
                    if (ended != "else" && ended != "elif")
                        need("%}");
                    return;
                }
                statement(inner);
            }
        }
    }
    void statement(const tpl_token &tag) {
        if (tag.text == "if")
            return run_if(tag);
        if (tag.text == "for")
            return run_for(tag);
        if (tag.text == "set")
            return run_set(tag);
        if (tag.text == "macro")
            return run_macro(tag);
        if (!tpl_has_word("break continue generation endgeneration", tag.text)) // generation: text marked for training
            tpl_bad(tag.line, "unexpected tag '%s'", show(tag.text).c_str());
        if (live() && (tag.text == "break" || tag.text == "continue")) {
            if (!find("loop"))
                tpl_bad(tag.line, "'%s' outside a loop", string(tag.text).c_str());
            leaving = tag.text;
        }
        need("%}");
    }
};

// ---- rendering --------------------------------------------------------------------------------------------------

// What a template is rendered with. The texts belong to the caller.
struct chat_input {
    const json_value *messages = nullptr; // an array of objects
    vector<std::pair<string_view, const json_value *>> args;
    bool add_generation_prompt = false;
    string_view bos, eos;
};

struct chat_text {
    string text;
    string literal; // literal[i] != 0: byte i came from a message, so special tokens are not parsed in it
};

struct template_limits {
    uint64_t max_steps = TPL_MAX_STEPS, max_memory = TPL_MAX_MEMORY; // a longer conversation gets more
    time_t now = 0;                                                  // for strftime_now; 0: the clock
};

// Messages of roles and contents as the JSON array that parse_json would make of them.
static json_document messages_document(const engine_message *messages, size_t n) {
    json_document d;
    d.values.reserve(1 + 5 * n);
    d.values.push_back({JSON_ARRAY, uint32_t(n), 1 + 5 * n});
    for (size_t i = 0; i < n; i++) {
        d.values.push_back({JSON_OBJECT, 2, 5});
        for (string_view s : {string_view("role"), string_view(messages[i].role), string_view("content"),
                              string_view(messages[i].content)})
            d.values.push_back(json_value(s));
    }
    return d;
}

static tpl_value tpl_from_json(tpl_run &r, const json_value &v, char mark) {
    r.work(1);
    if (v.kind == JSON_STRING)
        return r.text(v.text(), mark);
    if (v.kind == JSON_NULL)
        return tpl_none();
    if (v.kind < JSON_STRING) // the bits of a float are in i too
        return {v.kind == JSON_BOOL ? TPL_BOOL : v.kind == JSON_INT ? TPL_INT : TPL_FLOAT, v.i, nullptr};
    const bool dict = v.kind == JSON_OBJECT;
    vector<tpl_value> items;
    const size_t n = size_t(v.n) * (dict ? 2 : 1);
    r.room(n * sizeof(tpl_value));
    items.reserve(n);
    for (const json_value *item = v.begin(); item != v.end(); item = item->next())
        items.push_back(tpl_from_json(r, *item, mark));
    return r.make(dict ? TPL_DICT : TPL_LIST, {}, std::move(items));
}

// fn(text) for each text in a content, which is a string or a list of parts. False when it has other parts too.
template <class F> static bool tpl_content_texts(const json_value *content, F &&fn) {
    bool only_texts = true;
    if (content && content->kind == JSON_STRING)
        fn(content->text());
    if (content && content->kind == JSON_ARRAY)
        for (const json_value *part = content->begin(); part != content->end(); part = part->next()) {
            const json_value *text = part->find("text");
            text && text->kind == JSON_STRING ? fn(text->text()) : void(only_texts = false);
        }
    return only_texts;
}

enum tpl_form { TPL_AS_GIVEN, TPL_AS_PARTS, TPL_AS_STRING };

static tpl_value tpl_content(tpl_run &r, const json_value &v, tpl_form form) {
    tpl_value content = tpl_from_json(r, v, TPL_CONTENT);
    if (form == TPL_AS_PARTS && v.kind == JSON_STRING)
        content = r.list({r.make(TPL_DICT, {}, {r.text("type"), r.text("text"), r.text("text"), content})});
    if (content.kind != TPL_LIST)
        return content;
    tpl_text joined;
    const auto join = [&](string_view t) { r.put(joined, tpl_text(string(t), TPL_CONTENT)); };
    if (form == TPL_AS_STRING && tpl_content_texts(&v, join))
        return r.text(std::move(joined));
    content.h->parts = true;
    for (const tpl_value &part : content.items())
        if (part.is_dict())
            part.h->parts = true;
    return content;
}

static tpl_value tpl_message(tpl_run &r, const json_value &v, tpl_form form) {
    vector<tpl_value> items;
    for (const json_value *key = v.begin(); key != v.end(); key = key[1].next()) {
        items.push_back(r.text(key->text(), TPL_GIVEN));
        items.push_back(key->text() == "content" ? tpl_content(r, key[1], form) : tpl_from_json(r, key[1], TPL_GIVEN));
    }
    return r.make(TPL_DICT, {}, std::move(items));
}

// The interpreter before it starts: budget and variables.
static void tpl_prepare(tpl_interpreter &in, const chat_input &chat, tpl_form form, const template_limits &limits) {
    uint64_t bytes = 0; // of texts: what is no longer than a name is part of the messages' structure
    const auto count = [&bytes](const json_value &all) {
        for (const json_value *v = &all; v != all.next(); v++)
            bytes += v->text().size() < 16 ? 0 : v->text().size();
    };
    count(*chat.messages);
    for (const auto &arg : chat.args)
        count(*arg.second);
    tpl_run &r = in.r;
    r.max_steps = limits.max_steps + 1000 * chat.messages->n + bytes;
    r.max_live = limits.max_memory + 4096 * chat.messages->n + 16 * bytes;
    r.now = limits.now ? limits.now : time(nullptr);
    vector<tpl_value> list;
    for (const json_value *m = chat.messages->begin(); m != chat.messages->end(); m = m->next())
        list.push_back(tpl_message(r, *m, form));
    in.set("messages", r.list(std::move(list)));
    in.set("tools", tpl_none()); // as Hugging Face does: templates ask "is not none"
    in.set("documents", tpl_none());
    in.set("add_generation_prompt", tpl_bool(chat.add_generation_prompt));
    in.set("bos_token", r.text(chat.bos));
    in.set("eos_token", r.text(chat.eos));
    for (int64_t i = 0; tpl_builtins[i].names; i++)
        if (tpl_builtins[i].roles & TPL_AS_FUNCTION)
            in.set(tpl_builtins[i].names, {TPL_FUNCTION, i, nullptr});
    // Tools and documents may come from strangers, so special tokens in them are text; a variable such as bos_token is
    // there to be one.
    for (const auto &arg : chat.args) {
        const bool token = arg.first.size() > 6 && arg.first.substr(arg.first.size() - 6) == "_token";
        in.set(arg.first, tpl_from_json(r, *arg.second, token ? TPL_OURS : TPL_GIVEN));
    }
}

// Contents are what they are given as, mostly strings. Some templates expect a list of {type: "text", text: ...}
// instead: they fail on a string, or print nothing of it; others know strings only. Then the other form is tried, and
// used when it brings the content out. But what the template refuses with raise_exception stays refused: the other form
// must not get past it.
static chat_text render_template(string_view source, const chat_input &chat, const template_limits &limits = {}) {
    tpl_lexer lexer;
    const string text = tpl_source(source); // the tokens point into it
    lexer.src = text;
    lexer.run();
    struct outcome {
        tpl_text out;
        Error error{0, ""};
        bool refused = false, shows_content = false;
    };
    auto render = [&](tpl_form form) {
        outcome o;
        tpl_interpreter in(lexer.out);
        in.out = &o.out;
        try {
            tpl_prepare(in, chat, form, limits);
            in.block({TPL_WORD, 1, "template", {}}, "");
            o.shows_content = o.out.marks.find(TPL_CONTENT) != string::npos;
        } catch (Error &e) {
            o.error = std::move(e);
        }
        o.refused = in.r.refused;
        return o;
    };
    auto content_beside = [&](const char *blanks) {
        bool found = false;
        for (const json_value *m = chat.messages->begin(); m != chat.messages->end(); m = m->next())
            tpl_content_texts(m->find("content"),
                              [&](string_view t) { found |= t.find_first_not_of(blanks) != string::npos; });
        return found;
    };
    outcome o = render(TPL_AS_GIVEN);
    const bool failed = o.error.code != 0;
    if (!o.refused && (failed || (!o.shows_content && content_beside(""))))
        for (tpl_form form : {TPL_AS_PARTS, TPL_AS_STRING}) {
            outcome other = render(form);
            // A template that trims blank contents away does not miss them.
            if (other.shows_content || (other.refused && (failed || content_beside(" \t\r\n")))) {
                o = std::move(other);
                break;
            }
        }
    if (o.error.code)
        throw std::move(o.error);
    return {std::move(o.out.bytes), std::move(o.out.marks)};
}

// ---------------------------------------------------------------------------------------------------
// 6. MODEL
//
// From a file to weights that FORWARD can run: the architecture table, hyper-parameters, the rotary
// frequencies, and the binding of every tensor to its field, with its shape checked. The only chapter that
// knows architectures by name. Invariant: after load_weights, every shape fits every other one.
// ---------------------------------------------------------------------------------------------------

// What distinguishes one dense decoder from another. A new one should cost one row here.
enum : unsigned {
    ROPE_HALVES = 1,  // rotary pairs (i, i + n_rot/2); otherwise (2i, 2i + 1)
    QK_NORM = 2,      // RMS norm over each query and key head
    QKV_BIAS = 4,     // attn_{q,k,v}.bias must exist; elsewhere they are optional
    POST_NORM = 8,    // attention and feed-forward each norm their output before it is added
    EMBED_SCALE = 16, // embeddings are multiplied by sqrt(n_embd)
    WINDOWS = 32,     // some layers see a window only, and rotate with a base of their own
};
struct arch {
    const char *name; // general.architecture, also the prefix of its keys
    int glu;          // OP_GLU's kind
    unsigned flags;
};
static const arch arch_table[] = {
    {"llama", 0, 0},
    {"qwen2", 0, ROPE_HALVES | QKV_BIAS},
    {"qwen3", 0, ROPE_HALVES | QK_NORM},
    {"gemma3", 1, ROPE_HALVES | QK_NORM | POST_NORM | EMBED_SCALE | WINDOWS},
};

struct hparams {
    int n_layer, n_embd, n_head, n_head_kv, dim_k, dim_v, n_ff, n_vocab, n_ctx_train;
    int n_rot;   // rotated dimensions per head, from the first on
    int pairing; // OP_ROPE's
    int glu;     // OP_GLU's kind
    float eps;
    float attn_scale;  // of q . k
    float embed_scale; // of embeddings
    float rope_scale;  // multiplies cos and sin of the first rotary table (YaRN's attention factor)
};

// A null handle means that the model does not have it.
struct layer {
    mem attn_norm;      // [n_embd]
    mat wq;             // [n_head * dim_k, n_embd]
    mat wk;             // [n_head_kv * dim_k, n_embd]
    mat wv;             // [n_head_kv * dim_v, n_embd]
    mat wo;             // [n_embd, n_head * dim_v]
    mem bq, bk, bv, bo; // biases of these
    mem q_norm, k_norm; // [dim_k]
    mem post_attn_norm; // [n_embd], of what attention adds
    mem ffn_norm;       // [n_embd]
    mat gate, up;       // [n_ff, n_embd]
    mat down;           // [n_embd, n_ff]
    mem b_gate, b_up, b_down;
    mem post_ffn_norm; // [n_embd], of what feed-forward adds
    int window;        // tokens that attention sees, this one included; 0: all
    int rotary;        // which of the rotary tables
};

struct weights {
    hparams hp = {};
    mat embed = {};          // [n_vocab, n_embd]
    vector<layer> layers;    // [n_layer]
    mem out_norm = {};       // [n_embd]
    mat out = {};            // [n_vocab, n_embd]; `embed` again when tied
    vector<double> freqs[2]; // [n_rot / 2], radians per position; the second is empty where all layers use the first
    vector<buffer> owned;    // vectors that had to be widened to f32
    int64_t decode_bytes = 0;
};

// The angle per position of each rotary pair without scaling: base^(-2i/n). *base is the value of `key`.
static vector<double> plain_freqs(const model_file &f, const string &key, int n_rot, double *base) {
    *base = f.get_float(key, 10000.0);
    if (!(*base >= 1 && *base <= 1e12))
        f.bad(key, "%g is out of range 1 to 1e12", *base);
    vector<double> freqs;
    for (int i = 0; i < n_rot / 2; i++)
        freqs.push_back(exact_exp(-2.0 * i / n_rot * exact_log(*base)));
    return freqs;
}

// The first rotary table: plain, then changed by the file's scaling rule. Linear divides by the factor; YaRN (arXiv
// 2309.00071, section 3) divides slow pairs, keeps fast ones, ramps in between and scales attention; Llama-3 files
// carry the divisors as a tensor.
static void load_rotary(const model_file &f, const string &prefix, weights &w) {
    hparams &hp = w.hp;
    const auto key = [&](const char *name) { return prefix + name; };
    double base;
    w.freqs[0] = plain_freqs(f, key("rope.freq_base"), hp.n_rot, &base);
    const int half = hp.n_rot / 2;

    if (const tensor_info *t = f.find("rope_freqs.weight")) {
        if (t->type != TYPE_F32 || t->dims[0] != uint64_t(half) || t->dims[1] * t->dims[2] * t->dims[3] != 1)
            f.bad("rope_freqs.weight", "expected F32 [%d]", half);
        for (int i = 0; i < half; i++) {
            float divisor;
            memcpy(&divisor, t->data + 4 * i, 4);
            if (!(divisor >= 0.25f && divisor <= 1e6f)) // so that an angle stays below 2^30 in any context
                f.bad("rope_freqs.weight", "entry %d is %g, expected 0.25 to 1e6", i, double(divisor));
            w.freqs[0][size_t(i)] /= double(divisor);
        }
    }

    string type(f.get_string(key("rope.scaling.type"), ""));
    double factor = f.get_float(key("rope.scaling.factor"), 0.0);
    if (type.empty() && f.meta(key("rope.scale_linear")))
        type = "linear", factor = f.get_float(key("rope.scale_linear"), 1.0);
    if (type.empty() && factor != 0)
        type = "linear"; // what files from before the key existed mean
    hp.rope_scale = float(f.get_float(key("rope.scaling.attn_factor"), 1.0));
    if (type.empty() || type == "none")
        return;
    if (type != "linear" && type != "yarn")
        fail(ENGINE_EUNSUPPORTED, "%s: %s: rotary scaling \"%s\" is not supported (none, linear, yarn are)",
             show_path(f.path).c_str(), key("rope.scaling.type").c_str(), show(type).c_str());
    if (!(factor >= 1 && factor <= 1e6))
        f.bad(key("rope.scaling.factor"), "%g, but scaling \"%s\" needs a factor of 1 to 1e6", factor, type.c_str());
    if (type == "linear") {
        for (double &x : w.freqs[0])
            x /= factor;
    } else { // yarn
        const double n_orig =
            double(f.get_int(key("rope.scaling.original_context_length"), hp.n_ctx_train, 1, INT_MAX));
        const double fast = f.get_float(key("rope.scaling.yarn_beta_fast"), 32.0);
        const double slow = f.get_float(key("rope.scaling.yarn_beta_slow"), 1.0);
        if (!(fast > 0 && slow > 0 && base > 1))
            f.bad(key("rope.scaling.yarn_beta_fast"), "beta_fast, beta_slow and freq_base - 1 must be positive");
        // The pair that turns `beta` times within the original context.
        const auto pair_of = [&](double beta) {
            return hp.n_rot * exact_log(n_orig / (beta * 6.283185307179586)) / (2 * exact_log(base));
        };
        const double low = std::max(0.0, std::floor(pair_of(fast)));
        const double high = std::min(hp.n_rot - 1.0, std::ceil(pair_of(slow)));
        for (int i = 0; i < half; i++) {
            const double ramp = std::min(1.0, std::max(0.0, (i - low) / std::max(0.001, high - low)));
            w.freqs[0][size_t(i)] *= (1 - ramp) + ramp / factor;
        }
        hp.rope_scale *= float(1 + 0.1 * exact_log(factor));
    }
}

static hparams load_hparams(const model_file &f, const arch &a, const string &prefix, const vocab &v) {
    const auto need = [&](const char *name, int64_t hi) { return int(f.need_int(prefix + name, 1, hi)); };
    const auto get = [&](const char *name, int fallback) { return int(f.get_int(prefix + name, fallback, 1, 65536)); };
    hparams hp = {};
    hp.n_layer = need("block_count", 4096);
    hp.n_embd = need("embedding_length", 1 << 20);
    hp.n_head = need("attention.head_count", 65536);
    hp.n_ff = need("feed_forward_length", 1 << 24);
    hp.n_ctx_train = need("context_length", 1 << 28);
    hp.n_head_kv = get("attention.head_count_kv", hp.n_head);
    if (hp.n_head % hp.n_head_kv)
        f.bad((prefix + "attention.head_count_kv"), "%d does not divide head_count %d", hp.n_head_kv, hp.n_head);
    if (!f.meta(prefix + "attention.key_length") && hp.n_embd % hp.n_head)
        f.bad((prefix + "attention.head_count"), "%d does not divide embedding_length %d", hp.n_head, hp.n_embd);
    hp.dim_k = get("attention.key_length", std::max(1, hp.n_embd / hp.n_head));
    hp.dim_v = get("attention.value_length", hp.dim_k);
    if (int64_t(hp.n_head) * std::max(hp.dim_k, hp.dim_v) > INT_MAX)
        f.bad(prefix + "attention.head_count", "%d heads of %d values are too many", hp.n_head,
              std::max(hp.dim_k, hp.dim_v));
    hp.n_rot = get("rope.dimension_count", hp.dim_k);
    if (hp.n_rot > hp.dim_k || hp.n_rot % 2)
        f.bad((prefix + "rope.dimension_count"), "%d: expected an even number up to the head size %d", hp.n_rot,
              hp.dim_k);
    hp.eps = float(f.get_float(prefix + "attention.layer_norm_rms_epsilon", 1e-5));
    if (!(hp.eps >= 0 && hp.eps < 1))
        f.bad((prefix + "attention.layer_norm_rms_epsilon"), "%g is out of range 0 to 1", double(hp.eps));
    if (f.get_int(prefix + "expert_count", 0, 0, INT_MAX) > 0)
        fail(ENGINE_EUNSUPPORTED, "%s: %sexpert_count: mixture-of-experts models are not supported yet",
             show_path(f.path).c_str(), prefix.c_str());
    if (!(a.flags & WINDOWS) && f.get_int(prefix + "attention.sliding_window", 0, 0, INT_MAX) > 0)
        log_msg(ENGINE_LOG_WARN,
                "%s: %sattention.sliding_window is not used by this architecture; full attention it is",
                show_path(f.path).c_str(), prefix.c_str());
    for (const char *name : {"attn_logit_softcapping", "final_logit_softcapping"}) // of Gemma 2, copied by converters
        if (f.get_float(prefix + name, 0.0) != 0)
            log_msg(ENGINE_LOG_WARN, "%s: %s%s is not used by this architecture", show_path(f.path).c_str(),
                    prefix.c_str(), name);
    hp.n_vocab = v.n;
    hp.pairing = a.flags & ROPE_HALVES ? 1 : 0;
    hp.glu = a.glu;
    hp.embed_scale = a.flags & EMBED_SCALE ? float(std::sqrt(double(hp.n_embd))) : 1.0f;
    // Gemma 3's largest model, the one with 62 layers, scales by what its heads would measure if they shared n_embd out
    // among themselves. Its files do not say so.
    const bool shared_out = string_view(a.name) == "gemma3" && hp.n_layer == 62;
    hp.attn_scale = float(1 / std::sqrt(double(shared_out ? hp.n_embd / hp.n_head : hp.dim_k)));
    return hp;
}

// Which layers see a window only. The file says it for each layer, or gives a period: the last layer of each sees
// everything, and with period 0 none does. Window layers have the second rotary table, which no scaling rule changes.
static void load_windows(const model_file &f, const string &prefix, weights &w) {
    const string key = prefix + "attention.sliding_window_pattern";
    const int window = int(f.need_int(prefix + "attention.sliding_window", 1, INT_MAX)), n = int(w.layers.size());
    const meta_value *v = f.meta(key);
    meta_array list;
    int64_t period = 6;
    if (v && v->type == META_ARRAY) {
        list = f.get_array(key, v->item == META_BOOL ? KIND_BOOL : KIND_INT);
        if (list.count != uint64_t(n))
            f.bad(key, "has %llu items, but the model has %d layers", (unsigned long long)list.count, n);
    } else {
        period = f.get_int(key, period, 0, INT_MAX);
    }
    // The two bases differ, so the default of the others is not right for the first, and some converters name it oddly.
    if (!f.meta(prefix + "rope.freq_base"))
        f.bad(prefix + "rope.freq_base", "is missing");
    double base;
    const vector<double> freqs = plain_freqs(f, prefix + "rope.freq_base_swa", w.hp.n_rot, &base);
    for (int i = 0; i < n; i++)
        if (list.data ? list.int_at(uint64_t(i)) != 0 : period == 0 || (i + 1) % period != 0) {
            w.layers[size_t(i)].window = window;
            w.layers[size_t(i)].rotary = 1;
            w.freqs[1] = freqs;
        }
}

// Finds tensors by name, checks their shape, and hands their bytes to the backend.
struct binder {
    const model_file &file;
    backend *be;
    const backend_ops &ops;
    vector<buffer> &owned;
    vector<string_view> used;

    const tensor_info *find(const string &name, int64_t n_in, int64_t n_out, bool required) {
        const tensor_info *t = file.find(name);
        if (!t) {
            if (required)
                fail(ENGINE_EFORMAT, "%s: tensor %s is missing", show_path(file.path).c_str(), name.c_str());
            return nullptr;
        }
        if (t->dims[0] != uint64_t(n_in) || t->dims[1] != uint64_t(n_out) || t->dims[2] != 1 || t->dims[3] != 1)
            fail(ENGINE_EFORMAT, "%s: tensor %s has shape [%llu, %llu, %llu, %llu], expected [%lld, %lld]",
                 show_path(file.path).c_str(), name.c_str(), (unsigned long long)t->dims[0],
                 (unsigned long long)t->dims[1], (unsigned long long)t->dims[2], (unsigned long long)t->dims[3],
                 (long long)n_in, (long long)n_out);
        if (!find_format(t->type))
            fail(ENGINE_EUNSUPPORTED, "%s: tensor %s has type %d, which holds no weights", show_path(file.path).c_str(),
                 name.c_str(), t->type);
        used.push_back(t->name);
        return t;
    }
    mem upload(const string &name, const uint8_t *data, uint64_t bytes) {
        mem m = ops.weights(be, data, bytes);
        if (!m.handle)
            fail(ENGINE_ENOMEM, "%s: tensor %s: no memory for %llu bytes", show_path(file.path).c_str(), name.c_str(),
                 (unsigned long long)bytes);
        return m;
    }
    // [n_out, n_in]; a null handle when it is absent and not required.
    mat matrix(const string &name, int64_t n_in, int64_t n_out, bool required = true) {
        mat m = {};
        if (const tensor_info *t = find(name, n_in, n_out, required)) {
            m.data = upload(name, t->data, t->bytes);
            m.type = t->type;
            m.n_in = int(n_in), m.n_out = int(n_out), m.n_mat = 1;
            m.mat_bytes = t->bytes;
            m.row_bytes = t->bytes / uint64_t(n_out);
        }
        return m;
    }
    // [n] as f32, widened into memory of our own where the file has another format.
    mem vector_f32(const string &name, int64_t n, bool required = true) {
        const tensor_info *t = find(name, n, 1, required);
        if (!t)
            return {};
        if (t->type == TYPE_F32 && reinterpret_cast<uintptr_t>(t->data) % alignof(float) == 0)
            return upload(name, t->data, t->bytes);
        owned.emplace_back(size_t(n) * 4, "a widened vector");
        decode_row(t->type, t->data, reinterpret_cast<float *>(owned.back().data), n);
        return upload(name, owned.back().data, size_t(n) * 4);
    }
};

static layer load_layer(binder &b, const hparams &hp, unsigned flags, int i) {
    const auto name = [&](const char *stem) { return strf("blk.%d.%s", i, stem); };
    const int64_t nq = int64_t(hp.n_head) * hp.dim_k, nk = int64_t(hp.n_head_kv) * hp.dim_k;
    const int64_t nv = int64_t(hp.n_head_kv) * hp.dim_v, no = int64_t(hp.n_head) * hp.dim_v;
    layer l = {};
    l.attn_norm = b.vector_f32(name("attn_norm.weight"), hp.n_embd);
    l.wq = b.matrix(name("attn_q.weight"), hp.n_embd, nq);
    l.wk = b.matrix(name("attn_k.weight"), hp.n_embd, nk);
    l.wv = b.matrix(name("attn_v.weight"), hp.n_embd, nv);
    l.wo = b.matrix(name("attn_output.weight"), no, hp.n_embd);
    const bool need_bias = flags & QKV_BIAS;
    l.bq = b.vector_f32(name("attn_q.bias"), nq, need_bias);
    l.bk = b.vector_f32(name("attn_k.bias"), nk, need_bias);
    l.bv = b.vector_f32(name("attn_v.bias"), nv, need_bias);
    l.bo = b.vector_f32(name("attn_output.bias"), hp.n_embd, false);
    if (flags & QK_NORM) {
        l.q_norm = b.vector_f32(name("attn_q_norm.weight"), hp.dim_k);
        l.k_norm = b.vector_f32(name("attn_k_norm.weight"), hp.dim_k);
    }
    if (flags & POST_NORM) {
        l.post_attn_norm = b.vector_f32(name("post_attention_norm.weight"), hp.n_embd);
        l.post_ffn_norm = b.vector_f32(name("post_ffw_norm.weight"), hp.n_embd);
    }
    l.ffn_norm = b.vector_f32(name("ffn_norm.weight"), hp.n_embd);
    l.gate = b.matrix(name("ffn_gate.weight"), hp.n_embd, hp.n_ff);
    l.up = b.matrix(name("ffn_up.weight"), hp.n_embd, hp.n_ff);
    l.down = b.matrix(name("ffn_down.weight"), hp.n_ff, hp.n_embd);
    l.b_gate = b.vector_f32(name("ffn_gate.bias"), hp.n_ff, false);
    l.b_up = b.vector_f32(name("ffn_up.bias"), hp.n_ff, false);
    l.b_down = b.vector_f32(name("ffn_down.bias"), hp.n_embd, false);
    return l;
}

// The row of the file's architecture, or an Error that names it.
static const arch &find_arch(const model_file &f) {
    const string_view name = f.need_string("general.architecture");
    string known;
    for (const arch &a : arch_table) {
        if (name == a.name)
            return a;
        known += string(known.empty() ? "" : ", ") + a.name;
    }
    fail(ENGINE_EUNSUPPORTED, "%s: general.architecture: \"%s\" is not supported (%s are)", show_path(f.path).c_str(),
         show(name).c_str(), known.c_str());
}

static weights load_weights(const model_file &f, const vocab &v, backend *be, const backend_ops &ops) {
    const arch &a = find_arch(f);
    const string prefix = string(a.name) + ".";
    weights w;
    w.hp = load_hparams(f, a, prefix, v);
    const hparams &hp = w.hp;
    load_rotary(f, prefix, w);

    binder b{f, be, ops, w.owned, {}};
    w.embed = b.matrix("token_embd.weight", hp.n_embd, hp.n_vocab);
    w.out_norm = b.vector_f32("output_norm.weight", hp.n_embd);
    w.out = b.matrix("output.weight", hp.n_embd, hp.n_vocab, false);
    if (!w.out.data.handle)
        w.out = w.embed;
    for (int i = 0; i < hp.n_layer; i++)
        w.layers.push_back(load_layer(b, hp, a.flags, i));
    if (a.flags & WINDOWS)
        load_windows(f, prefix, w);

    // A tensor that was not bound would be left out of the computation: an error. Parts for pictures (v., mm.), which
    // some files carry along, do not touch text.
    std::sort(b.used.begin(), b.used.end());
    for (const tensor_info &t : f.tensors) {
        if (std::binary_search(b.used.begin(), b.used.end(), t.name)) {
            if (t.name != "token_embd.weight" || w.out.data.handle == w.embed.data.handle)
                w.decode_bytes += int64_t(t.bytes);
        } else if (t.name.substr(0, 2) == "v." || t.name.substr(0, 3) == "mm.") {
            log_msg(ENGINE_LOG_WARN, "%s: tensor %s is not used", show_path(f.path).c_str(), show(t.name).c_str());
        } else if (t.name != "rope_freqs.weight") {
            fail(ENGINE_EUNSUPPORTED, "%s: tensor %s is not part of architecture %s as it is known here",
                 show_path(f.path).c_str(), show(t.name).c_str(), a.name);
        }
    }
    return w;
}

// ---------------------------------------------------------------------------------------------------
// 7. CPU
//
// The backend that every machine has, and the reference for the others. For each operation the plain C++
// version comes first and defines the result; the AVX2 and AVX-512 versions of the hot ones equal it bit
// for bit, because every order of addition is fixed (see the table in chapter QUANTS and the comment at
// each operation). Knows nothing of models. Invariant: a result never depends on the number of threads,
// on the instruction set, or on which other rows are in the call.
// ---------------------------------------------------------------------------------------------------

enum cpu_level { CPU_PLAIN, CPU_AVX2, CPU_AVX512 }; // CPU_AVX512 means F, BW, VL, DQ and VNNI

// What this processor can do, or less when ENGINE_CPU (plain, avx2, avx512) says so.
static cpu_level cpu_detect() {
    cpu_level best = CPU_PLAIN;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) // every one of these also has F16C
        best = CPU_AVX2;
    if (best == CPU_AVX2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni"))
        best = CPU_AVX512;
#endif
    const char *limit = getenv("ENGINE_CPU");
    if (!limit || !*limit)
        return best;
    static const char *const names[] = {"plain", "avx2", "avx512"};
    for (int i = 0; i <= CPU_AVX512; i++)
        if (!strcmp(limit, names[i]))
            return std::min(best, cpu_level(i));
    fail(ENGINE_EINVAL, "ENGINE_CPU=%s: expected plain, avx2 or avx512", show(limit).c_str());
}

} // namespace

// The CPU backend's state. One call at a time runs on it, those for memory included; `scratch` is the operations' own.
struct backend {
    struct allocation {
        uint8_t *data; // as struct buffer, but can grow
        uint64_t bytes;
        void unmap() const { munmap(data, std::max<uint64_t>(bytes, 1)); }
    };
    thread_pool pool;
    cpu_level level;
    buffer scratch;
    vector<allocation> allocations;     // few: a session makes some tens of them
    std::atomic<uint64_t> allocated{0}; // bytes of these and of scratch
    const char *error = nullptr;        // the first since the last sync
    bool no_memory = false;             // and whether it is a shortage of memory

    explicit backend(int n_threads) : pool(n_threads), level(cpu_detect()) {}
    ~backend() {
        for (const allocation &a : allocations)
            a.unmap();
    }
    backend(const backend &) = delete;
};

namespace {

template <class T> static T *at(mem m) { return reinterpret_cast<T *>(static_cast<uint8_t *>(m.handle) + m.offset); }

static void cpu_error(backend *be, const char *what, bool no_memory = false) {
    if (!be->error)
        be->error = what, be->no_memory = no_memory;
}

// Makes the scratch space at least `bytes` large, page-aligned, contents undefined. It never shrinks, and stays as it
// is when memory ends, which gives nonzero.
static int32_t cpu_reserve(backend *be, uint64_t bytes) {
    if (bytes <= be->scratch.size)
        return 0;
    const uint64_t before = be->scratch.size;
    try {
        be->scratch = buffer(bytes, "scratch memory");
    } catch (const Error &) {
        return 1;
    }
    be->allocated += bytes - before;
    return 0;
}

// An operation's scratch space. Allocates only where nothing was reserved; null, with the error latched, when memory
// ends.
static uint8_t *cpu_scratch(backend *be, uint64_t bytes) {
    if (cpu_reserve(be, bytes)) {
        cpu_error(be, "out of memory for the operations' scratch space", true);
        return nullptr;
    }
    return be->scratch.data;
}

// Matrix products.
//
// y = W x. The activations are quantized once per row into the scratch space (chapter QUANTS has the rules), then
// the weight rows are dealt out to the threads. The _vec kernels read one weight row after the other, straight into the
// dot products with one or a few rows of x. The _mm kernels, for AVX-512 and many rows of x, unpack some weight rows
// into a panel, in which the same value of all of them stands side by side, and the panel meets every row of x.
// Both add in the order of the reference, plain_vec, and equal it bit for bit.

// --- activations

// How the integers of a row of activations lie in memory.
enum act_form {
    ACT_PLAIN, // int8, as they come
    ACT_PAIRS, // int8, per 8 blocks of 32: for i < 4 the first halves of blocks i and i + 4, then their second halves
    ACT_WALK   // bytes q + 128, blocks in the order of the partial sums: 0, 8, 16 ... 1, 9, 17 ...
};

// One row: the integers, a float dx per block, and sums of the integers. ACT_Q8_32 keeps an int32 per block;
// ACT_Q8_256 keeps sixteen int16 per block, one per 16 values: those of the even ones, then those of the odd ones.
// dx and sums stand in the same order of blocks as the integers.
struct act_layout {
    int form, block;
    int64_t n, n_block; // values, blocks
    int64_t d_at, s_at; // bytes from the row's start to dx and to the sums
    int64_t stride;     // bytes from row to row
};

template <class T> static inline T load_as(const void *p) {
    T v;
    memcpy(&v, p, sizeof v);
    return v;
}

static int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Kernels read dx and sums of 8 blocks at a time, so there is room for them.
static act_layout act_plan(int act, int form, int64_t n) {
    act_layout a;
    a.form = form;
    a.block = act == ACT_Q8_32 ? 32 : 256;
    a.n = n;
    a.n_block = n / a.block;
    a.d_at = round_up(n, 256);
    a.s_at = a.d_at + round_up(a.n_block, 8) * int64_t(sizeof(float));
    a.stride = round_up(a.s_at + round_up(a.n_block, 8) * (act == ACT_Q8_32 ? 4 : 32), 64);
    return a;
}

// Position of block b among n when the blocks of each partial sum stand together.
static inline int64_t walk_index(int64_t b, int64_t n) { return b % 8 * (n / 8) + std::min(b % 8, n % 8) + b / 8; }

// dx, and the factor that makes integers of a block's values: 0 when they all become 0. amax: the largest absolute
// value as bits, so that infinity and NaN are larger than any number.
static inline float act_scale(uint32_t amax, float *factor) {
    float f = q_float(amax);
    *factor = 0;
    if (amax >= 0x7f800000)
        return q_float(0x7fc00000);
    if (f < 0x1p-100f)
        return 0;
    *factor = 127 / f;
    return f / 127;
}

static void plain_quantize(const float *x, const act_layout &a, uint8_t *out) {
    int8_t *q = reinterpret_cast<int8_t *>(out);
    float *d = reinterpret_cast<float *>(out + a.d_at);
    for (int64_t b = 0; b < a.n_block; b++, x += a.block, q += a.block) {
        uint32_t amax = 0;
        for (int i = 0; i < a.block; i++)
            amax = std::max(amax, float_bits(x[i]) & 0x7fffffff);
        float factor;
        d[b] = act_scale(amax, &factor);
        for (int i = 0; i < a.block; i++) // adding 1.5 * 2^23 rounds to an integer, to nearest even
            q[i] = factor == 0 ? int8_t(0) : int8_t(x[i] * factor + 12582912.0f - 12582912.0f);
        if (a.block == 32) {
            int32_t sum = 0;
            for (int i = 0; i < 32; i++)
                sum += q[i];
            memcpy(out + a.s_at + b * 4, &sum, 4);
        } else {
            for (int s = 0; s < 16; s++) {
                int16_t sum = 0;
                for (int i = s * 16; i < s * 16 + 16; i++)
                    sum = int16_t(sum + q[i]);
                memcpy(out + a.s_at + b * 32 + (s % 2 * 8 + s / 2) * 2, &sum, 2);
            }
        }
    }
}

// --- the reference

static float tree8(const float *p) { return ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7])); }

static float tree16(const float *p) {
    float r[8];
    for (int i = 0; i < 8; i++)
        r[i] = p[i] + p[i + 8];
    return tree8(r);
}

enum { VEC_ROWS = 64, VEC_X = 4 }; // weight rows and rows of x that a _vec kernel takes at most
enum { PANEL = 32, MM_X = 6 };     // weight rows of a panel, rows of x that meet it at a time

// Weight rows, row_bytes apart, and rows of activations.
struct vec_rows {
    const uint8_t *w;
    int64_t row_bytes;
    int n_w, n_x;
    const uint8_t *x;
    const act_layout &a;
};

// The product of a weight row and a row of activations: the bits that all other kernels reproduce.
template <int TYPE, int BLOCK, int BYTES, int SUB, bool MINS>
static float plain_dot(const uint8_t *w, const uint8_t *x, const act_layout &a) {
    float p[16] = {};
    for (int64_t k = 0; BLOCK == 1 && k < a.n; k++)
        p[k % 16] = std::fma(q_value(TYPE, w + k * BYTES, 0), load_as<float>(x + k * 4), p[k % 16]);
    if (BLOCK == 1)
        return tree16(p);
    for (int64_t b = 0; b < a.n_block; b++, w += BYTES) {
        const int8_t *q = reinterpret_cast<const int8_t *>(x) + b * BLOCK;
        int32_t dot = 0, min = 0;
        for (int s = 0; s < BLOCK / SUB; s++) {
            int32_t sub = 0, sum = 0;
            for (int i = s * SUB; i < (s + 1) * SUB; i++)
                sub += q_quant(TYPE, w, i) * q[i], sum += q[i];
            dot += q_sub_scale(TYPE, w, s) * sub;
            min += BLOCK == 32 ? sum : q_sub_min(TYPE, w, s) * sum;
        }
        const float dx = load_as<float>(x + a.d_at + b * 4), m = q_dmin(TYPE, w) * dx;
        p[b % 8] = std::fma(q_d(TYPE, w) * dx, float(dot), p[b % 8]);
        if (MINS)
            p[b % 8] = std::fma(BLOCK == 32 ? m : -m, float(min), p[b % 8]);
    }
    return tree8(p);
}

// out[n_x][VEC_ROWS], as for all _vec kernels.
template <int TYPE, int BLOCK, int BYTES, int SUB, bool MINS> static void plain_vec(const vec_rows &v, float *out) {
    for (int c = 0; c < v.n_x; c++)
        for (int r = 0; r < v.n_w; r++)
            out[c * VEC_ROWS + r] =
                plain_dot<TYPE, BLOCK, BYTES, SUB, MINS>(v.w + r * v.row_bytes, v.x + c * v.a.stride, v.a);
}

#if defined(__x86_64__)

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX2_INLINE __attribute__((target("avx2,fma,f16c"), always_inline)) static inline
#define AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#define AVX512_INLINE                                                                                                  \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"), always_inline)) static inline

AVX2_INLINE __m128i load16(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }
AVX2_INLINE __m256i load32(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
AVX512_INLINE __m512i load64(const void *p) { return _mm512_loadu_si512(p); }
AVX2_INLINE void store32(void *p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i *>(p), v); }
AVX2_INLINE __m256i join(__m128i low, __m128i high) { return _mm256_set_m128i(high, low); }

// --- activations, AVX2 (which serves AVX-512 as well: this is a small part of the work)

AVX2_INLINE __m256i max_abs32(const float *x, __m256i m) {
    for (int i = 0; i < 32; i += 8)
        m = _mm256_max_epi32(m, _mm256_and_si256(load32(x + i), _mm256_set1_epi32(0x7fffffff)));
    return m;
}

AVX2_INLINE __m256i round32(const float *x, float factor) {
    if (factor == 0)
        return _mm256_setzero_si256();
    __m256i v[4];
    for (int i = 0; i < 4; i++)
        v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i * 8), _mm256_set1_ps(factor)));
    __m256i q = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    return _mm256_permutevar8x32_epi32(q, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

AVX2 static void avx2_quantize(const float *x, const act_layout &a, uint8_t *out) {
    const __m256i flip = _mm256_set1_epi8(-128);
    float *d = reinterpret_cast<float *>(out + a.d_at);
    for (int64_t b = 0; b < a.n_block; b++, x += a.block) {
        __m256i m = _mm256_setzero_si256();
        for (int i = 0; i < a.block; i += 32)
            m = max_abs32(x + i, m);
        __m128i h = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
        h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4e));
        h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0xb1));
        const int64_t at = a.form == ACT_WALK ? walk_index(b, a.n_block) : b;
        float factor;
        d[at] = act_scale(uint32_t(_mm_cvtsi128_si32(h)), &factor);
        for (int i = 0; i < a.block; i += 32) {
            __m256i q = round32(x + i, factor);
            uint8_t *to = out + at * a.block + i;
            if (a.form == ACT_PLAIN)
                store32(to, q);
            if (a.form == ACT_WALK)
                store32(to, _mm256_xor_si256(q, flip));
            if (a.form == ACT_PAIRS) {
                to = out + b / 8 * 256 + b % 4 * 64 + b % 8 / 4 * 16;
                _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm256_castsi256_si128(q));
                _mm_storeu_si128(reinterpret_cast<__m128i *>(to + 32), _mm256_extracti128_si256(q, 1));
            }
            alignas(32) int64_t sum[4]; // of 8 values each, 128 added to each of them
            store32(sum, _mm256_sad_epu8(_mm256_xor_si256(q, flip), _mm256_setzero_si256()));
            if (a.block == 32) {
                int32_t all = int32_t(sum[0] + sum[1] + sum[2] + sum[3] - 32 * 128);
                memcpy(out + a.s_at + at * 4, &all, 4);
            } else {
                int16_t even = int16_t(sum[0] + sum[1] - 16 * 128), odd = int16_t(sum[2] + sum[3] - 16 * 128);
                memcpy(out + a.s_at + at * 32 + i / 16, &even, 2);
                memcpy(out + a.s_at + at * 32 + i / 16 + 16, &odd, 2);
            }
        }
    }
}

// --- the formats, unpacked with AVX2
//
// A struct per format. BYTES of a block, D and M: where d and m (dmin) stand in it, M = -1 for none. The unpacked
// integers are quants + OFF and at most MAX; a MAX of 128 says that they are signed. Formats with blocks of 32 have
//     halves(a, b)          the first 16 integers of block a and of block b, the other 16 of both
// and those with blocks of 256
//     quants(b, i)          32 integers, i = 0..7
//     scales(b), mins(b)    sixteen int16, one per 16 values, the even ones first, as the sums of the activations
// N_SUB: how many scaled sums the AVX-512 panel makes of a block; 1 where the scales fit into the panel's int8.

AVX2_INLINE __m256i low_nibbles(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
AVX2_INLINE __m256i high_nibbles(__m256i v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }

struct two {
    __m256i lo, hi;
};

AVX2_INLINE two nibbles2(const uint8_t *a, const uint8_t *b) {
    __m256i v = join(load16(a), load16(b));
    return {low_nibbles(v), high_nibbles(v)};
}

// 16 where the bit is set: bits 0-15 of the two words for lo, 16-31 for hi.
AVX2_INLINE two fifth_bits2(const uint8_t *a, const uint8_t *b) {
    const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201)), value = _mm256_set1_epi8(16);
    const __m256i byte = _mm256_unpacklo_epi64(_mm256_setzero_si256(), _mm256_set1_epi8(1));
    __m256i v = join(_mm_set1_epi32(load_as<int32_t>(a)), _mm_set1_epi32(load_as<int32_t>(b)));
    __m256i lo = _mm256_and_si256(_mm256_shuffle_epi8(v, byte), bit);
    __m256i hi = _mm256_and_si256(_mm256_shuffle_epi8(v, _mm256_add_epi8(byte, _mm256_set1_epi8(2))), bit);
    return {_mm256_and_si256(_mm256_cmpeq_epi8(lo, bit), value), _mm256_and_si256(_mm256_cmpeq_epi8(hi, bit), value)};
}

// Entries of a table of sixteen, each with `off` added.
AVX2_INLINE __m256i look_up(const signed char *table, int off, __m256i index) {
    __m256i t = _mm256_add_epi8(_mm256_broadcastsi128_si256(load16(table)), _mm256_set1_epi8(char(off)));
    return _mm256_shuffle_epi8(t, index);
}

// Sixteen bytes as int16, even ones first.
AVX2_INLINE __m256i split_bytes(__m128i v) {
    return join(_mm_srai_epi16(_mm_slli_epi16(v, 8), 8), _mm_srai_epi16(v, 8));
}

// Eight scales of 32 values each, in the arrangement of sixteen.
AVX2_INLINE __m256i twice(__m128i v) { return _mm256_broadcastsi128_si256(v); }

// The float scales of eight blocks from their 16 bits.
struct half_scales {
    static uint16_t bits(const uint8_t *p) { return load_as<uint16_t>(p); }
    AVX2_INLINE __m256 widen(__m128i h) { return _mm256_cvtph_ps(h); }
};

template <int TYPE> struct fmt;

template <> struct fmt<TYPE_Q4_0> : half_scales {
    enum { BLOCK = 32, BYTES = 18, D = 0, M = -1, OFF = 8, MAX = 15, N_SUB = 1, NEG = 0 };
    AVX2_INLINE two halves(const uint8_t *a, const uint8_t *b) { return nibbles2(a + 2, b + 2); }
};

template <> struct fmt<TYPE_Q4_1> : half_scales {
    enum { BLOCK = 32, BYTES = 20, D = 0, M = 2, OFF = 0, MAX = 15, N_SUB = 1, NEG = 0 };
    AVX2_INLINE two halves(const uint8_t *a, const uint8_t *b) { return nibbles2(a + 4, b + 4); }
};

template <> struct fmt<TYPE_Q5_0> : half_scales {
    enum { BLOCK = 32, BYTES = 22, D = 0, M = -1, OFF = 16, MAX = 31, N_SUB = 1, NEG = 0 };
    AVX2_INLINE two halves(const uint8_t *a, const uint8_t *b) {
        two v = nibbles2(a + 6, b + 6), f = fifth_bits2(a + 2, b + 2);
        return {_mm256_or_si256(v.lo, f.lo), _mm256_or_si256(v.hi, f.hi)};
    }
};

template <> struct fmt<TYPE_Q5_1> : half_scales {
    enum { BLOCK = 32, BYTES = 24, D = 0, M = 2, OFF = 0, MAX = 31, N_SUB = 1, NEG = 0 };
    AVX2_INLINE two halves(const uint8_t *a, const uint8_t *b) { return fmt<TYPE_Q5_0>::halves(a + 2, b + 2); }
};

template <> struct fmt<TYPE_Q8_0> : half_scales {
    enum { BLOCK = 32, BYTES = 34, D = 0, M = -1, OFF = 0, MAX = 128, N_SUB = 1, NEG = 0 };
    AVX2_INLINE two halves(const uint8_t *a, const uint8_t *b) {
        return {join(load16(a + 2), load16(b + 2)), join(load16(a + 18), load16(b + 18))};
    }
};

template <> struct fmt<TYPE_IQ4_NL> : half_scales {
    enum { BLOCK = 32, BYTES = 18, D = 0, M = -1, OFF = 0, MAX = 128, N_SUB = 1, NEG = 0 };
    AVX2_INLINE two halves(const uint8_t *a, const uint8_t *b) {
        two v = nibbles2(a + 2, b + 2);
        return {look_up(q_iq4_table, 0, v.lo), look_up(q_iq4_table, 0, v.hi)};
    }
};

template <> struct fmt<TYPE_MXFP4> {
    enum { BLOCK = 32, BYTES = 17, D = 0, M = -1, OFF = 12, MAX = 24, N_SUB = 1, NEG = 0 };
    AVX2_INLINE two halves(const uint8_t *a, const uint8_t *b) {
        two v = nibbles2(a + 1, b + 1);
        return {look_up(q_mxfp4_table, OFF, v.lo), look_up(q_mxfp4_table, OFF, v.hi)};
    }
    static uint16_t bits(const uint8_t *p) { return *p; }
    AVX2_INLINE __m256 widen(__m128i h) { // q_e8m0_halved
        __m256i e = _mm256_cvtepu16_epi32(h), small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
        __m256i f = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
        f = _mm256_blendv_epi8(f, _mm256_sllv_epi32(_mm256_set1_epi32(0x200000), e), small);
        __m256i nan = _mm256_cmpeq_epi32(e, _mm256_set1_epi32(255));
        return _mm256_castsi256_ps(_mm256_blendv_epi8(f, _mm256_set1_epi32(0x7fc00000), nan));
    }
};

// Bits `shift` and up of each byte, cut to those of `mask`.
AVX2_INLINE __m256i bits32(const uint8_t *p, int shift, int mask) {
    return _mm256_and_si256(_mm256_srl_epi16(load32(p), _mm_cvtsi32_si128(shift)), _mm256_set1_epi8(char(mask)));
}

template <> struct fmt<TYPE_Q2_K> : half_scales {
    enum { BLOCK = 256, BYTES = 84, D = 80, M = 82, OFF = 0, MAX = 3, N_SUB = 1, NEG = 0 };
    AVX2_INLINE __m256i quants(const uint8_t *b, int i) { return bits32(b + 16 + i / 4 * 32, i % 4 * 2, 3); }
    AVX2_INLINE __m256i scales(const uint8_t *b) { return split_bytes(_mm_and_si128(load16(b), _mm_set1_epi8(15))); }
    AVX2_INLINE __m256i mins(const uint8_t *b) {
        return split_bytes(_mm_and_si128(_mm_srli_epi16(load16(b), 4), _mm_set1_epi8(15)));
    }
};

template <> struct fmt<TYPE_Q3_K> : half_scales {
    enum { BLOCK = 256, BYTES = 110, D = 108, M = -1, OFF = 4, MAX = 7, N_SUB = 1, NEG = 1 };
    AVX2_INLINE __m256i quants(const uint8_t *b, int i) {
        __m256i high = _mm256_slli_epi16(bits32(b, i, 1), 2);
        return _mm256_or_si256(bits32(b + 32 + i / 4 * 32, i % 4 * 2, 3), high);
    }
    AVX2_INLINE __m256i scales(const uint8_t *b) {
        int64_t low = load_as<int64_t>(b + 96);
        int32_t high = load_as<int32_t>(b + 104);
        __m128i l = _mm_and_si128(_mm_set_epi64x(low >> 4, low), _mm_set1_epi8(15));
        __m128i h = _mm_and_si128(_mm_setr_epi32(high, high >> 2, high >> 4, high >> 6), _mm_set1_epi8(3));
        return split_bytes(_mm_sub_epi8(_mm_or_si128(l, _mm_slli_epi16(h, 4)), _mm_set1_epi8(32)));
    }
};

template <> struct fmt<TYPE_Q4_K> : half_scales {
    enum { BLOCK = 256, BYTES = 144, D = 0, M = 2, OFF = 0, MAX = 15, N_SUB = 8, NEG = 0 };
    AVX2_INLINE __m256i quants(const uint8_t *b, int i) { return bits32(b + 16 + i / 2 * 32, i % 2 * 4, 15); }
    AVX2_INLINE __m256i scales(const uint8_t *b) { return six_bits(b + 4, b + 12, 0); }
    AVX2_INLINE __m256i mins(const uint8_t *b) { return six_bits(b + 8, b + 12, 4); }
    AVX2_INLINE __m256i six_bits(const uint8_t *p, const uint8_t *rest, int shift) {
        uint32_t v = load_as<uint32_t>(p), r = load_as<uint32_t>(rest) >> shift;
        uint64_t low = v & 0x3f3f3f3f, high = (r & 0x0f0f0f0f) | (v >> 2 & 0x30303030);
        return twice(_mm_cvtepu8_epi16(_mm_cvtsi64_si128(int64_t(low | high << 32))));
    }
};

template <> struct fmt<TYPE_Q5_K> : half_scales {
    enum { BLOCK = 256, BYTES = 176, D = 0, M = 2, OFF = 0, MAX = 31, N_SUB = 8, NEG = 0 };
    AVX2_INLINE __m256i quants(const uint8_t *b, int i) {
        return _mm256_or_si256(fmt<TYPE_Q4_K>::quants(b + 32, i), _mm256_slli_epi16(bits32(b + 16, i, 1), 4));
    }
    AVX2_INLINE __m256i scales(const uint8_t *b) { return fmt<TYPE_Q4_K>::scales(b); }
    AVX2_INLINE __m256i mins(const uint8_t *b) { return fmt<TYPE_Q4_K>::mins(b); }
};

template <> struct fmt<TYPE_Q6_K> : half_scales {
    enum { BLOCK = 256, BYTES = 210, D = 208, M = -1, OFF = 32, MAX = 63, N_SUB = 16, NEG = 0 };
    AVX2_INLINE __m256i quants(const uint8_t *b, int i) {
        __m256i low = bits32(b + i / 4 * 64 + i % 2 * 32, i % 4 / 2 * 4, 15);
        return _mm256_or_si256(low, _mm256_slli_epi16(bits32(b + 128 + i / 4 * 32, i % 4 * 2, 3), 4));
    }
    AVX2_INLINE __m256i scales(const uint8_t *b) { return split_bytes(load16(b + 192)); }
};

template <> struct fmt<TYPE_IQ4_XS> : half_scales {
    enum { BLOCK = 256, BYTES = 136, D = 0, M = -1, OFF = 0, MAX = 128, N_SUB = 8, NEG = 0 };
    AVX2_INLINE __m256i quants(const uint8_t *b, int i) {
        __m128i v = load16(b + 8 + i * 16);
        return look_up(q_iq4_table, 0, low_nibbles(join(v, _mm_srli_epi16(v, 4))));
    }
    AVX2_INLINE __m256i scales(const uint8_t *b) {
        const __m256i at = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        __m256i low = _mm256_srlv_epi32(_mm256_set1_epi32(load_as<int32_t>(b + 4)), _mm256_slli_epi32(at, 2));
        __m256i high = _mm256_srlv_epi32(_mm256_set1_epi32(load_as<uint16_t>(b + 2)), _mm256_slli_epi32(at, 1));
        low = _mm256_and_si256(low, _mm256_set1_epi32(15)), high = _mm256_and_si256(high, _mm256_set1_epi32(3));
        __m256i s = _mm256_sub_epi32(_mm256_or_si256(low, _mm256_slli_epi32(high, 4)), _mm256_set1_epi32(32));
        return twice(_mm_packs_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1)));
    }
};

// What to multiply 32 quants with, as sixteen int16: the first eight are the scale of the first 16 values.
AVX2_INLINE __m256i chunk_scale(__m256i scales, int i) {
    return _mm256_shuffle_epi8(scales, _mm256_set1_epi16(int16_t(i * 0x202 + 0x100)));
}

// --- _vec: one weight row at a time, NX rows of x

enum { PREFETCH_BYTES = 4096 }; // how far ahead of the dot product the weights are fetched

AVX2_INLINE void prefetch(const uint8_t *p, int bytes) {
    for (int i = 0; i < bytes; i += 64)
        _mm_prefetch(reinterpret_cast<const char *>(p + PREFETCH_BYTES + i), _MM_HINT_T0);
}

// Sixteen sums of two neighbouring products; |integers| <= 128 and |x| <= 127, so a sum fits in an int16.
template <class F> AVX2_INLINE __m256i multiply_pairs(__m256i w, __m256i x) {
    return F::MAX == 128 ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
                         : _mm256_maddubs_epi16(w, x);
}

AVX2_INLINE float tree8(__m256 p) {
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(p), _mm256_extractf128_ps(p, 1)); // 0+4 1+5 2+6 3+7
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

AVX2_INLINE __m256 first_lanes(int n) { // all bits set in the first n lanes
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
}

// The float scales of eight blocks; at(k): where block k has its own.
template <class F, class AT> AVX2_INLINE __m256 scales8(AT at) {
    auto h = [&](int k) { return short(F::bits(at(k))); };
    return F::widen(_mm_setr_epi16(h(0), h(1), h(2), h(3), h(4), h(5), h(6), h(7)));
}

// What eight blocks of a weight row make with NX rows of x, block k in lane k.
template <int NX> struct block_sums {
    __m256 d, m;
    __m256i dot[NX], min[NX];
};

// The sums of eight blocks of 32, one per lane; u: their integers, by halves of two blocks.
template <class F> AVX2_INLINE __m256i dot_blocks8(const two *u, const uint8_t *q) {
    const __m256i one = _mm256_set1_epi16(1);
    __m256i v[4];
    for (int i = 0; i < 4; i++) {
        __m256i lo = multiply_pairs<F>(u[i].lo, load32(q + i * 64));
        __m256i hi = multiply_pairs<F>(u[i].hi, load32(q + i * 64 + 32));
        if (F::MAX == 128)
            v[i] = _mm256_add_epi32(_mm256_madd_epi16(lo, one), _mm256_madd_epi16(hi, one));
        else
            v[i] = _mm256_add_epi16(lo, hi);
    }
    if (F::MAX > 31)
        return _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    v[0] = _mm256_hadd_epi16(v[0], v[1]), v[2] = _mm256_hadd_epi16(v[2], v[3]); // 8 products fit in an int16
    if (F::MAX > 15)
        return _mm256_hadd_epi32(_mm256_madd_epi16(v[0], one), _mm256_madd_epi16(v[2], one));
    return _mm256_madd_epi16(_mm256_hadd_epi16(v[0], v[2]), one); // and so do 16
}

// Blocks b to b + n - 1 of 32 values, n <= 8.
template <class F, int NX> AVX2_INLINE void add_blocks32(const uint8_t *w, int64_t b, int n, const uint8_t *x,
                                                         const act_layout &a, block_sums<NX> &to) {
    uint8_t last[8 * F::BYTES];
    prefetch(w, 8 * F::BYTES);
    if (n < 8) { // a copy, since nothing may be read behind the row
        memset(last, 0, sizeof last);
        w = static_cast<uint8_t *>(memcpy(last, w, size_t(n) * F::BYTES));
    }
    two u[4];
    for (int i = 0; i < 4; i++)
        u[i] = F::halves(w + i * F::BYTES, w + (i + 4) * F::BYTES);
    to.d = scales8<F>([=](int k) { return w + k * F::BYTES + F::D; });
    if (F::M >= 0)
        to.m = scales8<F>([=](int k) { return w + k * F::BYTES + F::M; });
    for (int c = 0; c < NX; c++, x += a.stride) {
        to.min[c] = load32(x + a.s_at + b * 4);
        to.dot[c] = dot_blocks8<F>(u, x + b * 32);
        if (F::OFF != 0)
            to.dot[c] = _mm256_sub_epi32(to.dot[c], _mm256_mullo_epi32(to.min[c], _mm256_set1_epi32(F::OFF)));
    }
}

// Lane k of the result: the sum of the lanes of v[k].
AVX2_INLINE __m256i sum_lanes8(const __m256i *v) {
    __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

// Likewise, of 256 values.
template <class F, int NX> AVX2_INLINE void add_blocks256(const uint8_t *w, int64_t b, int n, const uint8_t *x,
                                                          const act_layout &a, block_sums<NX> &to) {
    __m256i dot[NX][8], min[NX][8];
    uint16_t d[8], m[8];
    for (int k = n; k < 8; k++) {
        for (int c = 0; c < NX; c++)
            dot[c][k] = min[c][k] = _mm256_setzero_si256();
        d[k] = m[k] = 0;
    }
    for (int k = 0; k < n; k++, w += F::BYTES) {
        const uint8_t *q = x + (b + k) * 256, *sums = x + a.s_at + (b + k) * 32;
        prefetch(w, F::BYTES);
        const __m256i scale = F::scales(w);
        __m256i t[NX];
        for (int c = 0; c < NX; c++)
            t[c] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const __m256i u = F::quants(w, i), s = chunk_scale(scale, i);
            for (int c = 0; c < NX; c++) {
                __m256i v = multiply_pairs<F>(u, load32(q + c * a.stride + i * 32));
                t[c] = _mm256_add_epi32(t[c], _mm256_madd_epi16(v, s));
            }
        }
        for (int c = 0; c < NX; c++) {
            const __m256i sum = load32(sums + c * a.stride);
            __m256i off = _mm256_mullo_epi32(_mm256_madd_epi16(scale, sum), _mm256_set1_epi32(F::OFF));
            dot[c][k] = F::OFF != 0 ? _mm256_sub_epi32(t[c], off) : t[c];
            if constexpr (F::M >= 0)
                min[c][k] = _mm256_madd_epi16(F::mins(w), sum);
        }
        d[k] = F::bits(w + F::D);
        if (F::M >= 0)
            m[k] = F::bits(w + F::M);
    }
    to.d = F::widen(load16(d));
    if (F::M >= 0)
        to.m = F::widen(load16(m));
    for (int c = 0; c < NX; c++) {
        to.dot[c] = sum_lanes8(dot[c]);
        if (F::M >= 0)
            to.min[c] = sum_lanes8(min[c]);
    }
}

template <class F, int NX> AVX2_INLINE void avx2_vec_rows(const vec_rows &rows, const uint8_t *x, float *out) {
    const act_layout &a = rows.a;
    for (int r = 0; r < rows.n_w; r++) {
        const uint8_t *w = rows.w + r * rows.row_bytes;
        __m256 p[NX];
        for (int c = 0; c < NX; c++)
            p[c] = _mm256_setzero_ps();
        for (int64_t b = 0; b < a.n_block; b += 8, w += 8 * F::BYTES) {
            const int n = int(std::min<int64_t>(a.n_block - b, 8));
            block_sums<NX> s;
            if constexpr (F::BLOCK == 32)
                add_blocks32<F>(w, b, n, x, a, s);
            else
                add_blocks256<F>(w, b, n, x, a, s);
            for (int c = 0; c < NX; c++) {
                __m256 dx = _mm256_castsi256_ps(load32(x + c * a.stride + a.d_at + b * 4));
                __m256 v = _mm256_fmadd_ps(_mm256_mul_ps(s.d, dx), _mm256_cvtepi32_ps(s.dot[c]), p[c]);
                if (F::M >= 0 && F::BLOCK == 32)
                    v = _mm256_fmadd_ps(_mm256_mul_ps(s.m, dx), _mm256_cvtepi32_ps(s.min[c]), v);
                if (F::M >= 0 && F::BLOCK == 256)
                    v = _mm256_fnmadd_ps(_mm256_mul_ps(s.m, dx), _mm256_cvtepi32_ps(s.min[c]), v);
                p[c] = n == 8 ? v : _mm256_blendv_ps(p[c], v, first_lanes(n)); // a lane without a block keeps its sum
            }
        }
        for (int c = 0; c < NX; c++)
            out[c * VEC_ROWS + r] = tree8(p[c]);
    }
}

template <class F> AVX2 static void avx2_vec(const vec_rows &v, float *out) {
    if (v.n_x == VEC_X)
        return avx2_vec_rows<F, VEC_X>(v, v.x, out);
    for (int c = 0; c < v.n_x; c++)
        avx2_vec_rows<F, 1>(v, v.x + c * v.a.stride, out + c * VEC_ROWS);
}

// --- _vec, floats: sixteen partial sums are two registers

template <int TYPE> AVX2_INLINE __m256 load_floats8(const uint8_t *p) {
    if (TYPE == TYPE_F16)
        return _mm256_cvtph_ps(load16(p));
    if (TYPE == TYPE_BF16)
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(p)), 16));
    return _mm256_castsi256_ps(load32(p));
}

// NW weight rows times NX rows of x. The last n % 16 values are copied, so that nothing is read behind a row, and
// change only the sums that they belong to.
template <int TYPE, int NW, int NX>
AVX2_INLINE void avx2_floats(const vec_rows &rows, const uint8_t *w, const uint8_t *x, float *out) {
    constexpr int SIZE = TYPE == TYPE_F32 ? 4 : 2;
    __m256 p[NW][NX][2];
    for (int i = 0; i < NW; i++)
        for (int j = 0; j < NX; j++)
            p[i][j][0] = p[i][j][1] = _mm256_setzero_ps();
    const int64_t rest = rows.a.n % 16;
    for (const uint8_t *end = x + (rows.a.n - rest) * 4; x < end; x += 64, w += 16 * SIZE) {
        if (NX == 1)
            for (int i = 0; i < NW; i++)
                _mm_prefetch(reinterpret_cast<const char *>(w + i * rows.row_bytes + PREFETCH_BYTES / NW), _MM_HINT_T0);
        for (int h = 0; h < 2; h++) {
            __m256 v[NX];
            for (int j = 0; j < NX; j++)
                v[j] = load_floats8<TYPE_F32>(x + j * rows.a.stride + h * 32);
            for (int i = 0; i < NW; i++) {
                __m256 u = load_floats8<TYPE>(w + i * rows.row_bytes + h * 8 * SIZE);
                for (int j = 0; j < NX; j++)
                    p[i][j][h] = _mm256_fmadd_ps(u, v[j], p[i][j][h]);
            }
        }
    }
    for (int i = 0; i < NW; i++)
        for (int j = 0; j < NX; j++) {
            if (rest) {
                uint8_t u[64] = {}, v[64] = {};
                memcpy(u, w + i * rows.row_bytes, size_t(rest) * SIZE);
                memcpy(v, x + j * rows.a.stride, size_t(rest) * 4);
                for (int h = 0; h < 2; h++) {
                    __m256 s = p[i][j][h];
                    s = _mm256_fmadd_ps(load_floats8<TYPE>(u + h * 8 * SIZE), load_floats8<TYPE_F32>(v + h * 32), s);
                    p[i][j][h] = _mm256_blendv_ps(p[i][j][h], s, first_lanes(int(rest) - h * 8));
                }
            }
            out[j * VEC_ROWS + i] = tree8(_mm256_add_ps(p[i][j][0], p[i][j][1]));
        }
}

template <int TYPE> AVX2 static void avx2_vec_floats(const vec_rows &v, float *out) {
    for (int c = 0; c < v.n_x;) {
        const bool two = c + 2 <= v.n_x;
        const uint8_t *x = v.x + c * v.a.stride;
        float *to = out + c * VEC_ROWS;
        for (int r = 0; r < v.n_w;) {
            const uint8_t *w = v.w + r * v.row_bytes;
            const int left = v.n_w - r, step = two ? (left < 3 ? 1 : 3) : (left < 4 ? 1 : 4);
            if (two)
                step == 3 ? avx2_floats<TYPE, 3, 2>(v, w, x, to + r) : avx2_floats<TYPE, 1, 2>(v, w, x, to + r);
            else
                step == 4 ? avx2_floats<TYPE, 4, 1>(v, w, x, to + r) : avx2_floats<TYPE, 1, 1>(v, w, x, to + r);
            r += step;
        }
        c += two ? 2 : 1;
    }
}

// --- _mm, AVX-512: panels of 32 weight rows
//
// A panel holds, per block in the order of the partial sums, units of 128 bytes, one int32 or float per weight row:
//     BLOCK / 4  four integers, int8; multiplied with their scales where N_SUB is 1, which fits, negated if NEG says so
//     N_SUB      int32 scales, where N_SUB > 1
//     8          two mins, int16, where a block of 256 has them
//     1          what makes up for the 128 that ACT_WALK adds to each integer of x
//     1          d
//     1          m, where a block has it
template <class F> struct avx512_panel {
    enum {
        SCALES_AT = F::BLOCK / 4,
        MINS_AT = SCALES_AT + (F::N_SUB > 1 ? int(F::N_SUB) : 0),
        FIX_AT = MINS_AT + (F::BLOCK == 256 && F::M >= 0 ? 8 : 0),
        UNITS = FIX_AT + 2 + (F::M >= 0)
    };
};

// Quants 32 i to 32 i + 31 of two rows as signed integers.
template <class F> AVX2_INLINE two signed_quants2(const uint8_t *a, const uint8_t *b, int i) {
    const __m256i off = _mm256_set1_epi8(char(F::OFF));
    two v;
    if constexpr (F::BLOCK == 32) {
        v = F::halves(a, b);
        v = {_mm256_permute2x128_si256(v.lo, v.hi, 0x20), _mm256_permute2x128_si256(v.lo, v.hi, 0x31)};
    } else {
        v = {F::quants(a, i), F::quants(b, i)};
    }
    return {_mm256_sub_epi8(v.lo, off), _mm256_sub_epi8(v.hi, off)};
}

// 32 int8 multiplied with the scales of the two halves; the products fit.
AVX2_INLINE __m256i scaled8(__m256i v, __m256i scale) {
    __m256i lo = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(v)),
            hi = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(v, 1));
    lo = _mm256_mullo_epi16(lo, _mm256_permute2x128_si256(scale, scale, 0x00));
    hi = _mm256_mullo_epi16(hi, _mm256_permute2x128_si256(scale, scale, 0x11));
    return _mm256_permute4x64_epi64(_mm256_packs_epi16(lo, hi), 0xd8);
}

// Sixteen rows of eight int32: v[k] has element k of all rows.
AVX512_INLINE void transpose16(const __m256i *row, __m512i *v) {
    __m512i t[8];
    for (int h = 0; h < 2; h++) {
        __m512i r[4], u[4];
        for (int i = 0; i < 4; i++)
            r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(row[h * 8 + i]), row[h * 8 + i + 4], 1);
        for (int i = 0; i < 4; i += 2) {
            u[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
            u[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
        }
        for (int k = 0; k < 2; k++) {
            t[h * 4 + 2 * k] = _mm512_unpacklo_epi64(u[k], u[k + 2]);
            t[h * 4 + 2 * k + 1] = _mm512_unpackhi_epi64(u[k], u[k + 2]);
        }
    }
    for (int k = 0; k < 4; k++) {
        v[k] = _mm512_shuffle_i32x4(t[k], t[k + 4], 0x88);
        v[k + 4] = _mm512_shuffle_i32x4(t[k], t[k + 4], 0xdd);
    }
}

// One half of a panel's block: sixteen rows. `to` is the half's first unit.
template <class F> AVX512_INLINE void avx512_unpack16(const uint8_t *const *block, uint8_t *to) {
    using P = avx512_panel<F>;
    __m256i scale[16], row[16];
    __m512i v[8], fix = _mm512_setzero_si512();
    if constexpr (F::BLOCK == 256)
        for (int r = 0; r < 16; r++) {
            scale[r] = F::scales(block[r]);
            if (F::NEG != 0)
                scale[r] = _mm256_sub_epi16(_mm256_setzero_si256(), scale[r]);
        }
    if (F::N_SUB > 1) {
        transpose16(scale, v);
        for (int k = 0; k < F::N_SUB / 2; k++) { // pair k: of neighbours, or of every other one, even ones first
            int s = F::N_SUB == 8 ? 2 * k : k % 4 * 4 + k / 4, step = F::N_SUB == 8 ? 1 : 2;
            _mm512_storeu_si512(to + (P::SCALES_AT + s) * 128, _mm512_srai_epi32(_mm512_slli_epi32(v[k], 16), 16));
            _mm512_storeu_si512(to + (P::SCALES_AT + s + step) * 128, _mm512_srai_epi32(v[k], 16));
        }
    }
    for (int i = 0; i < F::BLOCK / 32; i++) {
        for (int r = 0; r < 16; r += 2) {
            two v2 = signed_quants2<F>(block[r], block[r + 1], i);
            row[r] = v2.lo, row[r + 1] = v2.hi;
        }
        for (int r = 0; r < 16 && F::BLOCK == 256 && F::N_SUB == 1; r++)
            row[r] = scaled8(row[r], chunk_scale(scale[r], i));
        transpose16(row, v);
        __m512i sum[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        for (int k = 0; k < 8; k++) {
            _mm512_storeu_si512(to + (i * 8 + k) * 128, v[k]);
            sum[k / 4] = _mm512_dpbusd_epi32(sum[k / 4], _mm512_set1_epi8(1), v[k]);
        }
        for (int h = 0; h < 2 && F::N_SUB > 1; h++) {
            int s = F::N_SUB == 8 ? i : 2 * i + h;
            sum[h] = _mm512_mullo_epi32(sum[h], load64(to + (P::SCALES_AT + s) * 128));
        }
        fix = _mm512_sub_epi32(fix, _mm512_slli_epi32(_mm512_add_epi32(sum[0], sum[1]), 7));
    }
    if constexpr (F::BLOCK == 256 && F::M >= 0) {
        for (int r = 0; r < 16; r++)
            row[r] = F::mins(block[r]);
        transpose16(row, v);
        for (int k = 0; k < 8; k++)
            _mm512_storeu_si512(to + (P::MINS_AT + k) * 128, v[k]);
    }
    _mm512_storeu_si512(to + P::FIX_AT * 128, fix);
    float *d = reinterpret_cast<float *>(to + (P::FIX_AT + 1) * 128);
    for (int r = 0; r < 16; r += 8, d += 8) {
        _mm256_storeu_ps(d, scales8<F>([=](int k) { return block[r + k] + F::D; }));
        if (F::M >= 0)
            _mm256_storeu_ps(d + 32, scales8<F>([=](int k) { return block[r + k] + F::M; }));
    }
}

template <class F> AVX512 static void avx512_unpack(const uint8_t *const *row, int64_t n, uint8_t *panel) {
    const int64_t n_block = n / F::BLOCK;
    for (int64_t b = 0; b < n_block; b++) {
        uint8_t *to = panel + walk_index(b, n_block) * avx512_panel<F>::UNITS * 128;
        const uint8_t *block[32];
        for (int r = 0; r < 32; r++)
            block[r] = row[r] + b * F::BYTES;
        avx512_unpack16<F>(block, to);
        avx512_unpack16<F>(block + 16, to + 64);
    }
}

// acc += d dx sum, and the min term, of one block for NX rows of activations and 32 weight rows.
template <class F, int NX> AVX512_INLINE void avx512_block(const uint8_t *panel, const uint8_t *const *row,
                                                           const act_layout &a, int64_t b, __m512 (*acc)[2]) {
    using P = avx512_panel<F>;
    constexpr int STEP = F::N_SUB == 16 ? 4 : 8; // units of quants to a sum, or to a round of the loop
    __m512i s[NX][2], total[NX][2];
    for (int c = 0; c < NX; c++)
        for (int h = 0; h < 2; h++)
            total[c][h] = load64(panel + P::FIX_AT * 128 + h * 64);
    for (int i = 0; i < a.block / (4 * STEP); i++) {
        for (int c = 0; c < NX; c++)
            for (int h = 0; h < 2; h++)
                s[c][h] = F::N_SUB > 1 ? _mm512_setzero_si512() : total[c][h];
        const uint8_t *w = panel + i * (STEP * 128);
        const int64_t at = b * F::BLOCK + i * (STEP * 4);
#pragma GCC unroll 8
        for (int k = 0; k < STEP; k++) {
            __m512i w0 = load64(w + k * 128), w1 = load64(w + k * 128 + 64);
            for (int c = 0; c < NX; c++) {
                __m512i v = _mm512_set1_epi32(load_as<int32_t>(row[c] + at + k * 4));
                s[c][0] = _mm512_dpbusd_epi32(s[c][0], v, w0);
                s[c][1] = _mm512_dpbusd_epi32(s[c][1], v, w1);
            }
        }
        for (int c = 0; c < NX; c++)
            for (int h = 0; h < 2; h++)
                if (F::N_SUB > 1) {
                    __m512i scale = load64(panel + (P::SCALES_AT + i) * 128 + h * 64);
                    total[c][h] = _mm512_add_epi32(total[c][h], _mm512_mullo_epi32(s[c][h], scale));
                } else {
                    total[c][h] = s[c][h];
                }
    }
    for (int c = 0; c < NX; c++) {
        __m512 dx = _mm512_set1_ps(load_as<float>(row[c] + a.d_at + b * 4));
        for (int h = 0; h < 2; h++) {
            if (F::NEG != 0)
                total[c][h] = _mm512_sub_epi32(_mm512_setzero_si512(), total[c][h]);
            __m512 d = _mm512_castsi512_ps(load64(panel + (P::FIX_AT + 1) * 128 + h * 64));
            acc[c][h] = _mm512_fmadd_ps(_mm512_mul_ps(d, dx), _mm512_cvtepi32_ps(total[c][h]), acc[c][h]);
            if (F::M < 0)
                continue;
            __m512 m = _mm512_mul_ps(_mm512_castsi512_ps(load64(panel + (P::FIX_AT + 2) * 128 + h * 64)), dx);
            if (F::BLOCK == 32) {
                __m512i sum = _mm512_set1_epi32(load_as<int32_t>(row[c] + a.s_at + b * 4));
                acc[c][h] = _mm512_fmadd_ps(m, _mm512_cvtepi32_ps(sum), acc[c][h]);
            } else {
                __m512i sum = _mm512_setzero_si512();
                for (int k = 0; k < 8; k++) {
                    __m512i v = _mm512_set1_epi32(load_as<int32_t>(row[c] + a.s_at + b * 32 + k * 4));
                    sum = _mm512_dpwssd_epi32(sum, load64(panel + (P::MINS_AT + k) * 128 + h * 64), v);
                }
                acc[c][h] = _mm512_fnmadd_ps(m, _mm512_cvtepi32_ps(sum), acc[c][h]);
            }
        }
    }
}

// out[c][32] for NX rows of activations, row c at x + min(c, n_x - 1) * a.stride.
template <class F, int NX>
AVX512_INLINE void avx512_tile_rows(const uint8_t *panel, const uint8_t *x, int n_x, const act_layout &a, float *out) {
    const uint8_t *row[NX];
    for (int c = 0; c < NX; c++)
        row[c] = x + std::min(c, n_x - 1) * a.stride;
    float p[8][NX][32];
    for (int64_t j = 0, b = 0; j < 8; j++) {
        __m512 acc[NX][2];
        for (int c = 0; c < NX; c++)
            acc[c][0] = acc[c][1] = _mm512_setzero_ps();
        for (int64_t n = (a.n_block + 7 - j) / 8; n > 0; n--, b++, panel += avx512_panel<F>::UNITS * 128)
            avx512_block<F, NX>(panel, row, a, b, acc);
        for (int c = 0; c < NX; c++)
            for (int h = 0; h < 2; h++)
                _mm512_storeu_ps(p[j][c] + h * 16, acc[c][h]);
    }
    for (int c = 0; c < NX; c++)
        for (int h = 0; h < 32; h += 16) {
            __m512 q[8];
            for (int j = 0; j < 8; j++)
                q[j] = _mm512_loadu_ps(p[j][c] + h);
            __m512 even = _mm512_add_ps(_mm512_add_ps(q[0], q[4]), _mm512_add_ps(q[2], q[6]));
            __m512 odd = _mm512_add_ps(_mm512_add_ps(q[1], q[5]), _mm512_add_ps(q[3], q[7]));
            _mm512_storeu_ps(out + c * 32 + h, _mm512_add_ps(even, odd));
        }
}

template <class F>
AVX512 static void avx512_tile(const uint8_t *panel, const uint8_t *x, int n_x, const act_layout &a, float *out) {
    for (; n_x > 4; n_x -= MM_X) // once
        avx512_tile_rows<F, MM_X>(panel, x, n_x, a, out);
    for (; n_x > 0; n_x -= 2, x += 2 * a.stride, out += 2 * 32)
        avx512_tile_rows<F, 2>(panel, x, n_x, a, out);
}

// A float panel holds the weights as f32, four rows together: sixteen values of each, then the next sixteen; what is
// missing from the last sixteen is never used.
static int64_t float_panel_group(int64_t n) { return round_up(n, 16) * 4; } // floats of four rows

template <int TYPE> AVX2 static void avx2_unpack_floats(const uint8_t *const *row, int64_t n, uint8_t *panel) {
    constexpr int SIZE = TYPE == TYPE_F32 ? 4 : 2;
    for (int r = 0; r < PANEL; r++) {
        float *to = reinterpret_cast<float *>(panel) + r / 4 * float_panel_group(n) + r % 4 * 16;
        const uint8_t *from = row[r], *end = from + n / 16 * 16 * SIZE;
        for (; from < end; from += 16 * SIZE, to += 64)
            for (int h = 0; h < 16; h += 8)
                _mm256_storeu_ps(to + h, load_floats8<TYPE>(from + h * SIZE));
        for (int64_t k = 0; k < n % 16; k++)
            to[k] = q_value(TYPE, from + k * SIZE, 0);
    }
}

// 32 weight rows times NX rows of x. Only so many values are taken at a time that they stay in the first-level cache
// for all weight rows; the partial sums wait in memory.
template <int NX>
AVX512_INLINE void avx512_floats(const float *panel, const uint8_t *x, int64_t x_bytes, int64_t n, float *out) {
    constexpr int64_t PART = 1024;
    float sums[32 * NX][16];
    for (int64_t begin = 0; begin < n; begin += PART) {
        const int64_t end = std::min(begin + PART, n), whole = end / 16 * 16;
        const __mmask16 rest = __mmask16((1 << (end - whole)) - 1);
        for (int r = 0; r < 32; r += 4) {
            __m512 p[4][NX];
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < NX; j++)
                    p[i][j] = begin ? _mm512_loadu_ps(sums[r * NX + j * 4 + i]) : _mm512_setzero_ps();
            const float *w = panel + r / 4 * float_panel_group(n) + begin * 4;
            const uint8_t *v = x + begin * 4;
            for (const uint8_t *last = x + whole * 4; v < last; v += 64, w += 64) {
                __m512 u[4];
                for (int i = 0; i < 4; i++)
                    u[i] = _mm512_loadu_ps(w + i * 16);
                for (int j = 0; j < NX; j++)
                    for (int i = 0; i < 4; i++)
                        p[i][j] = _mm512_fmadd_ps(u[i], _mm512_loadu_ps(v + j * x_bytes), p[i][j]);
            }
            for (int j = 0; j < NX; j++)
                for (int i = 0; i < 4; i++) {
                    if (rest)
                        p[i][j] = _mm512_mask3_fmadd_ps(_mm512_loadu_ps(w + i * 16),
                                                        _mm512_maskz_loadu_ps(rest, v + j * x_bytes), p[i][j], rest);
                    _mm512_storeu_ps(sums[r * NX + j * 4 + i], p[i][j]);
                }
        }
    }
    for (int r = 0; r < 32; r++)
        for (int j = 0; j < NX; j++) {
            __m512 s = _mm512_loadu_ps(sums[r / 4 * 4 * NX + j * 4 + r % 4]);
            out[j * 32 + r] = tree8(_mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1)));
        }
}

AVX512 static void avx512_tile_floats(const uint8_t *panel, const uint8_t *x, int n_x, const act_layout &a,
                                      float *out) {
    const float *w = reinterpret_cast<const float *>(panel);
    if (n_x == MM_X)
        avx512_floats<MM_X>(w, x, a.stride, a.n, out);
    else
        for (int c = 0; c < n_x; c++)
            avx512_floats<1>(w, x + c * a.stride, 0, a.n, out + c * 32);
}

#endif // __x86_64__

// --- the operation

// What multiplies one format at one level. mm_from 0: the _vec kernel serves all row counts.
struct matmul_kernels {
    const char *path;
    int vec_form, mm_from; // rows of x from which the _mm kernel is faster
    void (*vec)(const vec_rows &, float *out);
    void (*unpack)(const uint8_t *const *row, int64_t n, uint8_t *panel);
    void (*tile)(const uint8_t *panel, const uint8_t *x, int n_x, const act_layout &, float *out); // out[n_x][32]
    int64_t panel_bytes; // of a panel, per block
};

template <int TYPE, int BLOCK, int BYTES, int SUB, bool MINS> static matmul_kernels choose_kernels(cpu_level level) {
    matmul_kernels k = {"plain", ACT_PLAIN, 0, plain_vec<TYPE, BLOCK, BYTES, SUB, MINS>, nullptr, nullptr, 0};
    if (level == CPU_PLAIN)
        return k;
#if defined(__x86_64__)
    if constexpr (BLOCK == 1) {
        k = {"avx512", 0, 12, avx2_vec_floats<TYPE>, avx2_unpack_floats<TYPE>, avx512_tile_floats, PANEL * 4};
    } else {
        using F = fmt<TYPE>;
        const int form = BLOCK == 32 ? ACT_PAIRS : ACT_PLAIN, bytes = avx512_panel<F>::UNITS * 128;
        k = {"avx512", form, 5, avx2_vec<F>, avx512_unpack<F>, avx512_tile<F>, bytes};
    }
    if (level == CPU_AVX2)
        k.path = "avx2", k.mm_from = 0;
#endif
    return k;
}

static matmul_kernels find_kernels(int type, cpu_level level) {
#define KERNELS_CASE(name, id, block, bytes, sub, act, mins)                                                           \
    case id:                                                                                                           \
        return choose_kernels<id, block, bytes, sub, mins != 0>(level);
    switch (type) { Q_FORMATS(KERNELS_CASE) }
#undef KERNELS_CASE
    return {};
}

// Which family of kernels serves a format: "avx512", "avx2" or "plain".
static const char *cpu_matmul_path(int type, cpu_level level) { return find_kernels(type, level).path; }

// One product while it runs.
struct matmul_job {
    const matmul_op &op;
    const matmul_kernels &k;
    act_layout act;
    const uint8_t *w; // [n_group * n_out] rows, row_bytes apart
    int64_t row_bytes;
    const uint8_t *x; // row t of group g at g * x_group + t * act.stride, as act.form says, or floats
    int64_t x_group;
    float *y;
    const float *bias; // [n_group * n_out] or null
};

// y[t][at ...] = r, plus a bias, plus what y was.
static void put_results(const matmul_job &m, int64_t t, int64_t at, const float *r, int64_t n) {
    float *y = m.y + t * m.op.ld_y + at;
    for (int64_t i = 0; i < n; i++) {
        float v = m.bias ? r[i] + m.bias[at + i] : r[i];
        y[i] = m.op.accumulate ? y[i] + v : v;
    }
}

// Weight rows [begin, end) of all groups times every row of x, in pieces that stay in the first-level cache meanwhile.
static void matmul_vec(const matmul_job &m, int64_t begin, int64_t end) {
    const int64_t most = std::max<int64_t>(4, std::min<int64_t>(VEC_ROWS, 8192 / m.row_bytes));
    float r[VEC_X][VEC_ROWS];
    while (begin < end) {
        const int64_t g = begin / m.op.n_out, n = std::min({most, end - begin, (g + 1) * m.op.n_out - begin});
        for (int64_t t = 0; t < m.op.n_rows; t += VEC_X) {
            const int n_x = int(std::min<int64_t>(VEC_X, m.op.n_rows - t));
            const uint8_t *x = m.x + g * m.x_group + t * m.act.stride;
            m.k.vec({m.w + begin * m.row_bytes, m.row_bytes, int(n), n_x, x, m.act}, r[0]);
            for (int c = 0; c < n_x; c++)
                put_results(m, t + c, begin, r[c], n);
        }
        begin += n;
    }
}

// Panel `panel` of all groups times rows [t0, t1) of x. Rows that the last panel of a group lacks repeat its last one.
static void matmul_mm(const matmul_job &m, int64_t panel, int64_t t0, int64_t t1, uint8_t *space) {
    const int64_t per_group = (m.op.n_out + PANEL - 1) / PANEL;
    const int64_t g = panel / per_group, first = panel % per_group * PANEL;
    const int64_t n = std::min<int64_t>(PANEL, m.op.n_out - first), at = g * m.op.n_out + first;
    const uint8_t *row[PANEL];
    for (int64_t r = 0; r < PANEL; r++)
        row[r] = m.w + (at + std::min(r, n - 1)) * m.row_bytes;
    m.k.unpack(row, m.op.n_in, space);
    float r[MM_X][PANEL];
    for (int64_t t = t0; t < t1; t += MM_X) {
        const int n_x = int(std::min<int64_t>(MM_X, t1 - t));
        m.k.tile(space, m.x + g * m.x_group + t * m.act.stride, n_x, m.act, r[0]);
        for (int c = 0; c < n_x; c++)
            put_results(m, t + c, at, r[c], n);
    }
}

// x as the kernels want it: quantized into `out`, all rows of a group together.
static void quantize_rows(backend *be, matmul_job &m, const float *x, uint8_t *out) {
    const matmul_op &op = m.op;
    auto quantize = plain_quantize;
#if defined(__x86_64__)
    if (be->level != CPU_PLAIN)
        quantize = avx2_quantize;
#endif
    const int64_t grain = std::max<int64_t>(1, 16384 / op.n_in);
    parallel(be->pool, int64_t(op.n_group) * op.n_rows, grain, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; i++)
            quantize(x + i % op.n_rows * op.ld_x + i / op.n_rows * op.n_in, m.act, out + i * m.act.stride);
    });
    m.x = out;
    m.x_group = op.n_rows * m.act.stride;
}

// How one product runs: its kernels, whether they are the _mm ones, and what of the scratch space is for what.
struct matmul_plan {
    matmul_kernels k;
    bool mm;
    act_layout act;
    int64_t x_bytes, panel_bytes; // all rows of activations; a panel of one worker
};

// Never smaller for more rows: a reserve for the most rows is enough for fewer.
static matmul_plan plan_matmul(const backend *be, const matmul_op *op, const format &f) {
    matmul_plan p = {find_kernels(f.type, be->level), false, {}, 0, 0};
    p.mm = p.k.mm_from > 0 && op->n_rows >= p.k.mm_from;
    if (f.act == ACT_F32) {
        p.act = {ACT_PLAIN, 1, op->n_in, op->n_in, 0, 0, op->ld_x * int64_t(sizeof(float))};
    } else {
        p.act = act_plan(f.act, p.mm ? int(ACT_WALK) : p.k.vec_form, op->n_in);
        p.x_bytes = int64_t(op->n_group) * op->n_rows * p.act.stride;
    }
    if (p.mm)
        p.panel_bytes = round_up(op->n_in, 16) / f.block * p.k.panel_bytes;
    return p;
}

static uint64_t matmul_bytes(const backend *be, const matmul_plan &p) {
    return uint64_t(std::max<int64_t>(64, p.x_bytes + p.panel_bytes * be->pool.size));
}

static uint64_t cpu_matmul_scratch(backend *be, const matmul_op *op, const mat *w) {
    const format *f = find_format(w->type);
    return f ? matmul_bytes(be, plan_matmul(be, op, *f)) : 0;
}

static void cpu_matmul(backend *be, const matmul_op *op, mem y, const mat *w, mem x, mem bias) {
    const format *f = find_format(w->type);
    if (!f || op->n_in % f->block != 0) {
        cpu_error(be, "matmul: the weight's format does not fit");
        return;
    }
    if (op->n_rows <= 0 || op->n_out <= 0 || op->n_group <= 0)
        return;
    const matmul_plan p = plan_matmul(be, op, *f);
    uint8_t *space = cpu_scratch(be, matmul_bytes(be, p));
    if (!space)
        return;
    matmul_job m = {*op, p.k,          p.act,  at<const uint8_t>(w->data), int64_t(w->row_bytes), at<const uint8_t>(x),
                    0,   at<float>(y), nullptr};
    m.x_group = op->n_in * int64_t(sizeof(float));
    if (op->has_bias)
        m.bias = at<const float>(bias);
    if (f->act != ACT_F32)
        quantize_rows(be, m, at<const float>(x), space);

    const int64_t n_rows = op->n_rows, n_group = op->n_group, workers = be->pool.size;
    if (!p.mm) { // pieces small enough to end together, large enough that handing one out costs nothing
        const int64_t n = n_group * op->n_out, bytes = n * m.row_bytes;
        const int64_t piece = std::max<int64_t>(32768, std::min<int64_t>(bytes / (workers * 8), 1 << 20));
        parallel(be->pool, n, std::max<int64_t>(1, piece / m.row_bytes),
                 [&](int64_t begin, int64_t end, int) { matmul_vec(m, begin, end); });
        return;
    }
    // A piece is a panel and all rows of x, or a part of them where there are too few panels for all workers.
    const int64_t panels = n_group * ((op->n_out + PANEL - 1) / PANEL);
    int64_t parts = panels >= workers * 4 ? 1 : std::min((workers * 4 + panels - 1) / panels, n_rows / 64 + 1);
    const int64_t part = round_up((n_rows + parts - 1) / parts, MM_X);
    parts = (n_rows + part - 1) / part;
    const int64_t work = std::min(n_rows, part) * PANEL * op->n_in;
    const int64_t grain = std::max<int64_t>(1, 500000 / work);
    parallel(be->pool, panels * parts, grain, [&](int64_t begin, int64_t end, int worker) {
        for (int64_t i = begin; i < end; i++)
            matmul_mm(m, i / parts, i % parts * part, std::min(n_rows, (i % parts + 1) * part),
                      space + p.x_bytes + worker * p.panel_bytes);
    });
}

// ---- operations other than matmul ----
//
// A body is written once in plain C++ and compiled three times: cpu_at inlines it into a function for the wanted
// instruction set, where the compiler may use wide registers and fused instructions, but no other order. Only the
// inner products of attend are written by hand for each.

#define CPU_BODY static inline __attribute__((always_inline))
#define CPU_EACH(i) [&](int64_t i) __attribute__((always_inline))
#if defined(__x86_64__)
template <auto BODY, class... A> AVX2 static void cpu_at_avx2(A... args) { BODY(args...); }
template <auto BODY, class... A> AVX512 static void cpu_at_avx512(A... args) { BODY(args...); }
#endif

template <auto BODY, class... A> static void cpu_at(cpu_level level, A... args) {
#if defined(__x86_64__)
    if (level == CPU_AVX512)
        return cpu_at_avx512<BODY>(args...);
    if (level == CPU_AVX2)
        return cpu_at_avx2<BODY>(args...);
#endif
    (void)level;
    BODY(args...);
}

// body(t) for each row t, which takes `work` elementary steps. Little work stays on the calling thread, since waking
// another costs microseconds.
template <class F> static void each_row(backend *be, int64_t n_rows, int64_t work, F &&body) {
    parallel(be->pool, n_rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(work, 1)),
             [&](int64_t begin, int64_t end, int) {
                 for (int64_t t = begin; t < end; t++)
                     body(t);
             });
}

// y[i] = value(i) for i < n, by sixteen through the stack: y may be an operand of value, and the compiler would have to
// assume any overlap.
template <class F> CPU_BODY void fill_row(float *y, int64_t n, F value) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        float v[16];
        for (int j = 0; j < 16; j++)
            v[j] = value(i + j);
        memcpy(y + i, v, sizeof v);
    }
    for (; i < n; i++)
        y[i] = value(i);
}

// e^x: x = n ln 2 + r with n rounded by adding 1.5 * 2^23, a polynomial in r, and 2^n as two factors, so that results
// below 2^-126 are rounded once. Within 1 ulp. NaN stays; the limits lie where the result is inf and 0 already.
CPU_BODY float cpu_exp(float x) {
    const float round = 12582912.0f;
    x = x > 89.0f ? 89.0f : x;
    x = x < -105.0f ? -105.0f : x;
    float shifted = std::fma(x, 1.44269504f, round), n = shifted - round;
    float r = std::fma(n, 1.90465421e-09f, std::fma(n, -0.693147182f, x));
    float p = std::fma(r, 1.39269268e-3f, 8.36377405e-3f);
    p = std::fma(r, p, 4.16665487e-2f);
    p = std::fma(r, p, 0.166665733f);
    p = std::fma(r, p, 0.5f);
    p = std::fma(r * r, p, r) + 1.0f;
    uint32_t whole = float_bits(shifted) - float_bits(round), half = uint32_t(int32_t(whole) >> 1);
    return p * q_float((half + 127) << 23) * q_float((whole - half + 127) << 23);
}

// tanh x: an odd polynomial up to 0.625, 1 - 2 / (e^2|x| + 1) beyond. Within 3 ulp.
CPU_BODY float cpu_tanh(float x) {
    float a = q_float(float_bits(x) & 0x7fffffff), z = x * x;
    float p = std::fma(z, -6.09670812e-3f, 2.09971741e-2f);
    p = std::fma(z, p, -5.38509078e-2f);
    p = std::fma(z, p, 0.133327693f);
    p = std::fma(z, p, -0.333333284f);
    float small = x * std::fma(z, p, 1.0f), large = 1.0f - 2.0f / (cpu_exp(a + a) + 1.0f);
    large = q_float(float_bits(large) | (float_bits(x) & 0x80000000));
    return a <= 0.625f ? small : large;
}

// ---- memory ----

// Anonymous mappings: zeros that take memory only where they are written, so a pool of pages may be larger than what is
// in use of it.
static uint8_t *map_zeros(uint64_t bytes) {
    void *p = mmap(nullptr, std::max<uint64_t>(bytes, 1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return p == MAP_FAILED ? nullptr : static_cast<uint8_t *>(p);
}

static mem cpu_alloc(backend *be, uint64_t bytes) {
    uint8_t *p = map_zeros(bytes);
    try {
        if (p)
            be->allocations.push_back({p, bytes});
        be->allocated += p ? bytes : 0;
    } catch (const std::bad_alloc &) {
        backend::allocation{p, bytes}.unmap();
        p = nullptr;
    }
    return {p, 0};
}

// Null where `m` is not one of ours.
static backend::allocation *find_allocation(backend *be, mem m) {
    for (backend::allocation &a : be->allocations)
        if (a.data == m.handle)
            return &a;
    return nullptr;
}

static void cpu_free(backend *be, mem m) {
    if (backend::allocation *a = find_allocation(be, m)) {
        a->unmap();
        be->allocated -= a->bytes;
        *a = be->allocations.back();
        be->allocations.pop_back();
    }
}

// The mapping's own size counts: what is beyond it is new and zero.
static mem cpu_grow(backend *be, mem m, uint64_t, uint64_t bytes) {
    backend::allocation *a = find_allocation(be, m);
    if (!a)
        return {};
    if (bytes <= a->bytes)
        return m;
#if defined(__linux__)
    void *p = mremap(a->data, std::max<uint64_t>(a->bytes, 1), bytes, MREMAP_MAYMOVE);
    if (p == MAP_FAILED)
        return {};
#else
    uint8_t *p = map_zeros(bytes);
    if (!p)
        return {};
    memcpy(p, a->data, a->bytes);
    a->unmap();
#endif
    be->allocated += bytes - a->bytes;
    *a = {static_cast<uint8_t *>(p), bytes};
    return {p, m.offset};
}

static uint64_t cpu_allocated(backend *be) { return be->allocated.load(); }

static mem cpu_weights(backend *, const void *host, uint64_t) { return {const_cast<void *>(host), 0}; }

static void cpu_put(backend *, mem to, const void *from, uint64_t bytes) { memcpy(at<uint8_t>(to), from, bytes); }

static void cpu_get(backend *, void *to, mem from, uint64_t bytes) { memcpy(to, at<uint8_t>(from), bytes); }

static void cpu_copy(backend *, mem to, mem from, uint64_t bytes) {
    memmove(at<uint8_t>(to), at<uint8_t>(from), bytes);
}

static const char *cpu_sync(backend *be, int32_t *no_memory) {
    const char *error = be->error;
    *no_memory = be->no_memory;
    be->error = nullptr, be->no_memory = false;
    return error;
}

// ---- rows ----

CPU_BODY void scale_body(float *y, float s, int64_t n) {
    fill_row(
        y, n, CPU_EACH(i) { return y[i] * s; });
}

static void cpu_embed(backend *be, const embed_op *op, mem y, const mat *w, const step *st) {
    const int32_t *token = at<int32_t>(st->token);
    for (int64_t t = 0; t < op->n_rows; t++)
        if (token[t] < 0 || token[t] >= w->n_out)
            return cpu_error(be, "embed: a token id is outside the vocabulary");
    each_row(be, op->n_rows, op->n, [&](int64_t t) {
        float *row = at<float>(y) + t * op->n;
        decode_row(op->type, at<uint8_t>(w->data) + uint64_t(token[t]) * w->row_bytes, row, op->n);
        if (op->scale != 1.0f)
            cpu_at<scale_body>(be->level, row, op->scale, op->n);
    });
}

static void cpu_rows(backend *, const rows_op *op, mem y, mem x, const step *st) {
    const int32_t *from = at<int32_t>(st->out_row);
    for (int64_t i = 0; i < op->n_rows; i++)
        memcpy(at<float>(y) + i * op->n, at<float>(x) + int64_t(from[i]) * op->n, size_t(op->n) * sizeof(float));
}

// Sum of squares by the sixteen-sum rule; r = 1 / sqrt(sum / n + eps); y = (x * r) * w, or * (1 + w), or x * r.
CPU_BODY void norm_body(float *y, const float *x, const float *w, int64_t n, int kind, float eps) {
    float p[16] = {};
    int64_t k = 0;
    for (; k + 16 <= n; k += 16)
        for (int j = 0; j < 16; j++)
            p[j] = std::fma(x[k + j], x[k + j], p[j]);
    for (int j = 0; k + j < n; j++)
        p[j] = std::fma(x[k + j], x[k + j], p[j]);
    const float r = 1.0f / std::sqrt(tree16(p) / float(n) + eps);
    if (kind == 0)
        fill_row(
            y, n, CPU_EACH(i) { return x[i] * r; });
    else if (kind == 1)
        fill_row(
            y, n, CPU_EACH(i) { return x[i] * r * w[i]; });
    else
        fill_row(
            y, n, CPU_EACH(i) { return x[i] * r * (1.0f + w[i]); });
}

static void cpu_norm(backend *be, const norm_op *op, mem y, mem x, mem w) {
    each_row(be, op->n_rows, int64_t(op->n_part) * op->n, [&](int64_t t) {
        for (int64_t i = 0; i < op->n_part; i++)
            cpu_at<norm_body>(be->level, at<float>(y) + t * op->ld_y + i * op->n,
                              at<float>(x) + t * op->ld_x + i * op->n, at<float>(w), op->n, op->weight_kind, op->eps);
    });
}

// (a, b) becomes (fma(a, c, -(b * s)), fma(a, s, b * c)); `cs` holds c and s of each pair.
CPU_BODY void rope_body(float *x, const float *cs, const rope_op *op) {
    const int half = op->n_rot / 2, stride = op->pairing ? 1 : 2, other = op->pairing ? half : 1;
    const float sign = op->inverse ? -1.0f : 1.0f;
    for (int h = 0; h < op->n_head; h++) {
        float *v = x + int64_t(h) * op->head_dim + op->first;
        for (int i = 0; i < half; i++) {
            float a = v[i * stride], b = v[i * stride + other], c = cs[2 * i], s = sign * cs[2 * i + 1];
            v[i * stride] = std::fma(a, c, -(b * s));
            v[i * stride + other] = std::fma(a, s, b * c);
        }
    }
}

static void cpu_rope(backend *be, const rope_op *op, mem x, const step *st) {
    const float *cs = at<float>(st->rotary[op->table]);
    each_row(be, op->n_rows, int64_t(op->n_head) * op->n_rot, [&](int64_t t) {
        cpu_at<rope_body>(be->level, at<float>(x) + t * op->ld_x, cs + t * (op->n_rot / 2) * 2, op);
    });
}

// silu: (g / (1 + e^-g)) * u. gelu: its tanh form is g / (1 + e^-2v), v = sqrt(2 / pi) * (g + 0.044715 g^3). The
// clamped form: (u + 1) * (g / (1 + e^-1.702g)).
CPU_BODY float glu_value(float g, float u, int kind, float clamp_gate, float clamp_up) {
    g = clamp_gate > 0 && g > clamp_gate ? clamp_gate : g;
    u = clamp_up > 0 && u > clamp_up ? clamp_up : u;
    u = clamp_up > 0 && u < -clamp_up ? -clamp_up : u;
    float e = kind == 0 ? -g : kind == 1 ? -1.59576912f * std::fma(0.044715f * g * g, g, g) : -1.702f * g;
    return g / (1.0f + cpu_exp(e)) * (kind == 2 ? u + 1.0f : u);
}

CPU_BODY void glu_body(float *y, const float *g, const float *u, int64_t n, int kind, float clamp_gate,
                       float clamp_up) {
    fill_row(
        y, n, CPU_EACH(i) { return glu_value(g[i], u[i], kind, clamp_gate, clamp_up); });
}

static void cpu_glu(backend *be, const glu_op *op, mem y, mem gate, mem up) {
    each_row(be, op->n_rows, int64_t(op->n) * 2, [&](int64_t t) {
        cpu_at<glu_body>(be->level, at<float>(y) + t * op->ld_y, at<float>(gate) + t * op->ld_gate,
                         at<float>(up) + t * op->ld_up, op->n, op->kind, op->clamp_gate, op->clamp_up);
    });
}

CPU_BODY void add_body(float *y, const float *x, int64_t n) {
    fill_row(
        y, n, CPU_EACH(i) { return y[i] + x[i]; });
}

static void cpu_add(backend *be, const add_op *op, mem y, mem x) {
    each_row(be, op->n_rows, op->n, [&](int64_t t) {
        cpu_at<add_body>(be->level, at<float>(y) + t * op->n, at<float>(x) + t * op->n, op->n);
    });
}

// ---- the cache ----

#if defined(__x86_64__)
AVX2 static int64_t avx2_narrow(uint16_t *y, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(y + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    return i;
}
#endif

static void narrow_row(cpu_level level, uint16_t *y, const float *x, int64_t n) {
    int64_t i = 0;
#if defined(__x86_64__)
    if (level != CPU_PLAIN)
        i = avx2_narrow(y, x, n);
#endif
    (void)level;
    for (; i < n; i++)
        y[i] = float_to_half(x[i]);
}

// A row in q8_0: blocks of 32 values, the last one filled up with zeros, each a scale d in f16 and 32 int8.
//     amax = max |x_i|, compared as bit patterns, so that a NaN wins
//     d = amax / 127 rounded to f16;  q_i = nearest even of x_i * (1 / d), limited to [-127, 127]
//     d = 0: all q_i = 0;  d not finite: d = NaN, all q_i = 0
// The limit matters only where d is a denormal. A value that is read is d * q, which is exact in f32.
CPU_BODY void q8_0_body(uint8_t *y, const float *x, int64_t n) {
    for (int64_t begin = 0; begin < n; begin += 32, y += 34) {
        float v[32] = {};
        memcpy(v, x + begin, size_t(std::min<int64_t>(32, n - begin)) * sizeof(float));
        uint32_t amax = 0;
        for (int i = 0; i < 32; i++)
            amax = std::max(amax, float_bits(v[i]) & 0x7fffffff);
        uint16_t d = float_to_half(q_float(amax) / 127);
        if (d >= 0x7c00)
            d = 0x7e00;
        memcpy(y, &d, 2);
        memset(y + 2, 0, 32);
        if (d == 0 || d == 0x7e00)
            continue;
        const float factor = 1 / half_to_float(d);
        for (int i = 0; i < 32; i++) {
            float q = v[i] * factor;
            q = q > 127.0f ? 127.0f : q;
            q = q < -127.0f ? -127.0f : q;
            y[2 + i] = uint8_t(int8_t(q + 12582912.0f - 12582912.0f)); // 1.5 * 2^23
        }
    }
}

static void put_row(cpu_level level, int type, uint8_t *y, const float *x, int64_t n) {
    if (type == TYPE_Q8_0)
        cpu_at<q8_0_body>(level, y, x, n);
    else
        narrow_row(level, (uint16_t *)y, x, n);
}

static bool cpu_cache_type(int type) { return type == TYPE_F16 || type == TYPE_Q8_0; }

static void cpu_kv_put(backend *be, const kv_put_op *op, const seg *sg, mem k, mem v, const step *st) {
    if (!cpu_cache_type(sg->type) || op->type != sg->type || sg->ratio > 1)
        return cpu_error(be, "kv_put: the CPU stores one f16 or q8_0 row per token only");
    each_row(be, op->n_rows, int64_t(op->n_head_kv) * (op->dim_k + op->dim_v), [&](int64_t t) {
        const int64_t pos = at<int32_t>(st->pos)[t], seq = at<int32_t>(st->seq)[t];
        const int32_t id = at<int32_t>(st->table[sg->table])[seq * st->table_len + pos / PAGE_TOKENS];
        uint8_t *page = at<uint8_t>(sg->pool) + uint64_t(id) * sg->page_bytes;
        for (int64_t h = 0; h < op->n_head_kv; h++) {
            const uint64_t slot = uint64_t(h * PAGE_TOKENS + pos % PAGE_TOKENS);
            put_row(be->level, op->type, page + sg->k_offset + slot * sg->k_row_bytes,
                    at<float>(k) + t * op->ld_k + h * op->dim_k, op->dim_k);
            if (!op->shared)
                put_row(be->level, op->type, page + sg->v_offset + slot * sg->v_row_bytes,
                        at<float>(v) + t * op->ld_v + h * op->dim_v, op->dim_v);
        }
    });
}

// ---- attend ----
//
// The order of everything, for one query row of one head:
//   pages ascending, in each the visible slots i ascending; masked slots are skipped, never multiplied by zero
//   s_i = scale * dot(q, k_i) (sixteen-sum rule over dimensions); with a softcap s_i = cap * tanh(s_i / cap)
//   m' = max(m, s_i of this page); a = e^(m - m'); p_i = e^(s_i - m')
//   l = fma(l, a, sum of p_i), that sum by the sixteen-sum rule over slots (partial i % 16, the tree at the page's end)
//   acc_d = acc_d * a; then acc_d = fma(p_i, v_i[d], acc_d) for each i
// Every SPLIT_PAGES pages, counted from position 0, a new split starts with m = -inf, l = 0, acc = 0. Splits are merged
// in ascending order, empty ones left out and the first one taken as it is:
//   M' = max(M, m); A = e^(M - M'); b = e^(m - M'); L = fma(L, A, l * b); ACC_d = fma(ACC_d, A, acc_d * b)
// With a sink: M' = max(M, sink); A = e^(M - M'); L = fma(L, A, e^(sink - M')); ACC_d = ACC_d * A.
// y_d = ACC_d / L, or 0 where nothing is visible. So nothing depends on other rows, and neither blocks of rows nor
// threads show in a result.
//
// Keys and values are those of the cache's rows widened to f32, which is exact for f16 and for q8_0.
//
// Few query rows (decode) read the rows of a page directly, lanes being dimensions. Many rows (prefill) share keys and
// values widened in memory, lanes being sixteen query rows. The plain version always does the first.

enum { SPLIT_PAGES = 16, SPLIT_TOKENS = SPLIT_PAGES * int(PAGE_TOKENS), ATTEND_ROWS = 128, DIRECT_ROWS = 8 };
enum { SPLIT_FLOATS = 8 << 20 }; // of all states when splits are tasks of their own

// Value d of a row.
template <int TYPE> static inline float row_value(const uint8_t *row, int64_t d) {
    return TYPE == TYPE_Q8_0 ? q_value(TYPE_Q8_0, row + d / 32 * 34, int(d % 32)) : q_value(TYPE_F16, row + d * 2, 0);
}

// s[i] = dot(q, k_i) for n keys, ld_k bytes apart.
template <int TYPE> static void plain_dots(float *s, const float *q, const uint8_t *k, int64_t ld_k, int n, int dim) {
    for (int i = 0; i < n; i++) {
        float p[16] = {};
        for (int d = 0; d < dim; d++)
            p[d % 16] = std::fma(row_value<TYPE>(k + i * ld_k, d), q[d], p[d % 16]);
        s[i] = tree16(p);
    }
}

// acc[d] = fma(p[i], v[i][d], acc[d]) for slots [i0, i1).
template <int TYPE>
static void plain_values(float *acc, const float *p, const uint8_t *v, int64_t ld_v, int i0, int i1, int dim) {
    for (int i = i0; i < i1; i++)
        for (int d = 0; d < dim; d++)
            acc[d] = std::fma(p[i], row_value<TYPE>(v + i * ld_v, d), acc[d]);
}

#if defined(__x86_64__)
AVX2_INLINE __m256 floats8(const float *p) { return _mm256_loadu_ps(p); }

// 8 or 16 values of a row from d + 8 * b or d + 16 * b on. d and b stand apart so that the compiler sees which of them
// share a q8_0 block: d is a multiple of 32, or of 16 where the values end with d's block.
template <int TYPE> AVX2_INLINE __m256 row_floats8(const uint8_t *row, unsigned d, unsigned b) {
    if constexpr (TYPE == TYPE_Q8_0) {
        const uint8_t *block = row + d / 32 * 34 + b / 4 * 34, *q = block + 2 + d % 32 + b % 4 * 8;
        const __m256 scale = _mm256_cvtph_ps(_mm_set1_epi16(load_as<int16_t>(block)));
        return _mm256_mul_ps(
            scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(q)))));
    } else {
        return load_floats8<TYPE>(row + (d + b * 8) * (TYPE == TYPE_F32 ? 4 : 2));
    }
}

template <int TYPE> AVX512_INLINE __m512 row_floats16(const uint8_t *row, unsigned d, unsigned b) {
    if constexpr (TYPE == TYPE_Q8_0) {
        const uint8_t *block = row + d / 32 * 34 + b / 2 * 34;
        const __m512 scale = _mm512_cvtph_ps(_mm256_set1_epi16(load_as<int16_t>(block)));
        return _mm512_mul_ps(scale, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(block + 2 + d % 32 + b % 2 * 16))));
    } else if constexpr (TYPE == TYPE_F16) {
        return _mm512_cvtph_ps(load32(row + (d + b * 16) * 2));
    } else {
        return _mm512_loadu_ps(row + (d + b * 16) * 4);
    }
}

template <int TYPE> AVX2 static void avx2_widen(float *y, const uint8_t *row, int n) {
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int b = 0; b < 2; b++)
            _mm256_storeu_ps(y + i + b * 8, row_floats8<TYPE>(row, unsigned(i), unsigned(b)));
    for (; i < n; i++)
        y[i] = row_value<TYPE>(row, i);
}

// tree16 of four dot products at once, from what r_i = p_i + p_{i+8} gives.
AVX2_INLINE __m128 trees4(const __m256 *r) {
    __m128 h[4];
    for (int a = 0; a < 4; a++)
        h[a] = _mm_add_ps(_mm256_castps256_ps128(r[a]), _mm256_extractf128_ps(r[a], 1));
    __m128 x = _mm_add_ps(_mm_shuffle_ps(h[0], h[1], 0x44), _mm_shuffle_ps(h[0], h[1], 0xee));
    __m128 y = _mm_add_ps(_mm_shuffle_ps(h[2], h[3], 0x44), _mm_shuffle_ps(h[2], h[3], 0xee));
    return _mm_add_ps(_mm_shuffle_ps(x, y, 0x88), _mm_shuffle_ps(x, y, 0xdd));
}

// s[a * PAGE_TOKENS + i] = dot(q_a, k_i) for NQ queries [NQ, dim] and n keys; four pairs of them per pass, with two
// registers of partial sums each. n and dim are multiples of 16.
template <int NQ, int TYPE>
AVX2 static void avx2_dots(float *s, const float *q, const uint8_t *k, int64_t ld_k, int n, int dim) {
    constexpr int NK = 4 / NQ;
    for (int i = 0; i < n; i += NK) {
        __m256 lo[4], hi[4];
        for (int a = 0; a < 4; a++)
            lo[a] = hi[a] = _mm256_setzero_ps();
        for (int d = 0; d < dim; d += 16)
            for (int b = 0; b < NK; b++) {
                const uint8_t *row = k + (i + b) * ld_k;
                __m256 k0 = row_floats8<TYPE>(row, unsigned(d), 0), k1 = row_floats8<TYPE>(row, unsigned(d), 1);
                for (int a = 0; a < NQ; a++) {
                    lo[a * NK + b] = _mm256_fmadd_ps(k0, floats8(q + int64_t(a) * dim + d), lo[a * NK + b]);
                    hi[a * NK + b] = _mm256_fmadd_ps(k1, floats8(q + int64_t(a) * dim + d + 8), hi[a * NK + b]);
                }
            }
        for (int a = 0; a < 4; a++)
            lo[a] = _mm256_add_ps(lo[a], hi[a]);
        float r[4];
        _mm_storeu_ps(r, trees4(lo));
        for (int a = 0; a < NQ; a++)
            memcpy(s + a * PAGE_TOKENS + i, r + a * NK, NK * sizeof(float));
    }
}

// The same with eight pairs per pass and one register each.
template <int NQ, int TYPE>
AVX512 static void avx512_dots(float *s, const float *q, const uint8_t *k, int64_t ld_k, int n, int dim) {
    constexpr int NK = 8 / NQ;
    for (int i = 0; i < n; i += NK) {
        __m512 p[8];
        for (__m512 &x : p)
            x = _mm512_setzero_ps();
        for (int d = 0; d < dim; d += 16)
            for (int b = 0; b < NK; b++) {
                const __m512 key = row_floats16<TYPE>(k + (i + b) * ld_k, unsigned(d), 0);
                for (int a = 0; a < NQ; a++)
                    p[a * NK + b] = _mm512_fmadd_ps(key, _mm512_loadu_ps(q + int64_t(a) * dim + d), p[a * NK + b]);
            }
        __m256 half[8];
        for (int a = 0; a < 8; a++)
            half[a] = _mm256_add_ps(_mm512_castps512_ps256(p[a]), _mm512_extractf32x8_ps(p[a], 1));
        float r[8];
        _mm_storeu_ps(r, trees4(half));
        _mm_storeu_ps(r + 4, trees4(half + 4));
        for (int a = 0; a < NQ; a++)
            memcpy(s + a * PAGE_TOKENS + i, r + a * NK, NK * sizeof(float));
    }
}

// acc[a][d] = fma(p[a * step_q + i * step_i], v[i][d], acc[a][d]) for slots [i0, i1), rows of v ld_v bytes apart.
// acc [NQ, dim], dim a multiple of 16, in strips of NV registers, from d on, that stay in place.
template <int NQ, int NV, int TYPE> AVX2_INLINE void avx2_strip(float *acc, const float *p, int step_q, int step_i,
                                                                const uint8_t *v, int64_t ld_v, int i0, int i1, int dim,
                                                                int d) {
    __m256 sum[NQ][NV];
    for (int a = 0; a < NQ; a++)
        for (int b = 0; b < NV; b++)
            sum[a][b] = _mm256_loadu_ps(acc + int64_t(a) * dim + d + b * 8);
    for (int i = i0; i < i1; i++)
        for (int b = 0; b < NV; b++) {
            __m256 value = row_floats8<TYPE>(v + i * ld_v, unsigned(d), unsigned(b));
            for (int a = 0; a < NQ; a++)
                sum[a][b] = _mm256_fmadd_ps(_mm256_set1_ps(p[a * step_q + i * step_i]), value, sum[a][b]);
        }
    for (int a = 0; a < NQ; a++)
        for (int b = 0; b < NV; b++)
            _mm256_storeu_ps(acc + int64_t(a) * dim + d + b * 8, sum[a][b]);
}

template <int NQ, int TYPE> AVX2 static void avx2_values(float *acc, const float *p, int step_q, int step_i,
                                                         const uint8_t *v, int64_t ld_v, int i0, int i1, int dim) {
    int d = 0;
    for (; d + 64 / NQ <= dim; d += 64 / NQ)
        avx2_strip<NQ, 8 / NQ, TYPE>(acc, p, step_q, step_i, v, ld_v, i0, i1, dim, d);
    for (; d < dim; d += 16)
        avx2_strip<NQ, 2, TYPE>(acc, p, step_q, step_i, v, ld_v, i0, i1, dim, d);
}

// Where the partial sum of round c begins: bit-reversed (0, 8, 4, 12, 2, …), so that tree16 is a binary counter's
// carries.
static inline int reversed4(int c) { return (c & 1) * 8 + (c & 2) * 2 + (c & 4) / 2 + (c & 8) / 8; }

// s[i * 16 + a] = dot(q_a, k_i) for sixteen queries, transposed: q [dim, 16], and n keys, a multiple of 8.
AVX2 static void avx2_wide_dots(float *s, const float *q, const float *k, int64_t ld_k, int n, int dim) {
    for (int i = 0; i < n; i += 4) {
        __m256 level[5][8];
        for (int c = 0, up; c < 16; c++) {
            __m256 p[8];
            for (__m256 &x : p)
                x = _mm256_setzero_ps();
            for (int d = reversed4(c); d < dim; d += 16)
                for (int b = 0; b < 4; b++) {
                    __m256 key = _mm256_set1_ps(k[(i + b) * ld_k + d]);
                    p[2 * b] = _mm256_fmadd_ps(key, floats8(q + d * 16), p[2 * b]);
                    p[2 * b + 1] = _mm256_fmadd_ps(key, floats8(q + d * 16 + 8), p[2 * b + 1]);
                }
            for (up = 0; c >> up & 1; up++)
                for (int b = 0; b < 8; b++)
                    p[b] = _mm256_add_ps(level[up][b], p[b]);
            for (int b = 0; b < 8; b++)
                level[up][b] = p[b];
        }
        for (int b = 0; b < 8; b++)
            _mm256_storeu_ps(s + i * 16 + b * 8, level[4][b]);
    }
}

// Likewise for NG groups of sixteen: q [NG, dim, 16], s [NG, PAGE_TOKENS, 16].
template <int NG>
AVX512 static void avx512_wide_dots(float *s, const float *q, const float *k, int64_t ld_k, int n, int dim) {
    for (int i = 0; i < n; i += 8 / NG) {
        __m512 level[5][8];
        for (int c = 0, up; c < 16; c++) {
            __m512 p[8];
            for (__m512 &x : p)
                x = _mm512_setzero_ps();
            for (int d = reversed4(c); d < dim; d += 16)
                for (int b = 0; b < 8; b++)
                    p[b] = _mm512_fmadd_ps(_mm512_set1_ps(k[(i + b / NG) * ld_k + d]),
                                           _mm512_loadu_ps(q + (b % NG * dim + d) * 16), p[b]);
            for (up = 0; c >> up & 1; up++)
                for (int b = 0; b < 8; b++)
                    p[b] = _mm512_add_ps(level[up][b], p[b]);
            for (int b = 0; b < 8; b++)
                level[up][b] = p[b];
        }
        for (int b = 0; b < 8; b++)
            _mm512_storeu_ps(s + (b % NG * PAGE_TOKENS + i + b / NG) * 16, level[4][b]);
    }
}

template <int NQ, int NV, int TYPE> AVX512_INLINE void avx512_strip(float *acc, const float *p, int step_q, int step_i,
                                                                    const uint8_t *v, int64_t ld_v, int i0, int i1,
                                                                    int dim, int d) {
    __m512 sum[NQ][NV];
    for (int a = 0; a < NQ; a++)
        for (int b = 0; b < NV; b++)
            sum[a][b] = _mm512_loadu_ps(acc + int64_t(a) * dim + d + b * 16);
    for (int i = i0; i < i1; i++)
        for (int b = 0; b < NV; b++) {
            __m512 value = row_floats16<TYPE>(v + i * ld_v, unsigned(d), unsigned(b));
            for (int a = 0; a < NQ; a++)
                sum[a][b] = _mm512_fmadd_ps(_mm512_set1_ps(p[a * step_q + i * step_i]), value, sum[a][b]);
        }
    for (int a = 0; a < NQ; a++)
        for (int b = 0; b < NV; b++)
            _mm512_storeu_ps(acc + int64_t(a) * dim + d + b * 16, sum[a][b]);
}

template <int NQ, int TYPE> AVX512 static void avx512_values(float *acc, const float *p, int step_q, int step_i,
                                                             const uint8_t *v, int64_t ld_v, int i0, int i1, int dim) {
    int d = 0;
    for (; d + 64 <= dim; d += 64)
        avx512_strip<NQ, 4, TYPE>(acc, p, step_q, step_i, v, ld_v, i0, i1, dim, d);
    for (; d < dim; d += 16)
        avx512_strip<NQ, 1, TYPE>(acc, p, step_q, step_i, v, ld_v, i0, i1, dim, d);
}

#define BY_COUNT(f) (nq == 4 ? f<4, TYPE> : nq == 2 ? f<2, TYPE> : f<1, TYPE>)
#endif

// For nq = 1, 2 or 4 query rows; the plain versions take one.
template <int TYPE> static void page_dots(cpu_level level, int nq, float *s, const float *q, const uint8_t *k,
                                          int64_t ld_k, int n, int dim) {
#if defined(__x86_64__)
    if (level == CPU_AVX512)
        return BY_COUNT(avx512_dots)(s, q, k, ld_k, n, dim);
    if (level == CPU_AVX2)
        return BY_COUNT(avx2_dots)(s, q, k, ld_k, n, dim);
#endif
    (void)level, (void)nq;
    plain_dots<TYPE>(s, q, k, ld_k, n, dim);
}

template <int TYPE> static void page_values(cpu_level level, int nq, float *acc, const float *p, int step_q, int step_i,
                                            const uint8_t *v, int64_t ld_v, int i0, int i1, int dim) {
#if defined(__x86_64__)
    if (level == CPU_AVX512)
        return BY_COUNT(avx512_values)(acc, p, step_q, step_i, v, ld_v, i0, i1, dim);
    if (level == CPU_AVX2)
        return BY_COUNT(avx2_values)(acc, p, step_q, step_i, v, ld_v, i0, i1, dim);
#endif
    (void)level, (void)nq, (void)step_q, (void)step_i;
    if constexpr (TYPE != TYPE_F32)
        plain_values<TYPE>(acc, p, v, ld_v, i0, i1, dim);
}

// Scores of one query row become weights: s [PAGE_TOKENS], of which [lo, hi), not empty, is visible. Returns what acc
// is to be multiplied by.
CPU_BODY void softmax_body(float *s, int lo, int hi, float scale, float cap, float *m, float *l, float *a) {
    const int begin = lo & ~15;
    float best[16], part[16] = {}, top = *m;
    for (int j = 0; j < 16; j++)
        best[j] = top;
    for (int i = begin; i < hi; i += 16)
        for (int j = 0; j < 16; j++) {
            float x = s[i + j] * scale;
            x = cap > 0 ? cap * cpu_tanh(x / cap) : x;
            s[i + j] = x = i + j >= lo && i + j < hi ? x : -INFINITY;
            best[j] = x > best[j] ? x : best[j];
        }
    for (int j = 0; j < 16; j++)
        top = best[j] > top ? best[j] : top;
    for (int i = begin; i < hi; i += 16)
        for (int j = 0; j < 16; j++)
            part[j] += s[i + j] = cpu_exp(s[i + j] - top); // 0 where masked
    *a = cpu_exp(*m - top);
    *l = std::fma(*l, *a, tree16(part));
    *m = top;
}

// The same for sixteen query rows side by side, s [slot][16]; lo, hi, m, l and a are arrays of sixteen. Rows that see
// nothing here stay as they are.
CPU_BODY void softmax_wide_body(float *s, const int *lo, const int *hi, int begin, int end, float scale, float cap,
                                float *m, float *l, float *a) {
    float top[16], part[16][16] = {};
    memcpy(top, m, sizeof top);
    for (int i = begin; i < end; i++)
        for (int j = 0; j < 16; j++) {
            float x = s[i * 16 + j] * scale;
            s[i * 16 + j] = x = cap > 0 ? cap * cpu_tanh(x / cap) : x;
            x = i >= lo[j] && i < hi[j] ? x : -INFINITY;
            top[j] = x > top[j] ? x : top[j];
        }
    for (int i = begin; i < end; i++)
        for (int j = 0; j < 16; j++) {
            const float e = cpu_exp(s[i * 16 + j] - top[j]);
            s[i * 16 + j] = e;
            part[i % 16][j] += i >= lo[j] && i < hi[j] ? e : 0.0f;
        }
    for (int half = 8; half > 0; half /= 2) // tree16, for each column
        for (int i = 0; i < half; i++)
            for (int j = 0; j < 16; j++)
                part[i][j] += part[i + half][j];
    for (int j = 0; j < 16; j++) {
        const float e = cpu_exp(m[j] - top[j]);
        a[j] = lo[j] < hi[j] ? e : 1.0f;
        l[j] = lo[j] < hi[j] ? std::fma(l[j], e, part[0][j]) : l[j];
        m[j] = top[j];
    }
}

// total becomes the two in order. l is 0 only where nothing was visible.
CPU_BODY void merge_body(float *m, float *l, float *acc, float m1, float l1, const float *acc1, int dim) {
    if (l1 == 0)
        return;
    if (*l == 0) {
        *m = m1, *l = l1;
        memcpy(acc, acc1, size_t(dim) * sizeof(float));
        return;
    }
    const float top = m1 > *m ? m1 : *m, a = cpu_exp(*m - top), b = cpu_exp(m1 - top);
    *m = top;
    *l = std::fma(*l, a, l1 * b);
    fill_row(
        acc, dim, CPU_EACH(d) { return std::fma(acc[d], a, acc1[d] * b); });
}

CPU_BODY void finish_body(float *y, float m, float l, const float *acc, const float *sink, int dim) {
    float a = 1.0f;
    if (sink && l != 0) {
        const float top = *sink > m ? *sink : m;
        a = cpu_exp(m - top);
        l = std::fma(l, a, cpu_exp(*sink - top));
    }
    fill_row(
        y, dim, CPU_EACH(d) { return l == 0 ? 0.0f : acc[d] * a / l; });
}

// What query rows have gathered: m [rows], l [rows], acc [rows, pad_v].
struct attend_state {
    float *m, *l, *acc;
};

// One call of attend: the operands, and how its work is cut. A block is up to block_rows consecutive rows of one
// sequence; a task is a block, a KV head with its group of heads, and one split when split_tasks. A block's query rows
// are ordered by row, then head.
struct attend_job {
    backend *be;
    const attend_op *op;
    const seg *sg;
    const int32_t *pos, *seq, *table;
    const float *q, *sinks;
    float *y;
    int table_len, group, block_rows, n_block, n_split;
    int pad_k, pad_v; // the dimensions, padded to 16; unless plain
    int max_rows;     // query rows of a block, padded
    bool split_tasks;
    int32_t *blocks; // [n_block + 1], first row of each
    float *workers;  // worker_floats for each worker
    float *states;   // split_tasks: a state for each task
    int64_t worker_floats, state_floats;

    int first(int t) const { return op->window > 0 ? std::max(0, pos[t] - op->window + 1) : 0; }
    attend_state state(float *p) const { return {p, p + max_rows, p + 2 * max_rows}; }
};

// What a worker has of its own.
struct attend_space {
    float *q, *s, *k, *v, *states; // q [max_rows, pad_k], or [max_rows / 16, dim_k, 16] when the rows are many
    int *lo, *hi;                  // [max_rows], visible slots of the page
};

// Adds the weighted values of nq (1, 2 or 4) query rows, together when all see the same slots.
template <int TYPE> static void attend_values(const attend_job &j, int nq, float *acc, const float *p, int step_q,
                                              int step_i, const uint8_t *v, int64_t ld_v, const int *lo,
                                              const int *hi) {
    const bool same = std::count(lo, lo + nq, *lo) == nq && std::count(hi, hi + nq, *hi) == nq;
    for (int a = 0; a < (same ? 1 : nq); a++)
        if (lo[a] < hi[a])
            page_values<TYPE>(j.be->level, same ? nq : 1, acc + int64_t(a) * j.pad_v, p + a * step_q, step_q, step_i, v,
                              ld_v, lo[a], hi[a], j.pad_v);
}

// One page for n query rows, of which some see slots in [begin, end), reading its rows where they are.
template <int TYPE> static void attend_direct(const attend_job &j, const attend_space &w, int n, int begin, int end,
                                              const uint8_t *k, int64_t ld_k, const uint8_t *v, int64_t ld_v,
                                              attend_state st) {
    const cpu_level level = j.be->level;
    for (int r = 0, nq; r < n; r += nq) {
        nq = level == CPU_PLAIN ? 1 : n - r >= 4 ? 4 : n - r >= 2 ? 2 : 1;
        page_dots<TYPE>(level, nq, w.s + begin, w.q + int64_t(r) * j.pad_k, k + begin * ld_k, ld_k, end - begin,
                        j.op->dim_k);
        for (int i = r; i < r + nq; i++)
            if (float a; w.lo[i] < w.hi[i]) {
                cpu_at<softmax_body>(level, w.s + (i - r) * PAGE_TOKENS, w.lo[i], w.hi[i], j.op->scale, j.op->softcap,
                                     st.m + i, st.l + i, &a);
                cpu_at<scale_body>(level, st.acc + int64_t(i) * j.pad_v, a, j.pad_v);
            }
        attend_values<TYPE>(j, nq, st.acc + int64_t(r) * j.pad_v, w.s, PAGE_TOKENS, 1, v, ld_v, w.lo + r, w.hi + r);
    }
}

#if defined(__x86_64__)
// One page for many query rows, its slots [begin, end) widened.
static void attend_wide(const attend_job &j, const attend_space &w, int n, int begin, int end, const float *v,
                        int64_t ld_v, attend_state st) {
    const cpu_level level = j.be->level;
    for (int r = 0, left; r < n; r += 16) {
        left = std::min(n - r, 16);
        float a[16], *s = w.s + r / 16 % 2 * 16 * PAGE_TOKENS;
        const float *q = w.q + int64_t(r) * j.op->dim_k, *k = w.k + int64_t(begin) * j.pad_k;
        if (level == CPU_AVX2)
            avx2_wide_dots(s + begin * 16, q, k, j.pad_k, end - begin, j.op->dim_k);
        else if (r % 32 == 0) // this group and the next
            (n - r > 16 ? avx512_wide_dots<2> : avx512_wide_dots<1>)(s + begin * 16, q, k, j.pad_k, end - begin,
                                                                     j.op->dim_k);
        cpu_at<softmax_wide_body>(level, s, w.lo + r, w.hi + r, begin, end, j.op->scale, j.op->softcap, st.m + r,
                                  st.l + r, a);
        for (int i = 0; i < left; i++)
            cpu_at<scale_body>(level, st.acc + int64_t(r + i) * j.pad_v, a[i], j.pad_v);
        for (int i = 0, nq; i < left; i += nq) {
            nq = left - i >= 4 ? 4 : left - i >= 2 ? 2 : 1;
            attend_values<TYPE_F32>(j, nq, st.acc + int64_t(r + i) * j.pad_v, s + i, 1, 16, (const uint8_t *)v,
                                    ld_v * int64_t(sizeof(float)), w.lo + r + i, w.hi + r + i);
        }
    }
}
#endif

// Rows [t0, t1) with the heads of one KV head, over the pages of one split.
static void attend_split(const attend_job &j, const attend_space &w, int t0, int t1, int kv, int split, bool direct,
                         attend_state st) {
    const attend_op *op = j.op;
    const int n = (t1 - t0) * j.group, padded = (n + 15) & ~15;
    std::fill(st.m, st.m + padded, -INFINITY);
    std::fill(st.l, st.l + padded, 0.0f);
    std::fill(st.acc, st.acc + int64_t(n) * j.pad_v, 0.0f);
    int from = INT_MAX, to = -1; // positions that any row sees
    for (int t = t0; t < t1; t++)
        from = std::min(from, j.first(t)), to = std::max(to, j.pos[t]);
    const int last = std::min(to / PAGE_TOKENS, (split + 1) * SPLIT_PAGES - 1);
    for (int page = std::max(from / PAGE_TOKENS, split * SPLIT_PAGES); page <= last; page++) {
        const int base = page * PAGE_TOKENS;
        std::fill(w.lo + n, w.lo + padded, 0);
        std::fill(w.hi + n, w.hi + padded, 0);
        for (int r = 0; r < n; r++) {
            const int t = t0 + r / j.group;
            w.lo[r] = std::max(j.first(t) - base, 0), w.hi[r] = std::min(j.pos[t] + 1 - base, int(PAGE_TOKENS));
        }
        const int64_t id = j.table[int64_t(j.seq[t0]) * j.table_len + page];
        const uint8_t *rows = at<uint8_t>(j.sg->pool) + uint64_t(id) * j.sg->page_bytes;
        const int64_t ld_k = int64_t(j.sg->k_row_bytes),
                      ld_v = int64_t(op->shared ? j.sg->k_row_bytes : j.sg->v_row_bytes);
        const uint8_t *k = rows + j.sg->k_offset + kv * PAGE_TOKENS * ld_k;
        const uint8_t *v = op->shared ? k : rows + j.sg->v_offset + kv * PAGE_TOKENS * ld_v;
        const int begin = std::max(from - base, 0) & ~15, end = std::min((to - base + 16) & ~15, int(PAGE_TOKENS));
        const bool q8_0 = j.sg->type == TYPE_Q8_0;
        if (direct) {
            (q8_0 ? attend_direct<TYPE_Q8_0> : attend_direct<TYPE_F16>)(j, w, n, begin, end, k, ld_k, v, ld_v, st);
            continue;
        }
#if defined(__x86_64__)
        const auto widen = q8_0 ? avx2_widen<TYPE_Q8_0> : avx2_widen<TYPE_F16>;
        for (int64_t i = begin; i < end; i++) {
            widen(w.k + i * j.pad_k, k + i * ld_k, op->dim_k);
            if (!op->shared)
                widen(w.v + i * j.pad_v, v + i * ld_v, op->dim_v);
        }
        attend_wide(j, w, n, begin, end, op->shared ? w.k : w.v, op->shared ? j.pad_k : j.pad_v, st);
#endif
    }
}

static void attend_merge(const attend_job &j, int n, attend_state total, attend_state part) {
    for (int r = 0; r < n; r++)
        cpu_at<merge_body>(j.be->level, total.m + r, total.l + r, total.acc + int64_t(r) * j.pad_v, part.m[r],
                           part.l[r], part.acc + int64_t(r) * j.pad_v, j.pad_v);
}

static void attend_finish(const attend_job &j, int t0, int t1, int kv, attend_state total) {
    for (int r = 0; r < (t1 - t0) * j.group; r++) {
        const int64_t t = t0 + r / j.group, h = kv * j.group + r % j.group;
        cpu_at<finish_body>(j.be->level, j.y + t * j.op->ld_y + h * j.op->dim_v, total.m[r], total.l[r],
                            total.acc + int64_t(r) * j.pad_v, j.sinks ? j.sinks + h : nullptr, j.op->dim_v);
    }
}

static void attend_task(const attend_job &j, int64_t task, int worker) {
    const int64_t pair = j.split_tasks ? task / j.n_split : task;
    const int block = j.n_block - 1 - int(pair / j.op->n_head_kv), kv = int(pair % j.op->n_head_kv); // long rows first
    const int t0 = j.blocks[block], t1 = j.blocks[block + 1], n = (t1 - t0) * j.group, dim = j.op->dim_k;
    const bool direct = j.be->level == CPU_PLAIN || (n <= DIRECT_ROWS && dim == j.pad_k && j.op->dim_v == j.pad_v);
    attend_space w;
    w.q = j.workers + worker * j.worker_floats;
    w.s = w.q + int64_t(j.max_rows) * j.pad_k;
    w.k = w.s + 32 * PAGE_TOKENS;
    w.v = w.k + int64_t(PAGE_TOKENS) * j.pad_k;
    w.states = w.v + int64_t(PAGE_TOKENS) * j.pad_v;
    w.lo = (int *)(w.states + 2 * j.state_floats), w.hi = w.lo + j.max_rows;
    for (int r = 0; r < (direct ? n : (n + 15) & ~15); r++) {
        const int64_t t = t0 + r / j.group, h = kv * j.group + r % j.group;
        const float *from = j.q + t * j.op->ld_q + h * dim;
        float *to = direct ? w.q + int64_t(r) * j.pad_k : w.q + int64_t(r / 16) * dim * 16 + r % 16;
        for (int d = 0; d < dim; d++)
            to[direct ? d : d * 16] = r < n ? from[d] : 0.0f;
    }
    if (j.split_tasks)
        return attend_split(j, w, t0, t1, kv, int(task % j.n_split), direct, j.state(j.states + task * j.state_floats));
    const attend_state total = j.state(w.states), part = j.state(w.states + j.state_floats);
    std::fill(total.l, total.l + n, 0.0f);
    const int last = *std::max_element(j.pos + t0, j.pos + t1) / SPLIT_TOKENS;
    for (int split = 0; split <= last; split++) {
        attend_split(j, w, t0, t1, kv, split, direct, part);
        attend_merge(j, n, total, part);
    }
    attend_finish(j, t0, t1, kv, total);
}

// What follows from the operation alone. All of it is the larger, the more rows there are.
static attend_job attend_shape(backend *be, const attend_op *op) {
    attend_job j = {};
    j.be = be, j.op = op;
    const int fill = be->level == CPU_PLAIN ? 0 : 15;
    j.pad_k = (op->dim_k + fill) & ~fill, j.pad_v = (op->dim_v + fill) & ~fill, j.group = op->n_head / op->n_head_kv;
    const int64_t fair = int64_t(op->n_rows) * op->n_head_kv / (2 * be->pool.size);
    j.block_rows = int(std::max<int64_t>(1, std::min<int64_t>(ATTEND_ROWS / j.group, fair)));
    j.max_rows = (j.block_rows * j.group + 15) & ~15;
    j.state_floats = int64_t(j.max_rows) * (j.pad_v + 2);
    j.worker_floats =
        int64_t(j.max_rows) * (j.pad_k + 2) + int64_t(PAGE_TOKENS) * (32 + j.pad_k + j.pad_v) + 2 * j.state_floats;
    return j;
}

static int64_t attend_list_floats(const attend_op *op) { return round_up(int64_t(op->n_rows) + 1, 16); }

// The list of blocks, the workers' own, and the states of split tasks: no more of these than cpu_attend lets there be.
static uint64_t cpu_attend_scratch(backend *be, const attend_op *op, const seg *, int64_t n_tokens) {
    const attend_job j = attend_shape(be, op);
    const int64_t n_split = (n_tokens + SPLIT_TOKENS - 1) / SPLIT_TOKENS;
    const int64_t n_pair = std::min<int64_t>(int64_t(op->n_rows) * op->n_head_kv, 4 * be->pool.size - 1);
    const int64_t states = n_split > 1 ? std::min<int64_t>(n_pair * n_split * j.state_floats, SPLIT_FLOATS) : 0;
    return uint64_t(attend_list_floats(op) + j.worker_floats * be->pool.size + states) * sizeof(float);
}

// Cuts the work into tasks, which are the longer the fewer workers there are, and carves up the scratch space.
static void cpu_attend(backend *be, const attend_op *op, mem y, mem q, const seg sg[2], mem sinks, const step *st) {
    if (op->n_seg != 1 || !cpu_cache_type(sg[0].type) || sg[0].ratio > 1 || sg[0].row_ids.handle)
        return cpu_error(be, "attend: the CPU reads one segment of f16 or q8_0 rows, one per token, only");
    attend_job j = attend_shape(be, op);
    j.sg = sg, j.table_len = st->table_len;
    j.pos = at<int32_t>(st->pos), j.seq = at<int32_t>(st->seq), j.table = at<int32_t>(st->table[sg[0].table]);
    j.q = at<float>(q), j.y = at<float>(y), j.sinks = op->has_sinks ? at<float>(sinks) : nullptr;
    int64_t work = 0;
    int longest = 0;
    for (int t = 0, rows = 0; t < op->n_rows; t++, rows++) {
        if (t == 0 || rows == j.block_rows || j.seq[t] != j.seq[t - 1])
            j.n_block++, rows = 0;
        longest = std::max(longest, j.pos[t]);
        work += j.pos[t] + 1 - j.first(t);
    }
    float *scratch = (float *)cpu_scratch(be, cpu_attend_scratch(be, op, sg, int64_t(longest) + 1));
    if (!scratch)
        return;
    const int64_t n_pair = int64_t(j.n_block) * op->n_head_kv;
    j.n_split = longest / SPLIT_TOKENS + 1;
    j.split_tasks = j.n_split > 1 && n_pair < 4 * be->pool.size && n_pair * j.n_split * j.state_floats <= SPLIT_FLOATS;
    const int64_t n_task = j.split_tasks ? n_pair * j.n_split : n_pair;
    j.blocks = (int32_t *)scratch;
    j.workers = scratch + attend_list_floats(op);
    j.states = j.workers + j.worker_floats * be->pool.size;
    j.blocks[0] = 0, j.blocks[j.n_block] = op->n_rows;
    for (int t = 1, b = 0; t < op->n_rows; t++)
        if (t - j.blocks[b] == j.block_rows || j.seq[t] != j.seq[t - 1])
            j.blocks[++b] = t;

    const bool tiny = work * op->n_head * (j.pad_k + j.pad_v) < 65536; // not worth waking a thread
    parallel(be->pool, n_task, tiny ? n_task : 1, [&](int64_t begin, int64_t end, int worker) {
        for (int64_t i = begin; i < end; i++)
            attend_task(j, i, worker);
    });
    if (j.split_tasks)
        parallel(be->pool, n_pair, 1, [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; i++) {
                float *states = j.states + i * j.n_split * j.state_floats;
                const int block = j.n_block - 1 - int(i / op->n_head_kv), t0 = j.blocks[block],
                          t1 = j.blocks[block + 1];
                for (int split = 1; split < j.n_split; split++)
                    attend_merge(j, (t1 - t0) * j.group, j.state(states), j.state(states + split * j.state_floats));
                attend_finish(j, t0, t1, int(i % op->n_head_kv), j.state(states));
            }
        });
}

// ---- the table ----
//
// In the order of backend.h. What no supported architecture needs yet is null.

static const backend_ops cpu_ops = {
    cpu_alloc, cpu_grow,           cpu_free,           cpu_weights, cpu_put,       cpu_get,
    cpu_copy,  cpu_matmul_scratch, cpu_attend_scratch, cpu_reserve, cpu_allocated, cpu_sync,
    cpu_embed, cpu_rows,           cpu_norm,           cpu_matmul,
    nullptr, // matmul_id
    cpu_rope,  cpu_kv_put,         cpu_attend,         cpu_glu,     cpu_add,
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

// ---------------------------------------------------------------------------------------------------
// 9. CACHE
//
// Pages of 128 tokens that hold keys and values. All pages of a model lie in pools, one for the layers that see
// everything and one for window layers; a session is a table of pages in each. A complete page has a name, a
// hash over all tokens up to its end and everything else that can change its bits, by which any session finds it.
// Knows shapes and tokens, not what they mean. Invariants: a page with a name is never written; one without
// belongs to a single session; a session never waits for a page, because its share of the pool was set aside.
// ---------------------------------------------------------------------------------------------------

// A change of anything that changes the bits of a key or a value: cached pages and saved sessions of before are no
// longer found.
enum { NUMERICS_VERSION = 1 };

// The two kinds of layers, each with its pages and its page table.
enum { SEES_ALL, SEES_WINDOW, N_KINDS };

struct cache_type {
    const char *name;
    int type;
};
static const cache_type cache_types[] = {{"f16", TYPE_F16}, {"q8_0", TYPE_Q8_0}};

static const cache_type &find_cache_type(const char *name) {
    string known;
    for (const cache_type &c : cache_types) {
        if (!strcmp(c.name, name ? name : "f16"))
            return c;
        known += string(known.empty() ? "" : ", ") + c.name;
    }
    fail(ENGINE_EINVAL, "kv is \"%s\": the cache can have rows of %s", show(name).c_str(), known.c_str());
}

static const char *cache_type_name(int type) {
    for (const cache_type &c : cache_types)
        if (c.type == type)
            return c.name;
    return "";
}

// Where the rows of each layer of one kind lie in a page: see struct seg.
struct page_layout {
    int n_layer = 0; // of this kind; 0: there are no pages
    int window = 0;
    uint64_t layer_bytes = 0, page_bytes = 0;
    seg first = {}; // the first of these layers; the i-th lies i * layer_bytes further

    seg of_layer(mem pool, int i) const {
        seg s = first;
        s.pool = pool;
        s.k_offset += uint64_t(i) * layer_bytes;
        s.v_offset += uint64_t(i) * layer_bytes;
        return s;
    }
    // The first page that a row at position n reads.
    int64_t first_page(int64_t n) const { return window ? std::max<int64_t>(0, n - window + 1) / PAGE_TOKENS : 0; }
};

static page_layout make_page_layout(const weights &w, int type, int kind) {
    const format &f = *find_format(type);
    const hparams &hp = w.hp;
    page_layout p;
    for (const layer &l : w.layers)
        if ((l.window > 0) == (kind == SEES_WINDOW))
            p.n_layer++, p.window = std::max(p.window, l.window);
    const auto bytes = [&](int dim) { return row_bytes(f, (uint64_t(dim) + f.block - 1) / f.block * f.block); };
    p.first.type = type;
    p.first.table = kind;
    p.first.ratio = 1;
    p.first.k_row_bytes = bytes(hp.dim_k);
    p.first.v_row_bytes = bytes(hp.dim_v);
    p.first.v_offset = uint64_t(hp.n_head_kv) * PAGE_TOKENS * p.first.k_row_bytes;
    p.layer_bytes = p.first.v_offset + uint64_t(hp.n_head_kv) * PAGE_TOKENS * p.first.v_row_bytes;
    p.page_bytes = p.layer_bytes * uint64_t(p.n_layer);
    p.first.page_bytes = p.page_bytes;
    return p;
}

struct page {
    int refs = 0; // tables and checkpoints that hold it
    bool named = false;
    digest name, before;            // its own and that of the page before it
    int32_t tokens[PAGE_TOKENS];    // of a named page
    int32_t older = -1, newer = -1; // neighbours in the list of pages with a name that nobody holds
    int32_t next = -1;              // of those whose names begin alike
};

// All pages of one kind. A page is unused (no name, nobody holds it), held, or idle (named, nobody holds it): idle
// pages are found by name until their room is needed, the longest idle first.
struct page_pool {
    page_layout layout;
    mem data = {}; // [pages.size(), page_bytes]
    vector<page> pages;
    int64_t reserved = 0; // pages that sessions may hold
    vector<int32_t> unused;
    int32_t oldest = -1, newest = -1; // ends of the list of idle pages
    vector<int32_t> buckets;          // a power of two of them: the first page with a name that hashes to it

    mem at(int32_t id) const { return {data.handle, data.offset + uint64_t(id) * layout.page_bytes}; }

    // A page without a name, held once. There is one, by reservation.
    int32_t take() {
        if (unused.empty())
            forget(oldest);
        const int32_t id = unused.back();
        unused.pop_back();
        pages[size_t(id)].refs = 1;
        return id;
    }
    void hold(int32_t id) {
        if (pages[size_t(id)].refs++ == 0)
            unlink(id);
    }
    void release(int32_t id) {
        page &p = pages[size_t(id)];
        if (--p.refs > 0)
            return;
        if (!p.named)
            return unused.push_back(id);
        p.older = newest, p.newer = -1;
        (newest >= 0 ? pages[size_t(newest)].newer : oldest) = id;
        newest = id;
    }
    // Makes room for n pages in all; only here is memory taken.
    void resize(size_t n) {
        const size_t had = pages.size();
        size_t n_bucket = 64;
        while (n_bucket < n)
            n_bucket *= 2;
        vector<int32_t> more, table(n_bucket, -1);
        more.reserve(n);
        pages.resize(n);
        for (size_t id = n; id-- > had;) // the lowest is taken first
            more.push_back(int32_t(id));
        more.insert(more.end(), unused.begin(), unused.end());
        unused.swap(more);
        buckets.swap(table);
        for (size_t id = 0; id < had; id++)
            if (pages[id].named)
                enter(int32_t(id));
    }
    // The page of this name, or -1.
    int32_t find(const digest &name) const {
        int32_t id = buckets.empty() ? -1 : buckets[bucket(name)];
        while (id >= 0 && !(pages[size_t(id)].name == name))
            id = pages[size_t(id)].next;
        return id;
    }
    // The same when it also holds these tokens behind these.
    int32_t find(const digest &name, const digest &before, const int32_t *tokens) const {
        const int32_t id = find(name);
        if (id < 0)
            return -1;
        const page &p = pages[size_t(id)];
        return p.before == before && !memcmp(p.tokens, tokens, sizeof p.tokens) ? id : -1;
    }
    // Gives a held page its name. If another has it already, that one is held instead. Returns the page that has it.
    int32_t name(int32_t id, const digest &name, const digest &before, const int32_t *tokens) {
        const int32_t other = find(name, before, tokens);
        if (other >= 0) {
            hold(other);
            release(id);
            return other;
        }
        page &p = pages[size_t(id)];
        p.named = true;
        p.name = name, p.before = before;
        memcpy(p.tokens, tokens, sizeof p.tokens);
        enter(id);
        return id;
    }
    void unname(int32_t id) {
        page &p = pages[size_t(id)];
        int32_t *at = &buckets[bucket(p.name)];
        while (*at != id)
            at = &pages[size_t(*at)].next;
        *at = p.next;
        p.named = false;
    }

  private:
    size_t bucket(const digest &name) const {
        uint64_t h;
        memcpy(&h, name.b, sizeof h);
        return size_t(h) & (buckets.size() - 1);
    }
    void enter(int32_t id) {
        int32_t &first = buckets[bucket(pages[size_t(id)].name)];
        pages[size_t(id)].next = first;
        first = id;
    }
    void unlink(int32_t id) { // from the idle
        page &p = pages[size_t(id)];
        (p.older >= 0 ? pages[size_t(p.older)].newer : oldest) = p.newer;
        (p.newer >= 0 ? pages[size_t(p.newer)].older : newest) = p.older;
        p.older = p.newer = -1;
    }
    void forget(int32_t id) { // an idle page becomes unused
        unlink(id);
        unname(id);
        unused.push_back(id);
    }
};

// The pages of a model with one type of rows. `mutex` guards lists, names and tables. The pages' bytes and where they
// lie are read and written under the model's lock; whoever holds both takes the model's first. A session's own tables
// may be read by its own call without it, since nobody else changes them.
struct page_store {
    std::mutex mutex;
    int type;
    digest root; // the name of nothing: what all names begin with
    page_pool pool[N_KINDS];

    page_store(const weights &w, int t, const digest &fingerprint) : type(t) {
        root = sha256().value(int32_t(NUMERICS_VERSION)).value(int32_t(t)).value(fingerprint).finish();
        for (int kind = 0; kind < N_KINDS; kind++)
            pool[kind].layout = make_page_layout(w, t, kind);
    }
};

// What a session may hold, in pages of each kind.
struct cache_share {
    int64_t pages[N_KINDS];
    int64_t per_checkpoint, checkpoints; // pages of window layers in one; how many there may be

    // For n_ctx tokens, evaluated `chunk` rows at a time. That there is a page whenever one is wanted: no session holds
    // more than its share, and what is held by two counts twice. To copy a page of layers that see everything takes
    // one more for a moment, but only when somebody else holds it too; the + 1 at the end is for window layers, where
    // that may be a checkpoint of the same session.
    cache_share(const page_layout *layout, int64_t n_ctx, int chunk, int n_checkpoints) {
        const int64_t window = layout[SEES_WINDOW].window;
        const auto pages_of = [](int64_t n) { return (n + PAGE_TOKENS - 1) / PAGE_TOKENS; };
        pages[SEES_ALL] = layout[SEES_ALL].n_layer ? pages_of(n_ctx) : 0;
        // n rows, wherever they begin, touch pages_of(n) + 1 pages at most; a checkpoint also reaches back from the
        // page boundary before it.
        per_checkpoint = window ? std::min(pages_of(n_ctx), pages_of(window + PAGE_TOKENS) + 1) : 0;
        checkpoints = window ? n_checkpoints : 0;
        pages[SEES_WINDOW] =
            window ? std::min(pages_of(n_ctx), pages_of(window + chunk) + 1) + 1 + per_checkpoint * checkpoints : 0;
    }
};

// A position from which evaluation can go on, with the pages of window layers that this needs.
struct checkpoint {
    int64_t pos;
    int64_t first; // the first page, counted from the beginning of the timeline
    vector<int32_t> pages;
};

// The pages of one session. `n` below is the number of evaluated tokens.
struct kv_cache {
    page_store &store;
    const cache_share share;
    vector<int32_t> table[N_KINDS]; // pages in order; -1: given back
    vector<digest> names;           // of the complete pages
    vector<checkpoint> checkpoints; // in order of position
    // The timeline has pages from a file. Nobody vouches for their content, so that what is computed from it gets no
    // name under which other sessions would find it.
    bool from_file = false;

    kv_cache(page_store &st, const cache_share &s, int64_t n_ctx) : store(st), share(s) {
        for (vector<int32_t> &t : table)
            t.reserve(size_t(n_ctx / PAGE_TOKENS + 1));
        names.reserve(size_t(n_ctx / PAGE_TOKENS + 1));
        checkpoints.reserve(size_t(share.checkpoints + 1));
        std::lock_guard<std::mutex> lock(store.mutex);
        for (int kind = 0; kind < N_KINDS; kind++)
            store.pool[kind].reserved += share.pages[kind]; // for which the pool is large enough by now
    }
    kv_cache(const kv_cache &) = delete;
    ~kv_cache() {
        std::lock_guard<std::mutex> lock(store.mutex);
        rewind(0);
        for (int kind = 0; kind < N_KINDS; kind++)
            store.pool[kind].reserved -= share.pages[kind];
    }

    // The rest is called under the store's mutex.

    // Makes room for rows [n, n + count), in pages that may be written. copy(kind, to, from) copies a page that others
    // hold too. What lies before all windows is given back first.
    template <class F> void prepare(int64_t n, int64_t count, F &&copy) {
        page_pool &window = store.pool[SEES_WINDOW];
        for (int64_t i = window.layout.first_page(n) - 1; window.layout.n_layer && i >= 0; i--) {
            if (i >= int64_t(table[SEES_WINDOW].size()) || table[SEES_WINDOW][size_t(i)] < 0)
                break;
            drop(SEES_WINDOW, size_t(i));
        }
        for (int kind = 0; kind < N_KINDS; kind++) {
            page_pool &pool = store.pool[kind];
            if (!pool.layout.n_layer)
                continue;
            if (n % PAGE_TOKENS) {
                int32_t &id = table[kind][size_t(n / PAGE_TOKENS)];
                const page &p = pool.pages[size_t(id)];
                if (p.named && p.refs == 1) {
                    pool.unname(id);
                } else if (p.named) {
                    const int32_t own = pool.take();
                    copy(kind, own, id);
                    pool.release(id);
                    id = own;
                }
            }
            while (int64_t(table[kind].size()) * PAGE_TOKENS < n + count)
                table[kind].push_back(pool.take());
        }
    }

    // Rows [from, to) have been written: what became complete gets its name. tokens: the timeline.
    void complete(const int32_t *tokens, int64_t from, int64_t to) {
        names.resize(size_t(from / PAGE_TOKENS)); // within what was reserved, like all of this
        for (int64_t i = from / PAGE_TOKENS; i < to / PAGE_TOKENS; i++) {
            const int32_t *these = tokens + i * PAGE_TOKENS;
            const digest before = name_before(i), name = page_name(before, these);
            for (int kind = 0; kind < N_KINDS && !from_file; kind++)
                if (store.pool[kind].layout.n_layer)
                    table[kind][size_t(i)] = store.pool[kind].name(table[kind][size_t(i)], name, before, these);
            names.push_back(name);
        }
    }

    // Forgets everything from n on and returns the last position, up to n, from which evaluation can go on: n itself
    // where every layer sees everything.
    int64_t rewind(int64_t n) {
        while (!checkpoints.empty() && checkpoints.back().pos > n)
            drop_checkpoint(checkpoints.size() - 1);
        from_file = from_file && n > 0;
        cut(n);
        const page_layout &l = store.pool[SEES_WINDOW].layout;
        if (!l.n_layer || covered(n))
            return n;
        // The window's rows are gone: the nearest checkpoint, or page boundary whose pages are still somewhere.
        const int64_t saved = checkpoints.empty() ? 0 : checkpoints.back().pos;
        for (int64_t k = n / PAGE_TOKENS; k * PAGE_TOKENS > saved; k--)
            if (take_window(k)) {
                cut(k * PAGE_TOKENS);
                return k * PAGE_TOKENS;
            }
        clear_window();
        cut(saved);
        if (saved) {
            const checkpoint &c = checkpoints.back();
            table[SEES_WINDOW].assign(size_t(c.first), -1);
            for (int32_t id : c.pages) {
                store.pool[SEES_WINDOW].hold(id);
                table[SEES_WINDOW].push_back(id);
            }
        }
        return saved;
    }

    // Looks for pages of any session that hold tokens [0, count) beyond the n that are here, and takes them over.
    // Returns the new n.
    int64_t adopt(const int32_t *tokens, int64_t count, int64_t n) {
        page_pool &all = store.pool[SEES_ALL], &window = store.pool[SEES_WINDOW];
        const int64_t first = n / PAGE_TOKENS;
        int64_t k = first; // pages whose rows of layers that see everything are somewhere
        for (; (k + 1) * PAGE_TOKENS <= count; k++) {
            const int32_t *these = tokens + k * PAGE_TOKENS;
            const digest before = name_before(k), name = page_name(before, these);
            if ((all.layout.n_layer ? all : window).find(name, before, these) < 0)
                break;
            names.push_back(name);
        }
        if (window.layout.n_layer)
            while (k > first && !take_window(k, tokens))
                k--;
        names.resize(size_t(k));
        if (k == first)
            return n;
        for (int64_t i = first; i < k && all.layout.n_layer; i++) {
            const int32_t id = all.find(names[size_t(i)]);
            all.hold(id);
            if (i < int64_t(table[SEES_ALL].size())) { // the page that was begun here
                all.release(table[SEES_ALL][size_t(i)]);
                table[SEES_ALL][size_t(i)] = id;
            } else {
                table[SEES_ALL].push_back(id);
            }
        }
        return k * PAGE_TOKENS;
    }

    // Position n, up to which all is evaluated and whose window is here, becomes one that can be gone back to.
    void keep_checkpoint(int64_t n) {
        const page_layout &l = store.pool[SEES_WINDOW].layout;
        if (!share.checkpoints || n <= 0)
            return;
        size_t at = checkpoints.size();
        while (at > 0 && checkpoints[at - 1].pos >= n)
            at--;
        if (at < checkpoints.size() && checkpoints[at].pos == n)
            return;
        checkpoint c = {n, l.first_page(n), {}};
        const int64_t boundary = l.first_page(n / PAGE_TOKENS * PAGE_TOKENS);
        if (boundary < c.first && table[SEES_WINDOW][size_t(boundary)] >= 0)
            c.first = boundary; // so that other sessions can go on from the page boundary
        try {
            for (int64_t i = c.first; i * PAGE_TOKENS < n; i++) {
                if (table[SEES_WINDOW][size_t(i)] < 0)
                    return;
                c.pages.push_back(table[SEES_WINDOW][size_t(i)]);
            }
        } catch (const std::bad_alloc &) {
            return; // then there is one less to go back to
        }
        for (int32_t id : c.pages)
            store.pool[SEES_WINDOW].hold(id);
        checkpoints.insert(checkpoints.begin() + std::ptrdiff_t(at), std::move(c));
        if (int64_t(checkpoints.size()) > share.checkpoints)
            thin();
    }

    uint64_t bytes_used() const { return held(SEES_ALL) + held(SEES_WINDOW) + checkpoint_bytes(); }
    // Of pages that are in checkpoints only.
    uint64_t checkpoint_bytes() const {
        vector<int32_t> ids;
        for (const checkpoint &c : checkpoints)
            for (size_t i = 0; i < c.pages.size(); i++) {
                const size_t at = size_t(c.first) + i;
                if (at >= table[SEES_WINDOW].size() || table[SEES_WINDOW][at] != c.pages[i])
                    ids.push_back(c.pages[i]);
            }
        std::sort(ids.begin(), ids.end());
        ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
        return ids.size() * store.pool[SEES_WINDOW].layout.page_bytes;
    }
    static int64_t token_bytes(const page_layout *layout) {
        return int64_t(layout[0].page_bytes + layout[1].page_bytes) / PAGE_TOKENS;
    }
    // Bytes of cache that a step at the end of n tokens reads.
    int64_t read_bytes(int64_t n) const { return read_bytes(store.pool[0].layout, store.pool[1].layout, n); }
    static int64_t read_bytes(const page_layout &all, const page_layout &window, int64_t n) {
        return (int64_t(all.page_bytes) * n + int64_t(window.page_bytes) * std::min<int64_t>(n, window.window)) /
               PAGE_TOKENS;
    }

    digest name_before(int64_t page) const { return page ? names[size_t(page - 1)] : store.root; }
    // The names of the complete pages of n tokens.
    void set_names(const int32_t *tokens, int64_t n) {
        for (int64_t i = int64_t(names.size()); i < n / PAGE_TOKENS; i++)
            names.push_back(page_name(name_before(i), tokens + i * PAGE_TOKENS));
    }

  private:
    static digest page_name(const digest &before, const int32_t *tokens) {
        return sha256().value(before).add(tokens, PAGE_TOKENS * sizeof *tokens).finish();
    }
    uint64_t held(int kind) const {
        const auto given_back = std::count(table[kind].begin(), table[kind].end(), -1);
        return (table[kind].size() - size_t(given_back)) * store.pool[kind].layout.page_bytes;
    }
    void drop(int kind, size_t i) {
        if (table[kind][i] >= 0)
            store.pool[kind].release(table[kind][i]);
        table[kind][i] = -1;
    }
    void cut(int64_t n) {
        for (int kind = 0; kind < N_KINDS; kind++)
            while (int64_t(table[kind].size()) > (n + PAGE_TOKENS - 1) / PAGE_TOKENS) {
                drop(kind, table[kind].size() - 1);
                table[kind].pop_back();
            }
        names.resize(std::min(names.size(), size_t(n / PAGE_TOKENS)));
    }
    void clear_window() {
        for (size_t i = 0; i < table[SEES_WINDOW].size(); i++)
            drop(SEES_WINDOW, i);
        table[SEES_WINDOW].clear();
    }
    bool covered(int64_t n) const { // the window before n is here
        const vector<int32_t> &t = table[SEES_WINDOW];
        for (int64_t i = store.pool[SEES_WINDOW].layout.first_page(n); i * PAGE_TOKENS < n; i++)
            if (i >= int64_t(t.size()) || t[size_t(i)] < 0)
                return false;
        return true;
    }
    // Takes over the window's pages before page k, all of which have names here. Returns false, with nothing changed,
    // when one is nowhere. tokens: the timeline, when it may not be what the pages of this session hold.
    bool take_window(int64_t k, const int32_t *tokens = nullptr) {
        page_pool &pool = store.pool[SEES_WINDOW];
        const int64_t first = pool.layout.first_page(k * PAGE_TOKENS);
        for (int64_t i = first; i < k; i++) {
            const int32_t id = pool.find(names[size_t(i)]);
            if (id < 0 || !(pool.pages[size_t(id)].before == name_before(i)) ||
                (tokens && memcmp(pool.pages[size_t(id)].tokens, tokens + i * PAGE_TOKENS, sizeof page::tokens)))
                return false;
        }
        vector<int32_t> &t = table[SEES_WINDOW];
        while (int64_t(t.size()) < k)
            t.push_back(-1);
        for (int64_t i = first; i < k; i++) {
            const int32_t id = pool.find(names[size_t(i)]);
            pool.hold(id); // before the one that is there is released: it may be the same
            drop(SEES_WINDOW, size_t(i));
            t[size_t(i)] = id;
        }
        for (int64_t i = 0; i < int64_t(t.size()); i++)
            if (i < first || i >= k)
                drop(SEES_WINDOW, size_t(i));
        t.resize(size_t(k));
        return true;
    }
    void drop_checkpoint(size_t i) {
        for (int32_t id : checkpoints[i].pages)
            store.pool[SEES_WINDOW].release(id);
        checkpoints.erase(checkpoints.begin() + std::ptrdiff_t(i));
    }
    // Removes the one whose neighbours are nearest to each other for its age, never the newest: they thin out with age.
    void thin() {
        size_t victim = 0;
        double least = HUGE_VAL;
        const int64_t end = checkpoints.back().pos;
        for (size_t i = 0; i + 1 < checkpoints.size(); i++) {
            const int64_t gap = checkpoints[i + 1].pos - (i ? checkpoints[i - 1].pos : 0);
            const double score = double(gap) / double(end - checkpoints[i].pos + 1);
            if (score < least)
                least = score, victim = i;
        }
        drop_checkpoint(victim);
    }
};

// ---------------------------------------------------------------------------------------------------
// 10. FORWARD
//
// One walk through the layers, written once for all backends as calls through the operation table. Reads
// flags, numbers and null handles; never the name of an architecture or a backend. Invariant: a row's
// result depends on its own tokens only, not on what else is in the step.
// ---------------------------------------------------------------------------------------------------

static matmul_op matmul_args(const mat &w, int n_rows) {
    matmul_op op = {};
    op.n_rows = n_rows;
    op.n_in = op.ld_x = w.n_in;
    op.n_out = op.ld_y = w.n_out;
    op.n_group = 1;
    op.type = w.type;
    return op;
}

static attend_op attend_args(const hparams &hp, int window, int n_rows, int64_t n_tokens) {
    attend_op op = {};
    op.n_rows = n_rows;
    op.n_head = hp.n_head;
    op.n_head_kv = hp.n_head_kv;
    op.dim_k = hp.dim_k;
    op.dim_v = hp.dim_v;
    op.n_seg = 1;
    op.window = window;
    op.scale = hp.attn_scale;
    for (op.bucket = PAGE_TOKENS; op.bucket < n_tokens && op.bucket < 1 << 30;)
        op.bucket *= 2;
    op.ld_q = hp.n_head * hp.dim_k;
    op.ld_y = hp.n_head * hp.dim_v;
    return op;
}

// Consecutive rows of one session in a step.
struct slice {
    const kv_cache *cache;
    const int32_t *tokens; // [n_rows]
    int n_rows;
    int64_t pos;  // of the first
    int out_from; // from this row on, logits are wanted
    const std::atomic<bool> *cancel;
};

enum { OUT_ROWS = 32 }; // rows of logits computed at a time

// Memory for the rows of one step, shared by all sessions of a model, and the host side of the step block.
struct work_area {
    int rows = 0, seqs = 0; // how many rows and sequences a step may have
    mem x = {}, normed = {}, q = {}, k = {}, v = {}, att = {}, gate = {}, up = {}; // float [rows, width of each]
    mem tail = {};   // float [rows, n_embd]: rows whose logits are wanted
    mem logits = {}; // float [OUT_ROWS, n_vocab]
    step st = {};    // device side
    vector<int32_t> token, pos, seq, out_row;
    vector<float> rotary[2];
    vector<slice> slices;

    // f(memory, bytes) for all of it, as large as its numbers say.
    template <class F> void each(const hparams &hp, int n_rotary, int n_kinds, F &&f) {
        const uint64_t r = uint64_t(rows), heads = uint64_t(hp.n_head), kv = uint64_t(hp.n_head_kv);
        const uint64_t dk = uint64_t(hp.dim_k), dv = uint64_t(hp.dim_v);
        for (mem *m : {&x, &normed, &tail})
            f(*m, r * uint64_t(hp.n_embd) * 4);
        f(q, r * heads * std::max(dk, dv) * 4); // attention's output rows are gathered here too
        f(k, r * kv * dk * 4);
        f(v, r * kv * dv * 4);
        f(att, r * heads * dv * 4);
        f(gate, r * uint64_t(hp.n_ff) * 4);
        f(up, r * uint64_t(hp.n_ff) * 4);
        f(logits, uint64_t(OUT_ROWS) * uint64_t(hp.n_vocab) * 4);
        for (mem *m : {&st.token, &st.pos, &st.seq, &st.out_row})
            f(*m, r * 4);
        for (int i = 0; i < n_rotary; i++)
            f(st.rotary[i], r * uint64_t(hp.n_rot) * 4);
        for (int i = 0; i < n_kinds; i++)
            f(st.table[i], uint64_t(seqs) * uint64_t(st.table_len) * 4);
    }
};

} // namespace

// A model and everything that its sessions share.
struct engine_model {
    model_file file;
    vocab voc;
    std::unique_ptr<backend> be;
    const backend_ops *ops = nullptr;
    weights w;
    digest fingerprint = {};         // when there are sessions
    page_layout f16_layout[N_KINDS]; // of the default cache, for what is said about the model
    work_area work;
    vector<float> rows;                                     // [OUT_ROWS, n_vocab], where rows of logits are handed out
    std::mutex mutex;                                       // held while the backend computes, and for what follows
    std::atomic<std::thread::id> caller{std::thread::id()}; // who holds it while a callback may run
    vector<std::unique_ptr<page_store>> stores;             // one for each type of cache rows in use
    std::atomic<int> n_session{0};

    engine_model(model_file &&f, vocab &&v, int n_threads, const backend_ops *table)
        : file(std::move(f)), voc(std::move(v)), be(new backend(n_threads)), ops(table) {}
    ~engine_model() {
        release(work);
        for (const auto &s : stores)
            for (page_pool &p : s->pool)
                if (p.data.handle)
                    ops->free(be.get(), p.data);
    }

    int n_rotary() const { return w.freqs[1].empty() ? 1 : 2; }
    int n_tables() const { return f16_layout[SEES_WINDOW].n_layer ? 2 : 1; }

    // Bytes of a work area, and of the operations' scratch, for `rows` rows of `seqs` sequences of up to n_tokens.
    uint64_t work_bytes(int n_rows, int seqs, int64_t n_tokens) {
        uint64_t sum = 0;
        work_area wa = sized(n_rows, seqs, n_tokens);
        wa.each(w.hp, n_rotary(), n_tables(), [&](mem &, uint64_t bytes) { sum += bytes; });
        return sum;
    }
    // What the operations of a step need at most, beside that.
    uint64_t scratch_bytes(int n_rows, int64_t n_tokens, const page_layout *layout) {
        uint64_t most = 0;
        const auto count = [&](const mat &m, int rows) {
            const matmul_op op = matmul_args(m, rows);
            most = std::max(most, ops->matmul_scratch(be.get(), &op, &m));
        };
        for (const layer &l : w.layers)
            for (const mat *m : {&l.wq, &l.wk, &l.wv, &l.wo, &l.gate, &l.up, &l.down})
                count(*m, n_rows);
        count(w.out, std::min<int>(n_rows, OUT_ROWS));
        for (int kind = 0; kind < N_KINDS; kind++)
            if (layout[kind].n_layer) {
                const attend_op op = attend_args(w.hp, layout[kind].window, n_rows, n_tokens);
                most = std::max(most, ops->attend_scratch(be.get(), &op, &layout[kind].first, n_tokens));
            }
        return most;
    }

    // Makes work area and scratch large enough. When that fails, the old ones stay.
    void reserve(int n_rows, int seqs, int64_t n_tokens, const page_layout *layout) {
        if (ops->reserve(be.get(), scratch_bytes(n_rows, n_tokens, layout)))
            fail(ENGINE_ENOMEM, "out of memory for the operations' scratch space");
        work_area next = sized(n_rows, seqs, n_tokens);
        next.rows = std::max(next.rows, work.rows);
        next.seqs = std::max(next.seqs, work.seqs);
        next.st.table_len = std::max(next.st.table_len, work.st.table_len);
        if (next.rows == work.rows && next.seqs == work.seqs && next.st.table_len == work.st.table_len)
            return;
        next.each(w.hp, n_rotary(), n_tables(), [&](mem &m, uint64_t bytes) {
            m = ops->alloc(be.get(), bytes);
            if (!m.handle) {
                release(next);
                fail(ENGINE_ENOMEM, "out of memory: %.1f MiB of work space for prefill", double(bytes) / (1 << 20));
            }
        });
        for (vector<int32_t> *v : {&next.token, &next.pos, &next.seq, &next.out_row})
            v->reserve(size_t(next.rows));
        for (int i = 0; i < n_rotary(); i++)
            next.rotary[i].reserve(size_t(next.rows) * size_t(w.hp.n_rot));
        next.slices.reserve(size_t(next.seqs));
        release(work);
        work = std::move(next);
    }

    // The store for rows of this type.
    page_store &store_for(int type) {
        for (const auto &s : stores)
            if (s->type == type)
                return *s;
        if (stores.empty())
            fingerprint = ::fingerprint(file); // reads the file here and there: not when it is only opened
        stores.emplace_back(new page_store(w, type, fingerprint));
        return *stores.back();
    }
    // Makes the pools large enough for one more session. Its share is set aside when its cache is made.
    void reserve_pages(page_store &store, const cache_share &share) {
        std::lock_guard<std::mutex> lock(store.mutex);
        for (int kind = 0; kind < N_KINDS; kind++) {
            page_pool &p = store.pool[kind];
            const uint64_t had = p.pages.size(), need = uint64_t(p.reserved + share.pages[kind]);
            if (need <= had)
                continue;
            const mem grown = p.data.handle
                                  ? ops->grow(be.get(), p.data, had * p.layout.page_bytes, need * p.layout.page_bytes)
                                  : ops->alloc(be.get(), need * p.layout.page_bytes);
            if (!grown.handle)
                fail(ENGINE_ENOMEM, "out of memory: %.1f MiB of KV cache",
                     double(need * p.layout.page_bytes) / (1 << 20));
            p.data = grown;
            p.resize(size_t(need));
        }
    }

  private:
    static work_area sized(int n_rows, int seqs, int64_t n_tokens) {
        work_area wa;
        wa.rows = n_rows, wa.seqs = seqs;
        wa.st.table_len = int32_t((n_tokens + PAGE_TOKENS - 1) / PAGE_TOKENS);
        return wa;
    }
    void release(work_area &area) {
        area.each(w.hp, n_rotary(), n_tables(), [&](mem &m, uint64_t) {
            if (m.handle)
                ops->free(be.get(), m);
            m = {};
        });
    }
};

namespace {

// Uploads what this step's operations read: tokens, positions, page tables, and the rotary rows, which the host
// computes in double because a float angle of a late position has few digits left. Returns the number of rows whose
// logits are wanted.
static int put_step(engine_model &m, const slice *slices, int n_slice) {
    work_area &wa = m.work;
    const hparams &hp = m.w.hp;
    const auto put = [&](mem to, const void *from, size_t count) {
        if (count)
            m.ops->put(m.be.get(), to, from, count * 4);
    };
    wa.token.clear(), wa.pos.clear(), wa.seq.clear(), wa.out_row.clear();
    for (int i = 0; i < n_slice; i++) {
        const slice &sl = slices[i];
        for (int t = 0; t < sl.n_rows; t++) {
            if (t >= sl.out_from)
                wa.out_row.push_back(int32_t(wa.token.size()));
            wa.token.push_back(sl.tokens[t]);
            wa.pos.push_back(int32_t(sl.pos + t));
            wa.seq.push_back(i);
        }
        for (int kind = 0; kind < m.n_tables(); kind++) {
            mem to = wa.st.table[kind];
            to.offset += uint64_t(i) * uint64_t(wa.st.table_len) * 4;
            put(to, sl.cache->table[kind].data(), sl.cache->table[kind].size());
        }
    }
    put(wa.st.token, wa.token.data(), wa.token.size());
    put(wa.st.pos, wa.pos.data(), wa.pos.size());
    put(wa.st.seq, wa.seq.data(), wa.seq.size());
    put(wa.st.out_row, wa.out_row.data(), wa.out_row.size());
    const size_t half = size_t(hp.n_rot) / 2;
    for (int i = 0; i < m.n_rotary(); i++) {
        vector<float> &rows = wa.rotary[i];
        const double scale = i == 0 ? double(hp.rope_scale) : 1.0;
        rows.clear();
        for (const int32_t pos : wa.pos)
            for (size_t k = 0; k < half; k++) {
                double s, c;
                exact_sin_cos(double(pos) * m.w.freqs[i][k], &s, &c);
                rows.push_back(float(c * scale));
                rows.push_back(float(s * scale));
            }
        put(wa.st.rotary[i], rows.data(), rows.size());
    }
    return int(wa.out_row.size());
}

// Whether one of the step's sessions is to stop. Once it is, it stays so until its call has ended; the large operations
// of the step are left out from then on, and its results are not used.
static bool is_cancelled(const engine_model &m) {
    return std::any_of(m.work.slices.begin(), m.work.slices.end(), [](const slice &s) { return s.cancel->load(); });
}

// The helper for every weight: y = W x (+ bias), or y += when `accumulate`.
static void matmul(engine_model &m, mem y, const mat &w, mem bias, mem x, int n_rows, bool accumulate = false) {
    if (is_cancelled(m))
        return;
    matmul_op op = matmul_args(w, n_rows);
    op.accumulate = accumulate;
    op.has_bias = bias.handle != nullptr;
    m.ops->matmul(m.be.get(), &op, y, &w, x, bias);
}

// RMS norm over each of n_part parts of n values; y may be x.
static void norm(engine_model &m, mem y, mem x, mem weight, int n_rows, int n_part, int n) {
    norm_op op = {};
    op.n_rows = n_rows;
    op.n_part = n_part;
    op.n = n;
    op.ld_x = op.ld_y = n_part * n;
    op.weight_kind = 1;
    op.eps = m.w.hp.eps;
    m.ops->norm(m.be.get(), &op, y, x, weight);
}

// y += W x (+ bias), normed before it is added where the model has a norm for that. Uses work.normed.
static void add_branch(engine_model &m, mem y, const mat &w, mem bias, mem x, mem post_norm, int n_rows) {
    if (!post_norm.handle)
        return matmul(m, y, w, bias, x, n_rows, true);
    const mem branch = m.work.normed;
    matmul(m, branch, w, bias, x, n_rows);
    norm(m, branch, branch, post_norm, n_rows, 1, w.n_out);
    add_op op = {n_rows, w.n_out};
    m.ops->add(m.be.get(), &op, y, branch);
}

static void rope(engine_model &m, const layer &l, mem x, int n_rows, int n_head) {
    const hparams &hp = m.w.hp;
    rope_op op = {};
    op.n_rows = n_rows;
    op.n_head = n_head;
    op.head_dim = hp.dim_k;
    op.n_rot = hp.n_rot;
    op.pairing = hp.pairing;
    op.table = l.rotary;
    op.ld_x = n_head * hp.dim_k;
    m.ops->rope(m.be.get(), &op, x, &m.work.st);
}

static void rows(engine_model &m, mem y, mem x, int n_rows, int n) {
    rows_op op = {n_rows, n};
    m.ops->rows(m.be.get(), &op, y, x, &m.work.st);
}

// Queries, keys and values of the step's rows; keys and values go into the cache.
static void attention_inputs(engine_model &m, const layer &l, const seg &s, int n_rows) {
    const hparams &hp = m.w.hp;
    work_area &wa = m.work;
    norm(m, wa.normed, wa.x, l.attn_norm, n_rows, 1, hp.n_embd);
    matmul(m, wa.q, l.wq, l.bq, wa.normed, n_rows);
    matmul(m, wa.k, l.wk, l.bk, wa.normed, n_rows);
    matmul(m, wa.v, l.wv, l.bv, wa.normed, n_rows);
    if (l.q_norm.handle) {
        norm(m, wa.q, wa.q, l.q_norm, n_rows, hp.n_head, hp.dim_k);
        norm(m, wa.k, wa.k, l.k_norm, n_rows, hp.n_head_kv, hp.dim_k);
    }
    rope(m, l, wa.q, n_rows, hp.n_head);
    rope(m, l, wa.k, n_rows, hp.n_head_kv);
    kv_put_op put = {};
    put.n_rows = n_rows;
    put.n_head_kv = hp.n_head_kv;
    put.dim_k = hp.dim_k;
    put.dim_v = hp.dim_v;
    put.type = s.type;
    put.ld_k = hp.n_head_kv * hp.dim_k;
    put.ld_v = hp.n_head_kv * hp.dim_v;
    m.ops->kv_put(m.be.get(), &put, &s, wa.k, wa.v, &wa.st);
}

static void attend_rows(engine_model &m, const layer &l, const seg &s, int n_rows, int64_t n_tokens) {
    if (is_cancelled(m))
        return;
    const attend_op op = attend_args(m.w.hp, l.window, n_rows, n_tokens);
    const seg segs[2] = {s, {}};
    m.ops->attend(m.be.get(), &op, m.work.att, m.work.q, segs, mem(), &m.work.st);
}

static void feed_forward(engine_model &m, const layer &l, mem x, int n_rows) {
    const hparams &hp = m.w.hp;
    work_area &wa = m.work;
    norm(m, wa.normed, x, l.ffn_norm, n_rows, 1, hp.n_embd);
    matmul(m, wa.gate, l.gate, l.b_gate, wa.normed, n_rows);
    matmul(m, wa.up, l.up, l.b_up, wa.normed, n_rows);
    glu_op op = {};
    op.n_rows = n_rows;
    op.n = op.ld_gate = op.ld_up = op.ld_y = hp.n_ff;
    op.kind = hp.glu;
    m.ops->glu(m.be.get(), &op, wa.gate, wa.gate, wa.up);
    add_branch(m, x, l.down, l.b_down, wa.gate, l.post_ffn_norm, n_rows);
}

// Evaluates the slices, whose pages must be there. The final hidden states of the rows whose logits are wanted are left
// in work.tail, in order. Returns false, with nothing lost, when one of the slices was cancelled on the way.
static bool forward(engine_model &m, const page_store &store, const slice *slices, int n_slice) {
    const hparams &hp = m.w.hp;
    work_area &wa = m.work;
    const int n_out = put_step(m, slices, n_slice), n_rows = int(wa.token.size());
    int64_t n_tokens = 0; // of the longest sequence
    for (int i = 0; i < n_slice; i++)
        n_tokens = std::max(n_tokens, slices[i].pos + slices[i].n_rows);
    embed_op em = {};
    em.n_rows = n_rows;
    em.n = hp.n_embd;
    em.type = m.w.embed.type;
    em.scale = hp.embed_scale;
    m.ops->embed(m.be.get(), &em, wa.x, &m.w.embed, &wa.st);
    int seen[N_KINDS] = {}; // layers of each kind so far
    for (int i = 0; i < hp.n_layer; i++) {
        if (is_cancelled(m))
            return false;
        const layer &l = m.w.layers[size_t(i)];
        const int kind = l.window ? SEES_WINDOW : SEES_ALL;
        const page_pool &pool = store.pool[kind];
        const seg s = pool.layout.of_layer(pool.data, seen[kind]++);
        attention_inputs(m, l, s, n_rows);
        const bool last = i + 1 == hp.n_layer;
        if (last && n_out == 0)
            break; // later rows need this layer's keys and values, and nothing else of it
        attend_rows(m, l, s, n_rows, n_tokens);
        if (last && n_out < n_rows) {
            rows(m, wa.tail, wa.x, n_out, hp.n_embd);
            rows(m, wa.q, wa.att, n_out, hp.n_head * hp.dim_v);
            add_branch(m, wa.tail, l.wo, l.bo, wa.q, l.post_attn_norm, n_out);
            feed_forward(m, l, wa.tail, n_out);
        } else {
            add_branch(m, wa.x, l.wo, l.bo, wa.att, l.post_attn_norm, n_rows);
            feed_forward(m, l, wa.x, n_rows);
        }
    }
    if (n_out == n_rows)
        std::swap(wa.x, wa.tail);
    return !is_cancelled(m);
}

// Logits of rows first to first + n - 1 of work.tail (n <= OUT_ROWS), into out [n, n_vocab].
static void read_logits(engine_model &m, int first, int n, float *out) {
    const hparams &hp = m.w.hp;
    work_area &wa = m.work;
    mem x = wa.tail;
    x.offset += uint64_t(first) * uint64_t(hp.n_embd) * 4;
    norm(m, wa.normed, x, m.w.out_norm, n, 1, hp.n_embd);
    matmul(m, wa.logits, m.w.out, mem(), wa.normed, n);
    m.ops->get(m.be.get(), out, wa.logits, uint64_t(n) * uint64_t(hp.n_vocab) * 4);
}

// ---------------------------------------------------------------------------------------------------
// 11. SAMPLER
//
// From logits to a token: bias, penalties and DRY change the logits; top-k, typical, top-p, min-p and XTC
// drop candidates; temperature and one draw choose among the rest. Also the settings that a model's own
// metadata asks for. Knows the bytes of tokens and general.sampling.*, nothing of models and sessions.
// Invariant: the choice depends on logits, settings, timeline, seed and position, and on nothing else;
// equal logits are ordered by id; the vocabulary is never fully sorted; something is always chosen, and
// never a banned token.
// ---------------------------------------------------------------------------------------------------

struct candidate {
    float logit;
    int32_t id;
    bool operator<(const candidate &o) const { return logit != o.logit ? logit < o.logit : id > o.id; } // worse than o
};
static bool better(const candidate &a, const candidate &b) { return b < a; }

// A candidate where some are kept until their probabilities add up.
struct share {
    double key; // low ones are kept first
    int32_t id;
    uint64_t mass;
    bool operator<(const share &o) const { return key != o.key ? key < o.key : id < o.id; }
};

// Kept by the caller, so that sampling does not allocate.
struct sampler_room {
    vector<float> logits;   // [n_vocab] after bias, penalties and DRY
    vector<candidate> pick; // what the filters have left so far, by ascending id: every sum is taken in this order
    vector<candidate> part; // the best so far while top-k looks for them
    vector<share> shares;   // see keep_share
    vector<int32_t> tally;  // [n_vocab] zeros between two uses
    vector<int32_t> seen;   // ids whose tally is not zero
    vector<int32_t> match;  // DRY: [window] see find_repeats
};

static bool is_share(float p) { return p > 0 && p < 1; }
static bool has_penalty(const engine_sampling &opt) {
    return (opt.repeat_penalty > 0 && opt.repeat_penalty != 1) || opt.presence_penalty != 0 ||
           opt.frequency_penalty != 0;
}
static bool changes_logits(const engine_sampling &opt) {
    return opt.n_bias || has_penalty(opt) || opt.dry_multiplier > 0;
}

// Candidates that top-k holds at most while it looks for the k best: with some spare, so that it seldom has to cut.
static size_t part_size(size_t k) { return 2 * k + 64; }

// Takes all the memory that `sample` will want for any timeline of up to n_ctx tokens.
static void reserve_room(sampler_room &room, const engine_sampling &opt, size_t n_vocab, size_t n_ctx) {
    if (changes_logits(opt))
        room.logits.reserve(n_vocab);
    if (has_penalty(opt) || opt.dry_multiplier > 0) {
        room.tally.resize(n_vocab);
        room.seen.reserve(std::min(n_vocab, n_ctx));
    }
    if (opt.dry_multiplier > 0)
        room.match.reserve(n_ctx);
    if (opt.temperature <= 0)
        return;
    const bool top_k = opt.top_k > 0 && size_t(opt.top_k) < n_vocab;
    const size_t k = top_k ? size_t(opt.top_k) : n_vocab;
    room.pick.reserve(k);
    if (top_k)
        room.part.reserve(std::min(n_vocab, part_size(k)));
    if (is_share(opt.typical_p) || is_share(opt.top_p))
        room.shares.reserve(k);
}

// ---- the logits ----

// Loops like this one are several times as fast as std::max_element.
static int32_t best_id(const vector<float> &logits) {
    size_t best = 0;
    float most = logits[0];
    for (size_t i = 1; i < logits.size(); i++)
        if (logits[i] > most)
            most = logits[i], best = i;
    return int32_t(best);
}

// log(sum(exp(logits)))
static double log_sum_exp(const vector<float> &logits) {
    const double best = double(logits[size_t(best_id(logits))]);
    double sum = 0;
    for (float l : logits)
        sum += exact_exp(double(l) - best);
    return best + exact_log(sum);
}

// Only a ban makes a logit infinite: what grows beyond a float ends at its largest number.
static bool is_banned(float logit) { return logit == -HUGE_VALF; }
static float bounded(double x) {
    const double most = 0x1.fffffep127;
    return float(std::min(std::max(x, -most), most));
}

// The first index of the last n tokens; -1: all.
static size_t window_start(const vector<int32_t> &timeline, int n) {
    return n < 0 || size_t(n) >= timeline.size() ? 0 : timeline.size() - size_t(n);
}

static void clear_tally(sampler_room &room) {
    for (int32_t id : room.seen)
        room.tally[size_t(id)] = 0;
    room.seen.clear();
}

// The repetition penalty as in the CTRL paper: it always makes a token less likely, whatever the sign of its logit.
static void apply_penalties(const engine_sampling &opt, const vector<int32_t> &timeline, sampler_room &room) {
    for (size_t i = window_start(timeline, opt.penalty_last_n); i < timeline.size(); i++)
        if (room.tally[size_t(timeline[i])]++ == 0)
            room.seen.push_back(timeline[i]);
    const double repeat = opt.repeat_penalty > 0 ? double(opt.repeat_penalty) : 1;
    for (int32_t id : room.seen) {
        float &logit = room.logits[size_t(id)];
        if (is_banned(logit))
            continue;
        const double x = double(logit) > 0 ? double(logit) / repeat : double(logit) * repeat;
        logit =
            bounded(x - double(room.tally[size_t(id)]) * double(opt.frequency_penalty) - double(opt.presence_penalty));
    }
    clear_tally(room);
}

// With w = the last n tokens, backwards: match[i] becomes the length of the longest common start of w and w[i ...], for
// i in [1, n). That is how many tokens before the i-th last one repeat the timeline's end. In linear time (the Z
// algorithm): [from, to) is the match that reaches farthest, and inside of it earlier results hold again. Returns the
// longest.
static int32_t find_repeats(const vector<int32_t> &timeline, size_t n, vector<int32_t> &match) {
    const int32_t *end = timeline.data() + timeline.size() - 1;
    const auto w = [&](size_t i) { return end[-std::ptrdiff_t(i)]; };
    match.resize(n);
    int32_t longest = 0;
    size_t from = 0, to = 0;
    for (size_t i = 1; i < n; i++) {
        size_t k = i < to ? std::min(to - i, size_t(match[i - from])) : 0;
        while (i + k < n && w(k) == w(i + k))
            k++;
        if (i + k > to)
            from = i, to = i + k;
        match[i] = int32_t(k);
        longest = std::max(longest, match[i]);
    }
    return longest;
}

// Whether `breaker` ends with byte `end` of token `at`; it may begin in tokens before that one.
static bool breaker_ends_at(const vocab &v, const vector<int32_t> &timeline, size_t at, size_t end,
                            string_view breaker) {
    for (string_view text = token_bytes(v, timeline[at], true).substr(0, end);;) {
        const size_t n = std::min(text.size(), breaker.size());
        if (text.substr(text.size() - n) != breaker.substr(breaker.size() - n))
            return false;
        breaker.remove_suffix(n);
        if (breaker.empty() || at == 0)
            return breaker.empty();
        text = token_bytes(v, timeline[--at], true);
    }
}

// How many tokens at the timeline's end come after the last breaker, at most `most`.
static int32_t after_breaker(const engine_sampling &opt, const vocab &v, const vector<int32_t> &timeline,
                             int32_t most) {
    bool may_end[256] = {}; // breakers with this byte
    for (size_t b = 0; b < opt.n_dry_breakers; b++)
        may_end[uint8_t(string_view(opt.dry_breakers[b]).back())] = true;
    for (int32_t n = 0; n < most; n++) {
        const size_t at = timeline.size() - 1 - size_t(n);
        const string_view text = token_bytes(v, timeline[at], true);
        for (size_t end = 1; end <= text.size(); end++)
            for (size_t b = 0; may_end[uint8_t(text[end - 1])] && b < opt.n_dry_breakers; b++)
                if (breaker_ends_at(v, timeline, at, end, opt.dry_breakers[b]))
                    return n;
    }
    return most;
}

static void apply_dry(const engine_sampling &opt, const vocab &v, const vector<int32_t> &timeline, sampler_room &room) {
    const size_t n = timeline.size() - window_start(timeline, opt.dry_last_n > 0 ? opt.dry_last_n : -1);
    const int32_t allowed = opt.dry_allowed_length;
    int32_t most = n ? find_repeats(timeline, n, room.match) : 0;
    if (most >= allowed)
        most = after_breaker(opt, v, timeline, most);
    if (most < allowed)
        return;
    for (size_t i = 1; i < n; i++) {
        if (room.match[i] < allowed)
            continue;
        const int32_t next = timeline[timeline.size() - i]; // what came after the tokens that are repeated now
        int32_t &longest = room.tally[size_t(next)];
        if (longest == 0)
            room.seen.push_back(next);
        longest = std::max(longest, std::min(room.match[i], most));
    }
    const auto is_breaker = [&](int32_t id) {
        const string_view text = token_bytes(v, id, true);
        for (size_t b = 0; b < opt.n_dry_breakers; b++)
            if (text.find(opt.dry_breakers[b]) != string_view::npos)
                return true;
        return false;
    };
    const double growth = exact_log(double(opt.dry_base));
    for (int32_t id : room.seen) {
        float &logit = room.logits[size_t(id)];
        if (!is_banned(logit) && !is_breaker(id))
            logit = bounded(double(logit) -
                            double(opt.dry_multiplier) * exact_exp(double(room.tally[size_t(id)] - allowed) * growth));
    }
    clear_tally(room);
}

// The logits after bias, penalties and DRY: the model's own when nothing changes them.
static const vector<float> &adjust_logits(const vector<float> &logits, const engine_sampling &opt, const vocab &v,
                                          const vector<int32_t> &timeline, sampler_room &room) {
    if (!changes_logits(opt))
        return logits;
    room.logits.assign(logits.begin(), logits.end());
    room.tally.resize(logits.size());
    for (size_t i = 0; i < opt.n_bias; i++) {
        float &logit = room.logits[size_t(opt.bias[i].id)];
        if (is_banned(opt.bias[i].bias))
            logit = -HUGE_VALF;
        else if (!is_banned(logit))
            logit = bounded(double(logit) + double(opt.bias[i].bias));
    }
    if (has_penalty(opt))
        apply_penalties(opt, timeline, room);
    if (opt.dry_multiplier > 0)
        apply_dry(opt, v, timeline, room);
    return room.logits;
}

// ---- the candidates ----

// room.pick becomes the k best that are not banned. k > 0.
static void take_best(const vector<float> &logits, size_t k, sampler_room &room) {
    room.pick.clear();
    if (k >= logits.size()) {
        for (size_t i = 0; i < logits.size(); i++)
            if (!is_banned(logits[i]))
                room.pick.push_back({logits[i], int32_t(i)});
        return;
    }
    vector<candidate> &part = room.part;
    candidate last = {-HUGE_VALF, INT32_MAX}; // the k-th best so far
    const auto cut = [&] {
        const auto at = part.begin() + std::ptrdiff_t(k) - 1;
        std::nth_element(part.begin(), at, part.end(), better);
        last = *at;
        part.resize(k);
    };
    part.clear();
    for (size_t i = 0; i < logits.size(); i++)
        if (logits[i] > last.logit) { // an equal one has the higher id, so it is worse
            part.push_back({logits[i], int32_t(i)});
            if (part.size() == part_size(k))
                cut();
        }
    if (part.size() > k)
        cut();
    else if (!part.empty())
        last = *std::min_element(part.begin(), part.end());
    for (size_t i = 0; i < logits.size() && room.pick.size() < part.size(); i++)
        if (logits[i] >= last.logit && !(candidate{logits[i], int32_t(i)} < last))
            room.pick.push_back({logits[i], int32_t(i)});
}

template <class F> static void drop_if(vector<candidate> &pick, F &&what) {
    pick.erase(std::remove_if(pick.begin(), pick.end(), what), pick.end());
}

static double best_of(const vector<candidate> &pick) {
    float best = pick[0].logit;
    for (const candidate &c : pick)
        if (c.logit > best)
            best = c.logit;
    return double(best);
}

// exp(x) for x <= 0, within a few units in the last place. Without fma, which is a call in a portable build, it is
// several times as fast as exact_exp and gives the same bits everywhere all the same.
static double weight(double x) {
    if (!(x > -700))
        return 0;
    const int64_t k = int64_t(x * 1.4426950408889634 - 0.5);
    // ln 2 in two parts, then Taylor, |r| <= 0.347
    const double r = (x - double(k) * 0.693359375) + double(k) * 2.1219444005469057e-4;
    static const double factors[] = {1 / 39916800.0, 1 / 3628800.0, 1 / 362880.0, 1 / 40320.0, 1 / 5040.0, 1 / 720.0,
                                     1 / 120.0,      1 / 24.0,      1 / 6.0,      1 / 2.0,     1,          1};
    double sum = 1 / 479001600.0;
    for (double f : factors)
        sum = sum * r + f;
    const uint64_t bits = uint64_t(k + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return sum * power;
}

// Keeps the fewest candidates, in order of key(logit) and id, that have `part` of the probability. No key is below
// `lowest`. Probabilities are added as integers, so that no order of addition shows.
template <class F> static void keep_share(sampler_room &room, float part, double lowest, F &&key) {
    const double best = best_of(room.pick), unit = 0x1p62 / double(room.pick.size());
    const auto mass = [&](const candidate &c) { return uint64_t(weight(double(c.logit) - best) * unit); };
    // The last one that is kept is looked for by bins of its key first.
    constexpr int BINS = 1024;
    const auto bin = [&](const candidate &c) { return int(std::min((key(c.logit) - lowest) * 16, BINS - 1.0)); };
    uint64_t bins[BINS] = {}, total = 0, before = 0;
    for (const candidate &c : room.pick) {
        const uint64_t m = mass(c);
        bins[bin(c)] += m;
        total += m;
    }
    const uint64_t wanted = std::max<uint64_t>(1, uint64_t(std::ceil(double(part) * double(total))));
    int last_bin = 0;
    while (before + bins[last_bin] < wanted)
        before += bins[last_bin++];
    room.shares.clear();
    for (const candidate &c : room.pick)
        if (bin(c) == last_bin)
            room.shares.push_back({key(c.logit), c.id, mass(c)});
    // It lies in [from, to); what comes before has less than `wanted`. Halving finds it in linear time.
    auto from = room.shares.begin(), to = room.shares.end();
    while (to - from > 1) {
        const auto middle = from + (to - from) / 2;
        std::nth_element(from, middle, to);
        uint64_t sum = before;
        for (auto s = from; s != middle; ++s)
            sum += s->mass;
        if (sum >= wanted)
            to = middle;
        else
            before = sum, from = middle;
    }
    const share last = *from;
    drop_if(room.pick, [&](const candidate &c) { return last < share{key(c.logit), c.id, 0}; });
}

// Locally typical sampling: first what is nearest to the expected surprise. With logits relative to the best one,
// surprise and its expectation are both short of the same logarithm, which cancels out.
static void keep_typical(sampler_room &room, float part) {
    const double best = best_of(room.pick);
    double total = 0, moment = 0;
    for (const candidate &c : room.pick) {
        const double d = double(c.logit) - best, w = weight(d);
        total += w;
        moment += w * d;
    }
    const double expected = moment / total;
    keep_share(room, part, 0, [&](float logit) { return std::fabs(double(logit) - best - expected); });
}

// Of the candidates with at least `threshold` of the probability all but the least likely go.
static void drop_top_choices(vector<candidate> &pick, float threshold) {
    const double best = best_of(pick);
    double total = 0;
    for (const candidate &c : pick)
        total += weight(double(c.logit) - best);
    const candidate *least = nullptr;
    for (const candidate &c : pick)
        if (weight(double(c.logit) - best) >= double(threshold) * total && (!least || c < *least))
            least = &c;
    if (!least)
        return;
    const candidate kept = *least;
    drop_if(pick, [&](const candidate &c) { return kept < c; });
}

// ---- the choice ----

// The finalizer of splitmix64.
static uint64_t scramble(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// A uniform number in [0, 1) from seed and position.
static double draw(uint64_t seed, uint64_t position) {
    return double(scramble(seed + 0x9e3779b97f4a7c15u * (position + 1)) >> 11) * 0x1p-53;
}

// What bias, penalties, DRY and the filters leave, in room.pick: at least one.
static void narrow(const vector<float> &logits, const engine_sampling &opt, const vocab &v,
                   const vector<int32_t> &timeline, sampler_room &room) {
    const vector<float> &l = adjust_logits(logits, opt, v, timeline, room);
    take_best(l, opt.top_k > 0 ? size_t(opt.top_k) : l.size(), room);
    if (is_share(opt.typical_p))
        keep_typical(room, opt.typical_p);
    if (is_share(opt.top_p))
        keep_share(room, opt.top_p, -best_of(room.pick), [](float logit) { return -double(logit); });
    if (opt.min_p > 0) { // p >= min_p * p_best, in terms of logits
        const double floor = best_of(room.pick) + exact_log(double(opt.min_p));
        drop_if(room.pick, [&](const candidate &c) { return double(c.logit) < floor; });
    }
    // XTC has a sequence of draws of its own.
    if (draw(scramble(~opt.seed), timeline.size()) < double(opt.xtc_probability))
        drop_top_choices(room.pick, opt.xtc_threshold);
}

// The token after `timeline`. The options have been checked, and their defaults filled in, by the caller; they leave at
// least one token that is not banned.
static int32_t sample(const vector<float> &logits, const engine_sampling &opt, const vocab &v,
                      const vector<int32_t> &timeline, sampler_room &room) {
    if (opt.temperature <= 0)
        return best_id(adjust_logits(logits, opt, v, timeline, room));
    narrow(logits, opt, v, timeline, room);
    const double best = best_of(room.pick), heat = double(opt.temperature);
    double total = 0;
    for (const candidate &c : room.pick)
        total += weight((double(c.logit) - best) / heat);
    double target = draw(opt.seed, timeline.size()) * total;
    for (const candidate &c : room.pick)
        if ((target -= weight((double(c.logit) - best) / heat)) < 0)
            return c.id;
    return std::max_element(room.pick.begin(), room.pick.end())->id; // rounding ate the last piece of `target`
}

// ---- settings ----

static const char *const default_breakers[] = {"\n", ":", "\"", "*"};

// Keys "general.sampling." + name of a file, and what their values may be. Zero means a default in some fields where
// it means something else in a file, so that it is not accepted there.
static const struct sampling_key {
    const char *name;
    float engine_sampling::*real;
    int engine_sampling::*whole; // one of the two
    double lo, hi;
} sampling_keys[] = {
    {"temp", &engine_sampling::temperature, nullptr, 0, 1000},
    {"top_k", nullptr, &engine_sampling::top_k, -1, INT_MAX},
    {"top_p", &engine_sampling::top_p, nullptr, 1e-6, 1},
    {"min_p", &engine_sampling::min_p, nullptr, 0, 1},
    {"xtc_probability", &engine_sampling::xtc_probability, nullptr, 0, 1},
    {"xtc_threshold", &engine_sampling::xtc_threshold, nullptr, 1e-6, 0.5},
    {"penalty_last_n", nullptr, &engine_sampling::penalty_last_n, -1, INT_MAX},
    {"penalty_repeat", &engine_sampling::repeat_penalty, nullptr, 1e-6, 100},
};

// The common settings, changed by what the file asks for. Returns whether it does. What it asks for and cannot have is
// a warning: nothing of it is needed to run the model.
static bool default_sampling(const model_file &f, engine_sampling &out) {
    out.temperature = 0.8f, out.top_k = 40, out.top_p = 0.95f, out.min_p = 0.05f;
    const string_view prefix = "general.sampling.";
    bool used = false, no_window = false; // the penalty is to look at no token
    for (const meta_value &v : f.keys) {
        if (v.key.substr(0, prefix.size()) != prefix)
            continue;
        const string_view name = v.key.substr(prefix.size());
        const meta_kind kind = meta_types[v.type].kind;
        const double x = kind == KIND_INT     ? double(meta_int(v.type, v.data))
                         : kind == KIND_FLOAT ? meta_float(v.type, v.data)
                                              : double(NAN);
        const auto *key = std::find_if(std::begin(sampling_keys), std::end(sampling_keys),
                                       [&](const sampling_key &k) { return name == k.name; });
        string wrong;
        if (key == std::end(sampling_keys)) {
            // A file that turns mirostat off may still have numbers for it.
            if (name == "mirostat_tau" || name == "mirostat_eta" || (name == "mirostat" && x == 0))
                continue;
            wrong = "is not supported";
        } else if (kind != KIND_INT && kind != KIND_FLOAT) {
            wrong = strf("has type %s, expected a number", meta_types[v.type].name);
        } else if (!(x >= key->lo && x <= key->hi) || (key->whole && x != std::floor(x))) {
            wrong = strf("is %s, expected %s%g to %g", meta_text(v).c_str(), key->whole ? "a whole number from " : "",
                         key->lo, key->hi);
        }
        if (!wrong.empty()) {
            log_msg(ENGINE_LOG_WARN, "%s: %s %s; it is ignored", show_path(f.path).c_str(), show(v.key).c_str(),
                    wrong.c_str());
            continue;
        }
        no_window |= key->whole == &engine_sampling::penalty_last_n && x == 0;
        if (key->whole)
            out.*key->whole = int(x);
        else
            out.*key->real = float(x);
        used = true;
    }
    out.top_k = std::max(out.top_k, 0);
    if (no_window)
        out.repeat_penalty = 0;
    return used;
}

// ---------------------------------------------------------------------------------------------------
// 12. SESSION
//
// One timeline of tokens on a model: what is evaluated, what is pending, the logits of its end, batches of
// several, the file of one, and the loop that generates text. Returns ENGINE_E* codes instead of throwing,
// but for files. Invariant: the cache holds exactly the rows of tokens[0, n_done); the logits, when present,
// belong to position n_done - 1.
// ---------------------------------------------------------------------------------------------------

// The part of a session in one pass through the model.
struct pass_item {
    engine_session *session;
    int n;            // tokens, from n_done on
    bool last;        // they end the timeline: the last one's logits are wanted
    size_t no, index; // what a step function is told: which item, and the first token's index in it
};

} // namespace

struct engine_session {
    engine_model &model;
    const int n_ctx, chunk;
    kv_cache cache;
    vector<int32_t> tokens; // the timeline
    int64_t n_done = 0;     // of these, evaluated
    int64_t keep_at =
        -1; // a position to make a checkpoint at when evaluation comes by: where a prompt took another way
    bool have_logits = false;
    vector<float> logits;    // [n_vocab]
    sampler_room room;       // the sampler's
    vector<pass_item> items; // of the pass that evaluates it, and those beside it
    string note;             // the caller's bytes
    std::atomic<bool> cancel{false};
    bool busy = false;             // a call is computing; callbacks may not start another
    int64_t bad_row = 0;           // ENGINE_ENUMERIC: the token whose logits are not finite
    const char *failure = nullptr; // what the backend said
    engine_progress_fn progress = nullptr;
    void *progress_user = nullptr;
    engine_session_stats stats = {};
    vector<float> itl; // seconds of the last decode steps, a ring of ITL_STEPS

    engine_session(engine_model &m, page_store &store, const cache_share &share, int ctx, int rows)
        : model(m), n_ctx(ctx), chunk(rows), cache(store, share, ctx), logits(size_t(m.w.hp.n_vocab)) {
        tokens.reserve(size_t(ctx));
        itl.reserve(ITL_STEPS);
        items.reserve(1);
    }
    // Bytes of the arrays above; the sampler's room depends on its settings and is not counted.
    static int64_t host_bytes(int64_t n_ctx, int64_t n_vocab) {
        return n_ctx * int64_t(sizeof(int32_t)) + (n_vocab + ITL_STEPS) * int64_t(sizeof(float));
    }
    enum { ITL_STEPS = 4096 };
};

namespace {

enum { CHECKPOINT_TOKENS = 4096, MAX_CTX = 1 << 28 };

// What a session's options come to for a model.
struct session_plan {
    int64_t n_ctx; // tokens
    bool less;     // than the model was trained for, because of memory
    int chunk, type;
    page_layout layout[N_KINDS];
    cache_share share;

    uint64_t cache_bytes() const {
        return uint64_t(share.pages[0]) * layout[0].page_bytes + uint64_t(share.pages[1]) * layout[1].page_bytes;
    }
};

static session_plan plan_session(const engine_model &m, const engine_session_options &opt) {
    const int type = find_cache_type(opt.kv).type;
    const page_layout layout[N_KINDS] = {make_page_layout(m.w, type, 0), make_page_layout(m.w, type, 1)};
    const int64_t token_bytes = std::max<int64_t>(1, kv_cache::token_bytes(layout));
    const int64_t fits = physical_memory() / 2 / token_bytes / PAGE_TOKENS * PAGE_TOKENS; // the cache may take half
    const bool less = !opt.n_ctx && fits > 0 && fits < m.w.hp.n_ctx_train;
    const int64_t n_ctx = opt.n_ctx ? opt.n_ctx : less ? fits : m.w.hp.n_ctx_train;
    const int chunk = int(std::min<int64_t>(opt.chunk ? opt.chunk : 512, n_ctx));
    const int checkpoints = opt.checkpoints < 0 ? 0 : opt.checkpoints ? opt.checkpoints : 8;
    return {n_ctx, less, chunk, type, {layout[0], layout[1]}, cache_share(layout, n_ctx, chunk, checkpoints)};
}

static engine_plan_info describe_plan(engine_model &m, const session_plan &p) {
    engine_plan_info r = {};
    r.n_ctx = int(p.n_ctx), r.chunk = p.chunk, r.threads = m.be->pool.size;
    snprintf(r.kv, sizeof r.kv, "%s", cache_type_name(p.type));
    for (const tensor_info &t : m.file.tensors)
        r.weight_bytes += int64_t(t.bytes);
    for (const buffer &b : m.w.owned)
        r.widened_bytes += int64_t(b.size);
    r.page_bytes = int64_t(p.layout[0].page_bytes + p.layout[1].page_bytes);
    r.kv_token_bytes = kv_cache::token_bytes(p.layout);
    r.cache_bytes = int64_t(p.cache_bytes());
    r.checkpoint_bytes = p.share.checkpoints * p.share.per_checkpoint * int64_t(p.layout[1].page_bytes);
    r.work_bytes = int64_t(m.work_bytes(p.chunk, 1, p.n_ctx));
    r.scratch_bytes = int64_t(m.scratch_bytes(p.chunk, p.n_ctx, p.layout));
    r.session_bytes = engine_session::host_bytes(p.n_ctx, m.w.hp.n_vocab);
    r.memory_bytes = physical_memory();
    const int64_t fixed = r.weight_bytes + r.widened_bytes + r.work_bytes + r.scratch_bytes + r.session_bytes +
                          int64_t(p.share.pages[1] * p.layout[1].page_bytes);
    const int64_t per_token = int64_t(p.layout[0].page_bytes) / PAGE_TOKENS + int64_t(sizeof(int32_t));
    r.max_ctx = std::min<int64_t>(MAX_CTX, std::max<int64_t>(0, r.memory_bytes - fixed) / per_token);
    r.max_ctx = r.max_ctx / PAGE_TOKENS * PAGE_TOKENS;
    r.decode_bytes = m.w.decode_bytes;
    r.decode_kv_bytes = kv_cache::read_bytes(p.layout[0], p.layout[1], p.n_ctx);
    for (const layer &l : m.w.layers)
        for (const mat *w : {&l.wq, &l.wk, &l.wv, &l.wo, &l.gate, &l.up, &l.down})
            r.token_macs += int64_t(w->n_in) * w->n_out;
    return r;
}

static bool all_finite(const float *x, size_t n) {
    uint32_t most = 0; // the largest magnitude, as bits: infinity and NaN lie above every finite number
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        most = std::max(most, bits & 0x7fffffffu);
    }
    return most < 0x7f800000u;
}

// Waits for the backend and keeps what it complains of.
static int finish(engine_session &s) {
    int32_t no_memory = 0;
    s.failure = s.model.ops->sync(s.model.be.get(), &no_memory);
    return !s.failure ? ENGINE_OK : no_memory ? ENGINE_ENOMEM : ENGINE_EINTERNAL;
}

// Hands out the logits of the pass' rows, of which there are n: all to fn, if there is one, and those of each
// timeline's end to its session. What fails is noted in `lead`, the session that the caller asks about it.
static int deliver_logits(engine_session &lead, const vector<pass_item> &items, int n, engine_step_fn fn, void *user) {
    engine_model &m = lead.model;
    const size_t width = size_t(m.w.hp.n_vocab);
    const bool one = n == 1 && !fn; // a decode step: no detour
    int row = 0;                    // of those whose logits are wanted
    for (const pass_item &it : items)
        for (int i = fn ? 0 : it.last ? it.n - 1 : it.n; i < it.n; i++, row++) {
            engine_session &s = *it.session;
            if (row % OUT_ROWS == 0) {
                read_logits(m, row, std::min(n - row, int(OUT_ROWS)), one ? s.logits.data() : m.rows.data());
                if (const int code = finish(lead))
                    return code;
                if (is_cancelled(m))
                    return ENGINE_ECANCELLED;
            }
            const float *logits = one ? s.logits.data() : &m.rows[size_t(row % OUT_ROWS) * width];
            if (!all_finite(logits, width)) {
                lead.bad_row = s.n_done + i;
                return ENGINE_ENUMERIC;
            }
            if (fn && fn(user, it.no, it.index + size_t(i), logits))
                return ENGINE_ECANCELLED;
            if (it.last && i == it.n - 1 && !one)
                std::copy(logits, logits + width, s.logits.begin());
        }
    return ENGINE_OK;
}

// Shortens the timeline. The logits go, unless they are those of its end. Where layers see a window only, evaluation
// may have to go on from before its new end.
static void truncate(engine_session &s, size_t n) {
    if (n < s.tokens.size())
        s.tokens.resize(n);
    if (s.n_done > int64_t(n))
        s.have_logits = false;
    std::lock_guard<std::mutex> lock(s.cache.store.mutex);
    s.n_done = s.cache.rewind(std::min(s.n_done, int64_t(n)));
}

// One pass, under the model's lock. On failure, an exception of fn included, nothing of it counts.
static int evaluate_pass(engine_session &lead, const vector<pass_item> &items, engine_step_fn fn, void *user) {
    engine_model &m = lead.model;
    page_store &store = lead.cache.store;
    std::lock_guard<std::mutex> lock(m.mutex);
    struct pass_end {
        engine_model &m;
        page_store &store;
        const vector<pass_item> &items;
        bool done = false;
        ~pass_end() {
            m.caller = std::thread::id();
            std::lock_guard<std::mutex> pages(store.mutex);
            for (const pass_item &it : items)
                if (!done)
                    it.session->n_done = it.session->cache.rewind(it.session->n_done);
        }
    } end{m, store, items};
    if (fn)
        m.caller = std::this_thread::get_id();
    if (m.rows.empty() && (fn || items.size() > 1))
        m.rows.resize(size_t(OUT_ROWS) * size_t(m.w.hp.n_vocab));
    vector<slice> &slices = m.work.slices;
    slices.clear();
    int n_out = 0;
    for (const pass_item &it : items) {
        engine_session &s = *it.session;
        s.have_logits = false;
        {
            std::lock_guard<std::mutex> pages(store.mutex);
            s.cache.prepare(s.n_done, it.n, [&](int kind, int32_t to, int32_t from) {
                const page_pool &p = store.pool[kind];
                m.ops->copy(m.be.get(), p.at(to), p.at(from), p.layout.page_bytes);
            });
        }
        const int out_from = fn ? 0 : it.last ? it.n - 1 : it.n;
        n_out += it.n - out_from;
        slices.push_back({&s.cache, &s.tokens[size_t(s.n_done)], it.n, s.n_done, out_from, &s.cancel});
    }
    int code = forward(m, store, slices.data(), int(slices.size())) ? ENGINE_OK : ENGINE_ECANCELLED;
    if (!code)
        code = deliver_logits(lead, items, n_out, fn, user);
    if (!code || code == ENGINE_ECANCELLED) { // other codes come from the backend, or after it was done
        const int error = finish(lead);
        code = code ? code : error;
    }
    if (code)
        return code;
    end.done = true;
    std::lock_guard<std::mutex> pages(store.mutex);
    for (const pass_item &it : items) {
        engine_session &s = *it.session;
        const int64_t from = s.n_done, to = from + it.n;
        s.cache.complete(s.tokens.data(), from, to);
        s.n_done = to;
        s.have_logits = it.last;
        s.stats.evaluated += it.n;
        if (to / CHECKPOINT_TOKENS > from / CHECKPOINT_TOKENS)
            s.cache.keep_checkpoint(to / CHECKPOINT_TOKENS * CHECKPOINT_TOKENS);
        if (s.keep_at >= from && s.keep_at <= to)
            s.cache.keep_checkpoint(s.keep_at);
    }
    return ENGINE_OK;
}

// Evaluates the pending tokens of several sessions, as many in one pass as the smallest chunk allows. firsts: where the
// tokens begin that fn is told about, for each session.
static int evaluate(engine_session *const *sessions, const size_t *firsts, size_t n_session, engine_step_fn fn,
                    void *user) {
    int64_t room = sessions[0]->chunk, done = 0, total = 0;
    for (size_t i = 0; i < n_session; i++) {
        room = std::min<int64_t>(room, sessions[i]->chunk);
        total += int64_t(sessions[i]->tokens.size()) - sessions[i]->n_done;
    }
    vector<pass_item> &items = sessions[0]->items;
    items.reserve(n_session);
    while (done < total) {
        items.clear();
        int64_t left = room;
        for (size_t i = 0; i < n_session && left > 0; i++) {
            engine_session &s = *sessions[i];
            const int64_t pending = int64_t(s.tokens.size()) - s.n_done;
            // With fn, rows that it is not told about go in passes of their own.
            const int64_t before = fn ? int64_t(firsts[i]) - s.n_done : 0;
            if (before > 0 && !items.empty())
                break;
            const int64_t n = std::min(before > 0 ? before : pending, left);
            if (n > 0)
                items.push_back({&s, int(n), n == pending, i, size_t(s.n_done) - firsts[i]});
            left = before > 0 ? 0 : left - n;
        }
        const bool told = fn && size_t(items[0].session->n_done) >= firsts[items[0].no];
        if (const int code = evaluate_pass(*sessions[0], items, told ? fn : nullptr, user))
            return code;
        for (const pass_item &it : items)
            done += it.n;
        const engine_session &s = *sessions[0];
        if (done < total && s.progress && s.progress(s.progress_user, done, total))
            return ENGINE_ECANCELLED;
    }
    return ENGINE_OK;
}

static int evaluate(engine_session &s, size_t first = 0, engine_step_fn fn = nullptr, void *user = nullptr) {
    engine_session *const one[] = {&s};
    return evaluate(one, &first, 1, fn, user);
}

// A decode step took `seconds`.
static void count_step(engine_session &s, double seconds) {
    if (s.itl.size() < engine_session::ITL_STEPS)
        s.itl.push_back(float(seconds));
    else
        s.itl[size_t(s.stats.decode_tokens) % engine_session::ITL_STEPS] = float(seconds);
    s.stats.decode_tokens++;
    s.stats.decode_seconds += seconds;
    s.stats.decode_bytes += s.model.w.decode_bytes + s.cache.read_bytes(s.n_done);
}

// Makes sure that the last `count` tokens of what is evaluated are evaluated again.
static void step_back(engine_session &s, int64_t count) {
    s.have_logits = false;
    std::lock_guard<std::mutex> lock(s.cache.store.mutex);
    s.n_done = s.cache.rewind(s.n_done - count);
}

// Evaluates what is pending; should the end have no logits (after a rewind), its last token again. A single pending
// token is a decode step, which began at `since` (0: now). When it fails, what was pending still is.
static int settle(engine_session &s, double since = 0) {
    if (s.tokens.empty())
        return ENGINE_EINVAL;
    if (s.n_done == int64_t(s.tokens.size()) && s.have_logits)
        return ENGINE_OK;
    if (s.n_done == int64_t(s.tokens.size()))
        step_back(s, 1);
    const bool step = int64_t(s.tokens.size()) - s.n_done == 1;
    const double start = since ? since : now_seconds();
    const int code = evaluate(s);
    if (!code && step)
        count_step(s, now_seconds() - start);
    return code;
}

// The end of a call is a position that one may come back to: one token before it, because the last one is evaluated
// again for its logits.
static void keep_position(engine_session &s) {
    std::lock_guard<std::mutex> lock(s.cache.store.mutex);
    s.cache.keep_checkpoint(s.n_done - 1);
}

// However a call ends, unless it is done: timelines end where their evaluation did, but not before `keep`.
struct cut_unless_done {
    engine_session *const *sessions;
    const size_t *keep;
    size_t n;
    bool done = false;
    ~cut_unless_done() {
        for (size_t i = 0; i < n && !done; i++)
            truncate(*sessions[i], std::max(size_t(sessions[i]->n_done), keep[i]));
    }
};

// engine_sync. Returns a code; the number of tokens that need no evaluation goes into the statistics.
static int sync_to(engine_session &s, const int32_t *ids, size_t n) {
    const double start = now_seconds();
    size_t same = 0;
    while (same < n && same < s.tokens.size() && s.tokens[same] == ids[same])
        same++;
    s.keep_at = same < s.tokens.size() ? int64_t(same) : -1;
    truncate(s, same);
    const int64_t own = s.n_done, evaluated = s.stats.evaluated;
    {
        std::lock_guard<std::mutex> lock(s.cache.store.mutex);
        s.n_done = s.cache.adopt(ids, int64_t(n), own);
    }
    s.have_logits = s.have_logits && s.n_done == own;
    const int64_t shared = s.n_done - own;
    engine_session *const self = &s;
    const size_t nothing = 0;
    cut_unless_done cut{&self, &nothing, 1};
    s.tokens.assign(ids, ids + n); // within what was reserved
    if (n && s.n_done == int64_t(n) && !s.have_logits)
        step_back(s, 1);
    s.stats = {};
    s.stats.evaluated = evaluated;
    s.itl.clear();
    s.stats.prompt_tokens = int64_t(n);
    s.stats.reused_tokens = s.n_done;
    s.stats.shared_tokens = std::min(shared, s.n_done);
    const int code = evaluate(s);
    s.stats.prefill_seconds = now_seconds() - start;
    cut.done = !code;
    if (!code)
        keep_position(s);
    return code;
}

// Appends ids[i] to sessions[i] and evaluates; with fn the logits of all of these go to it. On failure each timeline
// ends where its evaluation did, but not before what it was.
static int append(engine_session *const *sessions, const engine_batch_item *items, size_t n_items, engine_step_fn fn,
                  void *user) {
    vector<size_t> before;
    before.reserve(n_items);
    for (size_t i = 0; i < n_items; i++)
        before.push_back(sessions[i]->tokens.size());
    cut_unless_done cut{sessions, before.data(), n_items};
    for (size_t i = 0; i < n_items; i++)
        sessions[i]->tokens.insert(sessions[i]->tokens.end(), items[i].ids, items[i].ids + items[i].n);
    const int code = fn || n_items > 1             ? evaluate(sessions, before.data(), n_items, fn, user)
                     : sessions[0]->tokens.empty() ? int(ENGINE_OK)
                                                   : settle(*sessions[0]);
    cut.done = !code;
    return code;
}

// --- sessions on disk
//
// A file is a head, its hash, and pages, each followed by a hash over head, page and number. The head: session_head,
// tokens int32 [n_tokens], the note, rows int32 [pages] (how many rows of each page count; the others are zeros), then
// for each checkpoint a checkpoint_head and the numbers of its pages. Pages of layers that see everything come first,
// in order; then those of window layers, of which the last n_tail are the timeline's own.

struct session_head {
    char magic[8]; // session_magic
    uint32_t version, numerics;
    digest fingerprint;
    int32_t type;
    uint32_t n_checkpoint;
    uint64_t page_bytes[N_KINDS];
    uint64_t n_tokens, n_done, n_note, n_pages[N_KINDS], n_tail;
};
struct checkpoint_head {
    int64_t pos, first;
    uint64_t n_pages;
};
static const char session_magic[8] = {'e', 'n', 'g', 's', 'e', 's', 's', '\n'};
enum { SESSION_VERSION = 1 };

struct descriptor {
    int fd = -1;
    ~descriptor() { reset(); }
    void reset(int next = -1) {
        if (fd >= 0)
            close(fd);
        fd = next;
    }
    descriptor() = default;
    descriptor(const descriptor &) = delete;
};

// A file that becomes `path` when it is complete. Until then it is path.part, which a crash leaves behind and the next
// one overwrites; a lock keeps two writers apart.
struct file_writer {
    string path, part;
    descriptor file;
    bool committed = false;

    explicit file_writer(const char *name) : path(name) {
        char real[PATH_MAX];
        if (realpath(name, real)) // the file that a link leads to is replaced, not the link
            path = real;
        part = path + ".part";
        struct stat open_file, named;
        if (path.empty())
            fail(ENGINE_EINVAL, "path is empty");
        if (!stat(path.c_str(), &named) && !S_ISREG(named.st_mode))
            fail(ENGINE_EIO, "%s: is not a file", show_path(path).c_str());
        do {
            file.reset(open(part.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
            if (file.fd < 0 || fstat(file.fd, &open_file))
                error("cannot be created");
            if (flock(file.fd, LOCK_EX | LOCK_NB))
                error("is being written by another process");
            // Another writer may have renamed it between our opening and our locking.
        } while (stat(part.c_str(), &named) || named.st_ino != open_file.st_ino || named.st_dev != open_file.st_dev);
        if (!S_ISREG(open_file.st_mode) || ftruncate(file.fd, 0) || fchmod(file.fd, 0600))
            error("cannot be written");
    }
    file_writer(const file_writer &) = delete;
    ~file_writer() {
        if (!committed)
            unlink(part.c_str());
    }
    [[noreturn]] void error(const char *what) {
        fail(ENGINE_EIO, "%s: %s: %s", show_path(part).c_str(), what, strerror(errno));
    }
    void write_all(const void *data, size_t bytes) {
        for (const char *p = static_cast<const char *>(data); bytes;) {
            const ssize_t n = write(file.fd, p, std::min(bytes, size_t(1) << 30));
            if (n < 0 && errno != EINTR)
                error("cannot be written");
            p += std::max<ssize_t>(n, 0), bytes -= size_t(std::max<ssize_t>(n, 0));
        }
    }
    void commit() {
        if (fsync(file.fd))
            error("cannot be written");
        if (rename(part.c_str(), path.c_str()))
            fail(ENGINE_EIO, "%s: cannot be replaced: %s", show_path(path).c_str(), strerror(errno));
        committed = true;
        const size_t slash = path.find_last_of('/');
        descriptor dir;
        dir.reset(open(slash == string::npos ? "." : path.substr(0, slash + 1).c_str(), O_RDONLY | O_CLOEXEC));
        if (dir.fd >= 0)
            fsync(dir.fd); // the name as well; some file systems cannot, and then it comes a little later
    }
};

// What a saved page needs beside its bytes.
struct saved_page {
    int32_t id;   // in the pool
    int32_t rows; // that count
};

static digest page_digest(const digest &head, uint64_t no, const buffer &page) {
    return sha256().value(head).value(no).add(page.data, page.size).finish();
}

// Rows from `rows` on become zeros: what was there belongs to something that has been rewound.
static void clear_rows(const page_layout &l, uint8_t *bytes, int32_t rows) {
    const uint64_t heads = l.first.v_offset / (PAGE_TOKENS * l.first.k_row_bytes);
    for (int i = 0; i < l.n_layer; i++)
        for (uint64_t h = 0; h < heads; h++)
            for (const bool is_key : {true, false}) {
                const uint64_t row = is_key ? l.first.k_row_bytes : l.first.v_row_bytes;
                uint8_t *base = bytes + uint64_t(i) * l.layer_bytes + (is_key ? l.first.k_offset : l.first.v_offset);
                base += h * PAGE_TOKENS * row;
                memset(base + uint64_t(rows) * row, 0, uint64_t(PAGE_TOKENS - rows) * row);
            }
}

// The head of the file, and the pages that follow it, by kind. Called under the store's mutex.
static string session_bytes(const engine_session &s, vector<saved_page> *pages) {
    const page_store &store = s.cache.store;
    const auto rows_of = [](int64_t n, int64_t page) {
        return int32_t(std::min<int64_t>(PAGE_TOKENS, n - page * PAGE_TOKENS));
    };
    const vector<int32_t> &all = s.cache.table[SEES_ALL], &window = s.cache.table[SEES_WINDOW];
    for (size_t i = 0; i < all.size(); i++)
        pages[SEES_ALL].push_back({all[i], rows_of(s.n_done, int64_t(i))});
    vector<saved_page> &kept =
        pages[SEES_WINDOW];                     // first the pages that only checkpoints have, then the timeline's own
    std::unordered_map<int32_t, size_t> number; // of a page in this list
    for (const checkpoint &c : s.cache.checkpoints)
        for (size_t i = 0; i < c.pages.size(); i++) {
            const size_t index = size_t(c.first) + i;
            const int32_t rows = rows_of(c.pos, int64_t(index));
            if (index < window.size() && window[index] == c.pages[i])
                continue;
            const auto added = number.emplace(c.pages[i], kept.size());
            if (added.second)
                kept.push_back({c.pages[i], rows});
            saved_page &p = kept[added.first->second];
            p.rows = std::max(p.rows, rows);
        }
    const size_t n_kept = kept.size();
    for (size_t i = 0; i < window.size(); i++)
        if (window[i] >= 0) {
            number[window[i]] = kept.size();
            kept.push_back({window[i], rows_of(s.n_done, int64_t(i))});
        }

    session_head head = {};
    memcpy(head.magic, session_magic, sizeof head.magic);
    head.version = SESSION_VERSION, head.numerics = NUMERICS_VERSION;
    head.fingerprint = s.model.fingerprint;
    head.type = store.type;
    head.n_checkpoint = uint32_t(s.cache.checkpoints.size());
    head.n_tokens = s.tokens.size(), head.n_done = uint64_t(s.n_done), head.n_note = s.note.size();
    head.n_tail = kept.size() - n_kept;
    for (int kind = 0; kind < N_KINDS; kind++) {
        head.page_bytes[kind] = store.pool[kind].layout.page_bytes;
        head.n_pages[kind] = pages[kind].size();
    }
    string bytes;
    const auto put = [&](const void *p, size_t n) { bytes.append(static_cast<const char *>(p), n); };
    put(&head, sizeof head);
    put(s.tokens.data(), s.tokens.size() * sizeof(int32_t));
    bytes += s.note;
    for (int kind = 0; kind < N_KINDS; kind++)
        for (const saved_page &p : pages[kind])
            put(&p.rows, sizeof p.rows);
    for (const checkpoint &c : s.cache.checkpoints) {
        const checkpoint_head h = {c.pos, c.first, c.pages.size()};
        put(&h, sizeof h);
        for (const int32_t id : c.pages) {
            const int64_t no = int64_t(number[id]);
            put(&no, sizeof no);
        }
    }
    return bytes;
}

static void save(engine_session &s, const char *path) {
    page_store &store = s.cache.store;
    vector<saved_page> pages[N_KINDS];
    string bytes;
    {
        std::lock_guard<std::mutex> lock(store.mutex);
        bytes = session_bytes(s, pages);
    }
    file_writer out(path);
    const digest sum = sha256().add(bytes.data(), bytes.size()).finish();
    out.write_all(bytes.data(), bytes.size());
    out.write_all(&sum, sizeof sum);
    uint64_t no = 0;
    for (int kind = 0; kind < N_KINDS; kind++) {
        const page_layout &layout = store.pool[kind].layout;
        const buffer page(size_t(layout.page_bytes), "a page");
        for (const saved_page &p : pages[kind]) {
            {
                std::lock_guard<std::mutex> lock(s.model.mutex);
                s.model.ops->get(s.model.be.get(), page.data, store.pool[kind].at(p.id), page.size);
                if (const int code = finish(s))
                    fail(code, "%s", s.failure);
            }
            clear_rows(layout, page.data, p.rows);
            const digest d = page_digest(sum, no++, page);
            out.write_all(page.data, page.size);
            out.write_all(&d, sizeof d);
        }
    }
    out.commit();
}

// A session file that is open for reading: every number in its head is checked against the file's size, the model and
// the session before it is used.
struct session_file {
    string path;
    descriptor file;
    session_head head = {};
    buffer bytes; // the whole head
    digest sum;
    vector<int32_t> tokens, rows; // the timeline; of each page, how many rows count
    string note;
    vector<checkpoint> checkpoints; // with numbers of pages in the file

    session_file(const char *name, const engine_session &s) : path(name) {
        struct stat st;
        file.reset(open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK)); // a pipe must not keep us waiting
        if (file.fd < 0 || fstat(file.fd, &st))
            fail(ENGINE_EIO, "%s: %s", show_path(path).c_str(), strerror(errno));
        if (!S_ISREG(st.st_mode))
            bad("is not a file");
        if (uint64_t(st.st_size) < sizeof head + sizeof sum)
            bad("is too short for a session: %lld bytes", (long long)st.st_size);
        read_at(0, &head, sizeof head);
        const uint64_t size = uint64_t(st.st_size);
        check_head(s, size);
        const uint64_t n_pages = head.n_pages[0] + head.n_pages[1];
        uint64_t head_bytes = sizeof head + head.n_tokens * 4 + head.n_note + n_pages * 4;
        const uint64_t page_bytes =
            head.n_pages[0] * (head.page_bytes[0] + sizeof sum) + head.n_pages[1] * (head.page_bytes[1] + sizeof sum);
        if (head_bytes + page_bytes + sizeof sum > size)
            bad("ends too early: %llu bytes of at least %llu", (unsigned long long)size,
                (unsigned long long)(head_bytes + page_bytes + sizeof sum));
        head_bytes = size - page_bytes - sizeof sum; // what is left are the checkpoints
        if (head_bytes > (uint64_t(1) << 32))
            bad("has a head of %llu bytes", (unsigned long long)head_bytes);
        bytes = buffer(size_t(head_bytes), "a session file's head");
        read_at(0, bytes.data, bytes.size);
        read_at(head_bytes, &sum, sizeof sum);
        if (!(sha256().add(bytes.data, bytes.size).finish() == sum))
            bad("is damaged: the checksum of its head is wrong");
        parse(s);
        buffer page;
        for (uint64_t i = 0; i < n_pages; i++)
            read_page(i, page); // all of it is checked before anything is changed
    }
    session_file(const session_file &) = delete;

    // Page number i, of both kinds together.
    void read_page(uint64_t i, buffer &page) const {
        const int kind = i < head.n_pages[0] ? SEES_ALL : SEES_WINDOW;
        const uint64_t in_kind = kind == SEES_ALL ? i : i - head.n_pages[0];
        const uint64_t skip = kind == SEES_ALL ? 0 : head.n_pages[0] * (head.page_bytes[0] + sizeof sum);
        const uint64_t at = bytes.size + sizeof sum + skip + in_kind * (head.page_bytes[kind] + sizeof sum);
        if (page.size != head.page_bytes[kind])
            page = buffer(size_t(head.page_bytes[kind]), "a page");
        digest d;
        read_at(at, page.data, page.size);
        read_at(at + page.size, &d, sizeof d);
        if (!(page_digest(sum, i, page) == d))
            bad("is damaged: the checksum of page %llu is wrong", (unsigned long long)i);
    }

  private:
    [[noreturn, gnu::format(printf, 2, 3)]] void bad(const char *fmt, ...) const {
        va_list args;
        va_start(args, fmt);
        const string reason = vstrf(fmt, args);
        va_end(args);
        fail(ENGINE_EFORMAT, "%s: %s", show_path(path).c_str(), reason.c_str());
    }
    void read_at(uint64_t at, void *to, size_t n) const {
        for (char *p = static_cast<char *>(to); n;) {
            const ssize_t got = pread(file.fd, p, n, off_t(at));
            if (got == 0)
                bad("ends too early");
            if (got < 0 && errno != EINTR)
                fail(ENGINE_EIO, "%s: cannot be read: %s", show_path(path).c_str(), strerror(errno));
            if (got > 0)
                p += got, at += uint64_t(got), n -= size_t(got);
        }
    }
    void check_head(const engine_session &s, uint64_t file_bytes) const {
        const page_store &store = s.cache.store;
        if (memcmp(head.magic, session_magic, sizeof head.magic))
            bad("is not a session file");
        if (head.version != SESSION_VERSION)
            bad("is a session file of version %u; this engine reads version %d", head.version, int(SESSION_VERSION));
        if (!(head.fingerprint == s.model.fingerprint))
            bad("is a session of another model");
        if (head.type != store.type) {
            const format *f = find_format(head.type);
            bad("has cache rows of type %s, this session has %s", f ? f->name : "?", find_format(store.type)->name);
        }
        if (head.numerics != NUMERICS_VERSION)
            bad("was computed by an engine with other arithmetic (%u, here %d)", head.numerics, int(NUMERICS_VERSION));
        // With these limits no sum and no product of the numbers wraps.
        for (int kind = 0; kind < N_KINDS; kind++)
            if (head.page_bytes[kind] != store.pool[kind].layout.page_bytes ||
                head.n_pages[kind] > file_bytes / (sizeof sum + head.page_bytes[kind]))
                bad("has a head that does not fit the model, or ends too early");
        if (head.n_tokens > file_bytes / 4 || head.n_note > INT_MAX || head.n_done > head.n_tokens ||
            head.n_tail > head.n_pages[SEES_WINDOW] || head.n_checkpoint > 4096)
            bad("has a head with impossible numbers, or ends too early");
        if (head.n_tokens > uint64_t(s.n_ctx))
            fail(ENGINE_ECONTEXT, "%s: %llu tokens exceeds the available context size of %d tokens",
                 show_path(path).c_str(), (unsigned long long)head.n_tokens, s.n_ctx);
    }
    // The parts of the head behind session_head, and whether they belong together.
    void parse(const engine_session &s) {
        const page_layout &all = s.cache.store.pool[SEES_ALL].layout, &window = s.cache.store.pool[SEES_WINDOW].layout;
        const int64_t n_done = int64_t(head.n_done), pages = (n_done + PAGE_TOKENS - 1) / PAGE_TOKENS;
        cursor c = {bytes.data, bytes.size, sizeof head, show_path(path)};
        const auto take = [&](auto &to, uint64_t n, const char *what) {
            to.resize(size_t(n));
            const uint8_t *from = c.take(n * sizeof to[0], what);
            if (n)
                memcpy(&to[0], from, size_t(n) * sizeof to[0]);
        };
        take(tokens, head.n_tokens, "the tokens");
        take(note, head.n_note, "the note");
        take(rows, head.n_pages[0] + head.n_pages[1], "the pages");
        for (uint64_t i = 0; i < head.n_tokens; i++)
            if (tokens[size_t(i)] < 0 || tokens[size_t(i)] >= s.model.voc.n)
                bad("token %llu is %d, which the model does not have", (unsigned long long)i, int(tokens[size_t(i)]));
        const int64_t tail = window.n_layer ? pages - window.first_page(n_done) : 0;
        if (int64_t(head.n_pages[SEES_ALL]) != (all.n_layer ? pages : 0) || int64_t(head.n_tail) < tail ||
            int64_t(head.n_tail) > (window.n_layer ? pages : 0))
            bad("has %llu and %llu pages, which does not fit %lld tokens", (unsigned long long)head.n_pages[SEES_ALL],
                (unsigned long long)head.n_tail, (long long)n_done);
        const uint64_t n_own = rows.size() - head.n_tail; // before these come the pages of checkpoints
        for (uint64_t i = 0; i < rows.size(); i++) {
            const int64_t index = i < head.n_pages[SEES_ALL] ? int64_t(i)
                                  : i < n_own                ? -1
                                                             : pages - int64_t(rows.size() - i);
            const int64_t least = index < 0 ? 1 : std::min<int64_t>(PAGE_TOKENS, n_done - index * PAGE_TOKENS);
            if (rows[size_t(i)] < least || rows[size_t(i)] > PAGE_TOKENS)
                bad("page %llu has %d rows", (unsigned long long)i, int(rows[size_t(i)]));
        }
        vector<int64_t> place(size_t(head.n_pages[SEES_WINDOW]), -1); // in the timeline, of each window page
        for (uint64_t i = 0; i < head.n_tail; i++)
            place[size_t(head.n_pages[SEES_WINDOW] - head.n_tail + i)] = pages - int64_t(head.n_tail - i);
        for (uint32_t i = 0; i < head.n_checkpoint; i++) {
            const auto h = c.get<checkpoint_head>("a checkpoint");
            if (h.pos < 1 || h.pos > n_done || (i && h.pos <= checkpoints.back().pos) || h.first < 0 ||
                h.first > window.first_page(h.pos) || h.n_pages > uint64_t(s.cache.share.per_checkpoint) ||
                h.first + int64_t(h.n_pages) != (h.pos + PAGE_TOKENS - 1) / PAGE_TOKENS)
                bad("checkpoint %u is at an impossible position", i);
            checkpoint cp = {h.pos, h.first, {}};
            for (uint64_t k = 0; k < h.n_pages; k++) {
                const auto no = c.get<int64_t>("a checkpoint");
                if (no < 0 || no >= int64_t(head.n_pages[SEES_WINDOW]))
                    bad("checkpoint %u has a page that is not there", i);
                const int64_t index = h.first + int64_t(k);
                if (place[size_t(no)] < 0)
                    place[size_t(no)] = index;
                if (place[size_t(no)] != index || rows[size_t(head.n_pages[SEES_ALL]) + size_t(no)] <
                                                      std::min<int64_t>(PAGE_TOKENS, h.pos - index * PAGE_TOKENS))
                    bad("checkpoint %u has a page of another position", i);
                cp.pages.push_back(int32_t(no));
            }
            checkpoints.push_back(std::move(cp));
        }
        if (c.left())
            bad("has %llu bytes too many", (unsigned long long)c.left());
    }
};

// Puts page `no` of the file, which is page `index` of the timeline, into the pool; one that is there by its name is
// used as it is.
static int32_t load_page(engine_session &s, const session_file &f, uint64_t no, int64_t index, buffer &page) {
    const int kind = no < f.head.n_pages[SEES_ALL] ? SEES_ALL : SEES_WINDOW;
    page_pool &pool = s.cache.store.pool[kind];
    if (f.rows[size_t(no)] == PAGE_TOKENS && (index + 1) * PAGE_TOKENS <= int64_t(f.head.n_done)) {
        std::lock_guard<std::mutex> pages(s.cache.store.mutex);
        const int32_t id =
            pool.find(s.cache.names[size_t(index)], s.cache.name_before(index), f.tokens.data() + index * PAGE_TOKENS);
        if (id >= 0) {
            pool.hold(id);
            return id;
        }
    }
    f.read_page(no, page);
    std::lock_guard<std::mutex> lock(s.model.mutex);
    std::lock_guard<std::mutex> pages(s.cache.store.mutex);
    const int32_t id = pool.take();
    s.model.ops->put(s.model.be.get(), pool.at(id), page.data, page.size);
    return id;
}

// The tables of the file's timeline, page by page. No other thread looks at them.
static void load_tables(engine_session &s, const session_file &f) {
    kv_cache &cache = s.cache;
    buffer page;
    cache.from_file = true;
    cache.set_names(f.tokens.data(), int64_t(f.head.n_done));
    const uint64_t n_all = f.head.n_pages[SEES_ALL], n_window = f.head.n_pages[SEES_WINDOW];
    for (uint64_t i = 0; i < n_all; i++)
        cache.table[SEES_ALL].push_back(load_page(s, f, i, int64_t(i), page));
    vector<int32_t> ids(size_t(n_window), -1),
        &window = cache.table[SEES_WINDOW]; // ids: in the pool, of what is loaded
    if (const page_layout &l = cache.store.pool[SEES_WINDOW].layout; l.n_layer) {
        const int64_t end = (int64_t(f.head.n_done) + PAGE_TOKENS - 1) / PAGE_TOKENS;
        window.resize(size_t(end), -1);
        for (int64_t i = l.first_page(int64_t(f.head.n_done)); i < end; i++) { // all of it is in the file
            const uint64_t no = n_window - uint64_t(end - i);
            window[size_t(i)] = ids[size_t(no)] = load_page(s, f, n_all + no, i, page);
        }
    }
    // As many checkpoints as this session may have, the newest ones.
    const size_t skip = f.checkpoints.size() - std::min(f.checkpoints.size(), size_t(cache.share.checkpoints));
    for (size_t c = skip; c < f.checkpoints.size(); c++) {
        const checkpoint &from = f.checkpoints[c];
        cache.checkpoints.push_back({from.pos, from.first, {}});
        vector<int32_t> &to = cache.checkpoints.back().pages;
        to.reserve(from.pages.size());
        for (size_t i = 0; i < from.pages.size(); i++) {
            int32_t &id = ids[size_t(from.pages[i])];
            if (id < 0) {
                id = load_page(s, f, n_all + uint64_t(from.pages[i]), from.first + int64_t(i), page);
            } else {
                std::lock_guard<std::mutex> pages(cache.store.mutex);
                cache.store.pool[SEES_WINDOW].hold(id);
            }
            to.push_back(id);
        }
    }
}

static void load(engine_session &s, const char *path) {
    session_file f(path, s);
    truncate(s, 0);
    try {
        load_tables(s, f);
        std::lock_guard<std::mutex> lock(s.model.mutex);
        if (const int code = finish(s))
            fail(code, "%s", s.failure);
    } catch (...) { // the file changed while it was read, or memory ended
        std::lock_guard<std::mutex> pages(s.cache.store.mutex);
        s.cache.rewind(0);
        throw;
    }
    s.n_done = int64_t(f.head.n_done);
    s.tokens.assign(f.tokens.begin(), f.tokens.end()); // within what was reserved
    s.note.swap(f.note);
}

// Text on its way out: whole characters only, and nothing that may still turn out to be the start of a stop string.
struct text_gate {
    const engine_generate_options &opt;
    engine_text_fn fn;
    void *user;
    utf8_gate utf8;
    string held;
    const char *stop = nullptr; // the string that was met

    // Returns false when generation must end: a stop string was met, or the callback asked for it.
    bool push(string_view bytes) { return settle_text(utf8.push(bytes), false); }
    bool finish() { return stop || settle_text(utf8.finish(), true); }
    // Something else follows, so that no character can go on.
    bool end_character() { return settle_text(utf8.finish(), false); }

  private:
    bool emit(size_t n) {
        const bool go_on = n == 0 || !fn || fn(user, held.data(), n) == 0;
        held.erase(0, n);
        return go_on;
    }
    bool settle_text(const string &text, bool last) {
        held += text;
        size_t first = string::npos, keep = 0;
        for (size_t i = 0; i < opt.n_stops; i++) {
            const string_view s = opt.stops[i];
            const size_t found = held.find(s);
            if (found < first)
                first = found, stop = opt.stops[i];
            for (size_t n = std::min(s.size() - 1, held.size()); n > keep; n--)
                if (string_view(held).substr(held.size() - n) == s.substr(0, n))
                    keep = n;
        }
        if (stop) {
            emit(first);
            held.clear();
            return false;
        }
        return emit(last ? held.size() : held.size() - keep);
    }
};

// What models put around their reasoning.
struct reasoning_marks {
    string_view open, close;
};
static const reasoning_marks reasoning_table[] = {
    {"<think>", "</think>"}, // DeepSeek, Qwen, GLM and most others
    {"[THINK]", "[/THINK]"}, // Mistral
    {"<seed:think>", "</seed:think>"},
    {"<|START_THINKING|>", "<|END_THINKING|>"},  // Cohere
    {"<|channel>thought", "<channel|>"},         // Gemma 4
    {"<|inner_prefix|>", "<|inner_suffix|>"},    // Apertus
    {"\u25c1think\u25b7", "\u25c1/think\u25b7"}, // Kimi
    {"<thought>", "</thought>"},                 // EXAONE Deep
    {"<reasoning>", "</reasoning>"},             // Reka
};

// Those of a model, or null: the first pair in its chat template, else the first whose marks are both tokens.
static const reasoning_marks *find_marks(const engine_model &m) {
    const meta_value *v = m.file.meta("tokenizer.chat_template");
    const bool text = v && meta_types[v->type].kind == KIND_STRING;
    const string_view source = text ? m.file.get_string(v->key, "") : string_view();
    const auto in_template = [&](string_view mark) { return source.find(mark) != string_view::npos; };
    const auto is_token = [&](string_view mark) {
        const int32_t id = match_special(m.voc, mark, 0, true, nullptr);
        return find_piece(m.voc, mark) >= 0 || (id >= 0 && m.voc.text[size_t(id)] == mark);
    };
    for (const reasoning_marks &r : reasoning_table)
        if (in_template(r.open) && in_template(r.close))
            return &r;
    for (const reasoning_marks &r : reasoning_table)
        if (is_token(r.open) && is_token(r.close))
            return &r;
    return nullptr;
}

static bool is_newline(char c) { return c == '\n' || c == '\r'; }

// Divides what a model writes into reasoning and answer. The marks are looked for in the bytes of all tokens, so it
// does not matter whether they are control tokens, whose bytes nobody gets to see, or how they are spelled. A closing
// mark without an opening one is part of the answer.
struct reasoning_gate {
    text_gate &answer;
    const engine_text_fn fn; // null: no reasoning is wanted, all is answer
    void *user;
    const reasoning_marks *marks = nullptr;
    bool inside = false;
    bool skip = false;   // newlines: a mark has just been
    string held, hidden; // what may still belong to a mark; hidden[i] != 0: byte i is a control token's
    utf8_gate utf8;

    // What the tail of the timeline has opened: a mark behind the last control token that is none itself, since turns
    // are made of these.
    void start(const engine_session &s) {
        const vocab &v = s.model.voc;
        marks = fn ? find_marks(s.model) : nullptr;
        const auto of_mark = [&](string_view t) {
            return marks && (marks->open.find(t) != string::npos || marks->close.find(t) != string::npos);
        };
        size_t from = s.tokens.size();
        while (marks && from > 0 && s.tokens.size() - from < MAX_TAIL &&
               (!is_hidden(v, s.tokens[from - 1]) || of_mark(token_bytes(v, s.tokens[from - 1], true))))
            from--;
        if (!marks || s.tokens.size() - from == MAX_TAIL)
            return;
        string tail;
        for (size_t i = from; i < s.tokens.size(); i++)
            tail += token_bytes(v, s.tokens[i], true);
        const size_t open = tail.rfind(marks->open), close = tail.rfind(marks->close);
        inside = open != string::npos && (close == string::npos || close < open);
        const size_t last = inside ? open + marks->open.size() : close + marks->close.size();
        skip = (inside || close != string::npos) &&
               std::all_of(tail.begin() + std::ptrdiff_t(last), tail.end(), is_newline);
    }
    static bool is_hidden(const vocab &v, int32_t id) {
        return token_bytes(v, id, false).size() != token_bytes(v, id, true).size();
    }
    // As text_gate::push.
    bool push(const vocab &v, int32_t id) {
        if (!marks)
            return answer.push(token_bytes(v, id, false));
        const string_view bytes = token_bytes(v, id, true);
        held += bytes;
        hidden.append(bytes.size(), char(is_hidden(v, id)));
        for (;;) {
            const string_view mark = inside ? marks->close : marks->open;
            const size_t found = held.find(mark);
            if (found == string::npos)
                return give(held.size() - pending(mark));
            if (!give(found - newlines_before(found)))
                return false;
            const size_t behind = held.find(mark) + mark.size();
            held.erase(0, behind), hidden.erase(0, behind);
            if (!(inside ? emit(utf8.finish()) : answer.end_character()))
                return false;
            inside = !inside;
            skip = true;
        }
    }
    bool finish() { return answer.stop || (give(held.size()) && emit(utf8.finish()) && answer.finish()); }

  private:
    enum { MAX_TAIL = 1 << 16, MAX_NEWLINES = 64 };
    // How many newlines of the reasoning end at n.
    size_t newlines_before(size_t n) const {
        size_t k = 0;
        while (inside && k < n && k < MAX_NEWLINES && is_newline(held[n - 1 - k]))
            k++;
        return k;
    }
    // Of the end of `held`: what may be the beginning of the mark and newlines before it.
    size_t pending(string_view mark) const {
        size_t n = std::min(mark.size() - 1, held.size());
        while (held.compare(held.size() - n, n, mark.substr(0, n)) != 0)
            n--;
        return n + newlines_before(held.size() - n);
    }
    bool emit(string_view text) { return text.empty() || fn(user, text.data(), text.size()) == 0; }
    bool give(size_t n) {
        string text;
        for (size_t i = 0; i < n; i++) {
            skip = skip && (is_newline(held[i]) || hidden[i]);
            if (!skip && !hidden[i])
                text += held[i];
        }
        held.erase(0, n), hidden.erase(0, n);
        return inside ? emit(utf8.push(text)) : text.empty() || answer.push(text);
    }
};

static int generate(engine_session &s, const engine_generate_options &opt, engine_text_fn fn, void *user,
                    engine_result &result) {
    text_gate answer{opt, fn, user, {}, {}, nullptr};
    reasoning_gate out{answer, opt.on_reasoning, user, nullptr, false, false, {}, {}, {}};
    out.start(s);
    result.reason = -1;
    double since = 0; // when the step before was done: sampling and the callback count as the time between two tokens
    while (result.reason < 0) {
        const int code = s.cancel.load() ? int(ENGINE_ECANCELLED) : settle(s, since);
        since = now_seconds();
        if (code) {
            out.finish();
            result.reason = ENGINE_STOP_CANCELLED;
            return code;
        }
        if (int64_t(s.tokens.size()) >= s.n_ctx) {
            result.reason = ENGINE_STOP_CONTEXT;
            break;
        }
        const int32_t id = sample(s.logits, *opt.sampling, s.model.voc, s.tokens, s.room);
        const bool reasoning = out.inside;
        s.tokens.push_back(id);
        result.n_tokens++;
        if (is_end(s.model.voc, id) && !opt.ignore_end)
            result.reason = ENGINE_STOP_END;
        else if (!out.push(s.model.voc, id))
            result.reason = answer.stop ? ENGINE_STOP_STRING : ENGINE_STOP_CALLBACK;
        else if (result.n_tokens == opt.max_tokens)
            result.reason = ENGINE_STOP_LENGTH;
        result.n_reasoning += reasoning || out.inside;
    }
    if (result.reason != ENGINE_STOP_CALLBACK && !out.finish())
        result.reason = answer.stop ? ENGINE_STOP_STRING : ENGINE_STOP_CALLBACK;
    result.stop = answer.stop;
    keep_position(s);
    return ENGINE_OK;
}

// ---------------------------------------------------------------------------------------------------
// 13. API
//
// The functions of engine.h: arguments are checked here, and the one place where exceptions become error
// codes is `guarded`. Knows every chapter, adds no behaviour of its own. Invariant: nothing is thrown
// across the C boundary, and an error leaves the session usable.
// ---------------------------------------------------------------------------------------------------

// Does not allocate: it runs where memory may have ended.
static int set_error(engine_error *err, int code, const char *msg) {
    if (err) {
        err->code = code;
        size_t n = strlen(msg);
        if (n >= sizeof err->msg)
            for (n = sizeof err->msg - 1;
                 n > 0 && (uint8_t(msg[n]) & 0xc0) == 0x80;) // not in the middle of a character
                n--;
        memcpy(err->msg, msg, n);
        std::replace_if(
            err->msg, err->msg + n, [](char c) { return uint8_t(c) < 0x20; }, ' '); // one line
        err->msg[n] = 0;
    }
    return code;
}

template <class F> static int guarded(engine_error *err, F &&body) {
    try {
        fp_mode mode;
        return body();
    } catch (const Error &e) {
        return set_error(err, e.code, e.msg.c_str());
    } catch (const std::bad_alloc &) {
        return set_error(err, ENGINE_ENOMEM, "out of memory");
    } catch (const std::exception &e) {
        char text[200];
        snprintf(text, sizeof text, "internal error: %s", e.what());
        return set_error(err, ENGINE_EINTERNAL, text);
    } catch (...) { // from a callback
        return set_error(err, ENGINE_EINTERNAL, "a callback threw");
    }
}

// The caller's option struct as this version knows it: fields that an older caller does not have are zero.
template <class T> static T options(const T *given, const char *what) {
    T opt = {};
    if (given) {
        const size_t size = given->size ? given->size : sizeof opt;
        if (size < sizeof(size_t) || size > 65536)
            fail(ENGINE_EINVAL, "%s.size is %zu, expected sizeof(%s)", what, given->size, what);
        memcpy(&opt, given, std::min(size, sizeof opt));
        for (size_t i = sizeof opt; i < size; i++) // what a newer caller asks for is not dropped in silence
            if (reinterpret_cast<const char *>(given)[i])
                fail(ENGINE_EUNSUPPORTED, "%s has fields that this version %s does not know", what, ENGINE_VERSION);
    }
    return opt;
}

// A result struct goes to the caller as far as the caller knows it. give_size checks what it says before there is work.
template <class T> static size_t give_size(const T *out, const char *what) {
    const size_t size = out->size ? out->size : sizeof(T);
    if (size < sizeof(size_t) || size > 65536)
        fail(ENGINE_EINVAL, "%s.size is %zu, expected sizeof(%s)", what, out->size, what);
    return size;
}
template <class T> static void give_struct(T *out, T value, const char *what) {
    value.size = give_size(out, what);
    memcpy(out, &value, std::min(value.size, sizeof value));
}

static void check_range(const char *what, int64_t value, int64_t lo, int64_t hi) {
    if (value < lo || value > hi)
        fail(ENGINE_EINVAL, "%s is %lld, expected %lld to %lld", what, (long long)value, (long long)lo, (long long)hi);
}
static void check_pointer(const char *what, const void *p) {
    if (!p)
        fail(ENGINE_EINVAL, "%s is NULL", what);
}
static string_view text_view(const char *text, size_t len) {
    if (!text && len)
        fail(ENGINE_EINVAL, "text is NULL");
    return text ? string_view(text, len == size_t(-1) ? strlen(text) : len) : string_view();
}

// snprintf's contract, for text and for tokens.
static int give_text(string_view s, char *out, size_t cap) {
    if (s.size() > INT_MAX)
        fail(ENGINE_ENOMEM, "%zu bytes of text are more than one call can return", s.size());
    if (cap && out) {
        const size_t n = std::min(s.size(), cap - 1);
        memcpy(out, s.data(), n);
        out[n] = 0;
    }
    return int(s.size());
}
static int give_tokens(const vector<int32_t> &v, int32_t *ids, size_t cap) {
    if (v.size() > INT_MAX)
        fail(ENGINE_ENOMEM, "%zu tokens are more than one call can return", v.size());
    if (ids)
        std::copy(v.begin(), v.begin() + std::ptrdiff_t(std::min(cap, v.size())), ids);
    return int(v.size());
}
static void copy_name(char *out, size_t cap, string_view s) {
    snprintf(out, cap, "%.*s", int(std::min(s.size(), cap)), s.data());
}

// "Q4_K 61% Q6_K 38% F32 1%": formats by their share of the bytes.
static string describe_types(const model_file &f) {
    vector<std::pair<uint64_t, int>> share; // bytes, type
    uint64_t total = 0;
    for (const tensor_info &t : f.tensors) {
        if (!find_format(t.type))
            continue;
        auto it = std::find_if(share.begin(), share.end(), [&](const auto &s) { return s.second == t.type; });
        if (it == share.end())
            it = share.insert(share.end(), {0, t.type});
        it->first += t.bytes;
        total += t.bytes;
    }
    std::sort(share.rbegin(), share.rend());
    string out;
    for (const auto &s : share)
        if (double(s.first) >= 0.005 * double(total))
            out += strf("%s%s %.0f%%", out.empty() ? "" : " ", find_format(s.second)->name,
                        100.0 * double(s.first) / double(total));
    return out;
}

// "matmul(IQ4_XS)": what runs without a kernel of its own on this processor.
static string describe_generic_ops(const engine_model &m) {
    string out;
    vector<int> seen;
    for (const tensor_info &t : m.file.tensors)
        if (t.n_dims > 1 && find_format(t.type) && std::find(seen.begin(), seen.end(), t.type) == seen.end()) {
            seen.push_back(t.type);
            if (!strcmp(cpu_matmul_path(t.type, m.be->level), "plain"))
                out += strf("%smatmul(%s)", out.empty() ? "" : " ", find_format(t.type)->name);
        }
    return out;
}

static string backend_name(cpu_level level) {
    return strf("cpu %s", level == CPU_AVX512 ? "avx512" : level == CPU_AVX2 ? "avx2" : "plain");
}

static string_view piece_text(const vocab &v, int32_t id) { return id < 0 ? string_view() : token_bytes(v, id, true); }

static void check_tokens(const engine_session &s, const int32_t *ids, size_t n, size_t before) {
    if (n)
        check_pointer("ids", ids);
    if (n > size_t(s.n_ctx) || before + n > size_t(s.n_ctx))
        fail(ENGINE_ECONTEXT, "%zu tokens exceeds the available context size of %d tokens", before + n, s.n_ctx);
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= s.model.voc.n)
            fail(ENGINE_EINVAL, "ids[%zu] is %d, expected 0 to %d", i, int(ids[i]), s.model.voc.n - 1);
}

// Turns a code of chapter SESSION into an Error with words.
static void check_code(engine_session &s, int code) {
    if (code == ENGINE_OK)
        return;
    if (code == ENGINE_ECANCELLED)
        fail(code, "cancelled; %lld tokens of the timeline are evaluated", (long long)s.n_done);
    if (code == ENGINE_ENUMERIC)
        fail(code, "%s: the logits after token %lld are not finite: the file or its quantization is damaged",
             show_path(s.model.file.path).c_str(), (long long)s.bad_row);
    if (code == ENGINE_EINVAL)
        fail(code, "the timeline is empty");
    fail(code, "%s", s.failure ? s.failure : "the backend failed");
}

// A callback that runs under the model's lock would wait for itself.
static void check_caller(const engine_model &m) {
    if (m.caller.load() == std::this_thread::get_id())
        fail(ENGINE_EINVAL, "a callback that is given logits may not compute on the model that called it");
}

static engine_session &need_session(engine_session *session) {
    check_pointer("session", session);
    return *session;
}

// Held by each call that computes: callbacks may not start another one on the session, and a cancel that came before
// the call ends it at once, while one that comes too late to stop it does not harm the next.
struct computing {
    engine_session &s;
    const bool computes;
    // computes: false for calls that use the session without computing on it, which no cancel is meant for.
    explicit computing(engine_session *session, bool does = true) : s(need_session(session)), computes(does) {
        if (s.busy)
            fail(ENGINE_EINVAL, "a callback may not compute on or change the session that called it");
        check_caller(s.model);
        s.failure = nullptr, s.bad_row = 0;
        if (computes && s.cancel.exchange(false))
            check_code(s, ENGINE_ECANCELLED);
        s.busy = true;
    }
    ~computing() {
        s.busy = false;
        if (computes)
            s.cancel = false;
    }
    computing(const computing &) = delete;
};

// The conversation, in whichever form it is given.
static json_document check_messages(const engine_message *messages, size_t n, const char *json) {
    if (!json) {
        if (n)
            check_pointer("messages", messages);
        check_range("n", int64_t(std::min<size_t>(n, INT_MAX)), 0, INT_MAX / 8);
        for (size_t i = 0; i < n; i++) {
            check_pointer("a message's role", messages[i].role);
            check_pointer("a message's content", messages[i].content);
            for (const char *s : {messages[i].role, messages[i].content})
                if (strlen(s) > INT_MAX)
                    fail(ENGINE_EINVAL, "messages[%zu] is longer than %d bytes", i, INT_MAX);
        }
        return messages_document(messages, n);
    }
    if (messages || n)
        fail(ENGINE_EINVAL, "messages and messages_json are both given");
    json_document d = parse_json(json, ENGINE_EINVAL, "messages_json");
    if (d.root().kind != JSON_ARRAY)
        fail(ENGINE_EINVAL, "messages_json is %s, expected an array of objects", json_kind_names[d.root().kind]);
    size_t i = 0;
    for (const json_value *v = d.root().begin(); v != d.root().end(); v = v->next(), i++)
        if (v->kind != JSON_OBJECT)
            fail(ENGINE_EINVAL, "messages_json[%zu] is %s, expected an object", i, json_kind_names[v->kind]);
    return d;
}

static vector<json_document> check_template_args(const engine_chat_options &opt) {
    vector<json_document> values;
    if (opt.n_args)
        check_pointer("args", opt.args);
    for (size_t i = 0; i < opt.n_args; i++) {
        check_pointer("an argument's name", opt.args[i].name);
        const string_view name = opt.args[i].name;
        const string shown = "template argument " + show(name);
        if (name.empty() || (name[0] >= '0' && name[0] <= '9') ||
            !std::all_of(name.begin(), name.end(), tpl_lexer::is_word))
            fail(ENGINE_EINVAL, "%s: a template cannot have a variable of this name", shown.c_str());
        if (name == "messages")
            fail(ENGINE_EINVAL, "%s: the conversation cannot be replaced", shown.c_str());
        check_pointer((shown + ": its value").c_str(), opt.args[i].json);
        values.push_back(parse_json(opt.args[i].json, ENGINE_EINVAL, shown));
    }
    return values;
}

} // namespace

void engine_set_log(engine_log_fn fn, void *user) {
    std::lock_guard<std::mutex> lock(log_mutex);
    log_fn = fn, log_user = user;
}

const char *engine_version(void) { return ENGINE_VERSION; }

int engine_backends(char *out, size_t cap) {
    return guarded(nullptr, [&] { return give_text(backend_name(cpu_detect()), out, cap); });
}

static std::unique_ptr<engine_model> make_model(const char *path, const engine_open_options *given) {
    check_pointer("path", path);
    const auto opt = options(given, "engine_open_options");
    check_range("threads", opt.threads, 0, 512);
    model_file file = open_model_file(path, opt.no_mmap != 0);
    find_arch(file); // before the tokenizer: its Error says more about a file for another kind of model
    vocab voc = load_vocab(file);
    std::unique_ptr<engine_model> m(
        new engine_model(std::move(file), std::move(voc), opt.threads ? opt.threads : usable_cores(), &cpu_ops));
    m->w = load_weights(m->file, m->voc, m->be.get(), *m->ops);
    for (int kind = 0; kind < N_KINDS; kind++)
        m->f16_layout[kind] = make_page_layout(m->w, TYPE_F16, kind);
    return m;
}

int engine_open(engine_model **out, const char *path, const engine_open_options *opt, engine_error *err) {
    return guarded(err, [&] {
        check_pointer("out", out);
        *out = nullptr;
        *out = make_model(path, opt).release();
        return ENGINE_OK;
    });
}

void engine_close(engine_model *model) { delete model; }

int engine_info(const engine_model *model, engine_model_info *info, engine_error *err) {
    return guarded(err, [&] {
        check_pointer("model", model);
        check_pointer("info", info);
        const engine_model &m = *model;
        const hparams &hp = m.w.hp;
        engine_model_info r = {};
        const size_t slash = m.file.path.find_last_of('/');
        const meta_value *name = m.file.meta("general.name");
        copy_name(r.name, sizeof r.name,
                  name && meta_types[name->type].kind == KIND_STRING ? m.file.get_string("general.name", "")
                                                                     : string_view(m.file.path).substr(slash + 1));
        copy_name(r.arch, sizeof r.arch, m.file.get_string("general.architecture", ""));
        copy_name(r.tokenizer, sizeof r.tokenizer, m.voc.describe);
        copy_name(r.types, sizeof r.types, describe_types(m.file));
        copy_name(r.backend, sizeof r.backend, backend_name(m.be->level));
        copy_name(r.generic_ops, sizeof r.generic_ops, describe_generic_ops(m));
        for (const tensor_info &t : m.file.tensors) {
            r.n_params += int64_t(t.dims[0] * t.dims[1] * t.dims[2] * t.dims[3]);
            r.weight_bytes += int64_t(t.bytes);
        }
        r.decode_bytes = m.w.decode_bytes;
        r.kv_token_bytes = kv_cache::token_bytes(m.f16_layout);
        r.n_window = m.f16_layout[SEES_WINDOW].window;
        r.allocated_bytes = int64_t(m.ops->allocated(m.be.get()));
        r.n_vocab = hp.n_vocab, r.n_layer = hp.n_layer, r.n_embd = hp.n_embd, r.n_head = hp.n_head;
        r.n_head_kv = hp.n_head_kv, r.head_dim = hp.dim_k, r.n_ff = hp.n_ff, r.n_ctx_train = hp.n_ctx_train;
        r.threads = m.be->pool.size;
        r.has_template = m.file.meta("tokenizer.chat_template") != nullptr;
        r.bos = m.voc.bos, r.eos = m.voc.eos, r.add_bos = m.voc.add_bos;
        give_struct(info, r, "engine_model_info");
        return ENGINE_OK;
    });
}

int engine_meta(const engine_model *model, const char *key, char *out, size_t cap, engine_error *err) {
    return guarded(err, [&] {
        check_pointer("model", model);
        if (key) {
            const meta_value *v = model->file.meta(key);
            if (!v)
                fail(ENGINE_EINVAL, "%s: no such key: %s", show_path(model->file.path).c_str(), show(key).c_str());
            return give_text(meta_text(*v), out, cap);
        }
        string all;
        for (const meta_value &v : model->file.keys)
            all += string(v.key) + " = " + meta_text(v) + "\n";
        return give_text(all, out, cap);
    });
}

int engine_tokenize(const engine_model *model, const char *text, size_t len, int flags, int32_t *ids, size_t cap,
                    engine_error *err) {
    return guarded(err, [&] {
        check_pointer("model", model);
        check_range("flags", flags, 0, ENGINE_ADD_BOS | ENGINE_PARSE_SPECIAL);
        const vocab &v = model->voc;
        vector<int32_t> all;
        if ((flags & ENGINE_ADD_BOS) && v.add_bos)
            all.push_back(v.bos);
        tokenize(v, text_view(text, len), (flags & ENGINE_PARSE_SPECIAL) != 0, nullptr, all);
        if ((flags & ENGINE_ADD_BOS) && v.add_eos)
            all.push_back(v.eos);
        return give_tokens(all, ids, cap);
    });
}

int engine_piece(const engine_model *model, int32_t id, int special, char *out, size_t cap, engine_error *err) {
    return guarded(err, [&] {
        check_pointer("model", model);
        check_range("id", id, 0, model->voc.n - 1);
        return give_text(token_bytes(model->voc, id, special != 0), out, cap);
    });
}

int engine_detokenize(const engine_model *model, const int32_t *ids, size_t n, int special, char *out, size_t cap,
                      engine_error *err) {
    return guarded(err, [&] {
        check_pointer("model", model);
        if (n)
            check_pointer("ids", ids);
        for (size_t i = 0; i < n; i++)
            check_range("an id", ids[i], 0, model->voc.n - 1);
        utf8_gate gate;
        string text = gate.push(detokenize(model->voc, ids, n, special != 0));
        text += gate.finish();
        return give_text(text, out, cap);
    });
}

int engine_token_is_end(const engine_model *model, int32_t id) {
    return model && id >= 0 && id < model->voc.n && is_end(model->voc, id);
}

int engine_render_chat(const engine_model *model, const engine_message *messages, size_t n,
                       const engine_chat_options *given, int32_t *ids, size_t cap, engine_error *err) {
    return guarded(err, [&] {
        const auto opt = options(given, "engine_chat_options");
        check_pointer("model", model);
        const engine_model &m = *model;
        const string path = show_path(m.file.path);
        if (!opt.template_text && !m.file.meta("tokenizer.chat_template"))
            fail(ENGINE_EUNSUPPORTED, "%s: tokenizer.chat_template: the model has no chat template; it completes text",
                 path.c_str());
        const json_document conversation = check_messages(messages, n, opt.messages_json);
        const vector<json_document> args = check_template_args(opt);
        chat_input in;
        in.messages = &conversation.root();
        for (size_t i = 0; i < args.size(); i++)
            in.args.emplace_back(opt.args[i].name, &args[i].root());
        in.add_generation_prompt = !opt.no_generation_prompt;
        in.bos = piece_text(m.voc, m.voc.bos), in.eos = piece_text(m.voc, m.voc.eos);
        chat_text chat;
        try {
            chat = render_template(
                opt.template_text ? opt.template_text : m.file.get_string("tokenizer.chat_template", ""), in);
            if (chat.text.empty())
                fail(ENGINE_ETEMPLATE, "template rendered nothing");
        } catch (const Error &e) {
            fail(e.code, "%s %s", opt.template_text ? "the given" : (path + ":").c_str(), e.msg.c_str());
        }
        vector<int32_t> all;
        tokenize(m.voc, chat.text, true, reinterpret_cast<const uint8_t *>(chat.literal.data()), all);
        return give_tokens(all, ids, cap);
    });
}

static session_plan check_session_options(const engine_model &m, const engine_session_options *given) {
    const auto opt = options(given, "engine_session_options");
    check_range("n_ctx", opt.n_ctx, 0, MAX_CTX);
    check_range("chunk", opt.chunk, 0, 4096);
    check_range("checkpoints", opt.checkpoints, -1, 4096);
    return plan_session(m, opt);
}

int engine_session_new(engine_session **out, engine_model *model, const engine_session_options *opt,
                       engine_error *err) {
    return guarded(err, [&] {
        check_pointer("out", out);
        *out = nullptr;
        check_pointer("model", model);
        check_caller(*model);
        const session_plan p = check_session_options(*model, opt);
        const int n_ctx_train = model->w.hp.n_ctx_train;
        const double gib = 1 << 30;
        if (p.less)
            log_msg(ENGINE_LOG_WARN,
                    "context of %lld tokens instead of %d: the KV cache may take half of this machine's memory",
                    (long long)p.n_ctx, n_ctx_train);
        if (double(p.cache_bytes()) > double(physical_memory()))
            fail(ENGINE_ENOMEM,
                 "a context of %lld tokens needs %.1f GiB of KV cache, this machine has %.1f GiB of memory",
                 (long long)p.n_ctx, double(p.cache_bytes()) / gib, double(physical_memory()) / gib);
        if (p.n_ctx > n_ctx_train)
            log_msg(ENGINE_LOG_WARN, "context of %lld tokens: the model was trained for %d", (long long)p.n_ctx,
                    n_ctx_train);
        model->file.read_ahead();
        std::lock_guard<std::mutex> lock(model->mutex);
        model->reserve(p.chunk, model->n_session + 1, p.n_ctx, p.layout);
        page_store &store = model->store_for(p.type);
        model->reserve_pages(store, p.share);
        *out = new engine_session(*model, store, p.share, int(p.n_ctx), p.chunk);
        model->n_session++;
        return ENGINE_OK;
    });
}

void engine_session_free(engine_session *session) {
    if (!session)
        return;
    session->model.n_session--;
    delete session;
}

int engine_session_ctx(const engine_session *session) { return session ? session->n_ctx : ENGINE_EINVAL; }

int engine_sync(engine_session *session, const int32_t *ids, size_t n, engine_error *err) {
    return guarded(err, [&] {
        computing call(session);
        check_tokens(*session, ids, n, 0);
        check_code(*session, sync_to(*session, ids, n));
        return int(session->stats.reused_tokens);
    });
}

int engine_eval(engine_session *session, const int32_t *ids, size_t n, engine_error *err) {
    return guarded(err, [&] {
        computing call(session);
        check_tokens(*session, ids, n, session->tokens.size());
        const engine_batch_item item = {session, ids, n};
        if (n)
            check_code(*session, append(&session, &item, 1, nullptr, nullptr));
        return ENGINE_OK;
    });
}

int engine_eval_all(engine_session *session, const int32_t *ids, size_t n, engine_logits_fn fn, void *user,
                    engine_error *err) {
    return guarded(err, [&] {
        computing call(session);
        check_pointer("fn", reinterpret_cast<const void *>(fn));
        check_tokens(*session, ids, n, session->tokens.size());
        struct target {
            engine_logits_fn fn;
            void *user;
        } to = {fn, user};
        const auto pass_on = [](void *p, size_t, size_t i, const float *logits) {
            const target &t = *static_cast<target *>(p);
            return t.fn(t.user, i, logits);
        };
        const engine_batch_item item = {session, ids, n};
        check_code(*session, append(&session, &item, 1, pass_on, &to));
        return ENGINE_OK;
    });
}

int engine_step(const engine_batch_item *items, size_t n_items, engine_step_fn fn, void *user, engine_error *err) {
    return guarded(err, [&] {
        if (n_items)
            check_pointer("items", items);
        vector<std::unique_ptr<computing>> calls;
        vector<engine_session *> sessions;
        calls.reserve(n_items), sessions.reserve(n_items);
        for (size_t i = 0; i < n_items; i++) {
            engine_session *s = items[i].session;
            if (std::find(sessions.begin(), sessions.end(), s) != sessions.end())
                fail(ENGINE_EINVAL, "items[%zu]: this session is in the batch twice", i);
            calls.emplace_back(new computing(s));
            if (&s->cache.store != &items[0].session->cache.store)
                fail(ENGINE_EINVAL, "items[%zu]: this session has another model or type of cache rows", i);
            check_tokens(*s, items[i].ids, items[i].n, s->tokens.size());
            sessions.push_back(s);
        }
        if (!n_items)
            return ENGINE_OK;
        check_code(*sessions[0], append(sessions.data(), items, n_items, fn, user));
        return ENGINE_OK;
    });
}

int engine_rewind(engine_session *session, size_t n, engine_error *err) {
    return guarded(err, [&] {
        check_pointer("session", session);
        if (session->busy)
            fail(ENGINE_EINVAL, "a callback may not change the session that called it");
        check_range("n", int64_t(std::min(n, size_t(INT_MAX))), 0, int64_t(session->tokens.size()));
        truncate(*session, n);
        return ENGINE_OK;
    });
}

int engine_set_note(engine_session *session, const void *data, size_t len, engine_error *err) {
    return guarded(err, [&] {
        check_pointer("session", session);
        if (len)
            check_pointer("data", data);
        if (len > INT_MAX)
            fail(ENGINE_EINVAL, "a note of %zu bytes is too long", len);
        if (session->busy)
            fail(ENGINE_EINVAL, "a callback may not change the session that called it");
        session->note.assign(static_cast<const char *>(data), len);
        return ENGINE_OK;
    });
}

int engine_note(const engine_session *session, char *out, size_t cap) {
    return guarded(nullptr, [&] {
        check_pointer("session", session);
        return give_text(session->note, out, cap);
    });
}

int engine_save(engine_session *session, const char *path, engine_error *err) {
    return guarded(err, [&] {
        computing call(session, false);
        check_pointer("path", path);
        save(*session, path);
        return ENGINE_OK;
    });
}

int engine_load(engine_session *session, const char *path, engine_error *err) {
    return guarded(err, [&] {
        computing call(session, false);
        check_pointer("path", path);
        load(*session, path);
        return int(session->tokens.size());
    });
}

int engine_tokens(const engine_session *session, int32_t *ids, size_t cap) {
    return guarded(nullptr, [&] {
        check_pointer("session", session);
        return give_tokens(session->tokens, ids, cap);
    });
}

void engine_cancel(engine_session *session) {
    if (session)
        session->cancel.store(true);
}

void engine_on_progress(engine_session *session, engine_progress_fn fn, void *user) {
    if (session)
        session->progress = fn, session->progress_user = user;
}

int engine_logits(engine_session *session, const float **out, engine_error *err) {
    return guarded(err, [&] {
        computing call(session);
        check_pointer("out", out);
        check_code(*session, settle(*session));
        *out = session->logits.data();
        return int(session->logits.size());
    });
}

int engine_top(engine_session *session, engine_candidate *out, size_t cap, engine_error *err) {
    return guarded(err, [&] {
        computing call(session);
        if (cap)
            check_pointer("out", out);
        engine_session &s = *session;
        check_code(s, settle(s));
        if (cap == 0)
            return 0;
        vector<candidate> &best = s.room.pick;
        take_best(s.logits, std::min(cap, s.logits.size()), s.room);
        std::sort(best.begin(), best.end(), better);
        const double total = log_sum_exp(s.logits);
        for (size_t i = 0; i < best.size(); i++)
            out[i] = {best[i].id, best[i].logit, float(double(best[i].logit) - total)};
        return int(best.size());
    });
}

// The caller's settings, checked and with their defaults filled in.
static engine_sampling check_sampling(const engine_sampling *given, const vocab &v) {
    auto opt = options(given, "engine_sampling");
    const auto check = [](const char *what, float x, float lo, float hi) {
        if (!(x >= lo && x <= hi))
            fail(ENGINE_EINVAL, "%s is %g, expected %g to %g", what, double(x), double(lo), double(hi));
    };
    const auto fill = [](auto &field, auto value) {
        if (field == 0)
            field = value;
    };
    fill(opt.penalty_last_n, 64);
    fill(opt.dry_base, 1.75f);
    fill(opt.dry_allowed_length, 2);
    fill(opt.dry_last_n, -1);
    fill(opt.xtc_threshold, 0.1f);
    check("temperature", opt.temperature, 0, 1000);
    check("top_p", opt.top_p, 0, 1);
    check("min_p", opt.min_p, 0, 1);
    check("typical_p", opt.typical_p, 0, 1);
    check("repeat_penalty", opt.repeat_penalty, 0, 100);
    check("presence_penalty", opt.presence_penalty, -100, 100);
    check("frequency_penalty", opt.frequency_penalty, -100, 100);
    check("dry_multiplier", opt.dry_multiplier, 0, 1000);
    check("dry_base", opt.dry_base, 1, 100);
    check("xtc_probability", opt.xtc_probability, 0, 1);
    check("xtc_threshold", opt.xtc_threshold, 0, 0.5);
    check_range("top_k", opt.top_k, 0, INT_MAX);
    check_range("penalty_last_n", opt.penalty_last_n, -1, INT_MAX);
    check_range("dry_allowed_length", opt.dry_allowed_length, 0, INT_MAX);
    check_range("dry_last_n", opt.dry_last_n, -1, INT_MAX);
    if (opt.n_dry_breakers)
        check_pointer("dry_breakers", opt.dry_breakers);
    for (size_t i = 0; i < opt.n_dry_breakers; i++) {
        if (!opt.dry_breakers[i] || !*opt.dry_breakers[i])
            fail(ENGINE_EINVAL, "dry_breakers[%zu] is empty", i);
        if (strlen(opt.dry_breakers[i]) > 256)
            fail(ENGINE_EINVAL, "dry_breakers[%zu] has more than 256 bytes", i);
    }
    if (!opt.dry_breakers) {
        opt.dry_breakers = default_breakers;
        opt.n_dry_breakers = sizeof default_breakers / sizeof *default_breakers;
    }
    if (opt.n_bias)
        check_pointer("bias", opt.bias);
    vector<uint8_t> banned(opt.n_bias < size_t(v.n) ? 0 : size_t(v.n)); // fewer biases cannot ban them all
    int left = v.n;
    for (size_t i = 0; i < opt.n_bias; i++) {
        const engine_logit_bias &b = opt.bias[i];
        if (b.id < 0 || b.id >= v.n)
            fail(ENGINE_EINVAL, "bias[%zu].id is %d, expected 0 to %d", i, int(b.id), v.n - 1);
        if (!(b.bias < HUGE_VALF))
            fail(ENGINE_EINVAL, "bias[%zu].bias is %g, expected a finite number or -inf", i, double(b.bias));
        if (!banned.empty() && is_banned(b.bias) && !banned[size_t(b.id)])
            banned[size_t(b.id)] = 1, left--;
    }
    if (left == 0)
        fail(ENGINE_EINVAL, "bias bans all %d tokens", v.n);
    return opt;
}

int engine_sampling_defaults(const engine_model *model, engine_sampling *out, int *from_model, engine_error *err) {
    return guarded(err, [&] {
        check_pointer("model", model);
        check_pointer("out", out);
        engine_sampling r = {};
        const bool used = default_sampling(model->file, r);
        give_struct(out, r, "engine_sampling");
        if (from_model)
            *from_model = used;
        return ENGINE_OK;
    });
}

int engine_sample(engine_session *session, const engine_sampling *sampling, engine_error *err) {
    return guarded(err, [&] {
        computing call(session);
        engine_session &s = *session;
        const engine_sampling opt = check_sampling(sampling, s.model.voc);
        reserve_room(s.room, opt, s.logits.size(), size_t(s.n_ctx));
        check_code(s, settle(s));
        return int(sample(s.logits, opt, s.model.voc, s.tokens, s.room));
    });
}

int engine_generate(engine_session *session, const engine_generate_options *given, engine_text_fn fn, void *user,
                    engine_result *result, engine_error *err) {
    return guarded(err, [&] {
        engine_result r = {};
        r.reason = ENGINE_STOP_CANCELLED;
        if (result)
            give_struct(result, r, "engine_result");
        computing call(session);
        auto opt = options(given, "engine_generate_options");
        const engine_sampling sampling = check_sampling(opt.sampling, session->model.voc);
        opt.sampling = &sampling;
        reserve_room(session->room, sampling, session->logits.size(), size_t(session->n_ctx));
        check_range("max_tokens", opt.max_tokens, 0, INT_MAX);
        if (opt.n_stops)
            check_pointer("stops", opt.stops);
        for (size_t i = 0; i < opt.n_stops; i++)
            if (!opt.stops[i] || !*opt.stops[i])
                fail(ENGINE_EINVAL, "stops[%zu] is empty", i);
        const int code = generate(*session, opt, fn, user, r);
        if (result)
            give_struct(result, r, "engine_result");
        check_code(*session, code);
        return ENGINE_OK;
    });
}

int engine_stats(const engine_session *session, engine_session_stats *stats, engine_error *err) {
    return guarded(err, [&] {
        check_pointer("session", session);
        check_pointer("stats", stats);
        engine_session_stats r = session->stats;
        vector<float> sorted = session->itl;
        std::sort(sorted.begin(), sorted.end());
        if (!sorted.empty()) {
            r.itl_p50 = double(sorted[sorted.size() / 2]);
            r.itl_p99 = double(sorted[std::min(sorted.size() - 1, sorted.size() * 99 / 100)]);
        }
        r.n_tokens = int64_t(session->tokens.size());
        {
            std::lock_guard<std::mutex> lock(session->cache.store.mutex);
            r.kv_bytes = int64_t(session->cache.bytes_used());
            r.checkpoint_bytes = int64_t(session->cache.checkpoint_bytes());
            r.n_checkpoints = int(session->cache.checkpoints.size());
        }
        give_struct(stats, r, "engine_session_stats");
        return ENGINE_OK;
    });
}

int engine_plan(const char *path, const engine_open_options *open, const engine_session_options *session,
                engine_plan_info *plan, engine_error *err) {
    return guarded(err, [&] {
        check_pointer("plan", plan);
        const std::unique_ptr<engine_model> opened = make_model(path, open);
        engine_model &m = *opened;
        engine_plan_info r = describe_plan(m, check_session_options(m, session));
        copy_name(r.backend, sizeof r.backend, backend_name(m.be->level));
        give_struct(plan, r, "engine_plan_info");
        return ENGINE_OK;
    });
}
