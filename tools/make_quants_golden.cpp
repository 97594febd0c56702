// Writes tests/data/quants_golden.inc: blocks of every format and their values as another engine decodes them.
//   g++ -std=c++20 tools/make_quants_golden.cpp -o make_quants_golden
//   ENGINE_GGML_LIB=.../libggml-base.so ./make_quants_golden > tests/data/quants_golden.inc
#include "../tests/quants_oracle.h"

#include <cstdio>

using namespace quants_oracle;

int main() {
    void *lib = open_library("./");
    if (!lib) {
        fprintf(stderr, "make_quants_golden: %s\n", dlerror());
        return 1;
    }
    printf("// Written by tools/make_quants_golden: type, the bytes of some blocks, the bits of their values.\n");
    printf("// clang-format off\n");
    for (const kind &k : kinds) {
        decode_fn decode = reinterpret_cast<decode_fn>(dlsym(lib, k.symbol));
        if (!decode) {
            fprintf(stderr, "make_quants_golden: no %s\n", k.symbol);
            return 1;
        }
        // Blocks with ordinary scales; for small blocks as many with odd ones.
        int n = k.block == 1 ? 64 : k.block == 32 ? 4 : 2;
        std::vector<uint8_t> in = make_blocks(k, n, 1000 + uint64_t(k.type), false);
        std::vector<uint8_t> odd = make_blocks(k, k.block == 256 ? 0 : n, 2000 + uint64_t(k.type), true);
        in.insert(in.end(), odd.begin(), odd.end());
        std::vector<float> values(in.size() / size_t(k.bytes) * size_t(k.block));
        decode(in.data(), values.data(), int64_t(values.size()));
        printf("{%d, \"", k.type);
        for (uint8_t b : in)
            printf("%02x", b);
        printf("\",\n \"");
        for (float v : values) {
            uint32_t bits;
            memcpy(&bits, &v, 4);
            printf("%08x", bits);
        }
        printf("\"},\n");
    }
}
