// The CUDA backend, run by the simulator in tests/cusim: every operation against the CPU's, whole models, failures. Its
// own program: kernels.cu is compiled as ordinary C++ and linked with the simulator in place of the CUDA runtime.
#include "unit.h"

#include "cusim/control.h"
#include "opened.h"

#if defined(ENGINE_CUDA)

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

} // namespace

#endif
