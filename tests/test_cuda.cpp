// The CUDA backend, run by the simulator in tests/cusim: every operation against the CPU's, whole models, failures. Its
// own program: kernels.cu is compiled as ordinary C++ and linked with the simulator in place of the CUDA runtime.
#include "unit.h"

#include "cusim/control.h"
#include "opened.h"

// As NEED_SHARED; a reason of its own, since this program is not there where CUDA's headers are not.
#define CUDA_NEED_SHARED(var, name)                                                                                    \
    const std::string var = test::shared_path(name);                                                                   \
    if (var.empty())                                                                                                   \
    GTEST_SKIP() << "[cudashared] no " << (name) << " in ../shared/data or $ENGINE_TEST_DATA"

namespace {

const backend_ops &cuda_ops = *cuda_backend_ops();

struct cuda_random {
    uint64_t s = 0x9e3779b97f4a7c15;
    explicit cuda_random(uint64_t seed) : s(seed * 0x9e3779b97f4a7c15 + 1) {}
    uint64_t next() {
        s ^= s << 13, s ^= s >> 7, s ^= s << 17;
        return s;
    }
    int range(int lo, int hi) { return lo + int(next() % uint64_t(hi - lo + 1)); }
    float unit() { return float(range(-1000000, 1000000)) * 1e-6f; }
    vector<float> row(size_t n, float size = 1.0f) {
        vector<float> v(n);
        for (float &f : v)
            f = size * unit();
        return v;
    }
};

// A device, and memory on it that goes with it.
struct cuda_test {
    backend *be = nullptr;
    backend cpu{1};
    cuda_test() {
        char error[256] = "";
        be = cuda_open(0, error, sizeof error);
        if (!be)
            ADD_FAILURE() << error;
    }
    ~cuda_test() {
        EXPECT_EQ(sync(), "");
        cuda_close(be);
    }
    std::string sync() {
        int32_t no_memory;
        const char *e = cuda_ops.sync(be, &no_memory);
        return e ? e : "";
    }
    template <class T> mem put(const vector<T> &v) {
        const mem m = cuda_ops.alloc(be, v.size() * sizeof(T));
        cuda_ops.put(be, m, v.data(), v.size() * sizeof(T));
        return m;
    }
    template <class T> vector<T> get(mem m, size_t n) {
        vector<T> v(n);
        cuda_ops.get(be, v.data(), m, n * sizeof(T));
        EXPECT_EQ(sync(), "");
        return v;
    }
};

template <class T> mem cuda_host(const vector<T> &v) { return {const_cast<T *>(v.data()), 0}; }

// Sum of squared differences over the sum of squares.
double cuda_error_of(const vector<float> &got, const vector<float> &want) {
    double d = 0, s = 0;
    for (size_t i = 0; i < want.size(); i++) {
        const double e = double(got[i]) - double(want[i]);
        d += std::isfinite(got[i]) ? e * e : 1e30;
        s += double(want[i]) * double(want[i]);
    }
    return got.size() != want.size() ? 1e30 : s > 0 ? d / s : d;
}

// The first index where two vectors differ in a bit, or -1; two NaN are equal.
int64_t cuda_differ(const vector<float> &a, const vector<float> &b) {
    for (size_t i = 0; i < b.size(); i++)
        if (i >= a.size() || !(float_bits(a[i]) == float_bits(b[i]) || (a[i] != a[i] && b[i] != b[i])))
            return int64_t(i);
    return -1;
}

const char *const cuda_orders[] = {"fwd", "rev", "1", "2", "3"};

// f(order) for each order of lanes.
template <class F> void cuda_each_order(F f) {
    for (const char *order : cuda_orders) {
        cusim::set_order(order);
        SCOPED_TRACE(std::string("lane order ") + order);
        f();
    }
    cusim::set_order("fwd");
}

// Random bits for quants and sub-scales, floats of reasonable size.
vector<uint8_t> cuda_weights_of(int type, int64_t n_values, cuda_random &rnd) {
    const format &f = *find_format(type);
    vector<uint8_t> w(row_bytes(f, uint64_t(n_values)));
    for (uint8_t &b : w)
        b = uint8_t(rnd.next() >> 32);
    const auto put_half = [](uint8_t *p, float v) {
        const uint16_t h = float_to_half(v);
        memcpy(p, &h, 2);
    };
    for (uint8_t *b = w.data(); b < w.data() + w.size(); b += f.bytes) {
        if (type == TYPE_F32) {
            const float v = rnd.unit();
            memcpy(b, &v, 4);
        } else if (type == TYPE_F16) {
            put_half(b, rnd.unit());
        } else if (type == TYPE_BF16) {
            const uint16_t h = uint16_t(float_bits(rnd.unit()) >> 16);
            memcpy(b, &h, 2);
        } else if (type == TYPE_MXFP4) {
            *b = uint8_t(rnd.range(115, 128));
        } else {
            const int at = type == TYPE_Q2_K ? 80 : type == TYPE_Q3_K ? 108 : type == TYPE_Q6_K ? 208 : 0;
            put_half(b + at, 0.01f * rnd.unit());
            if (f.mins)
                put_half(b + at + 2, 0.01f * rnd.unit());
        }
    }
    return w;
}

struct cuda_product {
    int type, n_rows, n_in, n_out, n_group = 1;
    bool bias = false, accumulate = false;
    int pad_x = 0, pad_y = 0;
};

// One product on both; all bits must be equal.
void cuda_check_matmul(const cuda_product &p, uint64_t seed) {
    cuda_random rnd(seed);
    cuda_test t;
    matmul_op op = {};
    op.n_rows = p.n_rows, op.n_in = p.n_in, op.n_out = p.n_out, op.n_group = p.n_group, op.type = p.type;
    op.ld_x = p.n_group * p.n_in + p.pad_x, op.ld_y = p.n_group * p.n_out + p.pad_y;
    op.accumulate = p.accumulate, op.has_bias = p.bias;
    const size_t rows = size_t(p.n_out) * size_t(p.n_group);
    const vector<uint8_t> w = cuda_weights_of(p.type, int64_t(rows) * p.n_in, rnd);
    const vector<float> x = rnd.row(size_t(p.n_rows) * size_t(op.ld_x)), bias = rnd.row(rows);
    const vector<float> y0 = rnd.row(size_t(p.n_rows) * size_t(op.ld_y));
    mat m = {};
    m.type = p.type, m.n_in = p.n_in, m.n_out = int(rows), m.n_mat = 1, m.row_bytes = w.size() / rows;
    m.mat_bytes = w.size();
    vector<float> want = y0;
    m.data = cuda_host(w);
    cpu_ops.matmul(&t.cpu, &op, cuda_host(want), &m, cuda_host(x), cuda_host(bias));
    m.data = cuda_ops.weights(t.be, w.data(), w.size());
    const mem y = t.put(y0);
    EXPECT_EQ(cuda_ops.reserve(t.be, cuda_ops.matmul_scratch(t.be, &op, &m)), 0);
    cuda_ops.matmul(t.be, &op, y, &m, t.put(x), t.put(bias));
    EXPECT_EQ(cuda_differ(t.get<float>(y, y0.size()), want), -1)
        << find_format(p.type)->name << " " << p.n_rows << " rows, " << p.n_in << " to " << p.n_out;
}

TEST(Cuda, MatmulEqualsTheCpu) {
    uint64_t seed = 1;
    for (const format &f : formats) {
        const int odd = f.block == 1 ? 0 : f.block == 32 ? 32 : 256;
        for (int n_rows : {1, 2, 7, 33, 129})
            cuda_check_matmul({f.type, n_rows, f.block == 1 ? 83 : 2 * odd + 256 + odd, n_rows > 32 ? 5 : 37}, seed++);
        cuda_check_matmul({f.type, 3, f.block == 1 ? 7 : f.block, 9, 3, true, true, 5 * 4, 3}, seed++);
        cuda_check_matmul({f.type, 10, f.block == 1 ? 1 : f.block * 9, 67, 2, true, true, 4, 1}, seed++);
    }
}

TEST(Cuda, MatmulInAllOrders) {
    cuda_each_order([] {
        for (int type : {TYPE_F16, TYPE_Q8_0, TYPE_Q4_0, TYPE_Q4_K, TYPE_Q6_K})
            for (int n_rows : {1, 7, 9})
                cuda_check_matmul({type, n_rows, type == TYPE_F16 ? 50 : 512, 11}, uint64_t(type + n_rows));
    });
}

// ---- rows

TEST(Cuda, Embed) {
    cuda_random rnd(5);
    for (const format &f : formats) {
        cuda_test t;
        const int n = f.block == 1 ? 77 : 3 * f.block, n_vocab = 13, n_rows = 7;
        const vector<uint8_t> w = cuda_weights_of(f.type, int64_t(n) * n_vocab, rnd);
        mat m = {};
        m.type = f.type, m.n_in = n, m.n_out = n_vocab, m.n_mat = 1, m.row_bytes = w.size() / n_vocab;
        const vector<int32_t> token = {0, 12, 5, 5, 1, 7, 3};
        for (float scale : {1.0f, 1.7f}) {
            embed_op op = {n_rows, n, f.type, scale};
            vector<float> want(size_t(n_rows * n));
            step st = {};
            st.token = cuda_host(token);
            m.data = cuda_host(w);
            cpu_ops.embed(&t.cpu, &op, cuda_host(want), &m, &st);
            st.token = t.put(token);
            m.data = cuda_ops.weights(t.be, w.data(), w.size());
            const mem y = cuda_ops.alloc(t.be, want.size() * 4);
            cuda_ops.embed(t.be, &op, y, &m, &st);
            EXPECT_EQ(cuda_differ(t.get<float>(y, want.size()), want), -1) << f.name;
        }
    }
    cuda_test t; // a token that is not in the vocabulary
    const vector<float> w(8, 1.0f);
    mat m = {};
    m.type = TYPE_F32, m.n_in = 4, m.n_out = 2, m.n_mat = 1, m.row_bytes = 16, m.data = t.put(w);
    step st = {};
    st.token = t.put(vector<int32_t>{1, 2, -1});
    const mem y = cuda_ops.alloc(t.be, 48);
    const embed_op op = {3, 4, TYPE_F32, 1.0f};
    cuda_ops.embed(t.be, &op, y, &m, &st);
    const vector<float> got = t.get<float>(y, 12);
    EXPECT_EQ(got[3], 1.0f);
    EXPECT_TRUE(std::isnan(got[4]) && std::isnan(got[11]));
}

TEST(Cuda, RowsAddGlu) {
    cuda_random rnd(6);
    for (int n : {1, 255, 256, 300})
        for (int n_rows : {1, 2, 7, 33}) {
            cuda_test t;
            const vector<float> x = rnd.row(size_t(n_rows * n), 3.0f), y0 = rnd.row(size_t(n_rows * n), 3.0f);
            vector<int32_t> from;
            for (int i = 0; i < n_rows; i++)
                from.push_back(rnd.range(0, n_rows - 1));
            step st = {};
            st.out_row = cuda_host(from);
            vector<float> want = y0;
            const rows_op ro = {n_rows, n};
            cpu_ops.rows(&t.cpu, &ro, cuda_host(want), cuda_host(x), &st);
            const mem dx = t.put(x);
            mem y = t.put(y0);
            st.out_row = t.put(from);
            cuda_ops.rows(t.be, &ro, y, dx, &st);
            EXPECT_EQ(cuda_differ(t.get<float>(y, want.size()), want), -1);

            const add_op ao = {n_rows, n};
            cpu_ops.add(&t.cpu, &ao, cuda_host(want), cuda_host(x));
            cuda_ops.add(t.be, &ao, y, dx);
            EXPECT_EQ(cuda_differ(t.get<float>(y, want.size()), want), -1);

            for (int kind = 0; kind < 3; kind++)
                for (float clamp : {0.0f, 1.5f}) {
                    glu_op go = {};
                    go.n_rows = n_rows, go.n = n, go.kind = kind, go.ld_gate = go.ld_up = go.ld_y = n;
                    go.clamp_gate = clamp, go.clamp_up = clamp;
                    want = y0;
                    cpu_ops.glu(&t.cpu, &go, cuda_host(want), cuda_host(want), cuda_host(x));
                    y = t.put(y0);
                    cuda_ops.glu(t.be, &go, y, y, dx);
                    EXPECT_EQ(cuda_differ(t.get<float>(y, want.size()), want), -1) << "kind " << kind;
                }
        }
}

TEST(Cuda, Norm) {
    cuda_each_order([] {
        cuda_random rnd(7);
        for (int n : {1, 8, 33, 512, 513, 2048, 3001})
            for (int n_part : {1, 3})
                for (int kind = 0; kind < 3; kind++) {
                    cuda_test t;
                    const int n_rows = n < 100 ? 7 : 2, ld = n_part * n + 5;
                    const vector<float> x = rnd.row(size_t(n_rows * ld), 4.0f), w = rnd.row(size_t(n));
                    norm_op op = {n_rows, n_part, n, ld, ld, kind, 1e-5f};
                    vector<float> want = x;
                    cpu_ops.norm(&t.cpu, &op, cuda_host(want), cuda_host(want), cuda_host(w));
                    const mem y = t.put(x);
                    cuda_ops.norm(t.be, &op, y, y, t.put(w));
                    EXPECT_LT(cuda_error_of(t.get<float>(y, want.size()), want), 1e-12) << n << " kind " << kind;
                }
    });
}

TEST(Cuda, Rope) {
    cuda_random rnd(8);
    for (int n_rot : {2, 8, 24})
        for (int flags = 0; flags < 4; flags++) {
            cuda_test t;
            const int n_rows = 5, dim = 26, first = n_rot < 24 ? 2 : 0, heads = 23, heads_kv = 3;
            rope_op op = {n_rows, heads, dim, first, n_rot, flags & 1, flags / 2, 1, heads * dim + 3};
            const vector<float> q = rnd.row(size_t(n_rows * op.ld_x)), k = rnd.row(size_t(n_rows * heads_kv * dim));
            const vector<float> rotary = rnd.row(size_t(n_rows * n_rot));
            vector<float> want_q = q, want_k = k;
            step st = {};
            st.rotary[1] = cuda_host(rotary);
            cpu_ops.rope(&t.cpu, &op, cuda_host(want_q), &st);
            st.rotary[1] = t.put(rotary);
            const mem dq = t.put(q), dk = t.put(k);
            cuda_ops.rope(t.be, &op, dq, &st);
            op.n_head = heads_kv, op.ld_x = heads_kv * dim;
            cuda_ops.rope(t.be, &op, dk, &st); // joins the launch before
            st.rotary[1] = cuda_host(rotary);
            cpu_ops.rope(&t.cpu, &op, cuda_host(want_k), &st);
            EXPECT_EQ(cuda_differ(t.get<float>(dq, want_q.size()), want_q), -1);
            EXPECT_EQ(cuda_differ(t.get<float>(dk, want_k.size()), want_k), -1);
        }
}

// ---- the cache and attention

struct cuda_attention {
    int n_head = 2, n_head_kv = 1, dim_k = 16, dim_v = 16, window = 0, type = TYPE_F16;
    bool shared = false, sinks = false;
    float softcap = 0;
    vector<int> lengths = {1};        // cached tokens of each sequence
    vector<std::pair<int, int>> rows; // sequence, position
};

// Fills a cache through both kv_puts, which must leave the same bytes, and attends through both.
void cuda_check_attend(const cuda_attention &c, uint64_t seed) {
    cuda_random rnd(seed);
    cuda_test t;
    int table_len = 0, n_page = 0, n_token = 0;
    for (int n : c.lengths) {
        table_len = std::max(table_len, (n + PAGE_TOKENS - 1) / PAGE_TOKENS);
        n_page += (n + PAGE_TOKENS - 1) / PAGE_TOKENS, n_token += n;
    }
    vector<int32_t> table(c.lengths.size() * size_t(table_len), INT32_MAX), pos, seq;
    for (size_t s = 0, next = size_t(n_page); s < c.lengths.size(); s++)
        for (int i = 0; i < c.lengths[s]; i++) {
            if (i % PAGE_TOKENS == 0)
                table[s * size_t(table_len) + size_t(i / PAGE_TOKENS)] = int32_t(--next);
            pos.push_back(i), seq.push_back(int32_t(s));
        }
    const auto row_of = [&](int dim) {
        return c.type == TYPE_F16 ? uint64_t(dim) * 2 : uint64_t((dim + 31) / 32) * 34;
    };
    seg sg = {};
    sg.type = c.type, sg.ratio = 1, sg.k_row_bytes = row_of(c.dim_k), sg.v_row_bytes = row_of(c.dim_v);
    sg.k_offset = 64, sg.v_offset = sg.k_offset + PAGE_TOKENS * sg.k_row_bytes * uint64_t(c.n_head_kv);
    sg.page_bytes = sg.v_offset + (c.shared ? 0 : PAGE_TOKENS * sg.v_row_bytes * uint64_t(c.n_head_kv));
    vector<uint8_t> pool(size_t(n_page) * sg.page_bytes, 0xff); // NaN where nothing is put
    const vector<uint8_t> nan = pool;
    const vector<float> k = rnd.row(size_t(n_token * c.n_head_kv * c.dim_k), 2.0f);
    const vector<float> v = rnd.row(size_t(n_token * c.n_head_kv * c.dim_v), 2.0f);
    kv_put_op put = {};
    put.n_rows = n_token, put.n_head_kv = c.n_head_kv, put.dim_k = c.dim_k, put.dim_v = c.dim_v, put.type = c.type;
    put.shared = c.shared, put.ld_k = c.n_head_kv * c.dim_k, put.ld_v = c.n_head_kv * c.dim_v;
    step st = {}, dst = {};
    st.pos = cuda_host(pos), st.seq = cuda_host(seq), st.table[0] = cuda_host(table), st.table_len = table_len;
    dst.pos = t.put(pos), dst.seq = t.put(seq), dst.table[0] = t.put(table), dst.table_len = table_len;
    sg.pool = cuda_host(pool);
    cpu_ops.kv_put(&t.cpu, &put, &sg, cuda_host(k), cuda_host(v), &st);
    sg.pool = t.put(nan);
    cuda_ops.kv_put(t.be, &put, &sg, t.put(k), t.put(v), &dst);
    ASSERT_EQ(t.get<uint8_t>(sg.pool, pool.size()), pool);

    const int n_rows = int(c.rows.size());
    attend_op op = {};
    op.n_rows = n_rows, op.n_head = c.n_head, op.n_head_kv = c.n_head_kv, op.dim_k = c.dim_k, op.dim_v = c.dim_v;
    op.n_seg = 1, op.window = c.window, op.has_sinks = c.sinks, op.shared = c.shared, op.scale = 0.37f;
    op.softcap = c.softcap, op.ld_q = c.n_head * c.dim_k + 3, op.ld_y = c.n_head * c.dim_v;
    for (op.bucket = PAGE_TOKENS; op.bucket < table_len * PAGE_TOKENS;)
        op.bucket *= 2;
    const vector<float> q = rnd.row(size_t(n_rows * op.ld_q), 2.0f), sinks = rnd.row(size_t(c.n_head), 3.0f);
    vector<int32_t> rpos, rseq;
    for (auto [s, p] : c.rows)
        rseq.push_back(s), rpos.push_back(p);
    vector<float> want(size_t(n_rows * op.ld_y));
    st.pos = cuda_host(rpos), st.seq = cuda_host(rseq);
    seg segs[2] = {sg, {}};
    segs[0].pool = cuda_host(pool);
    cpu_ops.attend(&t.cpu, &op, cuda_host(want), cuda_host(q), segs, cuda_host(sinks), &st);
    segs[0].pool = sg.pool;
    const mem y = cuda_ops.alloc(t.be, want.size() * 4), dq = t.put(q), ds = t.put(sinks);
    dst.pos = t.put(rpos), dst.seq = t.put(rseq);
    EXPECT_EQ(cuda_ops.reserve(t.be, cuda_ops.attend_scratch(t.be, &op, segs, op.bucket)), 0);
    cuda_ops.attend(t.be, &op, y, dq, segs, ds, &dst);
    const vector<float> got = t.get<float>(y, want.size());
    EXPECT_LT(cuda_error_of(got, want), 1e-10);

    // Row by row, with a larger bucket: the same bits, whatever splits are computed apart.
    op.n_rows = 1, op.bucket *= 2;
    const mem one = cuda_ops.alloc(t.be, want.size() * 4);
    for (int r = 0; r < n_rows; r++) {
        step row = dst;
        row.pos.offset += uint64_t(r) * 4, row.seq.offset += uint64_t(r) * 4;
        mem yr = one, qr = dq;
        yr.offset += uint64_t(r * op.ld_y) * 4, qr.offset += uint64_t(r * op.ld_q) * 4;
        cuda_ops.attend(t.be, &op, yr, qr, segs, ds, &row);
    }
    EXPECT_EQ(cuda_differ(t.get<float>(one, want.size()), got), -1);
}

TEST(Cuda, Attend) {
    uint64_t seed = 100;
    for (int type : {TYPE_F16, TYPE_Q8_0}) {
        cuda_attention c;
        c.type = type;
        c.rows = {{0, 0}};
        cuda_check_attend(c, seed++);
        c.n_head = 6, c.n_head_kv = 2, c.dim_k = 20, c.dim_v = 12, c.lengths = {129, 33}; // rows that are not aligned
        c.rows = {{0, 128}, {0, 127}, {1, 0}, {1, 32}, {0, 5}};
        cuda_check_attend(c, seed++);
        c.n_head = 4, c.n_head_kv = 1, c.dim_k = 64, c.dim_v = 48, c.lengths = {700}, c.rows.clear();
        for (int i = 667; i < 700; i++)
            c.rows.push_back({0, i});
        c.window = 200, c.softcap = 5.0f, c.sinks = true;
        cuda_check_attend(c, seed++);
        c.window = 0, c.shared = true, c.rows = {{0, 699}, {0, 256}}, c.softcap = 0;
        cuda_check_attend(c, seed++);
        c.n_head = c.n_head_kv = 3, c.dim_k = c.dim_v = 128, c.shared = c.sinks = false, c.lengths = {513, 2, 300};
        c.rows = {{0, 512}, {1, 1}, {2, 299}, {2, 255}};
        cuda_check_attend(c, seed++);
        c.n_head = 1, c.n_head_kv = 1, c.dim_k = 576, c.dim_v = 520, c.lengths = {40}, c.rows = {{0, 39}, {0, 3}};
        cuda_check_attend(c, seed++);
    }
}

TEST(Cuda, AttendInAllOrders) {
    cuda_each_order([] {
        cuda_attention c;
        c.n_head = 4, c.n_head_kv = 2, c.dim_k = c.dim_v = 32, c.lengths = {300, 20};
        for (int type : {TYPE_F16, TYPE_Q8_0})
            for (bool many : {false, true}) {
                c.type = type, c.window = many ? 100 : 0;
                c.rows = {{0, 299}, {1, 19}};
                for (int i = 0; many && i < 8; i++)
                    c.rows.push_back({0, 280 + i});
                cuda_check_attend(c, 9);
            }
    });
}

// ---- whole models
//
// A model whose operations go to the device, while its `backend` stays the CPU's, which the API asks about itself.

backend *cuda_model_backend;
template <auto SLOT> struct cuda_via;
template <class R, class... A, R (*backend_ops::*SLOT)(backend *, A...)> struct cuda_via<SLOT> {
    static R call(backend *, A... a) { return (cuda_ops.*SLOT)(cuda_model_backend, a...); }
};
#define CUDA_VIA(slot) cuda_via<&backend_ops::slot>::call

const backend_ops &cuda_model_ops() {
    static const backend_ops ops = [] {
        backend_ops o = {};
        o.alloc = CUDA_VIA(alloc), o.grow = CUDA_VIA(grow), o.free = CUDA_VIA(free), o.weights = CUDA_VIA(weights);
        o.put = CUDA_VIA(put), o.get = CUDA_VIA(get), o.copy = CUDA_VIA(copy);
        o.matmul_scratch = CUDA_VIA(matmul_scratch), o.attend_scratch = CUDA_VIA(attend_scratch);
        o.reserve = CUDA_VIA(reserve), o.allocated = CUDA_VIA(allocated), o.sync = CUDA_VIA(sync);
        o.embed = CUDA_VIA(embed), o.rows = CUDA_VIA(rows), o.norm = CUDA_VIA(norm), o.matmul = CUDA_VIA(matmul);
        o.rope = CUDA_VIA(rope), o.kv_put = CUDA_VIA(kv_put), o.attend = CUDA_VIA(attend), o.glu = CUDA_VIA(glu);
        o.add = CUDA_VIA(add);
        return o;
    }();
    return ops;
}

struct cuda_model {
    std::unique_ptr<engine_model> m;
    explicit cuda_model(const std::string &path) {
        char error[256] = "";
        cuda_model_backend = cuda_open(0, error, sizeof error);
        EXPECT_TRUE(cuda_model_backend) << error;
        model_file file = open_model_file(path.c_str(), false);
        vocab voc = load_vocab(file);
        m.reset(new engine_model(std::move(file), std::move(voc), 1, &cuda_model_ops()));
        m->w = load_weights(m->file, m->voc, m->be.get(), *m->ops);
        for (int kind = 0; kind < N_KINDS; kind++)
            m->f16_layout[kind] = make_page_layout(m->w, TYPE_F16, kind);
    }
    ~cuda_model() {
        m.reset();
        cuda_close(cuda_model_backend);
        EXPECT_EQ(cusim::count.allocations, 0) << "memory that was not freed";
    }
};

struct cuda_pick {
    int32_t id;
    float margin; // to the second best
};
cuda_pick cuda_best(const vector<float> &l) {
    size_t best = 0;
    for (size_t i = 1; i < l.size(); i++)
        best = l[i] > l[best] ? i : best;
    float second = -INFINITY;
    for (size_t i = 0; i < l.size(); i++)
        second = i != best ? std::max(second, l[i]) : second;
    return {int32_t(best), l[best] - second};
}

// The CPU's greedy tokens, fed to both: the device chooses the same wherever the choice is clear, and its logits stay
// near the CPU's. Where activations or cache rows are rounded to few bits, the last bit of a sum, which attention and
// norms add in another order, can move a value by a whole step.
void cuda_check_model(const std::string &path, int n_steps, double tolerance, const char *kv = nullptr) {
    open_model cpu(path);
    cuda_model gpu(path);
    open_session a(cpu.m, 0, 0, kv), b(gpu.m.get(), 0, 0, kv);
    model_ids ids = {1, 2 % cpu.m->voc.n};
    int clear = 0;
    const long graphs = cusim::count.graph_launches;
    for (int i = 0; i < n_steps; i++) {
        a.sync(ids), b.sync(ids);
        const vector<float> want = a.logits(), got = b.logits();
        ASSERT_LT(cuda_error_of(got, want), tolerance) << path << ", step " << i;
        const cuda_pick pick = cuda_best(want);
        if (pick.margin >= 0.02f) {
            ASSERT_EQ(cuda_best(got).id, pick.id) << path << ", step " << i;
            clear++;
        }
        ids.push_back(pick.id);
    }
    EXPECT_GE(clear, n_steps * 3 / 4);
    // Two places for the hidden state take turns, each with its graph: a step is one graph, and then the head.
    EXPECT_GE(cusim::count.graph_launches - graphs, n_steps - 6);
}

TEST(Cuda, Stories) {
    CUDA_NEED_SHARED(dir, "stories260K");
    for (const char *type : {"f16", "q8_0", "q4_0"})
        cuda_check_model(dir + "/stories260K-" + type + ".gguf", 64, *type == 'f' ? 1e-6 : 1e-3);
    for (const char *type : {"f32", "bf16", "q5_1"})
        cuda_check_model(dir + "/stories260K-" + type + ".gguf", 8, *type != 'q' ? 1e-6 : 1e-3);
}

TEST(Cuda, ShippedModel) { cuda_check_model(model_shipped, 6, 1e-3); }

TEST(Cuda, TinyChat) {
    CUDA_NEED_SHARED(dir, "tiny-chat");
    cuda_check_model(dir + "/tiny-chat-q4_k_m.gguf", 6, 1e-3);
}

// Norms of heads, biases, pairs of halves, windows, gelu; weights that are random, so choices need not be clear.
TEST(Cuda, OtherArchitectures) {
    test::temp_dir tmp;
    for (const char *o : {"--arch qwen3 --layers 2 --embd 64 --heads 4 --kv-heads 2 --ffn 96 --vocab 300 --type Q4_0",
                          "--arch qwen2 --layers 2 --embd 64 --heads 4 --kv-heads 1 --ffn 96 --vocab 300 --type Q5_1",
                          "--preset gemma3-tiny --vocab 300 --type Q8_0 --window 20"}) {
        const std::string path = model_make(tmp, o);
        open_model cpu(path);
        cuda_model gpu(path);
        open_session a(cpu.m), b(gpu.m.get());
        model_ids ids = model_prompt(45, 290);
        for (int i = 0; i < 3; i++) {
            a.sync(ids), b.sync(ids);
            EXPECT_LT(cuda_error_of(b.logits(), a.logits()), 1e-3) << o;
            ids.push_back(i);
        }
    }
}

// What the issue asks for in full: minutes.
TEST(Cuda, WholeModelsLong) {
    if (!test::long_tests())
        GTEST_SKIP() << "[cudalong] minutes of simulation";
    CUDA_NEED_SHARED(dir, "tiny-chat");
    for (const char *type : {"f16", "q8_0", "q4_k_m", "q4_0"})
        cuda_check_model(dir + "/tiny-chat-" + type + ".gguf", 64, *type == 'f' ? 1e-6 : 1e-3);
}

// The same logits whatever the chunk, whether rows are stored exactly or not, in a second session, after a rewind, and
// for the rows of two sessions in one step.
TEST(Cuda, SameBitsWhateverTheChunk) {
    CUDA_NEED_SHARED(dir, "stories260K");
    for (const char *type : {"q8_0", "f16"})
        for (const char *kv : {"f16", "q8_0"}) {
            cuda_model m(dir + "/stories260K-" + type + ".gguf");
            const model_ids ids = model_prompt(131, m.m->voc.n);
            vector<float> want;
            for (int chunk : {129, 128, 127, 3}) {
                open_session s(m.m.get(), 0, chunk, kv);
                s.sync(ids);
                const vector<float> got = s.logits();
                want = want.empty() ? got : want;
                EXPECT_EQ(cuda_differ(got, want), -1) << type << ", cache " << kv << ", chunk " << chunk;
            }
            open_session a(m.m.get(), 0, 0, kv), b(m.m.get(), 0, 0, kv);
            model_ids begin(ids.begin(), ids.end() - 1), other(ids.begin() + 40, ids.begin() + 60);
            a.sync(begin), b.sync(other);
            a.sync(ids);
            EXPECT_EQ(cuda_differ(a.logits(), want), -1) << type << ", decoded";
        }
}

// Pages move between the backends: a session that the CPU saved goes on on the device, and the other way round.
TEST(Cuda, SessionsLoadOnTheOtherBackend) {
    CUDA_NEED_SHARED(dir, "stories260K");
    const std::string path = dir + "/stories260K-q4_0.gguf";
    test::temp_dir tmp;
    const model_ids ids = model_prompt(140, 512);
    model_ids more = ids;
    more.push_back(7);
    open_model cpu(path);
    cuda_model gpu(path);
    engine_model *const models[] = {cpu.m, gpu.m.get()};
    for (int from = 0; from < 2; from++) {
        engine_error err = {};
        const std::string file = tmp / ("session" + std::to_string(from));
        open_session a(models[from]), b(models[1 - from]);
        a.sync(ids);
        ASSERT_EQ(engine_save(a.s, file.c_str(), &err), 0) << err.msg;
        ASSERT_GE(engine_load(b.s, file.c_str(), &err), 0) << err.msg;
        a.sync(more);
        EXPECT_GE(b.sync(more), 128) << "the pages were not used";
        EXPECT_LT(cuda_error_of(b.logits(), a.logits()), 1e-3);
    }
}

// ---- graphs, launches, failures

// A decode step of stories260K: how many launches, and that steps are graphs.
TEST(Cuda, StepsAreGraphs) {
    CUDA_NEED_SHARED(dir, "stories260K");
    cuda_model m(dir + "/stories260K-q8_0.gguf");
    open_session s(m.m.get());
    const long first = cusim::count.launches;
    s.sync({1});
    // Embedding, thirteen of each layer, and three of the head: norm, quantize, one launch for queries, keys and
    // values, rope of both, kv_put, attend, quantize, output; norm, quantize, gate and up, glu, down (whose weights are
    // floats).
    EXPECT_EQ(cusim::count.launches - first, 1 + 13 * 5 + 3);
    s.greedy(6); // both places of the hidden state have had their second turn
    const cusim::counters before = cusim::count;
    s.greedy(5);
    const cusim::counters after = cusim::count;
    EXPECT_EQ(after.captures, before.captures);
    EXPECT_EQ(after.launches, before.launches); // none outside the graph
    EXPECT_EQ(after.graph_launches - before.graph_launches, 4);
    EXPECT_EQ(after.syncs - before.syncs, 8);
}

TEST(Cuda, FailedAllocationsAreClear) {
    CUDA_NEED_SHARED(dir, "stories260K");
    const std::string path = dir + "/stories260K-q8_0.gguf";
    bool worked = false;
    int n = 1;
    for (; !worked && n < 400; n += n < 40 ? 13 : 1) {
        char error[256] = "";
        cuda_model_backend = cuda_open(0, error, sizeof error);
        ASSERT_TRUE(cuda_model_backend) << error;
        cusim::fault.alloc = n;
        try {
            model_file file = open_model_file(path.c_str(), false);
            vocab voc = load_vocab(file);
            engine_model m(std::move(file), std::move(voc), 1, &cuda_model_ops());
            m.w = load_weights(m.file, m.voc, m.be.get(), *m.ops);
            engine_session *s = nullptr;
            engine_error err = {};
            const int code = engine_session_new(&s, &m, nullptr, &err);
            if (code) {
                EXPECT_EQ(code, ENGINE_ENOMEM) << err.msg;
            } else {
                const int32_t id = 1;
                EXPECT_GE(engine_sync(s, &id, 1, &err), 0) << err.msg;
                worked = cusim::fault.alloc > 0;
                engine_session_free(s);
            }
        } catch (const Error &e) {
            EXPECT_EQ(e.code, ENGINE_ENOMEM);
        }
        cusim::fault.alloc = 0;
        cuda_close(cuda_model_backend);
        EXPECT_EQ(cusim::count.allocations, 0) << "after a failure at allocation " << n;
    }
    EXPECT_TRUE(worked);
    EXPECT_GT(n, 40);
}

TEST(Cuda, ALostDeviceIsAnError) {
    CUDA_NEED_SHARED(dir, "stories260K");
    cuda_model m(dir + "/stories260K-q8_0.gguf");
    {
        open_session s(m.m.get());
        s.sync({1});
        cusim::fault.launch = 20;
        const int32_t ids[] = {1, 2, 3};
        engine_error err = {};
        EXPECT_LT(engine_sync(s.s, ids, 3, &err), 0);
        EXPECT_NE(std::string(err.msg).find("CUDA"), std::string::npos) << err.msg;
        EXPECT_LT(engine_sync(s.s, ids, 3, &err), 0) << "it is still lost";
        cusim::fault.launch = -1; // found again, so that closing can be watched
        EXPECT_GE(engine_sync(s.s, ids, 3, &err), 0) << err.msg;
    }
}

TEST(Cuda, NoDeviceIsNoError) {
    cusim::fault.no_device = 1;
    EXPECT_EQ(cuda_devices(nullptr, 0), 0);
    char error[256] = "";
    EXPECT_EQ(cuda_open(0, error, sizeof error), nullptr);
    EXPECT_NE(error[0], 0);
    cusim::fault.no_device = 0;
    cuda_device d[1] = {};
    EXPECT_EQ(cuda_devices(d, 1), 1);
    EXPECT_STREQ(d[0].name, "simulated device");
    EXPECT_EQ(cuda_open(1, error, sizeof error), nullptr);
}

TEST(Cuda, WhatItCannotDoIsAnError) {
    cuda_test t;
    const vector<float> x(64);
    mat w = {};
    w.data = t.put(x), w.type = 99, w.n_in = 8, w.n_out = 8;
    matmul_op op = {1, 8, 8, 1, 99, 8, 8, 0, 0};
    cuda_ops.matmul(t.be, &op, t.put(x), &w, t.put(x), mem());
    EXPECT_NE(t.sync().find("format"), std::string::npos);
    attend_op a = {};
    a.n_rows = 1, a.n_seg = 2;
    const seg sg[2] = {};
    const step st = {};
    cuda_ops.attend(t.be, &a, mem(), mem(), sg, mem(), &st);
    EXPECT_NE(t.sync().find("attend"), std::string::npos);
    EXPECT_EQ(t.sync(), "");
}

TEST(Cuda, MemoryGrowsAndCopies) {
    cuda_test t;
    cuda_random rnd(3);
    const vector<float> v = rnd.row(3000000); // more than one piece of the staging memory, and than all of it
    const mem a = t.put(v);
    const vector<float> zeros = t.get<float>(cuda_ops.alloc(t.be, 4000), 1000);
    EXPECT_EQ(std::count(zeros.begin(), zeros.end(), 0.0f), 1000);
    const uint64_t before = cuda_ops.allocated(t.be);
    const mem b = cuda_ops.grow(t.be, a, v.size() * 4, v.size() * 4 + 4000);
    EXPECT_EQ(cuda_ops.allocated(t.be), before + 4000);
    const vector<float> got = t.get<float>(b, v.size() + 1000);
    EXPECT_TRUE(std::equal(v.begin(), v.end(), got.begin()));
    EXPECT_EQ(std::count(got.begin() + int64_t(v.size()), got.end(), 0.0f), 1000);
    mem to = b, from = b;
    to.offset = 400, from.offset = 4000;
    cuda_ops.copy(t.be, to, from, 40);
    EXPECT_EQ(t.get<float>(to, 10), vector<float>(v.begin() + 1000, v.begin() + 1010));
    cusim::fault.alloc = 1;
    EXPECT_EQ(cuda_ops.grow(t.be, b, v.size() * 4 + 4000, v.size() * 8).handle, nullptr);
    EXPECT_EQ(t.get<float>(b, 3), vector<float>(v.begin(), v.begin() + 3)); // the old one is still there
    cuda_ops.free(t.be, b);
}

} // namespace
