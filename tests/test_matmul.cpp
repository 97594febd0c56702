// Matrix products: activations, the reference, and every fast kernel against it.
#include "unit.h"

#include <sys/mman.h>

namespace {

struct matmul_rng {
    uint64_t s = 0x9e3779b97f4a7c15;
    uint64_t next() {
        s ^= s << 13, s ^= s >> 7, s ^= s << 17;
        return s;
    }
    int range(int lo, int hi) { return lo + int(next() % uint64_t(hi - lo + 1)); }
    float unit() { return float(range(-1000000, 1000000)) * 1e-6f; }
};

// Bytes that end where the readable memory ends.
struct matmul_guarded {
    size_t size, mapped;
    uint8_t *base, *data;
    explicit matmul_guarded(size_t bytes) : size(bytes) {
        const size_t page = size_t(sysconf(_SC_PAGESIZE));
        mapped = (bytes + page - 1) / page * page + page;
        base =
            static_cast<uint8_t *>(mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (base == MAP_FAILED || mprotect(base + mapped - page, page, PROT_NONE) != 0)
            abort();
        data = base + mapped - page - bytes;
    }
    matmul_guarded(const matmul_guarded &) = delete;
    ~matmul_guarded() { munmap(base, mapped); }
};

void matmul_put_half(uint8_t *p, float f) {
    uint16_t h = float_to_half(f);
    memcpy(p, &h, 2);
}

// Random quants and sub-scales of every bit pattern, floats of reasonable size.
void matmul_fill(int type, uint8_t *w, size_t bytes, matmul_rng &rng) {
    const format &f = *find_format(type);
    for (size_t i = 0; i < bytes; i++)
        w[i] = uint8_t(rng.next() >> 32);
    auto scale = [&] { return 0.001f * float(rng.range(1, 40)) * (rng.next() & 256 ? 1 : -1); };
    for (uint8_t *b = w; b < w + bytes; b += f.bytes) {
        if (type == TYPE_F32) {
            float v = rng.unit();
            memcpy(b, &v, 4);
        } else if (type == TYPE_F16) {
            matmul_put_half(b, rng.unit());
        } else if (type == TYPE_BF16) {
            uint16_t h = uint16_t(float_bits(rng.unit()) >> 16);
            memcpy(b, &h, 2);
        } else if (type == TYPE_MXFP4) {
            *b = uint8_t(rng.range(115, 128));
        } else {
            const int at = type == TYPE_Q2_K ? 80 : type == TYPE_Q3_K ? 108 : type == TYPE_Q6_K ? 208 : 0;
            matmul_put_half(b + at, scale());
            if (f.mins)
                matmul_put_half(b + at + 2, scale());
        }
    }
}

// The same bits, or two NaNs.
bool matmul_same(float a, float b) { return a != a ? b != b : float_bits(a) == float_bits(b); }

struct matmul_case {
    matmul_op op;
    const uint8_t *w;
    const float *x, *bias;
    float *y;
};

void matmul_run(backend &be, cpu_level level, const matmul_case &c) {
    const format &f = *find_format(c.op.type);
    be.level = level;
    const uint64_t row = row_bytes(f, uint64_t(c.op.n_in)), n_out = uint64_t(c.op.n_out) * uint64_t(c.op.n_group);
    const mat w = {{const_cast<uint8_t *>(c.w), 0}, c.op.type, c.op.n_in, int32_t(n_out), 1, row, row * n_out};
    be.error = nullptr;
    cpu_matmul(&be, &c.op, {c.y, 0}, &w, {const_cast<float *>(c.x), 0}, {const_cast<float *>(c.bias), 0});
    ASSERT_EQ(be.error, nullptr);
}

vector<cpu_level> matmul_levels() {
    vector<cpu_level> levels;
    for (int l = CPU_PLAIN; l <= cpu_detect(); l++)
        levels.push_back(cpu_level(l));
    return levels;
}

// One block of activations as the rule in chapter QUANTS says it, written from the words.
void matmul_expected_block(const float *x, int n, vector<int> &q, float &dx) {
    bool finite = true;
    float amax = 0;
    for (int i = 0; i < n; i++) {
        finite = finite && std::isfinite(x[i]);
        amax = std::fmax(amax, std::fabs(x[i]));
    }
    q.assign(size_t(n), 0);
    dx = finite ? 0.0f : NAN;
    if (!finite || double(amax) < std::ldexp(1.0, -100))
        return;
    dx = amax / 127.0f;
    const float factor = 127.0f / amax;
    for (int i = 0; i < n; i++) {
        const float v = x[i] * factor;
        double r = std::floor(double(v)), rest = double(v) - r;
        if (rest > 0.5 || (rest == 0.5 && std::fmod(r, 2.0) != 0))
            r += 1;
        q[size_t(i)] = int(r);
    }
}

vector<float> matmul_activation_rows(int n, matmul_rng &rng) {
    vector<float> x(static_cast<size_t>(n));
    for (float &v : x)
        v = rng.unit() * (rng.range(0, 9) == 0 ? 30.0f : 1.0f);
    const float special[] = {NAN, INFINITY, -INFINITY, 0x1p-100f, 0x1.fffffep-101f, 0x1p-149f, -0.0f, 3.4e38f, 1e-38f};
    const int n_block = n / 32;
    for (int b = 0; b < n_block; b++) {
        float *p = &x[size_t(b) * 32];
        const int kind = rng.range(0, 20);
        if (kind < 3) // one special value among others
            p[rng.range(0, 31)] = special[kind];
        else if (kind < 9) // nothing but small ones
            for (int i = 0; i < 32; i++)
                p[i] = i == 7 ? special[kind] : special[kind] * 0.25f;
        else if (kind == 9) // ties: amax 127 gives the factor 1
            for (int i = 0; i < 32; i++)
                p[i] = i == 0 ? -127.0f : float(i - 16) + 0.5f;
        else if (kind == 10)
            memset(p, 0, 32 * sizeof(float));
    }
    return x;
}

// The integer of value i of a row, in any of the forms.
int matmul_activation(const uint8_t *row, const act_layout &a, int64_t i) {
    const int64_t b = i / a.block, k = i % a.block;
    int64_t before = 0; // blocks that stand before b when every eighth one follows the other
    for (int64_t o = 0; o < a.n_block; o++)
        before += o % 8 < b % 8 || (o % 8 == b % 8 && o < b);
    if (a.form == ACT_PLAIN)
        return reinterpret_cast<const int8_t *>(row)[i];
    if (a.form == ACT_WALK)
        return row[before * a.block + k] - 128;
    return reinterpret_cast<const int8_t *>(row)[b / 8 * 256 + b % 4 * 64 + k / 16 * 32 + b % 8 / 4 * 16 + k % 16];
}

using matmul_quantize = void (*)(const float *, const act_layout &, uint8_t *);

void matmul_check_activations(matmul_quantize quantize, int act, int form, int n, matmul_rng &rng) {
    const vector<float> x = matmul_activation_rows(n, rng);
    const act_layout a = act_plan(act, form, n);
    vector<uint8_t> row(static_cast<size_t>(a.stride), 0xaa);
    quantize(x.data(), a, row.data());
    vector<int> q;
    for (int64_t b = 0; b < a.n_block; b++) {
        float dx, got;
        matmul_expected_block(&x[size_t(b * a.block)], a.block, q, dx);
        int64_t at = 0;
        for (int64_t o = 0; o < a.n_block; o++)
            at += form == ACT_PLAIN || form == ACT_PAIRS ? o < b : o % 8 < b % 8 || (o % 8 == b % 8 && o < b);
        memcpy(&got, row.data() + a.d_at + at * 4, 4);
        EXPECT_TRUE(matmul_same(got, dx)) << "block " << b << ": " << got << ", expected " << dx;
        int32_t sum = 0;
        int16_t sums[16] = {};
        for (int i = 0; i < a.block; i++) {
            EXPECT_EQ(matmul_activation(row.data(), a, b * a.block + i), q[size_t(i)])
                << "block " << b << " value " << i;
            sum += q[size_t(i)];
            const int sub = i / 16 % 16;
            sums[sub % 2 * 8 + sub / 2] = int16_t(sums[sub % 2 * 8 + sub / 2] + q[size_t(i)]);
        }
        if (act == ACT_Q8_32)
            EXPECT_EQ(memcmp(row.data() + a.s_at + at * 4, &sum, 4), 0) << "sum of block " << b;
        else
            EXPECT_EQ(memcmp(row.data() + a.s_at + at * 32, sums, 32), 0) << "sums of block " << b;
    }
}

// A row of x as the product of a format sees it.
vector<double> matmul_seen(int act, const float *x, int n) {
    vector<double> seen(x, x + n);
    const int step = act == ACT_Q8_32 ? 32 : 256;
    vector<int> q;
    float dx;
    for (int i = 0; i < n && act != ACT_F32; i++) {
        if (i % step == 0)
            matmul_expected_block(x + i, step, q, dx);
        seen[size_t(i)] = double(q[size_t(i % step)]) * double(dx);
    }
    return seen;
}

// Row lengths and sizes of a format's tests: whole groups of eight blocks, less, more.
vector<int> matmul_lengths(const format &f) {
    if (f.block == 1)
        return {1, 33, 172, 512};
    if (f.block == 32)
        return {32, 96, 256, 32 * 43};
    return {256, 768, 2048, 256 * 9};
}

// Weights that end where memory ends, activations, and the reference's results.
struct matmul_product {
    const format &f;
    int n_in, n_out, n_rows;
    uint64_t bytes;
    matmul_guarded w;
    vector<float> x, expected; // [n_rows, n_in], [n_rows, n_out]

    matmul_product(backend &be, const format &f, int n_in, int n_out, int n_rows, matmul_rng &rng)
        : f(f), n_in(n_in), n_out(n_out), n_rows(n_rows), bytes(row_bytes(f, uint64_t(n_in))),
          w(bytes * uint64_t(n_out)), x(size_t(n_in) * size_t(n_rows)), expected(size_t(n_out) * size_t(n_rows)) {
        matmul_fill(f.type, w.data, w.size, rng);
        for (float &v : x)
            v = rng.unit();
        reference(be);
    }
    void reference(backend &be) {
        matmul_run(be, CPU_PLAIN, {op(n_rows, n_out), w.data, x.data(), nullptr, expected.data()});
    }
    matmul_op op(int rows, int out) const { return {rows, n_in, out, 1, f.type, n_in, out, 0, 0}; }

    // The last `out` weight rows and the first `rows` of x, at some level.
    void check(backend &be, cpu_level level, int out, int rows) const {
        vector<float> y(size_t(out) * size_t(rows), 7.0f);
        matmul_run(be, level, {op(rows, out), w.data + uint64_t(n_out - out) * bytes, x.data(), nullptr, y.data()});
        for (int t = 0; t < rows; t++)
            for (int o = 0; o < out; o++)
                ASSERT_TRUE(matmul_same(y[size_t(t * out + o)], expected[size_t(t * n_out + n_out - out + o)]))
                    << f.name << " level " << level << " threads " << be.pool.size << " n_in " << n_in << " n_out "
                    << out << " rows " << rows << " at row " << t << ", " << o << ": " << y[size_t(t * out + o)]
                    << ", expected " << expected[size_t(t * n_out + n_out - out + o)];
    }
};

} // namespace

TEST(Matmul, ActivationsFollowTheWrittenRule) {
    fp_mode mode;
    matmul_rng rng;
    for (int act : {ACT_Q8_32, ACT_Q8_256})
        for (int blocks : {1, 2, 7, 8, 9, 40}) {
            const int n = blocks * (act == ACT_Q8_32 ? 32 : 256);
            matmul_check_activations(plain_quantize, act, ACT_PLAIN, n, rng);
#if defined(__x86_64__)
            if (cpu_detect() == CPU_PLAIN)
                continue;
            for (int form : {ACT_PLAIN, ACT_WALK})
                matmul_check_activations(avx2_quantize, act, form, n, rng);
            if (act == ACT_Q8_32)
                matmul_check_activations(avx2_quantize, act, ACT_PAIRS, n, rng);
#endif
        }
}

// The reference against the same product of decoded values in double. An f32 chain of n terms is off by at most
// n * 2^-24 of the sum of the absolute terms; a partial sum has n_block / 8 of them (twice that with minimums), the
// tree adds four levels, and scaling, decoding and the conversion of an integer to f32 round a few times more.
// A minimum is a term of its own, so the size of a value is |scale * quant| + |offset|.
TEST(Matmul, ReferenceMatchesDecodedProduct) {
    fp_mode mode;
    matmul_rng rng;
    backend be(1);
    for (const format &f : formats)
        for (int n_in : matmul_lengths(f)) {
            const matmul_product p(be, f, n_in, 5, 3, rng);
            vector<float> v(static_cast<size_t>(n_in));
            for (int t = 0; t < p.n_rows; t++) {
                const vector<double> seen = matmul_seen(f.act, &p.x[size_t(t * n_in)], n_in);
                for (int o = 0; o < p.n_out; o++) {
                    const uint8_t *row = p.w.data + p.bytes * uint64_t(o);
                    decode_row(f.type, row, v.data(), n_in);
                    double sum = 0, size = 0;
                    for (int i = 0; i < n_in; i++) {
                        const uint8_t *block = row + i / f.block * f.bytes;
                        const double value = double(v[size_t(i)]);
                        const double offset = f.mins ? double(q_offset(f.type, block, i % f.block / f.sub)) : 0;
                        sum += value * seen[size_t(i)];
                        size += (std::fabs(value - offset) + std::fabs(offset)) * std::fabs(seen[size_t(i)]);
                    }
                    const double terms = (f.block == 1 ? n_in / 16 : n_in / f.block / 4) + 10;
                    EXPECT_NEAR(p.expected[size_t(t * p.n_out + o)], sum, terms * 0x1p-24 * size)
                        << f.name << " n_in " << n_in;
                    EXPECT_GT(size, 0);
                }
            }
        }
}

TEST(Matmul, LevelsRowsAndThreadsGiveTheSameBits) {
    fp_mode mode;
    matmul_rng rng;
    backend one(1), two(2), three(3);
    for (const format &f : formats)
        for (int n_in : matmul_lengths(f)) {
            const bool small = n_in <= 256;
            const matmul_product p(one, f, n_in, small ? 129 : 33, small ? 129 : 33, rng);
            for (cpu_level level : matmul_levels())
                for (backend *be : {&one, &two, &three})
                    for (int out : {1, 2, 7, 33, 129})
                        for (int rows : {1, 2, 3, 4, 5, 6, 7, 33, 129})
                            if (out <= p.n_out && rows <= p.n_rows && (level != CPU_PLAIN || out * rows < 300))
                                p.check(*be, level, out, rows);
        }
}

// Every pattern of scales, the infinite and the NaN among them, and rows of x with NaN, infinity and nothing but zero.
TEST(Matmul, UnusualNumbersGiveTheSameBits) {
    fp_mode mode;
    matmul_rng rng;
    backend be(2);
    for (const format &f : formats)
        for (int n_in : matmul_lengths(f)) {
            matmul_product p(be, f, n_in, 33, 7, rng);
            for (size_t i = 0; i < p.w.size; i++)
                p.w.data[i] = uint8_t(rng.next() >> 32);
            if (f.type == TYPE_MXFP4) // all 256 exponents
                for (size_t b = 0; b < p.w.size / 17; b++)
                    p.w.data[b * 17] = uint8_t(b);
            p.x[size_t(n_in) + rng.next() % size_t(n_in)] = NAN;
            p.x[size_t(n_in) * 2 + rng.next() % size_t(n_in)] = -INFINITY;
            for (int i = 0; i < n_in; i++) {
                p.x[size_t(n_in * 3 + i)] = rng.next() % 2 ? -0.0f : 0.0f;
                p.x[size_t(n_in * 4 + i)] *= 0x1p-120f;
                p.x[size_t(n_in * 5 + i)] *= 0x1p-98f;
            }
            p.reference(be);
            for (cpu_level level : matmul_levels())
                for (int rows : {1, 2, 3, 7})
                    p.check(be, level, 33, rows);
            for (int o = 0; o < 33; o++)
                EXPECT_TRUE(std::isnan(p.expected[size_t(33 + o)])) << f.name << ": a NaN in x was lost";
        }
}

// A row of ordinary numbers beside one with a NaN keeps its own bits.
TEST(Matmul, RowsDoNotTouchEachOther) {
    fp_mode mode;
    matmul_rng rng;
    backend be(2);
    for (const format &f : formats) {
        const int n_in = matmul_lengths(f)[1];
        matmul_product p(be, f, n_in, 33, 7, rng);
        for (int t = 0; t < 7; t += 2)
            p.x[size_t(t * n_in + 3)] = NAN;
        for (cpu_level level : matmul_levels()) {
            vector<float> y(size_t(33 * 7));
            matmul_run(be, level, {p.op(7, 33), p.w.data, p.x.data(), nullptr, y.data()});
            for (int i = 0; i < 33 * 7; i++)
                EXPECT_TRUE(i / 33 % 2 == 0 ? std::isnan(y[size_t(i)])
                                            : matmul_same(y[size_t(i)], p.expected[size_t(i)]))
                    << f.name << " level " << level << " at " << i;
        }
    }
}

TEST(Matmul, GroupsBiasAccumulateAndStrides) {
    fp_mode mode;
    matmul_rng rng;
    backend be(3);
    for (const format &f : formats) {
        const int n_in = matmul_lengths(f)[1], n_group = 3, n_out = 35, rows = 9;
        const int ld_x = n_group * n_in + 5, ld_y = n_group * n_out + 3;
        const uint64_t bytes = row_bytes(f, uint64_t(n_in));
        matmul_guarded w(bytes * uint64_t(n_out * n_group));
        matmul_fill(f.type, w.data, w.size, rng);
        vector<float> x(size_t(rows * ld_x)), bias(size_t(n_out * n_group)), before(size_t(rows * ld_y));
        for (vector<float> *v : {&x, &bias, &before})
            for (float &e : *v)
                e = rng.unit();
        // Each group by itself, by the reference.
        vector<float> product(before.size());
        for (int g = 0; g < n_group; g++)
            matmul_run(be, CPU_PLAIN,
                       {{rows, n_in, n_out, 1, f.type, ld_x, ld_y, 0, 0},
                        w.data + bytes * uint64_t(g * n_out),
                        &x[size_t(g * n_in)],
                        nullptr,
                        &product[size_t(g * n_out)]});
        for (cpu_level level : matmul_levels())
            for (int n : {1, rows})
                for (int with : {0, 1, 2, 3}) {
                    vector<float> y = before;
                    matmul_run(be, level,
                               {{n, n_in, n_out, n_group, f.type, ld_x, ld_y, with & 1, with >> 1},
                                w.data,
                                x.data(),
                                with & 2 ? bias.data() : nullptr,
                                y.data()});
                    for (size_t i = 0; i < y.size(); i++) {
                        const size_t t = i / size_t(ld_y), o = i % size_t(ld_y);
                        float expected = with & 2 && o < bias.size() ? product[i] + bias[o] : product[i];
                        if (with & 1)
                            expected = before[i] + expected;
                        if (t >= size_t(n) || o >= size_t(n_out * n_group))
                            expected = before[i];
                        ASSERT_TRUE(matmul_same(y[i], expected)) << f.name << " level " << level << " rows " << n
                                                                 << " with " << with << " at " << t << ", " << o;
                    }
                }
    }
}

TEST(Matmul, ScratchIsKept) {
    fp_mode mode;
    matmul_rng rng;
    backend be(2);
    const matmul_product p(be, *find_format(TYPE_Q4_K), 768, 33, 33, rng);
    const cpu_level level = matmul_levels().back();
    p.check(be, level, 33, 33);
    const uint8_t *scratch = be.scratch.data;
    for (int rows : {1, 33, 5})
        p.check(be, level, 33, rows);
    EXPECT_EQ(be.scratch.data, scratch);
}

// What matmul_scratch says for the most rows is what a product of so many takes, and enough for fewer.
TEST(Matmul, ScratchIsKnownBefore) {
    fp_mode mode;
    matmul_rng rng;
    for (cpu_level level : matmul_levels())
        for (const format &f : formats)
            for (int threads = 1; threads <= 3; threads++) {
                const int n_group = rng.range(1, 3), most = rng.range(1, 40), n_out = rng.range(1, 40);
                const int n_in = f.block * rng.range(1, 600 / f.block + 1), ld = n_group * n_in;
                matmul_op op = {most, n_in, n_out, n_group, f.type, ld, n_group * n_out, 0, 0};
                const uint64_t bytes = row_bytes(f, uint64_t(n_in));
                matmul_guarded w(bytes * uint64_t(n_out * n_group));
                matmul_fill(f.type, w.data, w.size, rng);
                vector<float> x(size_t(most * ld), 0.5f), y(size_t(most * n_group * n_out));
                const mat m = {{w.data, 0}, f.type, n_in, n_out * n_group, 1, bytes, w.size};
                backend be(threads);
                be.level = level;
                const uint64_t need = cpu_ops.matmul_scratch(&be, &op, &m);
                matmul_run(be, level, {op, w.data, x.data(), nullptr, y.data()});
                EXPECT_EQ(be.scratch.size, need) << f.name << " level " << level << " rows " << most;
                // The scratch space ends where memory ends.
                matmul_guarded space(need);
                be.scratch = buffer();
                be.scratch.data = space.data, be.scratch.size = need;
                for (int i = 0; i < 6; i++) {
                    op.n_rows = i == 0 ? most : rng.range(1, most);
                    matmul_run(be, level, {op, w.data, x.data(), nullptr, y.data()});
                    ASSERT_TRUE(be.scratch.data == space.data && be.scratch.size == need)
                        << f.name << " level " << level << " rows " << op.n_rows << " of " << most;
                }
                be.scratch.data = nullptr, be.scratch.size = 0;
            }
}

TEST(Matmul, EveryFormatHasAPath) {
    static const char *const names[] = {"plain", "avx2", "avx512"};
    for (const format &f : formats)
        for (cpu_level level : matmul_levels())
            EXPECT_STREQ(cpu_matmul_path(f.type, level), names[level]) << f.name;
}

TEST(Matmul, ForeignTypeIsAnError) {
    backend be(1);
    float x[32] = {}, y[1] = {};
    const matmul_op op = {1, 32, 1, 1, 99, 32, 1, 0, 0};
    const mat w = {{x, 0}, 99, 32, 1, 1, 128, 128};
    cpu_matmul(&be, &op, {y, 0}, &w, {x, 0}, {nullptr, 0});
    EXPECT_NE(be.error, nullptr);
}
