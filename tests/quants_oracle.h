// quants_oracle.h: block decoding by code that nobody here wrote, the libggml-base.so of the npm package
// @node-llama-cpp/linux-x64, loaded at run time; and blocks to try it on. For test_quants.cpp and
// tools/make_quants_golden.cpp.
#ifndef QUANTS_ORACLE_H
#define QUANTS_ORACLE_H

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <string>
#include <vector>

namespace quants_oracle {

// The formats, stated independently of shaders/quants.h.
struct kind {
    int type;
    const char *name;
    int block, bytes;
    const char *symbol;
    int halves[2]; // where the block's floats of two bytes are, -1: none
};

static const kind kinds[] = {
    {2, "Q4_0", 32, 18, "dequantize_row_q4_0", {0, -1}},
    {3, "Q4_1", 32, 20, "dequantize_row_q4_1", {0, 2}},
    {6, "Q5_0", 32, 22, "dequantize_row_q5_0", {0, -1}},
    {7, "Q5_1", 32, 24, "dequantize_row_q5_1", {0, 2}},
    {8, "Q8_0", 32, 34, "dequantize_row_q8_0", {0, -1}},
    {10, "Q2_K", 256, 84, "dequantize_row_q2_K", {80, 82}},
    {11, "Q3_K", 256, 110, "dequantize_row_q3_K", {108, -1}},
    {12, "Q4_K", 256, 144, "dequantize_row_q4_K", {0, 2}},
    {13, "Q5_K", 256, 176, "dequantize_row_q5_K", {0, 2}},
    {14, "Q6_K", 256, 210, "dequantize_row_q6_K", {208, -1}},
    {20, "IQ4_NL", 32, 18, "dequantize_row_iq4_nl", {0, -1}},
    {23, "IQ4_XS", 256, 136, "dequantize_row_iq4_xs", {0, -1}},
    {39, "MXFP4", 32, 17, "dequantize_row_mxfp4", {-1, -1}},
    {1, "F16", 1, 2, "ggml_fp16_to_fp32_row", {0, -1}},
    {30, "BF16", 1, 2, "ggml_bf16_to_fp32_row", {-1, -1}},
};

using decode_fn = void (*)(const void *, float *, int64_t);

// Null when the library is nowhere. `root` is the repository's folder, with a slash at the end.
inline void *open_library(const std::string &root) {
    const char *path = getenv("ENGINE_GGML_LIB");
    std::string in_tests = root + "tests/node_modules/@node-llama-cpp/linux-x64/bins/linux-x64/libggml-base.so";
    return dlopen(path && *path ? path : in_tests.c_str(), RTLD_NOW | RTLD_LOCAL);
}

inline uint32_t next_random(uint64_t &state) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return uint32_t(state >> 33);
}

// Halves that are rarely met: zeros, denormals, the ends of the range, then infinities and NaNs.
static const uint16_t odd_halves[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x83ff, 0x0400, 0x8400, 0x3c00,
                                      0xbc00, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0xfe01, 0x7c01, 0xfdff};
constexpr int n_odd = sizeof odd_halves / sizeof *odd_halves, n_odd_finite = 12;

// n blocks of random bytes. Their scales are ordinary finite ones, and where `odd` says so every pair of odd halves in
// turn; MXFP4's scale byte runs through all its values.
inline std::vector<uint8_t> make_blocks(const kind &k, int n, uint64_t seed, bool odd) {
    std::vector<uint8_t> out(size_t(n) * size_t(k.bytes));
    for (uint8_t &b : out)
        b = uint8_t(next_random(seed) >> 8);
    for (int i = 0; i < n; i++) {
        uint8_t *block = &out[size_t(i) * size_t(k.bytes)];
        for (int j = 0; j < 2; j++) {
            uint32_t r = next_random(seed);
            uint16_t h = uint16_t((r & 0x83ff) | ((r >> 16) % 30 + 1) << 10);
            if (odd)
                h = odd_halves[j ? i / n_odd % n_odd : i % n_odd];
            if (k.halves[j] >= 0)
                memcpy(block + k.halves[j], &h, 2);
        }
        if (k.type == 39)
            block[0] = uint8_t(odd ? i : 100 + i % 50);
    }
    return out;
}

} // namespace quants_oracle

#endif
