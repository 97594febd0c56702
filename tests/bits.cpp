// bits MODEL [N_TOKENS]: prints a hash of the bits of all logits of a fixed prompt. The same model gives the same line
// from every compiler, optimisation level, instruction set and number of threads; tests compare such lines.
#include "../engine.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static uint64_t hash = 0xcbf29ce484222325u;
static int n_vocab;

static int add(void *, size_t, const float *logits) {
    for (int i = 0; i < n_vocab; i++) {
        uint32_t bits;
        memcpy(&bits, logits + i, 4);
        hash = (hash ^ bits) * 0x100000001b3u;
    }
    return 0;
}

int main(int argc, char **argv) {
    engine_error err = {};
    engine_model *model = nullptr;
    engine_session *session = nullptr;
    engine_model_info info = {};
    const int n = argc > 2 ? atoi(argv[2]) : 150;
    engine_session_options options = {};
    options.n_ctx = n;
    if (argc < 2 || engine_open(&model, argv[1], nullptr, &err) < 0 || engine_info(model, &info, &err) < 0 ||
        engine_session_new(&session, model, &options, &err) < 0) {
        fprintf(stderr, "bits: %s\n", argc < 2 ? "usage: bits MODEL [N_TOKENS]" : err.msg);
        return 1;
    }
    n_vocab = info.n_vocab;
    std::vector<int32_t> ids;
    for (uint32_t i = 0, x = 12345; i < uint32_t(n); i++)
        ids.push_back(int32_t((x = x * 1664525u + 1013904223u) >> 8) % n_vocab);
    if (engine_eval_all(session, ids.data(), ids.size(), add, nullptr, &err) < 0) {
        fprintf(stderr, "bits: %s\n", err.msg);
        return 1;
    }
    printf("%016llx\n", (unsigned long long)hash);
    engine_session_free(session);
    engine_close(model);
    return 0;
}
