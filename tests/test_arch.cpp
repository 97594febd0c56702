// Gemma 3: against llama.cpp, and what its window layers see. The other architectures are in test_model.cpp.
#include "unit.h"

#include "gguf_writer.h"

namespace {

typedef std::vector<int32_t> arch_ids;
typedef std::vector<std::vector<float>> arch_rows; // logits after each token

// Every test's model is this one with other options behind it.
const std::string arch_tiny = "--preset gemma3-tiny ";

std::string arch_make(const test::temp_dir &dir, const std::string &options) {
    const char *build = getenv("ENGINE_BUILD");
    const std::string path = dir / "model.gguf";
    const std::string tool = test::root_path(std::string(build && *build ? build : "build/release") + "/make_model");
    const test::command_result r = test::shell("'" + tool + "' " + path + " " + options);
    EXPECT_EQ(r.code, 0) << r.err;
    return path;
}

arch_ids arch_prompt(int n, int n_vocab) {
    arch_ids ids;
    uint32_t x = 4321;
    for (int i = 0; i < n; i++)
        ids.push_back(int32_t((x = x * 1664525u + 1013904223u) >> 8) % n_vocab);
    return ids;
}

// The logits after each of `ids`, evaluated `chunk` tokens at a time.
arch_rows arch_run(const std::string &path, const arch_ids &ids, int chunk, int threads = 1, const char *cpu = "") {
    arch_rows rows;
    engine_error err = {};
    engine_model *m = nullptr;
    engine_session *s = nullptr;
    engine_open_options open = {};
    open.threads = threads;
    engine_session_options session = {};
    session.n_ctx = int(ids.size()), session.chunk = chunk;
    const auto keep = [](void *user, size_t, const float *l) {
        static_cast<arch_rows *>(user)->emplace_back(l, l + 320);
        return 0;
    };
    setenv("ENGINE_CPU", cpu, 1);
    EXPECT_EQ(engine_open(&m, path.c_str(), &open, &err), 0) << err.msg;
    unsetenv("ENGINE_CPU");
    EXPECT_TRUE(m && engine_session_new(&s, m, &session, &err) == 0) << err.msg;
    EXPECT_TRUE(s && engine_eval_all(s, ids.data(), ids.size(), keep, &rows, &err) == 0) << err.msg;
    engine_session_free(s);
    engine_close(m);
    EXPECT_EQ(rows.size(), ids.size());
    rows.resize(ids.size());
    return rows;
}

std::string arch_list(const std::vector<int32_t> &v) {
    std::string s;
    for (int32_t x : v)
        s += (s.empty() ? "" : ",") + std::to_string(x);
    return s;
}

} // namespace

TEST(Arch, Gemma3EqualsLlamaCpp) {
    if (!test::exists(test::root_path("tests/node_modules/node-llama-cpp")))
        GTEST_SKIP() << "[npm] no node-llama-cpp in tests/node_modules";
    const struct {
        const char *options;
        int n;
    } cases[] = {
        {"", 200},                                            // window 32
        {"--type F16 --head-dim 40 --heads 3 --kv-heads 1 --embd 60 --ffn 90 --layers 13 --window 16", 150},
        {"--window 64 --rope-scaling linear --rope-factor 8", 300},
        {"--layers 62 --embd 64 --head-dim 24 --ffn 80", 60}, // the 27B's scale of q . k
        {"--window 1 --window-pattern 3", 40},
    };
    for (const auto &c : cases) {
        SCOPED_TRACE(c.options);
        test::temp_dir dir;
        const std::string path = arch_make(dir, arch_tiny + c.options);
        const arch_ids ids = arch_prompt(c.n, 320);
        arch_ids positions;
        for (int i = 0; i < c.n; i++)
            positions.push_back(i);
        const test::command_result r =
            test::run({"node", test::root_path("tests/arch_oracle.mjs"), path, arch_list(ids), arch_list(positions)});
        ASSERT_EQ(r.code, 0) << r.err;
        const arch_rows rows = arch_run(path, ids, 512);
        const char *at = r.out.c_str();
        double worst = 0;
        int other = 0;
        for (const std::vector<float> &row : rows) {
            std::vector<float> want;
            for (char *end; want.size() < row.size(); at = end)
                want.push_back(strtof(at, &end));
            for (size_t i = 0; i < row.size(); i++)
                worst = std::max(worst, std::fabs(double(row[i]) - double(want[i])));
            const size_t best = size_t(std::max_element(want.begin(), want.end()) - want.begin());
            other += *std::max_element(row.begin(), row.end()) - row[best] > 0.02f;
        }
        printf("%s: worst %g\n", c.options, worst);
        EXPECT_LT(worst, 0.02);
        EXPECT_EQ(other, 0);
        EXPECT_EQ(*at, '\n');
    }
}
