// test_vulkan.cpp: chapter VULKAN against the CPU backend, operation by operation and as whole models. Mesa's driver
// that computes on the CPU (llvmpipe) runs the shaders where there is no GPU.
#include "unit.h"

#include "opened.h"

#if defined(ENGINE_VULKAN)

namespace {

const char *const VULKAN_DEVICE = "llvmpipe";

// Why there is no device, or "".
std::string vulkan_missing() {
    static const std::string why = [] {
        try {
            vk_open(VULKAN_DEVICE);
        } catch (const Error &e) {
            return e.msg;
        }
        return std::string();
    }();
    return why;
}
#define NEED_VULKAN()                                                                                                  \
    if (!vulkan_missing().empty())                                                                                     \
    GTEST_SKIP() << "[vulkan] " << vulkan_missing()

struct vulkan_random {
    uint64_t s;
    explicit vulkan_random(uint64_t seed) : s(seed * 0x9e3779b97f4a7c15u + 1) {}
    uint32_t bits() {
        s = s * 6364136223846793005u + 1442695040888963407u;
        return uint32_t(s >> 32);
    }
    float unit() { return float(bits() >> 8) / float(1 << 23) - 1.0f; }
    int below(int n) { return int(bits() % uint32_t(n)); }
    vector<float> floats(size_t n, float size = 1.0f) {
        vector<float> v(n);
        for (float &f : v)
            f = size * unit();
        return v;
    }
};

// Random blocks of a format with scales of a reasonable size.
vector<uint8_t> vulkan_weights(int type, size_t values, vulkan_random &rnd) {
    const format &f = *find_format(type);
    vector<uint8_t> w(values / size_t(f.block) * size_t(f.bytes));
    for (uint8_t &b : w)
        b = uint8_t(rnd.bits() >> 24);
    const auto half = [&](uint8_t *p, float v) {
        const uint16_t h = float_to_half(v);
        memcpy(p, &h, 2);
    };
    for (uint8_t *b = w.data(); b < w.data() + w.size(); b += f.bytes) {
        const int at = type == TYPE_Q2_K ? 80 : type == TYPE_Q3_K ? 108 : type == TYPE_Q6_K ? 208 : 0;
        const float v = rnd.unit();
        if (type == TYPE_F32)
            memcpy(b, &v, 4);
        else if (type == TYPE_F16)
            half(b, v);
        else if (type == TYPE_BF16)
            b[1] = uint8_t(0x3c | (b[1] & 0x83)); // 2^-7 to 2^0
        else if (type == TYPE_MXFP4)
            *b = uint8_t(115 + rnd.below(14));
        else {
            half(b + at, 0.03f * v);
            if (f.mins)
                half(b + at + 2, 0.03f * rnd.unit());
        }
    }
    return w;
}

// A device and a CPU beside it.
struct vulkan_pair {
    std::unique_ptr<vk_backend> vk;
    backend cpu{2};
    explicit vulkan_pair(const vk_options &opt = vk_options()) : vk(vk_open(VULKAN_DEVICE, opt)) {}
    ~vulkan_pair() { EXPECT_STREQ(failure(), nullptr); }
    backend *be() { return vk_handle(vk.get()); }
    const char *failure() {
        int32_t no_memory;
        return vk_ops.sync(be(), &no_memory);
    }
    template <class T> mem up(const vector<T> &v) {
        const mem m = vk_ops.alloc(be(), v.size() * sizeof(T));
        EXPECT_NE(m.handle, nullptr);
        vk_ops.put(be(), m, v.data(), v.size() * sizeof(T));
        return m;
    }
    template <class T> vector<T> down(mem m, size_t n) {
        vector<T> v(n);
        vk_ops.get(be(), v.data(), m, n * sizeof(T));
        return v;
    }
};

mem vulkan_host(const void *p) { return {const_cast<void *>(p), 0}; }

const int VULKAN_ROWS[] = {1, 2, 7, 33, 129};

TEST(Vulkan, Memory) {
    NEED_VULKAN();
    for (bool staged : {false, true}) {
        vk_options opt;
        opt.staged = staged;
        vulkan_pair p(opt);
        vulkan_random rnd(1);
        const size_t big = (20 << 20) + 12; // more than the staging buffers
        EXPECT_EQ(vk_ops.allocated(p.be()), 0u);
        mem a = vk_ops.alloc(p.be(), big);
        const vector<uint8_t> zeros = p.down<uint8_t>(a, big);
        EXPECT_EQ(std::count(zeros.begin(), zeros.end(), 0), std::ptrdiff_t(big));
        vector<uint32_t> text(big / 4);
        for (uint32_t &t : text)
            t = rnd.bits();
        vk_ops.put(p.be(), a, text.data(), big);
        EXPECT_EQ(p.down<uint32_t>(a, text.size()), text);
        a = vk_ops.grow(p.be(), a, big, 2 * big);
        text.resize(2 * big / 4);
        EXPECT_EQ(p.down<uint32_t>(a, text.size()), text); // the new half is zero
        EXPECT_EQ(vk_ops.grow(p.be(), a, 2 * big, UINT64_MAX / 2).handle, nullptr);
        const mem b = vk_ops.alloc(p.be(), 4000);
        vk_ops.copy(p.be(), {b.handle, 40}, {a.handle, 8}, 400);
        vk_ops.copy(p.be(), {b.handle, 444}, {b.handle, 40}, 400);
        const vector<uint32_t> got = p.down<uint32_t>({b.handle, 444}, 100);
        EXPECT_TRUE(std::equal(got.begin(), got.end(), text.begin() + 2));
        for (int i = 0; i < 100; i++) { // in order with each other
            vk_ops.put(p.be(), b, &i, 4);
            vk_ops.copy(p.be(), {b.handle, uint64_t(400 + 4 * i)}, b, 4);
        }
        const vector<int32_t> order = p.down<int32_t>({b.handle, 400}, 100);
        for (int i = 0; i < 100; i++)
            EXPECT_EQ(order[size_t(i)], i);
        const mem w = vk_ops.weights(p.be(), text.data(), 1001), w2 = vk_ops.weights(p.be(), text.data() + 3, 77);
        EXPECT_EQ(p.down<uint32_t>(w, 250), vector<uint32_t>(text.begin(), text.begin() + 250));
        EXPECT_EQ(p.down<uint32_t>(w2, 19), vector<uint32_t>(text.begin() + 3, text.begin() + 22));
        vk_ops.free(p.be(), a);
        vk_ops.free(p.be(), b);
        vk_ops.free(p.be(), mem());
        EXPECT_EQ(vk_ops.allocated(p.be()), 0u);
    }
}

TEST(Vulkan, NormRopeGluAddRows) {
    NEED_VULKAN();
    vulkan_pair p;
    vulkan_random rnd(2);
    for (int n_rows : VULKAN_ROWS)
        for (int n : {1, 7, 66, 130, 576}) {
            SCOPED_TRACE(strf("%d rows of %d", n_rows, n));
            const int n_part = n < 100 ? 3 : 1, ld = n_part * n + 5;
            const size_t size = size_t(n_rows) * ld;
            const vector<float> x = rnd.floats(size, 2), u = rnd.floats(size, 3), w = rnd.floats(size_t(n));
            const mem dx = p.up(x), du = p.up(u), dw = p.up(w), dy = vk_ops.alloc(p.be(), size * 4);
            for (int kind = 0; kind < 3; kind++) {
                vector<float> want(size);
                norm_op op = {n_rows, n_part, n, ld, ld, kind, 1e-5f};
                cpu_ops.norm(&p.cpu, &op, vulkan_host(want.data()), vulkan_host(x.data()), vulkan_host(w.data()));
                vk_ops.norm(p.be(), &op, dy, dx, dw);
                EXPECT_EQ(p.down<float>(dy, size), want);
                glu_op glu = {n_rows, n_part * n, kind, ld, ld, ld, kind == 1 ? 0.7f : 0, kind == 2 ? 1.5f : 0};
                cpu_ops.glu(&p.cpu, &glu, vulkan_host(want.data()), vulkan_host(x.data()), vulkan_host(u.data()));
                vk_ops.glu(p.be(), &glu, dy, dx, du);
                EXPECT_EQ(p.down<float>(dy, size), want);
            }
            vector<float> want = x;
            add_op add = {n_rows, ld};
            cpu_ops.add(&p.cpu, &add, vulkan_host(want.data()), vulkan_host(u.data()));
            vk_ops.add(p.be(), &add, dx, du);
            EXPECT_EQ(p.down<float>(dx, size), want);

            step cpu_step = {}, vk_step = {};
            vector<int32_t> out_row;
            for (int i = 0; i < n_rows; i++)
                out_row.push_back(rnd.below(n_rows));
            cpu_step.out_row = vulkan_host(out_row.data());
            vk_step.out_row = p.up(out_row);
            rows_op rows = {n_rows, ld};
            vector<float> gathered(size);
            cpu_ops.rows(&p.cpu, &rows, vulkan_host(gathered.data()), vulkan_host(want.data()), &cpu_step);
            vk_ops.rows(p.be(), &rows, dy, dx, &vk_step);
            EXPECT_EQ(p.down<float>(dy, size), gathered);

            for (int mode = 0; n >= 7 && mode < 4; mode++) {
                const int n_rot = (n - 2) / 2 * 2;
                const vector<float> cs = rnd.floats(size_t(n_rows) * n_rot);
                cpu_step.rotary[1] = vulkan_host(cs.data());
                vk_step.rotary[1] = p.up(cs);
                rope_op rope = {n_rows, n_part, n, 1, n_rot, mode & 1, mode / 2, 1, ld};
                cpu_ops.rope(&p.cpu, &rope, vulkan_host(want.data()), &cpu_step);
                vk_ops.rope(p.be(), &rope, dx, &vk_step);
                EXPECT_EQ(p.down<float>(dx, size), want);
                vk_ops.free(p.be(), vk_step.rotary[1]);
            }
            for (const mem m : {dx, du, dw, dy, vk_step.out_row})
                vk_ops.free(p.be(), m);
        }
}

TEST(Vulkan, EmbedEveryFormat) {
    NEED_VULKAN();
    for (uint64_t range : {0, 8192}) { // a table in one piece, and in several
        vk_options opt;
        opt.max_range = range;
        vulkan_pair p(opt);
        vulkan_random rnd(3);
        for (const format &f : formats) {
            SCOPED_TRACE(f.name);
            const int n = f.block == 1 ? 77 : f.block, n_vocab = 400, n_rows = 5;
            const vector<uint8_t> w = vulkan_weights(f.type, size_t(n) * n_vocab, rnd);
            const uint64_t row = row_bytes(f, uint64_t(n));
            const mat m = {vk_ops.weights(p.be(), w.data(), w.size()), f.type, n, n_vocab, 1, row, row * n_vocab};
            const mat host = {vulkan_host(w.data()), f.type, n, n_vocab, 1, row, row * n_vocab};
            const vector<int32_t> token = {399, 0, 17, 17, 233}, wrong = {399, -1, 400, 3, INT_MIN};
            step cpu_step = {}, vk_step = {};
            cpu_step.token = vulkan_host(token.data());
            vk_step.token = p.up(token);
            const mem y = vk_ops.alloc(p.be(), size_t(n_rows * n) * 4);
            for (float scale : {1.0f, 1.75f}) {
                embed_op op = {n_rows, n, f.type, scale};
                vector<float> want(size_t(n_rows * n));
                cpu_ops.embed(&p.cpu, &op, vulkan_host(want.data()), &host, &cpu_step);
                vk_ops.embed(p.be(), &op, y, &m, &vk_step);
                EXPECT_EQ(p.down<float>(y, want.size()), want);
            }
            vk_ops.put(p.be(), vk_step.token, wrong.data(), 20);
            embed_op op = {n_rows, n, f.type, 1.0f};
            vk_ops.embed(p.be(), &op, y, &m, &vk_step);
            const vector<float> got = p.down<float>(y, size_t(n_rows * n));
            for (int t = 0; t < n_rows; t++) // no such token: nothing that looks like a number
                EXPECT_EQ(std::isnan(got[size_t(t * n)]), t == 1 || t == 2 || t == 4) << t;
            vk_ops.free(p.be(), y);
            vk_ops.free(p.be(), vk_step.token);
        }
    }
}

// The integers and scales are the CPU's, bit for bit.
TEST(Vulkan, ActivationsAreTheCpus) {
    NEED_VULKAN();
    vulkan_pair p;
    vulkan_random rnd(4);
    const int n = 1024;
    vector<float> x;
    for (int block = 0; block < 400; block++) {
        const float size = std::ldexp(1.0f, rnd.below(60) - 30);
        for (int i = 0; i < 256; i++)
            x.push_back(size * rnd.unit());
    }
    for (int i = 0; i < 256 * 4; i++) // halves between two integers, among them ties
        x[size_t(i)] = float(rnd.below(509) - 254) * 0.5f;
    x[5000] = INFINITY, x[8000] = NAN, x[9000] = -INFINITY;
    std::fill(x.begin() + 20480, x.begin() + 20480 + 512, 0.0f);
    std::fill(x.begin() + 25600, x.begin() + 25600 + 512, 1e-31f);
    const int n_rows = int(x.size()) / n;
    const mem dx = p.up(x);
    for (int type : {int(TYPE_Q8_0), int(TYPE_Q4_K)}) {
        const format &f = *find_format(type);
        matmul_op op = {n_rows, n, 1, 1, type, n, 1, 0, 0};
        ASSERT_EQ(vk_ops.reserve(p.be(), uint64_t(vk_quantized_bytes(&op))), 0);
        vk_quantize(p.vk.get(), &op, f, dx, int64_t(x.size()) * 4);
        const size_t stride = size_t(n / 4 + n / 32);
        const vector<uint32_t> got = p.down<uint32_t>({p.vk->scratch, 0}, stride * size_t(n_rows));
        const act_layout a = act_plan(f.act, ACT_PLAIN, n);
        vector<uint8_t> want(size_t(a.stride));
        for (int t = 0; t < n_rows; t++) {
            plain_quantize(&x[size_t(t) * n], a, want.data());
            ASSERT_EQ(memcmp(&got[size_t(t) * stride], want.data(), size_t(n)), 0) << f.name << " row " << t;
            for (int u = 0; u < n / 32; u++) {
                const float d = load_as<float>(want.data() + a.d_at + u * 32 / f.block * 4);
                const uint32_t bits = got[size_t(t) * stride + size_t(n / 4 + u)];
                ASSERT_TRUE(std::isnan(d) ? std::isnan(q_float(bits)) : float_bits(d) == bits) << f.name << " " << u;
            }
        }
    }
}

struct vulkan_product {
    matmul_op op;
    vector<uint8_t> w;
    vector<float> x, y, bias;
    mat host() const {
        const format &f = *find_format(op.type);
        const uint64_t row = row_bytes(f, uint64_t(op.n_in)), n = uint64_t(op.n_out) * uint64_t(op.n_group);
        return {vulkan_host(w.data()), op.type, op.n_in, int32_t(n), 1, row, row * n};
    }
};

vulkan_product vulkan_make_product(int type, int n_rows, int n_in, int n_out, int n_group, bool extras,
                                   vulkan_random &rnd) {
    vulkan_product m;
    const int pad = extras ? 3 : 0, in = n_in * n_group, out = n_out * n_group;
    m.op = {n_rows, n_in, n_out, n_group, type, in + pad, out + pad, extras, extras};
    m.w = vulkan_weights(type, size_t(in) * n_out, rnd);
    m.x = rnd.floats(size_t(n_rows) * (in + pad));
    m.y = rnd.floats(size_t(n_rows) * (out + pad));
    m.bias = rnd.floats(size_t(out));
    return m;
}

vector<float> vulkan_run(vulkan_pair &p, const vulkan_product &m, const mat &w, int first, int n_rows) {
    matmul_op op = m.op;
    op.n_rows = n_rows;
    const size_t x0 = size_t(first * op.ld_x), y0 = size_t(first * op.ld_y);
    const mem x = p.up(m.x), y = p.up(m.y), bias = p.up(m.bias);
    vk_ops.matmul(p.be(), &op, vk_at(y, y0 * 4), &w, vk_at(x, x0 * 4), bias);
    vector<float> got = p.down<float>(y, m.y.size());
    for (const mem o : {x, y, bias})
        vk_ops.free(p.be(), o);
    return got;
}

TEST(Vulkan, MatmulEveryFormat) {
    NEED_VULKAN();
    for (uint64_t range : {uint64_t(0), uint64_t(64 << 10)}) { // weights in one piece, and in several
        vk_options opt;
        opt.max_range = range;
        vulkan_pair p(opt);
        vulkan_random rnd(5);
        for (const format &f : formats)
            for (int n_rows : VULKAN_ROWS) {
                const bool hot = f.type == TYPE_Q8_0 || f.type == TYPE_Q4_K || f.type == TYPE_Q4_0 || f.block == 1;
                if (!hot && (n_rows == 33 || n_rows == 129) && !test::long_tests())
                    continue; // these run the same code as 7 rows
                if (range && n_rows != 2)
                    continue;
                SCOPED_TRACE(strf("%s, %d rows", f.name, n_rows));
                const int units = n_rows > 7 ? 3 : 19;
                const int n_in = f.block == 1 ? 333 : f.block == 32 ? units * 32 : (units + 3) / 4 * 256;
                const bool extras = n_rows != 7 && n_rows != 129;
                vulkan_product m =
                    vulkan_make_product(f.type, n_rows, n_in, n_rows == 2 ? 75 : 13, n_rows == 2 ? 3 : 1, extras, rnd);
                vector<float> want = m.y;
                const mat host = m.host();
                cpu_ops.matmul(&p.cpu, &m.op, vulkan_host(want.data()), &host, vulkan_host(m.x.data()),
                               vulkan_host(m.bias.data()));
                mat w = host;
                w.data = vk_ops.weights(p.be(), m.w.data(), m.w.size());
                const vector<float> got = vulkan_run(p, m, w, 0, n_rows);
                EXPECT_EQ(got, want);
                // A row's result is the same alone.
                for (int t : {0, n_rows / 2, n_rows - 1}) {
                    const vector<float> one = vulkan_run(p, m, w, t, 1);
                    for (int i = t * m.op.ld_y; i < t * m.op.ld_y + m.op.n_out * m.op.n_group; i++)
                        ASSERT_EQ(float_bits(one[size_t(i)]), float_bits(got[size_t(i)])) << "row " << t << " " << i;
                }
            }
    }
}

TEST(Vulkan, MatmulErrors) {
    NEED_VULKAN();
    vulkan_pair p;
    vulkan_random rnd(6);
    vulkan_product m = vulkan_make_product(TYPE_Q8_0, 1, 64, 8, 1, false, rnd);
    mat w = m.host();
    w.data = vk_ops.weights(p.be(), m.w.data(), m.w.size());
    w.type = 99;
    vulkan_run(p, m, w, 0, 1);
    EXPECT_STREQ(p.failure(), "matmul: the weight's format does not fit");
    EXPECT_STREQ(p.failure(), nullptr);
}

// A cache of several sequences on both sides.
struct vulkan_cache {
    seg host, device;
    step host_step, device_step;
    vector<uint8_t> pool;
    vector<int32_t> pos, seq, table;
    uint64_t row(int type, int dim) {
        const format &f = *find_format(type);
        return row_bytes(f, uint64_t(dim + f.block - 1) / uint64_t(f.block) * uint64_t(f.block));
    }
    // Room for n_seq sequences of n_tokens.
    vulkan_cache(vulkan_pair &p, int type, int n_kv, int dim_k, int dim_v, int n_seq, int n_tokens, vulkan_random &rnd)
        : host(), device(), host_step(), device_step() {
        const int pages = (n_tokens + PAGE_TOKENS - 1) / PAGE_TOKENS;
        host.type = type, host.table = 1, host.ratio = 1;
        host.k_row_bytes = row(type, dim_k), host.v_row_bytes = row(type, dim_v);
        host.k_offset = 68; // not where a page begins
        host.v_offset = host.k_offset + uint64_t(n_kv) * PAGE_TOKENS * host.k_row_bytes;
        host.page_bytes = (host.v_offset + uint64_t(n_kv) * PAGE_TOKENS * host.v_row_bytes + 3) / 4 * 4;
        pool.resize(host.page_bytes * uint64_t(n_seq * pages), 0x55);
        for (int i = 0; i < n_seq * pages; i++)
            table.push_back(i);
        for (size_t i = table.size(); i > 1; i--)
            std::swap(table[i - 1], table[size_t(rnd.below(int(i)))]);
        host.pool = vulkan_host(pool.data());
        host_step.table[1] = vulkan_host(table.data());
        host_step.table_len = pages;
        device = host, device_step = host_step;
        device.pool = p.up(pool);
        device_step.table[1] = p.up(table);
    }
    void rows(vulkan_pair &p, const vector<int32_t> &positions, const vector<int32_t> &sequences) {
        pos = positions, seq = sequences;
        host_step.pos = vulkan_host(pos.data()), host_step.seq = vulkan_host(seq.data());
        for (mem *m : {&device_step.pos, &device_step.seq})
            vk_ops.free(p.be(), *m);
        device_step.pos = p.up(pos), device_step.seq = p.up(seq);
    }
    void free(vulkan_pair &p) {
        for (const mem m : {device.pool, device_step.table[1], device_step.pos, device_step.seq})
            vk_ops.free(p.be(), m);
    }
};

TEST(Vulkan, KvPutStoresTheCpusBytes) {
    NEED_VULKAN();
    vulkan_pair p;
    vulkan_random rnd(7);
    for (int type : {int(TYPE_F16), int(TYPE_Q8_0)})
        for (int dim : {8, 33, 64, 129})
            for (bool shared : {false, true})
                for (int n_rows : {1, 7, 150}) {
                    SCOPED_TRACE(strf("%s, dim %d, %d rows", find_format(type)->name, dim, n_rows));
                    const int n_kv = 3, dim_v = dim + 2;
                    vulkan_cache c(p, type, n_kv, dim, dim_v, 2, 300, rnd);
                    vector<int32_t> pos, seq;
                    for (int i = 0; i < n_rows; i++)
                        pos.push_back(i / 2 + 100), seq.push_back(i % 2);
                    c.rows(p, pos, seq);
                    const kv_put_op op = {n_rows, n_kv, dim, dim_v, type, shared, n_kv * dim + 1, n_kv * dim_v + 2};
                    vector<float> k = rnd.floats(size_t(n_rows) * size_t(op.ld_k), 3);
                    vector<float> v = rnd.floats(size_t(n_rows) * size_t(op.ld_v), 3);
                    k[0] = INFINITY, v[2] = 1e6f, v[3] = 1e-8f;
                    std::fill(v.begin() + 40 % dim_v, v.begin() + 40 % dim_v + 10, 0.0f);
                    for (size_t i = k.size() / 2; i < k.size(); i++)
                        k[i] *= 1e-6f; // denormal halves
                    cpu_ops.kv_put(&p.cpu, &op, &c.host, vulkan_host(k.data()), vulkan_host(v.data()), &c.host_step);
                    const mem dk = p.up(k), dv = p.up(v);
                    vk_ops.kv_put(p.be(), &op, &c.device, dk, dv, &c.device_step);
                    const vector<uint8_t> got = p.down<uint8_t>(c.device.pool, c.pool.size());
                    const auto at = std::mismatch(got.begin(), got.end(), c.pool.begin());
                    ASSERT_TRUE(at.first == got.end()) << "byte " << at.first - got.begin() << " is " << int(*at.first)
                                                       << ", expected " << int(*at.second);
                    vk_ops.free(p.be(), dk);
                    vk_ops.free(p.be(), dv);
                    c.free(p);
                }
}

struct vulkan_attend_case {
    int type, n_head, n_kv, dim_k, dim_v, window;
    bool sinks, shared;
    float softcap;
    int n_rows, n_tokens;
};

TEST(Vulkan, Attend) {
    NEED_VULKAN();
    vulkan_pair p;
    vulkan_random rnd(8);
    const vulkan_attend_case cases[] = {{TYPE_F16, 4, 2, 64, 64, 0, false, false, 0, 1, 300},
                                        {TYPE_F16, 4, 4, 33, 31, 0, true, false, 5, 7, 129},
                                        {TYPE_Q8_0, 6, 2, 96, 96, 0, false, false, 0, 33, 260},
                                        {TYPE_Q8_0, 2, 1, 40, 40, 50, true, false, 0, 2, 400},
                                        {TYPE_F16, 2, 1, 136, 130, 100, false, true, 0, 3, 300},
                                        {TYPE_F16, 3, 1, 16, 16, 0, false, false, 2, 129, 129},
                                        {TYPE_F16, 2, 2, 16, 24, 0, true, false, 0, 2, 5000},
                                        {TYPE_Q8_0, 2, 1, 32, 32, 2500, false, false, 0, 3, 7000}};
    for (const vulkan_attend_case &t : cases) {
        SCOPED_TRACE(strf("type %d heads %d rows %d tokens %d", t.type, t.n_head, t.n_rows, t.n_tokens));
        vulkan_cache c(p, t.type, t.n_kv, t.dim_k, t.dim_v, 2, t.n_tokens, rnd);
        vector<uint16_t> fill(c.pool.size() / 2);
        for (uint16_t &h : fill)
            h = uint16_t(rnd.bits() & 0xbfff) & 0xbbff; // halves below 2, bytes of any value
        memcpy(c.pool.data(), fill.data(), c.pool.size());
        vk_ops.put(p.be(), c.device.pool, fill.data(), c.pool.size());
        vector<int32_t> pos, seq;
        for (int i = 0; i < t.n_rows; i++)
            pos.push_back(t.n_tokens - 1 - (i * 37) % t.n_tokens), seq.push_back(i % 2);
        c.rows(p, pos, seq);
        attend_op op = {};
        op.n_rows = t.n_rows, op.n_head = t.n_head, op.n_head_kv = t.n_kv, op.dim_k = t.dim_k, op.dim_v = t.dim_v;
        op.n_seg = 1, op.window = t.window, op.has_sinks = t.sinks, op.shared = t.shared;
        op.ld_q = t.n_head * t.dim_k + 1, op.ld_y = t.n_head * t.dim_v + 2;
        op.scale = 1.0f / std::sqrt(float(t.dim_k)), op.softcap = t.softcap;
        for (op.bucket = 128; op.bucket < t.n_tokens;)
            op.bucket *= 2;
        const vector<float> q = rnd.floats(size_t(t.n_rows) * size_t(op.ld_q)), sinks = rnd.floats(size_t(t.n_head), 3);
        vector<float> want(size_t(t.n_rows) * size_t(op.ld_y), 7.0f);
        const seg host[2] = {c.host, {}}, device[2] = {c.device, {}};
        const mem y = p.up(want), dq = p.up(q), ds = p.up(sinks);
        cpu_ops.attend(&p.cpu, &op, vulkan_host(want.data()), vulkan_host(q.data()), host, vulkan_host(sinks.data()),
                       &c.host_step);
        ASSERT_EQ(vk_ops.reserve(p.be(), vk_ops.attend_scratch(p.be(), &op, device, t.n_tokens)), 0);
        const uint64_t before = vk_ops.allocated(p.be());
        vk_ops.attend(p.be(), &op, y, dq, device, ds, &c.device_step);
        EXPECT_EQ(vk_ops.allocated(p.be()), before); // what was reserved is enough
        const vector<float> got = p.down<float>(y, want.size());
        EXPECT_EQ(got, want);
        op.bucket *= 4; // changes nothing
        vk_ops.attend(p.be(), &op, y, dq, device, ds, &c.device_step);
        EXPECT_EQ(p.down<float>(y, want.size()), got);
        op.bucket = 128; // one workgroup for all splits: nothing either
        vk_ops.attend(p.be(), &op, y, dq, device, ds, &c.device_step);
        EXPECT_EQ(p.down<float>(y, want.size()), got);
        for (const mem m : {y, dq, ds})
            vk_ops.free(p.be(), m);
        c.free(p);
    }
}

// ---- whole models ----

const char *const VULKAN_NAME = "vulkan llvmpipe";
struct vulkan_model : open_model {
    explicit vulkan_model(const std::string &path) : open_model(path, 2, "", false, VULKAN_NAME) {}
};

// Greedy tokens on both: the logits are the same bits.
void vulkan_compare(const std::string &path, const char *kv, int n = test::long_tests() ? 64 : 24) {
    SCOPED_TRACE(path + " " + kv);
    vulkan_model gpu(path);
    open_model cpu(path, 2);
    if (!gpu.m || !cpu.m)
        return;
    engine_model_info info = {};
    engine_info(gpu.m, &info, nullptr);
    EXPECT_EQ(std::string(info.backend).substr(0, 15), VULKAN_NAME);
    EXPECT_STREQ(info.generic_ops, "");
    open_session a(gpu.m, 512, 0, kv), b(cpu.m, 512, 0, kv);
    const model_ids ids = cpu.encode("Once upon a time, there was a", ENGINE_ADD_BOS);
    a.sync(ids), b.sync(ids);
    const vk_backend &v = *gpu.m->vk;
    const uint64_t n_submit = v.n_submit, n_record = v.n_record;
    for (int i = 0; i < n; i++) {
        const vector<float> want = b.logits();
        ASSERT_EQ(a.logits(), want) << "token " << i;
        const int best = int(std::max_element(want.begin(), want.end()) - want.begin());
        a.eval({best}), b.eval({best});
    }
    // Each step is sent as a whole, and recorded once for each of the two homes of the hidden state.
    EXPECT_EQ(v.n_submit - n_submit, uint64_t(n));
    EXPECT_EQ(v.n_record - n_record, 2u);
}

TEST(Vulkan, WholeModels) {
    NEED_VULKAN();
    for (const char *kv : {"f16", "q8_0"})
        vulkan_compare(model_shipped, kv);
    for (const char *file :
         {"stories260K/stories260K-f16.gguf", "stories260K/stories260K-q8_0.gguf", "stories260K/stories260K-q4_0.gguf",
          "tiny-chat/tiny-chat-f16.gguf", "tiny-chat/tiny-chat-q4_k_m.gguf"})
        if (test::shared_path(file) != "")
            vulkan_compare(test::shared_path(file), "f16");
}

// For other processes: less, and always there.
TEST(Vulkan, ShippedModel) {
    NEED_VULKAN();
    vulkan_compare(model_shipped, "q8_0", 8);
}

// Chunks, and what else is in the pass, do not change a bit.
TEST(Vulkan, ChunksDoNotMatter) {
    NEED_VULKAN();
    vulkan_model m(model_shipped);
    const model_ids ids = model_prompt(135, 2000);
    vector<float> first;
    for (int chunk : {512, 1, 3, 127, 128, 129}) {
        open_session s(m.m, 512, chunk);
        s.sync(ids);
        s.eval({5});
        if (first.empty())
            first = s.logits();
        EXPECT_EQ(s.logits(), first) << chunk;
    }
}

TEST(Vulkan, SessionsMoveBetweenBackends) {
    NEED_VULKAN();
    test::temp_dir dir;
    vulkan_model gpu(model_shipped);
    open_model cpu(model_shipped, 2);
    const model_ids ids = model_prompt(140, 2000);
    open_session a(gpu.m, 512), b(cpu.m, 512), c(gpu.m, 512), d(cpu.m, 512);
    a.sync(ids), b.sync(ids);
    ASSERT_EQ(engine_save(a.s, (dir / "a").c_str(), &a.err), 0) << a.err.msg;
    ASSERT_EQ(engine_save(b.s, (dir / "b").c_str(), &b.err), 0) << b.err.msg;
    ASSERT_GE(engine_load(c.s, (dir / "b").c_str(), &c.err), 0) << c.err.msg;
    ASSERT_GE(engine_load(d.s, (dir / "a").c_str(), &d.err), 0) << d.err.msg;
    for (open_session *s : {&a, &b, &c, &d})
        s->eval({7});
    EXPECT_EQ(c.logits(), b.logits());
    EXPECT_EQ(d.logits(), a.logits());
    EXPECT_EQ(c.stats().prompt_tokens, 0); // nothing was computed again
}

// ---- faults ----

// The driver's functions are members of the backend, so a test can stand between.
struct vulkan_faults {
    static PFN_vkAllocateMemory allocate;
    static PFN_vkQueueSubmit submit;
    static int countdown; // the call at which it reaches 0 fails, and all later ones
    static VkResult VKAPI_CALL failing_allocate(VkDevice d, const VkMemoryAllocateInfo *i,
                                                const VkAllocationCallbacks *c, VkDeviceMemory *m) {
        return countdown-- <= 0 ? VK_ERROR_OUT_OF_DEVICE_MEMORY : allocate(d, i, c, m);
    }
    static VkResult VKAPI_CALL failing_submit(VkQueue q, uint32_t n, const VkSubmitInfo *i, VkFence f) {
        return countdown-- <= 0 ? VK_ERROR_DEVICE_LOST : submit(q, n, i, f);
    }
    static void VKAPI_CALL no_barrier(VkCommandBuffer, VkPipelineStageFlags, VkPipelineStageFlags, VkDependencyFlags,
                                      uint32_t, const VkMemoryBarrier *, uint32_t, const VkBufferMemoryBarrier *,
                                      uint32_t, const VkImageMemoryBarrier *) {}
};
PFN_vkAllocateMemory vulkan_faults::allocate;
PFN_vkQueueSubmit vulkan_faults::submit;
int vulkan_faults::countdown;

TEST(Vulkan, MemoryEnds) {
    NEED_VULKAN();
    open_model cpu(model_shipped, 2);
    vulkan_model m(model_shipped);
    vk_backend &v = *m.m->vk;
    const model_ids ids = model_prompt(20, 2000);
    vulkan_faults::allocate = v.AllocateMemory;
    v.AllocateMemory = vulkan_faults::failing_allocate;
    int n = 0;
    for (;; n++) { // each allocation in turn fails, until none does
        vulkan_faults::countdown = n;
        engine_session *s = nullptr;
        engine_error err = {};
        engine_session_options o = {};
        o.n_ctx = 256;
        int code = engine_session_new(&s, m.m, &o, &err);
        if (code == 0)
            code = engine_sync(s, ids.data(), ids.size(), &err) < 0 ? err.code : 0;
        engine_session_free(s);
        if (code == 0)
            break;
        ASSERT_EQ(code, ENGINE_ENOMEM) << err.msg;
        ASSERT_NE(std::string(err.msg).find("out of "), std::string::npos) << err.msg;
    }
    EXPECT_GT(n, 5);
    v.AllocateMemory = vulkan_faults::allocate;
    open_session a(m.m, 256), b(cpu.m, 256); // and nothing was damaged
    a.sync(ids), b.sync(ids);
    EXPECT_EQ(a.logits(), b.logits());
}

TEST(Vulkan, TheDeviceIsLost) {
    NEED_VULKAN();
    const model_ids ids = model_prompt(20, 2000);
    for (int n : {0, 1, 3}) {
        vulkan_model m(model_shipped);
        vk_backend &v = *m.m->vk;
        open_session s(m.m, 256);
        vulkan_faults::submit = v.QueueSubmit;
        vulkan_faults::countdown = n;
        v.QueueSubmit = vulkan_faults::failing_submit;
        engine_error err = {};
        int code = engine_sync(s.s, ids.data(), ids.size(), &err);
        for (int32_t i = 0; i < n && code >= 0; i++)
            code = engine_eval(s.s, &i, 1, &err);
        EXPECT_EQ(code, ENGINE_EINTERNAL) << n;
        EXPECT_STREQ(err.msg, "Vulkan: the device was lost: the driver stopped it");
        v.QueueSubmit = vulkan_faults::submit;
        EXPECT_EQ(engine_sync(s.s, ids.data(), ids.size(), &err), ENGINE_EINTERNAL); // it does not come back
    }
}

TEST(Vulkan, DevicesAreChosenByName) {
    NEED_VULKAN();
    engine_model *m = nullptr;
    engine_error err = {};
    engine_open_options o = {};
    o.device = "vulkan no such thing";
    EXPECT_EQ(engine_open(&m, model_shipped.c_str(), &o, &err), ENGINE_EUNSUPPORTED);
    EXPECT_NE(std::string(err.msg).find("no Vulkan device is called \"no such thing\" (there is "), std::string::npos);
    EXPECT_NE(std::string(err.msg).find(VULKAN_DEVICE), std::string::npos) << err.msg;
    o.device = "vulkanism";
    EXPECT_EQ(engine_open(&m, model_shipped.c_str(), &o, &err), ENGINE_EINVAL);
    vk_instance vk;
    ASSERT_TRUE(vk.open());
    bool cpu = false; // devices that are CPUs come last
    for (const vk_device &d : vk_devices(vk)) {
        EXPECT_TRUE(!cpu || d.props.deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU);
        cpu = d.props.deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU;
    }
    EXPECT_EQ(vk_devices(vk).back().props.deviceType, VK_PHYSICAL_DEVICE_TYPE_CPU);
}

TEST(Vulkan, LimitsOfTheDevice) {
    NEED_VULKAN();
    vk_options opt;
    opt.max_range = 1 << 20;
    vulkan_pair p(opt);
    EXPECT_EQ(vk_ops.alloc(p.be(), (1 << 20) + 1).handle, nullptr); // what cannot be bound
    const mem a = vk_ops.alloc(p.be(), 1000);
    add_op add = {1, 251}; // of 250
    vk_ops.add(p.be(), &add, a, a);
    EXPECT_EQ(p.failure(), nullptr); // memory comes in pieces of 256 bytes
    add.n = 300;
    vk_ops.add(p.be(), &add, a, a);
    EXPECT_STREQ(p.failure(), "Vulkan: an operand is outside its buffer, or larger than the device can bind");
    float x = 1;
    vk_ops.get(p.be(), &x, a, 4);
    EXPECT_EQ(x, 0.0f);
}

// ---- the same in other processes ----

std::string vulkan_self() {
    char path[4096];
    const ssize_t n = readlink("/proc/self/exe", path, sizeof path);
    return std::string(path, n > 0 ? size_t(n) : 0);
}

// Output of some of these tests, in a process of its own with these variables.
test::command_result vulkan_again(const std::string &filter, const std::string &variables) {
    return test::shell(variables + " '" + vulkan_self() + "' --gtest_also_run_disabled_tests --gtest_filter='" +
                           filter + "'",
                       "", 600);
}

// What the validation layer has to say, with synchronisation validation on.
std::string vulkan_messages(const std::string &filter, const char *also = "SYNCHRONIZATION_VALIDATION") {
    test::temp_dir dir;
    test::write_file(dir / "vk_layer_settings.txt", "khronos_validation.debug_action = VK_DBG_LAYER_ACTION_LOG_MSG\n"
                                                    "khronos_validation.report_flags = error,warn,perf\n"
                                                    "khronos_validation.log_filename = " +
                                                        dir.path + "/log\n" +
                                                        "khronos_validation.enables = VK_VALIDATION_FEATURE_ENABLE_" +
                                                        also + "_EXT\n");
    const test::command_result r = vulkan_again(
        filter, "VK_INSTANCE_LAYERS=VK_LAYER_KHRONOS_validation VK_LAYER_SETTINGS_PATH='" + dir.path + "'");
    EXPECT_EQ(r.code, 0) << r.out << r.err;
    EXPECT_TRUE(test::exists(dir / "log")) << "the validation layer did not run: " << r.out << r.err;
    return test::exists(dir / "log") ? test::read_file(dir / "log") : "";
}

// Not for its own sake: synchronisation validation must find what is missing here.
TEST(Vulkan, DISABLED_WithoutBarriers) {
    NEED_VULKAN();
    vulkan_pair p;
    p.vk->CmdPipelineBarrier = vulkan_faults::no_barrier;
    const mem a = p.up(vector<float>(100, 1.0f));
    add_op add = {1, 100};
    for (int i = 0; i < 3; i++)
        vk_ops.add(p.be(), &add, a, a);
    p.down<float>(a, 100);
}

#define NEED_VALIDATION()                                                                                              \
    NEED_VULKAN();                                                                                                     \
    if (!test::exists("/usr/share/vulkan/explicit_layer.d/VkLayer_khronos_validation.json"))                           \
    GTEST_SKIP() << "[vulkan] the validation layer is not installed"

TEST(Vulkan, ValidationFindsMissingBarriers) {
    NEED_VALIDATION();
    EXPECT_NE(vulkan_messages("Vulkan.DISABLED_WithoutBarriers").find("SYNC-HAZARD"), std::string::npos);
}

TEST(Vulkan, ValidationHasNothingToSay) {
    NEED_VALIDATION();
    EXPECT_EQ(vulkan_messages("Vulkan.Memory:Vulkan.NormRopeGluAddRows:Vulkan.Embed*:Vulkan.KvPut*:Vulkan.Attend:"
                              "Vulkan.ShippedModel:Vulkan.MemoryEnds"),
              "");
    EXPECT_EQ(vulkan_messages("Vulkan.NormRopeGluAddRows", "GPU_ASSISTED"), "");
}

TEST(Vulkan, SubgroupsOfAnySize) {
    NEED_VULKAN();
    for (const char *bits : {"128", "512"}) { // subgroups of 4 and 16; 8 is what the other tests ran with
        const test::command_result r =
            vulkan_again("Vulkan.NormRopeGluAddRows:Vulkan.Activations*:Vulkan.KvPut*:Vulkan.Attend:"
                         "Vulkan.ShippedModel",
                         std::string("LP_NATIVE_VECTOR_WIDTH=") + bits);
        EXPECT_EQ(r.code, 0) << bits << r.out << r.err;
        EXPECT_EQ(r.out.find("SKIPPED"), std::string::npos) << r.out;
    }
}

} // namespace

#else

#define VULKAN_ABSENT(name)                                                                                            \
    TEST(Vulkan, name) { GTEST_SKIP() << "[vulkan] built without <vulkan/vulkan_core.h>"; }
VULKAN_ABSENT(Memory)
VULKAN_ABSENT(NormRopeGluAddRows)
VULKAN_ABSENT(EmbedEveryFormat)
VULKAN_ABSENT(ActivationsAreTheCpus)
VULKAN_ABSENT(MatmulEveryFormat)
VULKAN_ABSENT(MatmulErrors)
VULKAN_ABSENT(KvPutStoresTheCpusBytes)
VULKAN_ABSENT(Attend)
VULKAN_ABSENT(WholeModels)
VULKAN_ABSENT(ShippedModel)
VULKAN_ABSENT(ChunksDoNotMatter)
VULKAN_ABSENT(SessionsMoveBetweenBackends)
VULKAN_ABSENT(MemoryEnds)
VULKAN_ABSENT(TheDeviceIsLost)
VULKAN_ABSENT(DevicesAreChosenByName)
VULKAN_ABSENT(LimitsOfTheDevice)
VULKAN_ABSENT(ValidationFindsMissingBarriers)
VULKAN_ABSENT(ValidationHasNothingToSay)
VULKAN_ABSENT(SubgroupsOfAnySize)

#endif
