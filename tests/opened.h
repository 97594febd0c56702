// Models and sessions that close themselves, for tests through the C API.
#ifndef TESTS_OPENED_H
#define TESTS_OPENED_H

#include "unit.h"

namespace {

typedef std::vector<int32_t> model_ids;

// A model and a session that close themselves; errors become test failures.
struct open_model {
    engine_model *m = nullptr;
    engine_error err = {};
    explicit open_model(const std::string &path, int threads = 1, const char *cpu = "", bool no_mmap = false) {
        setenv("ENGINE_CPU", cpu, 1);
        engine_open_options o = {};
        o.threads = threads;
        o.no_mmap = no_mmap;
        if (engine_open(&m, path.c_str(), &o, &err) < 0)
            ADD_FAILURE() << err.msg;
        unsetenv("ENGINE_CPU");
    }
    ~open_model() { engine_close(m); }
    open_model(const open_model &) = delete;

    model_ids encode(const std::string &text, int flags) {
        int n = engine_tokenize(m, text.data(), text.size(), flags, nullptr, 0, &err);
        EXPECT_GE(n, 0) << err.msg;
        model_ids ids(size_t(std::max(n, 0)));
        EXPECT_EQ(engine_tokenize(m, text.data(), text.size(), flags, ids.data(), ids.size(), &err), n);
        return ids;
    }
    std::string decode(const model_ids &ids, int special = 0) {
        int n = engine_detokenize(m, ids.data(), ids.size(), special, nullptr, 0, &err);
        std::string s(size_t(std::max(n, 0)) + 1, 0);
        engine_detokenize(m, ids.data(), ids.size(), special, &s[0], s.size(), &err);
        s.pop_back();
        return s;
    }
    model_ids chat(const std::vector<engine_message> &messages) {
        model_ids ids(4096);
        int n = engine_render_chat(m, messages.data(), messages.size(), nullptr, ids.data(), ids.size(), &err);
        EXPECT_GE(n, 0) << err.msg;
        ids.resize(size_t(std::max(n, 0)));
        return ids;
    }
};
struct open_session {
    engine_session *s = nullptr;
    engine_error err = {};
    explicit open_session(engine_model *m, int n_ctx = 0, int chunk = 0, const char *kv = nullptr,
                          int checkpoints = 0) {
        engine_session_options o = {};
        o.n_ctx = n_ctx;
        o.chunk = chunk;
        o.kv = kv;
        o.checkpoints = checkpoints;
        if (engine_session_new(&s, m, &o, &err) < 0)
            ADD_FAILURE() << err.msg;
    }
    ~open_session() { engine_session_free(s); }
    open_session(const open_session &) = delete;

    int sync(const model_ids &ids) {
        int r = engine_sync(s, ids.data(), ids.size(), &err);
        EXPECT_GE(r, 0) << err.msg;
        return r;
    }
    int eval(const model_ids &ids) {
        int r = engine_eval(s, ids.data(), ids.size(), &err);
        EXPECT_EQ(r, 0) << err.msg;
        return r;
    }
    engine_session_stats stats() {
        engine_session_stats st = {};
        EXPECT_EQ(engine_stats(s, &st, &err), 0) << err.msg;
        return st;
    }
    std::vector<float> logits() {
        const float *p = nullptr;
        int n = engine_logits(s, &p, &err);
        EXPECT_GT(n, 0) << err.msg;
        return std::vector<float>(p, p + std::max(n, 0));
    }
    // n greedy steps
    model_ids greedy(int n) {
        model_ids out;
        for (int i = 0; i < n; i++) {
            int id = engine_sample(s, nullptr, &err);
            EXPECT_GE(id, 0) << err.msg;
            if (id < 0)
                break;
            out.push_back(id);
            if (i + 1 < n) {
                EXPECT_EQ(engine_eval(s, &id, 1, &err), 0) << err.msg;
            }
        }
        return out;
    }
    std::string generate(engine_generate_options o, engine_result *result = nullptr) {
        std::string text;
        int r = engine_generate(
            s, &o,
            [](void *user, const char *t, size_t n) {
                static_cast<std::string *>(user)->append(t, n);
                return 0;
            },
            &text, result, &err);
        EXPECT_EQ(r, 0) << err.msg;
        return text;
    }
};

const std::string model_shipped = test::root_path("models/tiny-chat-q8_0.gguf");

// A fixed pseudo-random prompt.
model_ids model_prompt(int n, int n_vocab, uint32_t seed = 12345) {
    model_ids ids;
    uint32_t x = seed;
    for (int i = 0; i < n; i++)
        ids.push_back(int32_t((x = x * 1664525u + 1013904223u) >> 8) % n_vocab);
    return ids;
}

// A synthetic model of tools/make_model, which the build folder has.
std::string model_make(const test::temp_dir &dir, const std::string &options) {
    const char *build = getenv("ENGINE_BUILD");
    const std::string path = dir / "model.gguf";
    const std::string tool = test::root_path(std::string(build && *build ? build : "build/release") + "/make_model");
    const test::command_result r = test::shell("'" + tool + "' " + path + " " + options);
    EXPECT_EQ(r.code, 0) << r.err;
    return path;
}

} // namespace

#endif
