// tools/make_model: the models that it writes open, and their weights have the mean and the deviation that its comment
// says.
#include "unit.h"

#include "opened.h"

namespace {

struct tools_spread {
    double mean = 0, deviation = 0;
};

tools_spread tools_measure(const tensor_info &t) {
    std::vector<float> row(t.dims[0]);
    double sum = 0, squares = 0, n = double(t.dims[0] * t.dims[1]);
    for (uint64_t i = 0; i < t.dims[1]; i++) {
        decode_row(t.type, t.data + i * (t.bytes / t.dims[1]), row.data(), int64_t(row.size()));
        for (float v : row)
            sum += v, squares += double(v) * v;
    }
    return {sum / n, std::sqrt(squares / n - sum / n * (sum / n))};
}

TEST(Tools, MakeModelScalesTheWeightsOfEveryFormat) {
    for (const format &f : formats) {
        test::temp_dir dir;
        model_file file = open_model_file(
            model_make(dir, strf("--layers 1 --embd 512 --ffn 512 --vocab 512 --pure --type %s", f.name)).c_str(),
            false);
        const tensor_info *up = file.find("blk.0.ffn_up.weight"), *down = file.find("blk.0.ffn_down.weight");
        ASSERT_TRUE(up && down);
        EXPECT_EQ(up->type, f.type);
        const double unit = 1 / std::sqrt(512.0);
        tools_spread s = tools_measure(*up);
        EXPECT_NEAR(s.mean / unit, 0, 0.03) << f.name;
        EXPECT_NEAR(s.deviation / unit, 1, 0.05) << f.name;
        EXPECT_NEAR(tools_measure(*down).deviation / unit, std::sqrt(0.5), 0.05) << f.name;
    }
}

TEST(Tools, MakeModelIsDeterministicAndSeeded) {
    test::temp_dir dir;
    const std::string a = test::read_file(model_make(dir, "--type Q4_K_M --embd 256"));
    EXPECT_EQ(a, test::read_file(model_make(dir, "--embd 256 --type Q4_K_M --seed 1")));
    EXPECT_NE(a, test::read_file(model_make(dir, "--type Q4_K_M --embd 256 --seed 2")));
}

// Odd shapes of every architecture, and the mixes: whole models that the engine runs.
TEST(Tools, MakeModelWritesModelsThatRun) {
    struct {
        const char *options, *types; // a format that must be among the file's
    } cases[] = {
        {"--arch llama --embd 96 --heads 6 --kv-heads 3 --ffn 200 --type Q4_0", "Q4_0"},
        {"--arch llama --embd 72 --heads 3 --kv-heads 1 --ffn 36 --vocab 261 --type Q8_0", "F16"},
        {"--arch llama --layers 8 --embd 256 --ffn 512 --type Q4_K_M", "Q6_K"},
        {"--arch llama --embd 96 --type Q4_K_M", "Q5_0"},
        {"--arch llama --rope-scaling linear --rope-factor 4 --type F32", "F32"},
        {"--arch llama --rope-scaling yarn --rope-factor 4 --rope-orig-ctx 512 --type BF16", "BF16"},
        {"--arch llama --rope-factors --type MXFP4", "MXFP4"},
        {"--arch qwen2 --type Q5_1", "Q5_1"},
        {"--arch qwen3 --head-dim 48 --tied --type Q5_K_M --embd 256 --ffn 256", "Q5_K"},
    };
    for (const auto &c : cases) {
        test::temp_dir dir;
        const std::string path = model_make(dir, c.options);
        engine_error err = {};
        engine_model *model = nullptr;
        engine_session *session = nullptr;
        engine_open_options open = {};
        open.threads = 1;
        ASSERT_EQ(engine_open(&model, path.c_str(), &open, &err), 0) << c.options << ": " << err.msg;
        engine_model_info info = {};
        info.size = sizeof info;
        EXPECT_EQ(engine_info(model, &info, &err), 0);
        EXPECT_NE(strf(" %s ", info.types).find(std::string(" ") + c.types + " "), string::npos) << info.types;
        int32_t ids[64];
        int n = engine_tokenize(model, "the thing that is another one", size_t(-1), ENGINE_ADD_BOS, ids, 64, &err);
        EXPECT_GT(n, 5) << err.msg;
        const float *logits = nullptr;
        EXPECT_EQ(engine_session_new(&session, model, nullptr, &err), 0) << err.msg;
        EXPECT_EQ(engine_sync(session, ids, size_t(n), &err), 0) << err.msg;
        ASSERT_EQ(engine_logits(session, &logits, &err), info.n_vocab) << c.options << ": " << err.msg;
        double squares = 0;
        for (int i = 0; i < info.n_vocab; i++)
            squares += double(logits[i]) * logits[i] / info.n_vocab;
        EXPECT_GT(squares, 1) << c.options;
        EXPECT_LT(squares, 30) << c.options;
        engine_session_free(session);
        engine_close(model);
    }
}

TEST(Tools, MakeModelRefusesWhatItCannotMake) {
    test::temp_dir dir;
    const char *build = getenv("ENGINE_BUILD");
    const std::string tool = test::root_path(std::string(build && *build ? build : "build/release") + "/make_model");
    const std::vector<std::vector<std::string>> cases = {{"--heads", "3", "--kv-heads", "2"},
                                                         {"--vocab", "100"},
                                                         {"--type", "Q9"},
                                                         {"--embd", "-4"},
                                                         {"--head-dim", "33"},
                                                         {"--layers", "two"},
                                                         {"--layers"},
                                                         {"--colour", "red"},
                                                         {"--rope-scaling", "magic"},
                                                         {"--preset", "gpt-99"},
                                                         {"--arch", "x"},
                                                         {"--embd", "0"}};
    for (std::vector<std::string> arguments : cases) {
        arguments.insert(arguments.begin(), {tool, dir / "m.gguf"});
        test::command_result r = test::run(arguments);
        EXPECT_EQ(r.code, 2) << arguments[2];
        EXPECT_EQ(r.err.find("make_model: "), 0u) << r.err;
        EXPECT_FALSE(test::exists(dir / "m.gguf")) << arguments[2];
    }
    EXPECT_EQ(test::run({tool, dir / "none" + "/m.gguf"}).code, 1);
}

} // namespace
