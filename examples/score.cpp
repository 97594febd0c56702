// score MODEL: for each line of stdin, the mean log-likelihood of its tokens (natural logarithm) and the line itself:
// the higher, the more the model expected the line.
//   make install PREFIX=$HOME/.local     (then, with PKG_CONFIG_PATH=$HOME/.local/lib/pkgconfig:)
//   g++ -std=c++17 examples/score.cpp $(pkg-config --cflags --libs engine) -Wl,-rpath,$HOME/.local/lib -o score
#include <engine.h>

#include <cmath>
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

struct scoring {
    const std::vector<int32_t> &ids;
    int n_vocab;
    double sum; // of the log-likelihoods so far
};

// Gets the logits at each position in turn; those after ids[i] say how likely ids[i + 1] was.
static int add(void *user, size_t i, const float *logits) {
    scoring &s = *static_cast<scoring *>(user);
    if (i + 1 >= s.ids.size())
        return 0;
    double top = logits[0], total = 0;
    for (int v = 1; v < s.n_vocab; v++)
        top = std::fmax(top, logits[v]);
    for (int v = 0; v < s.n_vocab; v++)
        total += std::exp(logits[v] - top);
    s.sum += logits[s.ids[i + 1]] - top - std::log(total);
    return 0;
}

int main(int argc, char **argv) {
    engine_error err = {};
    engine_model *model = nullptr;
    engine_session *session = nullptr;
    engine_model_info info = {};
    auto stop = [&] { return fprintf(stderr, "%s: %s\n", argv[0], err.msg), 1; };
    if (argc != 2)
        return fprintf(stderr, "usage: %s MODEL < LINES\n", argv[0]), 2;
    if (engine_open(&model, argv[1], nullptr, &err) < 0)
        return stop();
    std::unique_ptr<engine_model, void (*)(engine_model *)> close(model, engine_close);
    info.size = sizeof info;
    if (engine_info(model, &info, &err) < 0 || engine_session_new(&session, model, nullptr, &err) < 0)
        return stop();
    std::unique_ptr<engine_session, void (*)(engine_session *)> free(session, engine_session_free);
    for (std::string line; std::getline(std::cin, line);) {
        int n = engine_tokenize(model, line.data(), line.size(), ENGINE_ADD_BOS, nullptr, 0, &err);
        std::vector<int32_t> ids(n > 0 ? n : 0);
        scoring s = {ids, info.n_vocab, 0};
        if (n < 0 ||
            engine_tokenize(model, line.data(), line.size(), ENGINE_ADD_BOS, ids.data(), ids.size(), &err) < 0 ||
            engine_rewind(session, 0, &err) < 0 || engine_eval_all(session, ids.data(), ids.size(), add, &s, &err) < 0)
            return stop();
        printf("%9.4f  %s\n", ids.size() > 1 ? s.sum / double(ids.size() - 1) : 0.0, line.c_str());
    }
    return 0;
}
