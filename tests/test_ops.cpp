// test_ops.cpp: the CPU operations other than matmul. Values against naive formulas in double; bits (==) between
// instruction sets, thread counts, blocks of rows, and against the order of additions that chapter CPU states.
#include "unit.h"

namespace {

const char *ops_sync(backend *be) {
    int32_t no_memory;
    return cpu_ops.sync(be, &no_memory);
}

struct ops_random {
    uint64_t state;
    explicit ops_random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15u + 1) {}
    uint32_t bits() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return uint32_t(state >> 32);
    }
    float uniform() { return float(bits() >> 8) / float(1 << 23) - 1.0f; } // [-1, 1)
    int below(int n) { return int(bits() % uint32_t(n)); }
    vector<float> row(size_t n, float size = 1.0f) {
        vector<float> v(n);
        for (float &f : v)
            f = size * uniform();
        return v;
    }
};

// Memory that ends at a page that may not be touched.
struct ops_guarded {
    uint8_t *base = nullptr, *data = nullptr;
    size_t total = 0;
    explicit ops_guarded(size_t bytes) {
        const size_t page = size_t(sysconf(_SC_PAGESIZE)), room = (bytes + page - 1) / page * page;
        total = room + page;
        void *p = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        EXPECT_NE(p, MAP_FAILED);
        base = static_cast<uint8_t *>(p);
        EXPECT_EQ(mprotect(base + room, page, PROT_NONE), 0);
        data = base + room - bytes;
        memset(data, 0xff, bytes); // NaN as f16 and as f32
    }
    ops_guarded(const ops_guarded &) = delete;
    ~ops_guarded() { munmap(base, total); }
};

// The first index where two rows differ, or -1. Two NaN are equal.
int64_t ops_differ(const float *a, const float *b, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!(a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))))
            return int64_t(i);
    return -1;
}

vector<cpu_level> ops_levels() {
    vector<cpu_level> v;
    for (int l = CPU_PLAIN; l <= cpu_detect(); l++)
        v.push_back(cpu_level(l));
    return v;
}

mem ops_mem(const void *p) { return {const_cast<void *>(p), 0}; }

CPU_BODY void ops_exp_body(float *x, int n) {
    for (int i = 0; i < n; i++)
        x[i] = cpu_exp(x[i]);
}
CPU_BODY void ops_tanh_body(float *x, int n) {
    for (int i = 0; i < n; i++)
        x[i] = cpu_tanh(x[i]);
}

// Every sign and exponent, with the extreme mantissas and random ones.
vector<float> ops_sweep() {
    ops_random rnd(1);
    vector<float> v;
    for (uint32_t top = 0; top < 512; top++)
        for (int i = 0; i < 260; i++)
            v.push_back(q_float(top << 23 | (i == 0 ? 0 : i == 1 ? 1 : i == 2 ? 0x7fffff : rnd.bits() & 0x7fffff)));
    for (int i = 0; i < 40000; i++)
        v.push_back(110.0f * rnd.uniform());
    for (int i = 0; i < 20000; i++)
        v.push_back(2.0f * rnd.uniform());
    return v;
}

// Units in the last place between a result and the true value; the spacing of floats near it, not below 2^-149.
double ops_ulps(float got, double want) {
    int e;
    frexp(want, &e);
    return std::fabs(double(got) - want) / ldexp(1.0, std::max(e - 24, -149));
}

template <class F>
void ops_check_function(const vector<vector<float>> &by_level, const vector<float> &x, F want, double limit) {
    double worst = 0;
    for (size_t i = 0; i < x.size(); i++) {
        const float y = by_level[0][i];
        const double w = want(double(x[i]));
        if (std::isnan(x[i])) {
            ASSERT_TRUE(std::isnan(y)) << i;
            continue;
        }
        if (std::fabs(w) > 3.4028235e38 * (1 + 0x1p-25)) {
            ASSERT_TRUE(std::isinf(y)) << x[i];
            continue;
        }
        worst = std::max(worst, ops_ulps(y, w));
        ASSERT_LE(ops_ulps(y, w), limit) << "x = " << x[i] << " got " << y << " want " << w;
    }
    EXPECT_GT(worst, 0.4); // the sweep did reach values that round
    for (const vector<float> &level : by_level)
        EXPECT_EQ(ops_differ(by_level[0].data(), level.data(), x.size()), -1);
}

TEST(ops, exp_is_within_two_ulps) {
    const vector<float> x = ops_sweep();
    vector<vector<float>> y;
    for (cpu_level level : ops_levels()) {
        y.push_back(x);
        cpu_at<ops_exp_body>(level, y.back().data(), int(x.size()));
    }
    ops_check_function(
        y, x, [](double v) { return std::exp(v); }, 2.0);
    EXPECT_EQ(cpu_exp(-INFINITY), 0.0f);
    EXPECT_EQ(cpu_exp(INFINITY), INFINITY);
    EXPECT_EQ(cpu_exp(0.0f), 1.0f);
    EXPECT_EQ(cpu_exp(-0.0f), 1.0f);
    EXPECT_EQ(cpu_exp(-103.0f), 1.4012985e-45f); // the smallest denormal
    EXPECT_EQ(cpu_exp(-104.0f), 0.0f);
}

TEST(ops, tanh_is_within_three_ulps) {
    const vector<float> x = ops_sweep();
    vector<vector<float>> y;
    for (cpu_level level : ops_levels()) {
        y.push_back(x);
        cpu_at<ops_tanh_body>(level, y.back().data(), int(x.size()));
    }
    ops_check_function(
        y, x, [](double v) { return std::tanh(v); }, 3.0);
    EXPECT_EQ(cpu_tanh(INFINITY), 1.0f);
    EXPECT_EQ(cpu_tanh(-INFINITY), -1.0f);
    EXPECT_TRUE(std::signbit(cpu_tanh(-0.0f)));
}

// Runs `call(be, y)` for every level and for 1, 2 and 3 threads, demands equal bits and untouched bytes beyond y, and
// returns the result.
template <class F> vector<float> ops_everywhere(size_t n, F call) {
    vector<float> first;
    for (cpu_level level : ops_levels())
        for (int threads = 1; threads <= 3; threads++) {
            backend be(threads);
            be.level = level;
            ops_guarded out(n * sizeof(float));
            float *y = reinterpret_cast<float *>(out.data);
            call(&be, y);
            EXPECT_EQ(ops_sync(&be), nullptr);
            if (first.empty())
                first.assign(y, y + n);
            const int64_t at = ops_differ(first.data(), y, n);
            EXPECT_EQ(at, -1) << "level " << level << " threads " << threads << ": "
                              << first[size_t(std::max<int64_t>(at, 0))] << " " << y[std::max<int64_t>(at, 0)];
        }
    return first;
}

TEST(ops, norm) {
    ops_random rnd(2);
    for (int n : {1, 7, 16, 17, 64, 100, 288, 2048})
        for (int kind = 0; kind <= 2; kind++)
            for (bool in_place : {false, true}) {
                const int n_rows = 5, n_part = n < 200 ? 3 : 1, ld_x = n_part * n + (in_place ? 0 : 3),
                          ld_y = n_part * n;
                norm_op op = {};
                op.n_rows = n_rows, op.n_part = n_part, op.n = n, op.ld_x = ld_x, op.ld_y = ld_y;
                op.weight_kind = kind, op.eps = 1e-5f;
                const vector<float> x = rnd.row(size_t(n_rows) * ld_x, 3.0f), w = rnd.row(size_t(n));
                vector<float> y = ops_everywhere(size_t(n_rows) * ld_y, [&](backend *be, float *out) {
                    if (in_place)
                        std::copy(x.begin(), x.end(), out);
                    cpu_ops.norm(be, &op, ops_mem(out), ops_mem(in_place ? out : x.data()), ops_mem(w.data()));
                });
                for (int t = 0; t < n_rows; t++)
                    for (int p = 0; p < n_part; p++) {
                        double sum = 0;
                        for (int i = 0; i < n; i++)
                            sum += std::pow(double(x[size_t(t * ld_x + p * n + i)]), 2);
                        for (int i = 0; i < n; i++) {
                            const double scale = kind == 0   ? 1.0
                                                 : kind == 1 ? double(w[size_t(i)])
                                                             : 1.0 + double(w[size_t(i)]);
                            const double want =
                                double(x[size_t(t * ld_x + p * n + i)]) / std::sqrt(sum / n + double(1e-5f)) * scale;
                            // n / 16 roundings in the sum, halved by the root, and five more
                            ASSERT_NEAR(y[size_t(t * ld_y + p * n + i)], want,
                                        std::fabs(want) * (n / 32 + 6) * 0x1p-24 + 1e-7)
                                << n << " " << kind;
                        }
                    }
            }
}

TEST(ops, rope_rotates_and_rotates_back) {
    ops_random rnd(3);
    for (int pairing = 0; pairing <= 1; pairing++)
        for (int n_rot : {2, 6, 64, 96}) {
            const int n_rows = 9, n_head = 3, first = pairing ? 0 : 4, dim = first + n_rot + 2, ld = n_head * dim + 5;
            const vector<float> x = rnd.row(size_t(n_rows) * ld), angle = rnd.row(size_t(n_rows) * n_rot / 2, 3.0f);
            vector<float> cs;
            for (float a : angle)
                cs.push_back(float(std::cos(double(a)))), cs.push_back(float(std::sin(double(a))));
            step st = {};
            st.rotary[1] = ops_mem(cs.data());
            rope_op op = {};
            op.n_rows = n_rows, op.n_head = n_head, op.head_dim = dim, op.first = first, op.n_rot = n_rot;
            op.pairing = pairing, op.table = 1, op.ld_x = ld;
            vector<float> y = ops_everywhere(x.size(), [&](backend *be, float *out) {
                std::copy(x.begin(), x.end(), out);
                cpu_ops.rope(be, &op, ops_mem(out), &st);
            });
            vector<double> want(x.begin(), x.end());
            for (int t = 0; t < n_rows; t++)
                for (int h = 0; h < n_head; h++)
                    for (int i = 0; i < n_rot / 2; i++) {
                        const size_t at = size_t(t * ld + h * dim + first);
                        const size_t a = at + size_t(pairing ? i : 2 * i),
                                     b = at + size_t(pairing ? i + n_rot / 2 : 2 * i + 1);
                        const double th = double(angle[size_t(t * n_rot / 2 + i)]);
                        want[a] = double(x[a]) * std::cos(th) - double(x[b]) * std::sin(th);
                        want[b] = double(x[a]) * std::sin(th) + double(x[b]) * std::cos(th);
                    }
            for (size_t i = 0; i < x.size(); i++)
                ASSERT_NEAR(y[i], want[i], 4 * 0x1p-24) << i; // |x|, |y| < 2: cos, sin, a product and a sum rounded
            backend be(1);
            op.inverse = 1;
            cpu_ops.rope(&be, &op, ops_mem(y.data()), &st);
            for (size_t i = 0; i < x.size(); i++)
                ASSERT_NEAR(y[i], x[i], 8 * 0x1p-24) << i;
        }
}

double ops_glu(double g, double u, int kind, double clamp_gate, double clamp_up) {
    if (clamp_gate > 0)
        g = std::min(g, clamp_gate);
    if (clamp_up > 0)
        u = std::max(-clamp_up, std::min(u, clamp_up));
    if (kind == 0)
        return g / (1 + std::exp(-g)) * u;
    if (kind == 1)
        return 0.5 * g * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (g + 0.044715 * g * g * g))) * u;
    return (u + 1) * g / (1 + std::exp(-1.702 * g));
}

TEST(ops, glu) {
    ops_random rnd(4);
    for (int kind = 0; kind <= 2; kind++)
        for (float clamp : {0.0f, 7.0f})
            for (int n : {1, 15, 16, 50, 640}) {
                const int n_rows = 17, ld = n + 2;
                const vector<float> g = rnd.row(size_t(n_rows) * ld, 12.0f), u = rnd.row(size_t(n_rows) * ld, 12.0f);
                glu_op op = {};
                op.n_rows = n_rows, op.n = n, op.kind = kind, op.ld_gate = op.ld_up = op.ld_y = ld;
                op.clamp_gate = op.clamp_up = clamp;
                const vector<float> y = ops_everywhere(g.size(), [&](backend *be, float *out) {
                    std::copy(g.begin(), g.end(), out); // in place, as the model does it
                    cpu_ops.glu(be, &op, ops_mem(out), ops_mem(out), ops_mem(u.data()));
                });
                for (int t = 0; t < n_rows; t++)
                    for (int i = 0; i < ld; i++) {
                        const size_t at = size_t(t * ld + i);
                        const double want =
                            i < n ? ops_glu(double(g[at]), double(u[at]), kind, double(clamp), double(clamp))
                                  : double(g[at]);
                        // The exponent's relative error is its argument's, up to 150 here for gelu; the naive formula
                        // has its own where 1 + tanh cancels.
                        ASSERT_NEAR(y[at], want, std::fabs(want) * 320 * 0x1p-24 + 1e-13)
                            << kind << " " << g[at] << " " << u[at];
                    }
            }
    float g[3] = {NAN, 1.0f, 2.0f}, u[3] = {1.0f, NAN, 1.0f}, y[3];
    backend be(1);
    glu_op op = {};
    op.n_rows = 1, op.n = op.ld_gate = op.ld_up = op.ld_y = 3, op.clamp_gate = op.clamp_up = 7.0f;
    cpu_ops.glu(&be, &op, ops_mem(y), ops_mem(g), ops_mem(u));
    EXPECT_TRUE(std::isnan(y[0]) && std::isnan(y[1]) && !std::isnan(y[2]));
}

TEST(ops, add_embed_rows) {
    ops_random rnd(5);
    const int n_rows = 200, n = 352;
    const vector<float> x = rnd.row(size_t(n_rows) * n), x2 = rnd.row(size_t(n_rows) * n);
    add_op add = {};
    add.n_rows = n_rows, add.n = n;
    const vector<float> sum = ops_everywhere(x.size(), [&](backend *be, float *out) {
        std::copy(x.begin(), x.end(), out);
        cpu_ops.add(be, &add, ops_mem(out), ops_mem(x2.data()));
    });
    for (size_t i = 0; i < x.size(); i++)
        ASSERT_EQ(sum[i], x[i] + x2[i]);

    vector<uint16_t> half;
    for (float f : x)
        half.push_back(float_to_half(f));
    mat w = {};
    w.data = ops_mem(half.data()), w.type = TYPE_F16, w.n_in = n, w.n_out = n_rows, w.n_mat = 1, w.row_bytes = n * 2;
    vector<int32_t> token = {5, 0, n_rows - 1, 5};
    step st = {};
    st.token = st.out_row = ops_mem(token.data());
    embed_op embed = {};
    embed.n_rows = 4, embed.n = n, embed.type = TYPE_F16, embed.scale = 3.0f;
    const vector<float> rows = ops_everywhere(
        4 * size_t(n), [&](backend *be, float *out) { cpu_ops.embed(be, &embed, ops_mem(out), &w, &st); });
    rows_op gather = {4, n};
    const vector<float> gathered = ops_everywhere(4 * size_t(n), [&](backend *be, float *out) {
        cpu_ops.rows(be, &gather, ops_mem(out), ops_mem(x.data()), &st);
    });
    for (size_t t = 0; t < 4; t++)
        for (size_t i = 0; i < size_t(n); i++) {
            ASSERT_EQ(rows[t * n + i], 3.0f * half_to_float(half[size_t(token[t]) * n + i]));
            ASSERT_EQ(gathered[t * n + i], x[size_t(token[t]) * n + i]);
        }
    for (int32_t bad : {-1, n_rows}) {
        token[2] = bad;
        backend be(2);
        vector<float> out(4 * size_t(n));
        cpu_ops.embed(&be, &embed, ops_mem(out.data()), &w, &st);
        EXPECT_NE(ops_sync(&be), nullptr);
        EXPECT_EQ(ops_sync(&be), nullptr); // reported once
    }
}

TEST(ops, memory_is_zero_counted_and_moved) {
    backend be(1);
    EXPECT_EQ(cpu_ops.allocated(&be), 0u);
    mem m = cpu_ops.alloc(&be, 1000), none = cpu_ops.alloc(&be, UINT64_MAX - 100);
    ASSERT_NE(m.handle, nullptr);
    EXPECT_EQ(none.handle, nullptr);
    EXPECT_EQ(cpu_ops.allocated(&be), 1000u);
    for (int i = 0; i < 1000; i++)
        ASSERT_EQ(at<uint8_t>(m)[i], 0);
    const char text[] = "abc";
    char back[4];
    m.offset = 996;
    cpu_ops.put(&be, m, text, 4);
    cpu_ops.get(&be, back, m, 4);
    EXPECT_STREQ(back, text);
    const mem other = cpu_ops.alloc(&be, 8), empty = cpu_ops.alloc(&be, 0);
    EXPECT_NE(empty.handle, nullptr);
    cpu_ops.copy(&be, other, m, 4);
    EXPECT_STREQ(at<char>(other), text);
    cpu_ops.copy(&be, {other.handle, 1}, other, 4); // the two may overlap
    EXPECT_STREQ(at<char>(other), "aabc");
    EXPECT_EQ(cpu_ops.weights(&be, text, 4).handle, text);
    EXPECT_EQ(cpu_ops.allocated(&be), 1008u);
    cpu_ops.free(&be, m);
    EXPECT_EQ(cpu_ops.allocated(&be), 8u);
    cpu_ops.free(&be, empty);
    cpu_ops.free(&be, mem());
    cpu_ops.free(&be, other);
    EXPECT_EQ(cpu_ops.allocated(&be), 0u);
}

TEST(ops, memory_grows_and_keeps_its_content) {
    backend be(1);
    uint64_t bytes = 1;
    mem m = cpu_ops.alloc(&be, bytes);
    const mem neighbour = cpu_ops.alloc(&be, 4096); // in the way of growing in place, perhaps
    at<uint8_t>(m)[0] = 1;
    for (uint64_t more : {uint64_t(2), uint64_t(4096), uint64_t(4097), uint64_t(100000), uint64_t(100000), uint64_t(5),
                          uint64_t(3) << 20}) {
        m = cpu_ops.grow(&be, m, bytes, more);
        ASSERT_NE(m.handle, nullptr);
        for (uint64_t i = 0; i < std::max(bytes, more); i++)
            ASSERT_EQ(at<uint8_t>(m)[i], i < bytes ? uint8_t(i * 7 + 1) : 0) << i;
        bytes = std::max(bytes, more);
        for (uint64_t i = 0; i < bytes; i++)
            at<uint8_t>(m)[i] = uint8_t(i * 7 + 1);
        ASSERT_EQ(cpu_ops.allocated(&be), bytes + 4096);
    }
    EXPECT_EQ(cpu_ops.grow(&be, m, bytes, UINT64_MAX / 2).handle, nullptr); // and the old one is still there
    EXPECT_EQ(at<uint8_t>(m)[bytes - 1], uint8_t((bytes - 1) * 7 + 1));
    EXPECT_EQ(cpu_ops.allocated(&be), bytes + 4096);
    EXPECT_EQ(cpu_ops.grow(&be, mem(), 0, 100).handle, nullptr);
    EXPECT_EQ(ops_sync(&be), nullptr); // these calls report by themselves
    cpu_ops.free(&be, m);
    EXPECT_EQ(cpu_ops.allocated(&be), 4096u);
    cpu_ops.free(&be, neighbour);
}

// Resident bytes of this process.
uint64_t ops_resident() {
    unsigned long long size = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    EXPECT_TRUE(f && fscanf(f, "%llu %llu", &size, &resident) == 2);
    if (f)
        fclose(f);
    return uint64_t(resident) * uint64_t(sysconf(_SC_PAGESIZE));
}

TEST(ops, memory_costs_nothing_before_it_is_written) {
    backend be(1);
    const uint64_t bytes = uint64_t(1) << 30, before = ops_resident(), limit = before + (64 << 20);
    mem m = cpu_ops.alloc(&be, bytes / 2);
    ASSERT_NE(m.handle, nullptr);
    m = cpu_ops.grow(&be, m, bytes / 2, bytes);
    ASSERT_NE(m.handle, nullptr);
    EXPECT_LT(ops_resident(), limit);
    EXPECT_EQ(cpu_ops.reserve(&be, bytes), 0);
    EXPECT_LT(ops_resident(), limit);
    at<uint8_t>(m)[bytes - 1] = at<uint8_t>(m)[0] = 1;
    EXPECT_LT(ops_resident(), limit);
    EXPECT_EQ(cpu_ops.allocated(&be), 2 * bytes);
}

TEST(ops, reserve_never_shrinks) {
    backend be(1);
    EXPECT_EQ(cpu_ops.reserve(&be, 5000), 0);
    EXPECT_EQ(cpu_ops.allocated(&be), 5000u);
    const uint8_t *scratch = be.scratch.data;
    EXPECT_EQ(cpu_ops.reserve(&be, 100), 0);
    EXPECT_EQ(cpu_ops.allocated(&be), 5000u);
    EXPECT_NE(cpu_ops.reserve(&be, UINT64_MAX / 2), 0);
    EXPECT_EQ(be.scratch.data, scratch);
    EXPECT_EQ(cpu_ops.allocated(&be), 5000u);
    EXPECT_EQ(ops_sync(&be), nullptr);
}

// ---- cache rows ----

uint64_t ops_row_bytes(int type, int dim) {
    return type == TYPE_Q8_0 ? uint64_t(dim + 31) / 32 * 34 : uint64_t(dim) * 2;
}

// What chapter CPU says that a row of n values becomes, from the words.
vector<uint8_t> ops_stored(int type, const float *x, int n) {
    vector<uint8_t> row;
    const auto put_half = [&](uint16_t h) { row.push_back(uint8_t(h)), row.push_back(uint8_t(h >> 8)); };
    for (int begin = 0; begin < n; begin += type == TYPE_Q8_0 ? 32 : 1) {
        if (type == TYPE_F16) {
            put_half(float_to_half(x[begin]));
            continue;
        }
        const int end = std::min(n, begin + 32);
        float amax = 0;
        bool finite = true;
        for (int i = begin; i < end; i++)
            finite = finite && std::isfinite(x[i]), amax = std::fmax(amax, std::fabs(x[i]));
        const uint16_t half = float_to_half(amax / 127.0f);
        const float d = half_to_float(half);
        finite = finite && std::isfinite(d);
        put_half(finite ? half : 0x7e00);
        for (int i = begin; i < begin + 32; i++) {
            double q = 0;
            if (i < end && finite && d > 0) {
                const float scaled = x[i] * (1.0f / d);
                q = std::nearbyint(double(scaled));
                q = std::fmax(-127.0, std::fmin(127.0, q));
            }
            row.push_back(uint8_t(int8_t(q)));
        }
    }
    return row;
}

// And what is read from it.
vector<float> ops_widened(int type, const vector<uint8_t> &row, int n) {
    vector<float> v;
    for (int i = 0; i < n; i++) {
        const size_t block = type == TYPE_Q8_0 ? size_t(i / 32 * 34) : size_t(i) * 2;
        const float f = half_to_float(uint16_t(row[block] | row[block + 1] << 8));
        v.push_back(type == TYPE_Q8_0 ? f * float(int8_t(row[block + 2 + size_t(i % 32)])) : f);
    }
    return v;
}

// One row through kv_put, its bytes; what follows them stays.
vector<uint8_t> ops_put_row(cpu_level level, int type, const vector<float> &x) {
    const int n = int(x.size()), slot = 77;
    const uint64_t bytes = ops_row_bytes(type, n);
    backend be(1);
    be.level = level;
    vector<uint8_t> page(128 * bytes, 0xaa);
    vector<int32_t> pos = {slot}, zero = {0};
    seg sg = {};
    sg.pool = ops_mem(page.data()), sg.type = type, sg.ratio = 1, sg.k_row_bytes = bytes;
    step st = {};
    st.pos = ops_mem(pos.data()), st.seq = st.table[0] = ops_mem(zero.data()), st.table_len = 1;
    kv_put_op op = {};
    op.n_rows = op.n_head_kv = op.shared = 1, op.dim_k = op.dim_v = op.ld_k = n, op.type = type;
    cpu_ops.kv_put(&be, &op, &sg, ops_mem(x.data()), mem(), &st);
    EXPECT_EQ(ops_sync(&be), nullptr);
    for (size_t i = 0; i < page.size(); i++)
        EXPECT_TRUE(page[i] == 0xaa || i / bytes == slot) << i;
    return vector<uint8_t>(page.begin() + int64_t(slot * bytes), page.begin() + int64_t((slot + 1) * bytes));
}

TEST(ops, q8_0_rows_follow_the_written_rule) {
    ops_random rnd(6);
    for (int n : {1, 8, 31, 32, 33, 48, 64, 80, 128, 250})
        for (float size : {1e-9f, 3e-6f, 1e-4f, 1e-3f, 1.0f, 30.0f, 8e6f}) {
            const vector<float> x = rnd.row(size_t(n), size);
            const vector<uint8_t> want = ops_stored(TYPE_Q8_0, x.data(), n);
            const vector<float> back = ops_widened(TYPE_Q8_0, want, n);
            for (cpu_level level : ops_levels())
                ASSERT_EQ(ops_put_row(level, TYPE_Q8_0, x), want)
                    << "level " << level << " n " << n << " size " << size;
            for (int i = 0; i < n; i++) {
                double amax = 0;
                for (int j = i / 32 * 32; j < std::min(n, i / 32 * 32 + 32); j++)
                    amax = std::fmax(amax, std::fabs(double(x[size_t(j)])));
                // Half a step, which f16 rounds: by 2^-11 of it, or by 2^-25 where it is a denormal, times 127.
                const double limit = amax / 127 * 0.5 * (1 + 0x1p-10) + 127 * 0x1p-25;
                ASSERT_LE(std::fabs(double(back[size_t(i)]) - double(x[size_t(i)])), limit) << n << " " << size;
            }
            if (n % 32 == 0) { // the weight format of the same name
                vector<float> decoded(x.size());
                decode_row(TYPE_Q8_0, want.data(), decoded.data(), n);
                ASSERT_EQ(ops_differ(decoded.data(), back.data(), x.size()), -1);
            }
        }
}

TEST(ops, q8_0_rows_of_unusual_numbers) {
    for (cpu_level level : ops_levels()) {
        const auto widened = [&](vector<float> x) {
            return ops_widened(TYPE_Q8_0, ops_put_row(level, TYPE_Q8_0, x), int(x.size()));
        };
        // Infinite, not a number, or too large for the scale: never a finite value, and only in its own block.
        for (float bad : {INFINITY, -INFINITY, float(NAN), -float(NAN), 3.4e38f, -9e6f})
            for (int at : {0, 31, 40, 69}) {
                vector<float> x(70, 0.5f);
                x[size_t(at)] = bad;
                const vector<float> y = widened(x);
                for (int i = 0; i < 70; i++)
                    ASSERT_EQ(std::isfinite(y[size_t(i)]), i / 32 != at / 32) << bad << " " << at << " " << i;
            }
        for (float f : widened({0.0f, -0.0f, 1e-30f, -1e-40f}))
            EXPECT_EQ(f, 0.0f);
        const vector<float> ends = widened({-127.0f, 127.0f, 0.5f, 1.5f, -2.5f, 126.0f});
        EXPECT_EQ(ends, (vector<float>{-127.0f, 127.0f, 0.0f, 2.0f, -2.0f, 126.0f}));
        // d is 2^-23, nearest to 2.4 * 2^-24: x / d reaches 152.
        const float x = std::ldexp(127 * 2.4f, -24);
        EXPECT_EQ(widened({x, -x}), (vector<float>{std::ldexp(127.0f, -23), -std::ldexp(127.0f, -23)}));
    }
}

// ---- attention ----

// A cache of several sequences with shuffled pages, filled through kv_put, and queries for some rows.
struct ops_case {
    int n_head = 2, n_head_kv = 1, dim_k = 16, dim_v = 16, window = 0;
    int type = TYPE_F16, table = 0;
    bool shared = false, has_sinks = false;
    float softcap = 0;
    vector<int> lengths = {1};        // cached tokens of each sequence
    vector<std::pair<int, int>> rows; // sequence, position
};

struct ops_attention {
    ops_case c;
    int table_len = 0;
    vector<int32_t> table;
    vector<vector<float>> k, v; // of each sequence [length, n_head_kv, dim], as the cache has them
    vector<float> q, sinks;
    std::unique_ptr<ops_guarded> pool;
    seg sg = {};

    ops_attention(const ops_case &setup, uint64_t seed) : c(setup) {
        ops_random rnd(seed);
        int n_page = 0;
        for (int n : c.lengths)
            table_len = std::max(table_len, (n + 127) / 128);
        for (int n : c.lengths)
            n_page += (n + 127) / 128;
        vector<int32_t> ids(static_cast<size_t>(n_page));
        for (int i = 0; i < n_page; i++)
            ids[size_t(i)] = i;
        for (int i = n_page - 1; i > 0; i--)
            std::swap(ids[size_t(i)], ids[size_t(rnd.below(i + 1))]);
        table.assign(c.lengths.size() * size_t(table_len), INT32_MAX); // an entry that must not be followed
        for (size_t s = 0, next = 0; s < c.lengths.size(); s++)
            for (int i = 0; i < (c.lengths[s] + 127) / 128; i++)
                table[s * size_t(table_len) + size_t(i)] = ids[next++];
        sg.type = c.type, sg.ratio = 1, sg.table = c.table;
        sg.k_row_bytes = ops_row_bytes(c.type, c.dim_k), sg.v_row_bytes = ops_row_bytes(c.type, c.dim_v);
        const uint64_t gap = 64; // another layer's rows
        sg.k_offset = gap, sg.v_offset = gap + 128 * sg.k_row_bytes * uint64_t(c.n_head_kv);
        sg.page_bytes = sg.v_offset + (c.shared ? 0 : 128 * sg.v_row_bytes * uint64_t(c.n_head_kv));
        pool = std::make_unique<ops_guarded>(size_t(n_page) * sg.page_bytes); // what is not put stays NaN
        sg.pool = ops_mem(pool->data);
        backend be(2);
        for (size_t s = 0; s < c.lengths.size(); s++) {
            const int n = c.lengths[s];
            k.push_back(rnd.row(size_t(n) * c.n_head_kv * c.dim_k, 2.0f));
            v.push_back(rnd.row(size_t(n) * c.n_head_kv * c.dim_v, 2.0f));
            vector<int32_t> pos, seq(k.back().size() / size_t(c.n_head_kv * c.dim_k), int32_t(s));
            for (int i = 0; i < n; i++)
                pos.push_back(i);
            step st = step_of(pos, seq, table);
            kv_put_op op = {};
            op.n_rows = n, op.n_head_kv = c.n_head_kv, op.dim_k = c.dim_k, op.dim_v = c.dim_v, op.type = c.type;
            op.shared = c.shared, op.ld_k = c.n_head_kv * c.dim_k, op.ld_v = c.n_head_kv * c.dim_v;
            be.level = s % 2 ? CPU_PLAIN : cpu_detect();
            cpu_ops.kv_put(&be, &op, &sg, ops_mem(k.back().data()), ops_mem(v.back().data()), &st);
            EXPECT_EQ(ops_sync(&be), nullptr);
            for (auto [rows, dim] : {std::pair<vector<float> *, int>{&k.back(), c.dim_k}, {&v.back(), c.dim_v}})
                for (size_t i = 0; i < rows->size(); i += size_t(dim)) {
                    const vector<float> row = ops_widened(c.type, ops_stored(c.type, rows->data() + i, dim), dim);
                    std::copy(row.begin(), row.end(), rows->begin() + int64_t(i));
                }
        }
        q = rnd.row(c.rows.size() * size_t(ld_q()), 2.0f);
        sinks = rnd.row(size_t(c.n_head), 3.0f);
    }

    int ld_q() const { return c.n_head * c.dim_k + 3; }
    int ld_y() const { return c.n_head * c.dim_v; }

    // The other table has nothing that may be followed.
    step step_of(const vector<int32_t> &pos, const vector<int32_t> &seq, const vector<int32_t> &pages) const {
        static const vector<int32_t> none(4096, INT32_MAX);
        step st = {};
        st.pos = ops_mem(pos.data()), st.seq = ops_mem(seq.data());
        st.table[c.table] = ops_mem(pages.data()), st.table[1 - c.table] = ops_mem(none.data());
        st.table_len = table_len;
        return st;
    }

    attend_op op(int n_rows) const {
        attend_op op = {};
        op.n_rows = n_rows, op.n_head = c.n_head, op.n_head_kv = c.n_head_kv, op.dim_k = c.dim_k, op.dim_v = c.dim_v;
        op.n_seg = 1, op.window = c.window, op.has_sinks = c.has_sinks, op.shared = c.shared;
        op.ld_q = ld_q(), op.ld_y = ld_y(), op.scale = 0.37f, op.softcap = c.softcap, op.bucket = 8192;
        return op;
    }

    // Rows [r0, r1) in one call.
    void run(backend *be, float *y, size_t r0, size_t r1) const {
        vector<int32_t> pos, seq;
        for (size_t r = r0; r < r1; r++)
            seq.push_back(c.rows[r].first), pos.push_back(c.rows[r].second);
        vector<int32_t> pages = table;
        for (size_t i = 0; c.window > 0 && i < pages.size(); i++) { // pages before all windows were given back
            bool seen = false;
            for (size_t r = 0; r < pos.size(); r++)
                seen = seen ||
                       (seq[r] == int(i) / table_len && std::max(0, pos[r] - c.window + 1) / 128 <= int(i) % table_len);
            pages[i] = seen ? pages[i] : INT32_MAX;
        }
        const step st = step_of(pos, seq, pages);
        const attend_op o = op(int(r1 - r0));
        const seg segs[2] = {sg, {}};
        cpu_ops.attend(be, &o, ops_mem(y), ops_mem(q.data() + r0 * size_t(ld_q())), segs, ops_mem(sinks.data()), &st);
        EXPECT_EQ(ops_sync(be), nullptr);
    }

    float key(size_t s, int i, int h, int d) const { return k[s][(size_t(i) * c.n_head_kv + h) * c.dim_k + d]; }
    float value(size_t s, int i, int h, int d) const {
        return c.shared ? key(s, i, h, d) : v[s][(size_t(i) * c.n_head_kv + h) * c.dim_v + d];
    }

    // The formula, in double: y of one row and head, and the largest |value| for the tolerance.
    vector<double> naive(size_t r, int h, double &size) const {
        const size_t s = size_t(c.rows[r].first);
        const int pos = c.rows[r].second, kv = h / (c.n_head / c.n_head_kv);
        const int first = c.window > 0 ? std::max(0, pos - c.window + 1) : 0;
        vector<double> score, y(static_cast<size_t>(c.dim_v));
        for (int i = first; i <= pos; i++) {
            double dot = 0;
            for (int d = 0; d < c.dim_k; d++)
                dot += double(q[r * size_t(ld_q()) + size_t(h * c.dim_k + d)]) * double(key(s, i, kv, d));
            dot *= double(0.37f);
            score.push_back(c.softcap > 0 ? double(c.softcap) * std::tanh(dot / double(c.softcap)) : dot);
        }
        const double top = *std::max_element(score.begin(), score.end());
        double sum = c.has_sinks ? std::exp(double(sinks[size_t(h)]) - top) : 0;
        for (double x : score)
            sum += std::exp(x - top);
        for (int i = first; i <= pos; i++)
            for (int d = 0; d < c.dim_v; d++)
                y[size_t(d)] += std::exp(score[size_t(i - first)] - top) / sum * double(value(s, i, kv, d));
        size = 2.0;
        return y;
    }

    // The order that chapter CPU states, written once more, slot by slot.
    vector<float> stated(size_t r, int h) const {
        const size_t s = size_t(c.rows[r].first);
        const int pos = c.rows[r].second, kv = h / (c.n_head / c.n_head_kv);
        const int first = c.window > 0 ? std::max(0, pos - c.window + 1) : 0, dim = c.dim_v;
        vector<float> total(static_cast<size_t>(dim)), acc;
        float big_m = -INFINITY, big_l = 0;
        bool any = false;
        for (int split = first / 2048; split <= pos / 2048; split++) {
            float m = -INFINITY, l = 0;
            acc.assign(size_t(dim), 0.0f);
            for (int page = std::max(first / 128, split * 16); page <= std::min(pos / 128, split * 16 + 15); page++) {
                float score[128], m1 = m, sum[16] = {};
                const int lo = std::max(first, page * 128), hi = std::min(pos + 1, page * 128 + 128);
                for (int i = lo; i < hi; i++) {
                    float p[16] = {};
                    for (int d = 0; d < c.dim_k; d++)
                        p[d % 16] =
                            std::fma(key(s, i, kv, d), q[r * size_t(ld_q()) + size_t(h * c.dim_k + d)], p[d % 16]);
                    float x = tree(p) * 0.37f;
                    if (c.softcap > 0)
                        x = c.softcap * cpu_tanh(x / c.softcap);
                    score[i % 128] = x;
                    m1 = std::max(m1, x);
                }
                const float a = cpu_exp(m - m1);
                for (int i = lo; i < hi; i++)
                    score[i % 128] = cpu_exp(score[i % 128] - m1), sum[i % 16] += score[i % 128];
                l = std::fma(l, a, tree(sum));
                m = m1;
                for (int d = 0; d < dim; d++) {
                    acc[size_t(d)] *= a;
                    for (int i = lo; i < hi; i++)
                        acc[size_t(d)] = std::fma(score[i % 128], value(s, i, kv, d), acc[size_t(d)]);
                }
            }
            if (!any) {
                total = acc, big_m = m, big_l = l, any = true;
                continue;
            }
            const float top = std::max(big_m, m), a = cpu_exp(big_m - top), b = cpu_exp(m - top);
            big_m = top, big_l = std::fma(big_l, a, l * b);
            for (int d = 0; d < dim; d++)
                total[size_t(d)] = std::fma(total[size_t(d)], a, acc[size_t(d)] * b);
        }
        float a = 1;
        if (c.has_sinks) {
            const float sink = sinks[size_t(h)], top = std::max(big_m, sink);
            a = cpu_exp(big_m - top);
            big_l = std::fma(big_l, a, cpu_exp(sink - top));
        }
        for (float &f : total)
            f = f * a / big_l;
        return total;
    }

    static float tree(const float *p) {
        float r[8];
        for (int i = 0; i < 8; i++)
            r[i] = p[i] + p[i + 8];
        return ((r[0] + r[4]) + (r[2] + r[6])) + ((r[1] + r[5]) + (r[3] + r[7]));
    }
};

// All levels, thread counts and cuts agree; a sample of rows is right in value and in every bit.
void ops_check_attention(const ops_case &c, uint64_t seed, size_t n_sample, bool plain = true) {
    const ops_attention a(c, seed);
    const size_t n_rows = c.rows.size(), ld = size_t(a.ld_y());
    vector<float> whole;
    for (cpu_level level : ops_levels()) {
        if (level == CPU_PLAIN && !plain)
            continue;
        for (int threads = 1; threads <= (level == CPU_PLAIN ? 2 : 3); threads++) { // plain is slow
            backend be(threads);
            be.level = level;
            ops_guarded out(n_rows * ld * sizeof(float));
            float *y = reinterpret_cast<float *>(out.data);
            a.run(&be, y, 0, n_rows);
            if (whole.empty())
                whole.assign(y, y + n_rows * ld);
            ASSERT_EQ(ops_differ(whole.data(), y, n_rows * ld), -1) << "level " << level << " threads " << threads;
            if (level == CPU_PLAIN && threads == 1)
                continue;
            vector<float> cut(n_rows * ld);
            const size_t chunk = level == CPU_PLAIN ? 7 : threads == 1 ? 1 : threads == 2 ? 5 : 31;
            for (size_t r = 0; r < n_rows; r += chunk)
                a.run(&be, cut.data() + r * ld, r, std::min(n_rows, r + chunk));
            ASSERT_EQ(ops_differ(whole.data(), cut.data(), n_rows * ld), -1) << "level " << level << " chunk " << chunk;
        }
    }
    ops_random rnd(seed + 1);
    for (size_t i = 0; i < n_sample; i++) {
        const size_t r = i == 0 ? n_rows - 1 : size_t(rnd.below(int(n_rows)));
        const int h = rnd.below(c.n_head);
        const float *y = whole.data() + r * ld + size_t(h * c.dim_v);
        double size;
        const vector<double> want = a.naive(r, h, size);
        const vector<float> exact = a.stated(r, h);
        // Scores reach |0.37 * q * k| sqrt(dim) with errors of some 2^-24 of it, and enter an exponent; values are
        // below 2.
        const double limit = size * (64 + 4.0 * c.dim_k) * 0x1p-24;
        for (int d = 0; d < c.dim_v; d++)
            ASSERT_NEAR(y[d], want[size_t(d)], limit) << "row " << r << " head " << h << " dim " << d;
        ASSERT_EQ(ops_differ(exact.data(), y, size_t(c.dim_v)), -1) << "row " << r << " head " << h;
    }
}

TEST(ops, attend_groups_and_dimensions) {
    uint64_t seed = 10;
    for (int dim : {1, 16, 24, 32, 64, 80, 96, 100, 128, 256})
        for (int group : {1, 2, 4, 7}) {
            ops_case c;
            c.n_head_kv = 2, c.n_head = 2 * group, c.dim_k = c.dim_v = dim;
            c.lengths = {150};
            for (int p = 122; p < 150; p += 4)
                c.rows.push_back({0, p});
            SCOPED_TRACE(strf("dim %d group %d", dim, group));
            ops_check_attention(c, seed++, 3);
        }
}

TEST(ops, attend_values_of_another_width) {
    for (auto [dim_k, dim_v] : {std::pair{96, 64}, {48, 128}, {40, 24}, {192, 128}}) {
        ops_case c;
        c.n_head = 4, c.n_head_kv = 2, c.dim_k = dim_k, c.dim_v = dim_v;
        c.lengths = {200, 3};
        c.rows = {{0, 0}, {0, 199}, {1, 2}, {0, 127}, {0, 128}};
        ops_check_attention(c, 100 + uint64_t(dim_k), 5);
    }
    for (auto [dim_k, dim_v] : {std::pair{144, 128}, {36, 32}, {64, 64}, {72, 40}}) {
        ops_case c;
        c.n_head = 70, c.n_head_kv = 1, c.dim_k = dim_k, c.dim_v = dim_v,
        c.shared = true; // more heads than a block holds
        c.lengths = {140};
        c.rows = {{0, 5}, {0, 139}};
        ops_check_attention(c, 200 + uint64_t(dim_k), 4);
    }
}

TEST(ops, attend_lengths) {
    for (int n : {1, 2, 127, 128, 129, 300, 2048, 2049, 4500}) {
        ops_case c;
        c.n_head = 4, c.n_head_kv = 2, c.dim_k = c.dim_v = 64;
        c.lengths = {n};
        for (int p = std::max(0, n - 5); p < n; p++)
            c.rows.push_back({0, p});
        SCOPED_TRACE(n);
        ops_check_attention(c, 300 + uint64_t(n), 3);
    }
}

TEST(ops, attend_prompt) {
    for (int n_head_kv : {1, 4}) {
        ops_case c;
        c.n_head = 4, c.n_head_kv = n_head_kv, c.dim_k = c.dim_v = 32;
        c.lengths = {2300};
        for (int p = 0; p < 200; p++)
            c.rows.push_back({0, p});
        for (int p = 2040; p < 2060; p++)
            c.rows.push_back({0, p});
        ops_check_attention(c, 400 + uint64_t(n_head_kv), 12);
    }
}

TEST(ops, attend_windows_sinks_and_softcaps) {
    for (int window : {0, 1, 5, 128, 200, 2050})
        for (int form = 0; form < 4; form++) {
            ops_case c;
            c.n_head = 3, c.n_head_kv = 1, c.dim_k = c.dim_v = 48;
            c.window = window, c.has_sinks = form & 1, c.softcap = form & 2 ? 5.0f : 0.0f;
            c.lengths = {window > 2000 ? 4500 : 330};
            for (int p = c.lengths[0] - 12; p < c.lengths[0]; p++)
                c.rows.push_back({0, p});
            for (int p = 0; p < 4; p++)
                c.rows.push_back({0, p * 60});
            SCOPED_TRACE(strf("window %d form %d", window, form));
            ops_check_attention(c, 500 + uint64_t(window * 4 + form), 5, window < 2000);
        }
}

TEST(ops, attend_several_sequences) {
    for (int type : {TYPE_F16, TYPE_Q8_0}) {
        ops_case c;
        c.type = type;
        c.n_head = 4, c.n_head_kv = 2, c.dim_k = c.dim_v = 64;
        c.lengths = {300, 1, 2200, 129};
        for (int s = 0; s < 4; s++) // decode steps, then prompts side by side
            c.rows.push_back({s, c.lengths[size_t(s)] - 1});
        for (int p = 0; p < 129; p++)
            c.rows.push_back({3, p});
        for (int p = 100; p < 260; p++)
            c.rows.push_back({0, p});
        c.rows.push_back({2, 2047});
        ops_check_attention(c, 600, 12);
    }
}

TEST(ops, attend_q8_0_groups_and_dimensions) {
    uint64_t seed = 610;
    for (int dim : {8, 16, 33, 48, 64, 80, 128})
        for (int group : {1, 2, 4, 8})
            for (int form = 0; form < 2; form++) {
                ops_case c;
                c.type = TYPE_Q8_0, c.n_head_kv = 2, c.n_head = 2 * group, c.dim_k = dim;
                c.shared = form, c.dim_v = form && dim > 16 ? dim - 16 : dim;
                c.lengths = {140};
                for (int p = 126; p<140; p += group> 2 ? 13 : 3)
                    c.rows.push_back({0, p});
                SCOPED_TRACE(strf("dim %d group %d form %d", dim, group, form));
                ops_check_attention(c, seed++, 2);
            }
}

TEST(ops, attend_q8_0_lengths_windows_sinks_and_softcaps) {
    for (int form = 0; form < 8; form++) {
        ops_case c;
        c.type = TYPE_Q8_0, c.table = form & 1, c.n_head = 6, c.n_head_kv = 2;
        c.dim_k = form & 2 ? 64 : 48, c.dim_v = form & 2 ? 32 : 48;
        c.window = form & 4 ? 150 : 0, c.has_sinks = form & 1, c.softcap = form & 2 ? 5.0f : 0.0f;
        c.lengths = {2300, 40};
        c.rows = {{0, 2299}, {1, 39}, {0, 2047}, {0, 2048}, {0, 100}};
        for (int p = 2200; p < 2224; p++)
            c.rows.push_back({0, p});
        SCOPED_TRACE(form);
        ops_check_attention(c, 680 + uint64_t(form), 6, form == 0 || form == 7);
    }
}

// What attend_scratch says for the most rows and the longest sequence is enough for every batch: any rows, any split
// into sequences, any positions.
TEST(ops, attend_scratch_is_enough_for_every_batch) {
    ops_random rnd(750);
    for (int shape = 0; shape < 24; shape++) {
        const int group = 1 << rnd.below(5), most = 1 + rnd.below(shape % 4 ? 40 : 160), n_sequence = 1 + rnd.below(5);
        ops_case c;
        c.n_head_kv = 1 + rnd.below(4), c.n_head = c.n_head_kv * group, c.shared = rnd.below(4) == 0;
        c.dim_k = 8 * (1 + rnd.below(4)), c.dim_v = c.shared ? c.dim_k : 8 * (1 + rnd.below(4));
        c.window = rnd.below(3) ? 0 : 1 + rnd.below(300);
        c.type = rnd.below(2) ? TYPE_F16 : TYPE_Q8_0;
        int longest = 0;
        for (int s = 0; s < n_sequence; s++) {
            c.lengths.resize(size_t(s + 1), 1);
            c.lengths[size_t(s)] = rnd.below(3) ? 1 + rnd.below(300) : 2048 + rnd.below(2200);
            longest = std::max(longest, c.lengths[size_t(s)]);
        }
        ops_attention a(c, 751 + uint64_t(shape));
        for (cpu_level level : ops_levels()) {
            backend be(1 + rnd.below(4));
            be.level = level;
            const attend_op op = a.op(most);
            const uint64_t bytes = cpu_ops.attend_scratch(&be, &op, &a.sg, longest);
            // The scratch space ends where memory ends, and begins as NaN.
            const ops_guarded space(bytes);
            be.scratch.data = space.data, be.scratch.size = bytes;
            for (int batch = 0; batch < (level == CPU_PLAIN ? 3 : 6); batch++) {
                const int n = batch == 0 ? most : 1 + rnd.below(most), turn = 1 + rnd.below(20);
                a.c.rows.clear();
                for (int t = 0, s = 0; t < n; t++) {
                    if (t % turn == 0)
                        s = rnd.below(n_sequence);
                    const int length = c.lengths[size_t(s)];
                    a.c.rows.push_back({s, batch % 2 ? length - 1 : rnd.below(length)});
                }
                a.q.assign(size_t(n) * size_t(a.ld_q()), 0.5f);
                vector<float> y(size_t(n) * size_t(a.ld_y()));
                a.run(&be, y.data(), 0, size_t(n));
                const bool same = be.scratch.data == space.data && be.scratch.size == bytes;
                EXPECT_TRUE(same) << "shape " << shape << " level " << level << " rows " << n << " of " << most;
                if (!same)
                    return;
            }
            be.scratch.data = nullptr, be.scratch.size = 0;
        }
    }
}

// More rows or longer sequences never need less, and a long context with many threads does not need gigabytes.
TEST(ops, attend_scratch_grows_with_rows_and_tokens) {
    for (int threads : {1, 2, 16}) {
        backend be(threads);
        for (int group : {1, 8, 128, 200})
            for (int n_head_kv : {1, 8}) {
                attend_op op = {};
                op.n_head = n_head_kv * group, op.n_head_kv = n_head_kv, op.dim_k = op.dim_v = 128, op.n_seg = 1;
                const auto need = [&](int rows, int64_t tokens) {
                    op.n_rows = rows;
                    const seg sg = {};
                    return cpu_ops.attend_scratch(&be, &op, &sg, tokens);
                };
                for (int64_t tokens : {1, 2048, 2049, 40000, 1 << 20})
                    for (int rows = 1; rows < 600; rows++) {
                        ASSERT_LE(need(rows, tokens), need(rows + 1, tokens)) << group << " " << rows;
                        ASSERT_LE(need(rows, tokens), need(rows, tokens + 2048)) << group << " " << rows;
                    }
                EXPECT_LT(need(512, 1 << 20), uint64_t(64 + threads) << 20);
            }
    }
}

// A NaN in the cache reaches exactly the rows and heads that see it, also from a key that is beside a masked slot.
TEST(ops, attend_keeps_nan_where_it_is_seen) {
    ops_case c;
    c.n_head = 4, c.n_head_kv = 2, c.dim_k = c.dim_v = 64;
    c.lengths = {140};
    for (int p = 90; p < 140; p++)
        c.rows.push_back({0, p});
    for (int form = 0; form < 4; form++) {
        const bool in_key = form & 1;
        c.type = form & 2 ? TYPE_Q8_0 : TYPE_F16;
        const ops_attention a(c, 700);
        const int bad = 130, kv = 1;
        const uint64_t row = uint64_t(kv * 128 + bad % 128);
        uint8_t *page = a.pool->data + uint64_t(a.table[1]) * a.sg.page_bytes;
        const uint16_t nan = 0x7e00; // of an f16 value, or the scale of a q8_0 block
        memcpy(page + (in_key ? a.sg.k_offset + row * a.sg.k_row_bytes : a.sg.v_offset + row * a.sg.v_row_bytes), &nan,
               2);
        for (cpu_level level : ops_levels()) {
            backend be(1);
            be.level = level;
            vector<float> y(c.rows.size() * size_t(a.ld_y()));
            a.run(&be, y.data(), 0, c.rows.size());
            for (size_t r = 0; r < c.rows.size(); r++)
                for (int h = 0; h < c.n_head; h++)
                    ASSERT_EQ(std::isnan(y[r * size_t(a.ld_y()) + size_t(h * 64)]),
                              c.rows[r].second >= bad && h / 2 == kv)
                        << "form " << form << " level " << level << " row " << r << " head " << h;
        }
    }
}

TEST(ops, unsupported_rows_are_an_error) {
    ops_case c;
    c.rows = {{0, 0}};
    ops_attention a(c, 800);
    vector<float> y(size_t(a.ld_y()));
    vector<int32_t> zero = {0};
    const step st = a.step_of(zero, zero, a.table);
    for (int kind = 0; kind < 4; kind++) {
        seg segs[2] = {a.sg, a.sg};
        attend_op op = a.op(1);
        kv_put_op put = {};
        put.n_rows = 1, put.n_head_kv = 1, put.dim_k = put.dim_v = 16, put.ld_k = put.ld_v = 16, put.type = TYPE_F16;
        if (kind == 0)
            segs[0].type = put.type = TYPE_Q4_0;
        if (kind == 1)
            segs[0].ratio = 4;
        if (kind == 2)
            op.n_seg = 2;
        if (kind == 3)
            segs[0].row_ids = ops_mem(zero.data());
        backend be(1);
        cpu_ops.attend(&be, &op, ops_mem(y.data()), ops_mem(a.q.data()), segs, mem(), &st);
        EXPECT_NE(ops_sync(&be), nullptr) << kind;
        if (kind > 1)
            continue;
        cpu_ops.kv_put(&be, &put, segs, ops_mem(a.q.data()), ops_mem(a.q.data()), &st);
        EXPECT_NE(ops_sync(&be), nullptr) << kind;
        put.type = TYPE_Q8_0, segs[0].type = TYPE_F16, segs[0].ratio = 1; // the operation and the rows disagree
        cpu_ops.kv_put(&be, &put, segs, ops_mem(a.q.data()), ops_mem(a.q.data()), &st);
        EXPECT_NE(ops_sync(&be), nullptr) << kind;
    }
}

} // namespace
