// Chapter QUANTS and shaders/quants.h: every format against an implementation nobody here wrote and against values
// made with it, the shared text read through offsets and compiled as GLSL and CUDA, half and bf16 conversions.
#include "unit.h"

#include "quants_oracle.h"

// The shared text once more as a shader sees it: blocks are byte offsets into a buffer of 32-bit words.
#pragma push_macro("Q_BYTE")
#pragma push_macro("q_at")
#undef ENGINE_QUANTS_H
#undef Q_BYTE
#undef q_at
namespace quants_by_offset {
static const uint32_t *words;
static inline int byte_at(uint32_t k) { return int(words[k >> 2] >> (k & 3) * 8 & 255); }
#define q_at uint32_t
#define Q_BYTE(at, k) byte_at((at) + uint32_t(k))
#include "../shaders/quants.h"
} // namespace quants_by_offset
#pragma pop_macro("q_at")
#pragma pop_macro("Q_BYTE")

namespace {

using quants_oracle::kind;
using quants_oracle::kinds;

// The same value: the same bits, or two NaNs (their payloads depend on the compiler's order of operands).
bool quants_same(float a, float b) { return float_bits(a) == float_bits(b) || (std::isnan(a) && std::isnan(b)); }

vector<float> quants_decode(const kind &k, const vector<uint8_t> &blocks) {
    vector<float> out(blocks.size() / size_t(k.bytes) * size_t(k.block));
    decode_row(k.type, blocks.data(), out.data(), int64_t(out.size()));
    return out;
}

void quants_expect_same(const kind &k, const vector<float> &got, const vector<float> &want) {
    ASSERT_EQ(got.size(), want.size()) << k.name;
    for (size_t i = 0; i < got.size(); i++)
        ASSERT_TRUE(quants_same(got[i], want[i]))
            << k.name << ": value " << i % size_t(k.block) << " of block " << i / size_t(k.block) << " is " << got[i]
            << " (" << std::hex << float_bits(got[i]) << "), not " << want[i] << " (" << float_bits(want[i]) << ")";
}

// The half of |f| < 2^16, in double arithmetic: the number of units of the last place, rounded to nearest even.
uint16_t quants_half_reference(float f) {
    uint16_t sign = std::signbit(f) ? 0x8000 : 0;
    double a = std::fabs(double(f));
    int e = a < std::ldexp(1, -14) ? -14 : std::ilogb(a);
    double units = std::nearbyint(std::ldexp(a, 10 - e)); // up to 2048; below 1024 for denormals
    double bits = units + (e + 14) * 1024.0;
    return bits >= 0x7c00 ? uint16_t(sign | 0x7c00) : uint16_t(sign | int(bits));
}

float quants_half_value(uint16_t h) {
    int e = h >> 10 & 31, m = h & 1023;
    double a = e == 31 ? (m ? double(NAN) : double(INFINITY)) : std::ldexp(e ? m + 1024 : m, (e ? e : 1) - 25);
    return float(h & 0x8000 ? -a : a);
}

// Floats where a rounding to `bits` fewer bits of the significand turns: around every multiple of half a unit.
template <class F> void quants_for_edges(int bits, F &&check) {
    for (uint32_t top = 0; top < 1u << (33 - bits); top++) {
        uint32_t middle = top << (bits - 1);
        for (uint32_t u : {middle - 1, middle, middle + 1})
            check(q_float(u));
    }
}

} // namespace

TEST(Quants, TableIsTheKnownOne) {
    size_t n = 0;
    for (const kind &k : kinds) {
        const format *f = find_format(k.type);
        ASSERT_TRUE(f) << k.name;
        EXPECT_STREQ(f->name, k.name);
        EXPECT_EQ(f->block, k.block) << k.name;
        EXPECT_EQ(f->bytes, k.bytes) << k.name;
        EXPECT_EQ(f->block % f->sub, 0) << k.name;
        EXPECT_EQ(f->act, k.block == 1 ? ACT_F32 : k.block == 32 ? ACT_Q8_32 : ACT_Q8_256) << k.name;
        EXPECT_EQ(f->mins, !!strstr("Q4_1 Q5_1 Q2_K Q4_K Q5_K", k.name)) << k.name;
        EXPECT_EQ(row_bytes(*f, 512), uint64_t(512 / k.block * k.bytes)) << k.name;
        EXPECT_EQ(q_block(k.type), k.block) << k.name;
        EXPECT_EQ(q_bytes(k.type), k.bytes) << k.name;
        n++;
    }
    EXPECT_EQ(n + 1, sizeof formats / sizeof *formats); // and F32
    EXPECT_EQ(find_format(TYPE_F32)->bytes, 4);
    for (int type : {-1, 4, 5, 9, 15, 16, 24, 31, 38, 40, INT_MAX})
        EXPECT_FALSE(find_format(type)) << type;
}

TEST(Quants, DecodesLikeTheOracle) {
    void *lib = quants_oracle::open_library(test::root_path(""));
    if (!lib)
        GTEST_SKIP() << "[npm] no libggml-base.so: " << dlerror();
    for (const kind &k : kinds) {
        auto decode = reinterpret_cast<quants_oracle::decode_fn>(dlsym(lib, k.symbol));
        ASSERT_TRUE(decode) << k.symbol;
        for (bool odd : {false, true}) {
            // Every pair of odd scales, infinities and NaNs among them; every E8M0 byte but 255, NaN by its definition,
            // which the oracle takes for 2^128.
            int n = k.type == TYPE_MXFP4 ? 255 : quants_oracle::n_odd * quants_oracle::n_odd;
            vector<uint8_t> blocks = make_blocks(k, n, 7 + uint64_t(k.type), odd);
            vector<float> want(size_t(n * k.block));
            decode(blocks.data(), want.data(), int64_t(want.size()));
            quants_expect_same(k, quants_decode(k, blocks), want);
        }
    }
}

TEST(Quants, DecodesTheGoldenBlocks) {
    struct golden {
        int type;
        const char *bytes, *values;
    };
    static const golden all[] = {
#include "data/quants_golden.inc"
    };
    ASSERT_EQ(sizeof all / sizeof *all, sizeof kinds / sizeof *kinds);
    auto hex = [](const char *s, size_t digits) { return uint32_t(std::stoul(string(s, digits), nullptr, 16)); };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        ASSERT_EQ(all[i].type, kinds[i].type);
        vector<uint8_t> blocks;
        vector<float> want;
        for (const char *s = all[i].bytes; *s; s += 2)
            blocks.push_back(uint8_t(hex(s, 2)));
        for (const char *s = all[i].values; *s; s += 8)
            want.push_back(q_float(hex(s, 8)));
        ASSERT_GT(want.size(), 0u);
        quants_expect_same(kinds[i], quants_decode(kinds[i], blocks), want);
    }
}

// The integer parts are what products are made of: in range of the types that hold them, and composing to the value.
TEST(Quants, PartsComposeToTheValue) {
    for (const kind &k : kinds) {
        if (k.block == 1)
            continue;
        const format &f = *find_format(k.type);
        int low = 127, high = -128;
        vector<uint8_t> blocks = make_blocks(k, 64, 11, false);
        vector<float> row = quants_decode(k, blocks);
        for (int b = 0; b < 64; b++) {
            const uint8_t *at = &blocks[size_t(b * k.bytes)];
            float d = q_d(k.type, at), dmin = q_dmin(k.type, at);
            for (int i = 0; i < k.block; i++) {
                int s = i / f.sub, q = q_quant(k.type, at, i);
                int sc = q_sub_scale(k.type, at, s), mn = q_sub_min(k.type, at, s);
                low = std::min(low, q), high = std::max(high, q);
                ASSERT_TRUE(sc >= -128 && sc <= 127 && mn >= 0 && mn <= 63) << k.name;
                float value = k.block == 32 ? d * float(q) : (d * float(sc)) * float(q);
                if (f.mins)
                    value = k.block == 32 ? value + dmin : value - dmin * float(mn);
                else
                    ASSERT_TRUE(mn == 0 && dmin == 0) << k.name;
                ASSERT_EQ(k.block == 32 ? sc : 1, 1) << k.name;
                ASSERT_EQ(float_bits(row[size_t(b * k.block + i)]), float_bits(value)) << k.name << " " << i;
                ASSERT_EQ(float_bits(q_value(k.type, at, i)), float_bits(value)) << k.name << " " << i;
            }
        }
        // Enough random quants to meet both ends of every range.
        static const struct {
            const char *names;
            int low, high;
        } ranges[] = {
            {"Q4_0", -8, 7}, {"Q4_1 Q4_K", 0, 15}, {"Q5_0", -16, 15}, {"Q5_1 Q5_K", 0, 31},         {"Q8_0", -128, 127},
            {"Q2_K", 0, 3},  {"Q3_K", -4, 3},      {"Q6_K", -32, 31}, {"IQ4_NL IQ4_XS", -127, 113}, {"MXFP4", -12, 12}};
        bool found = false;
        for (const auto &r : ranges)
            if (strstr(r.names, k.name)) {
                found = true;
                EXPECT_TRUE(low == r.low && high == r.high) << k.name << ": " << low << " to " << high;
            }
        EXPECT_TRUE(found) << k.name;
    }
}

// 2^(e - 127) from the first to the last byte, and NaN after it: a file's bad scale must not look like a number.
TEST(Quants, Mxfp4Scales) {
    for (int e = 0; e < 256; e++) {
        uint8_t block[17] = {uint8_t(e), 0x42, 0x79}; // values 0 and 16: 1 and 2; values 1 and 17: -0.5 and 6
        float out[32];
        decode_row(TYPE_MXFP4, block, out, 32);
        if (e == 255) {
            for (float v : out)
                EXPECT_TRUE(std::isnan(v));
            continue;
        }
        EXPECT_EQ(out[0], float(std::ldexp(1.0, e - 127))) << e;
        EXPECT_EQ(out[16], float(std::ldexp(2.0, e - 127))) << e;
        EXPECT_EQ(out[1], float(std::ldexp(-0.5, e - 127))) << e;
        EXPECT_EQ(out[17], float(std::ldexp(6.0, e - 127))) << e; // infinity for the last one
    }
}

// Blocks of 17, 18, 34, … bytes begin at any byte of a word.
TEST(Quants, OffsetsReadLikePointers) {
    for (const kind &k : kinds) {
        const int n = 16;
        vector<uint8_t> blocks = make_blocks(k, n, 13, true);
        for (uint32_t shift = 0; shift < 4; shift++) {
            vector<uint32_t> words((blocks.size() + shift + 3) / 4);
            memcpy(reinterpret_cast<char *>(words.data()) + shift, blocks.data(), blocks.size());
            quants_by_offset::words = words.data();
            vector<float> got;
            for (int i = 0; i < n * k.block; i++)
                got.push_back(quants_by_offset::q_value(k.type, shift + uint32_t(i / k.block * k.bytes), i % k.block));
            quants_expect_same(k, got, quants_decode(k, blocks));
        }
    }
}

TEST(Quants, CompilesAsGlsl) {
    if (test::run({"glslc", "--version"}).code != 0)
        GTEST_SKIP() << "[glslc] no glslc in PATH";
    test::temp_dir dir;
    for (const char *optimise : {"-O0", "-O"}) {
        test::command_result r =
            test::run({"glslc", "-Werror", optimise, "--target-env=vulkan1.1", "-I" + test::root_path("shaders"), "-o",
                       dir / "decode.spv", test::root_path("tests/data/quants_decode.comp")});
        EXPECT_EQ(r.code, 0) << r.out << r.err;
    }
    EXPECT_GT(test::read_file(dir / "decode.spv").size(), 1000u);
}

TEST(Quants, CompilesAsCuda) {
    string nvcc = "nvcc";
    if (test::run({nvcc, "--version"}).code != 0)
        nvcc = "/usr/local/cuda/bin/nvcc";
    if (test::run({nvcc, "--version"}).code != 0)
        GTEST_SKIP() << "[nvcc] no nvcc in PATH or /usr/local/cuda/bin";
    test::temp_dir dir;
    test::command_result r = test::run({nvcc, "-c", "-Werror", "all-warnings", "-I" + test::root_path("shaders"), "-o",
                                        dir / "decode.o", test::root_path("tests/data/quants_decode.cu")});
    EXPECT_EQ(r.code, 0) << r.out << r.err;
}

TEST(Quants, EveryHalfIsExactAndComesBack) {
    for (uint32_t h = 0; h < 65536; h++) {
        float f = half_to_float(uint16_t(h));
        ASSERT_TRUE(quants_same(f, quants_half_value(uint16_t(h)))) << std::hex << h;
        ASSERT_EQ(float_bits(f) >> 31, h >> 15) << std::hex << h;
        ASSERT_EQ(float_to_half(f), std::isnan(f) ? h | 0x200 : h) << std::hex << h;
    }
}

TEST(Quants, FloatsRoundToNearestEven) {
    for (int mode : {FE_TONEAREST, FE_UPWARD}) { // the caller's mode must not matter
        quants_for_edges(13, [&](float f) {
            uint16_t want = std::fabs(f) < 65536 ? quants_half_reference(f) : std::signbit(f) ? 0xfc00 : 0x7c00;
            fesetround(mode);
            uint16_t got = float_to_half(f);
            fesetround(FE_TONEAREST);
            if (std::isnan(f))
                ASSERT_EQ(got & 0x7e00, 0x7e00) << std::hex << float_bits(f);
            else
                ASSERT_EQ(got, want) << f << " " << std::hex << float_bits(f);
        });
    }
}

#if defined(__x86_64__)
__attribute__((target("f16c"))) static float quants_f16c_to_float(uint16_t h) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
}
__attribute__((target("f16c"))) static uint16_t quants_f16c_to_half(float f) {
    return uint16_t(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(f), _MM_FROUND_TO_NEAREST_INT), 0));
}

// SIMD kernels use the processor's conversions beside ours, so that even NaNs must have the same bits.
TEST(Quants, HalvesConvertLikeTheProcessor) {
    if (!__builtin_cpu_supports("avx2")) // came after F16C, which clang 14 cannot ask for
        GTEST_SKIP() << "[cpu] no AVX2";
    for (uint32_t h = 0; h < 65536; h++)
        ASSERT_EQ(float_bits(half_to_float(uint16_t(h))), float_bits(quants_f16c_to_float(uint16_t(h)))) << h;
    quants_for_edges(13, [](float f) {
        ASSERT_EQ(float_to_half(f), quants_f16c_to_half(f)) << f << " " << std::hex << float_bits(f);
    });
}
#endif
