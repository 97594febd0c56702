// Gemma 3: against llama.cpp, and what its window layers see. The other architectures are in test_model.cpp.
#include "unit.h"

#include "gguf_writer.h"
#include "opened.h"

#include <deque>
#include <functional>

namespace {

typedef std::vector<std::vector<float>> arch_rows; // logits after each token

// Every test's model is this one with other options behind it.
const std::string arch_tiny = "--preset gemma3-tiny ";

// Not the other suites' prompt: the golden logits belong to this one.
model_ids arch_prompt(int n, int n_vocab) { return model_prompt(n, n_vocab, 4321); }

// The logits after each of `ids`, evaluated `chunk` tokens at a time.
arch_rows arch_run(const std::string &path, const model_ids &ids, int chunk, int threads = 1, const char *cpu = "") {
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

} // namespace

// The three largest logits of llama.cpp after 32, 33 and 200 tokens: the first window is full, has moved by one, is far
// from the start.
TEST(Arch, Gemma3GoldenOfLlamaCpp) {
    const struct {
        int32_t id;
        float logit;
    } golden[3][3] = {{{22, 15.233f}, {157, 8.920f}, {111, 8.520f}},
                      {{247, 17.661f}, {225, 8.497f}, {33, 8.129f}},
                      {{51, 18.317f}, {82, 8.410f}, {179, 8.078f}}};
    test::temp_dir dir;
    const arch_rows rows = arch_run(model_make(dir, arch_tiny), arch_prompt(200, 320), 512);
    for (int i = 0; i < 3; i++)
        for (const auto &top : golden[i])
            EXPECT_NEAR(rows[size_t(i < 2 ? 31 + i : 199)][size_t(top.id)], top.logit, 0.01) << i << " " << top.id;
}

// Wrong windows, bases or scales differ by 1 and more. llama.cpp looks gelu up in a table of halves, and F16 matrices
// are multiplied with activations as halves there, so that deep models differ a little.
TEST(Arch, Gemma3EqualsLlamaCpp) {
    if (!test::exists(test::root_path("tests/node_modules/node-llama-cpp")))
        GTEST_SKIP() << "[npm] no node-llama-cpp in tests/node_modules";
    const struct {
        const char *options;
        int n;
        double tolerance;
    } cases[] = {
        {"", 200, 0.02}, // window 32
        {"--type F16 --head-dim 40 --heads 3 --kv-heads 1 --embd 60 --ffn 90 --layers 13 --window 16", 150, 0.05},
        {"--window 64 --rope-scaling linear --rope-factor 8", 300, 0.02},
        {"--layers 62 --embd 64 --head-dim 24 --ffn 80", 60, 0.05}, // the 27B's scale of q . k
        {"--window 1 --window-pattern 3 --rope-scaling yarn --rope-factor 4 --rope-orig-ctx 64", 150, 0.02},
    };
    std::vector<std::string> command = {"node", test::root_path("tests/arch_oracle.mjs")};
    std::deque<test::temp_dir> dirs;
    for (const auto &c : cases) {
        dirs.emplace_back();
        command.push_back(model_make(dirs.back(), arch_tiny + c.options));
        std::string tokens;
        for (int32_t id : arch_prompt(c.n, 320))
            tokens += (tokens.empty() ? "" : ",") + std::to_string(id);
        command.push_back(tokens);
    }
    const test::command_result r = test::run(command);
    ASSERT_EQ(r.code, 0) << r.err;
    const char *at = r.out.c_str();
    for (const auto &c : cases) {
        double worst = 0;
        for (const std::vector<float> &row :
             arch_run(command[size_t(2 + 2 * (&c - cases))], arch_prompt(c.n, 320), 512)) {
            ASSERT_EQ(row.size(), 320u);
            std::vector<float> want;
            for (char *end; want.size() < row.size(); at = end) {
                want.push_back(strtof(at, &end));
                ASSERT_NE(at, end) << "the oracle's output is short";
                worst = std::max(worst, double(std::fabs(want.back() - row[want.size() - 1])));
            }
            // The same choice, or one that is as good.
            const auto best = std::max_element(want.begin(), want.end()) - want.begin();
            EXPECT_GE(row[size_t(best)], *std::max_element(row.begin(), row.end()) - 2 * float(c.tolerance));
        }
        EXPECT_LT(worst, c.tolerance) << c.options;
    }
    EXPECT_STREQ(at, "\n");
}

TEST(Arch, Gemma3SameBitsForEveryChunkThreadAndInstructionSet) {
    test::temp_dir dir;
    const std::string path = model_make(dir, arch_tiny + "--type Q8_0 --head-dim 40");
    const model_ids ids = arch_prompt(160, 320);
    const arch_rows want = arch_run(path, ids, 160, 1, "plain");
    for (const char *cpu : {"plain", "avx2", "avx512"})
        for (int threads : {1, 2, 3})
            for (int chunk : {1, 3, 31, 127, 128, 129, 160}) {
                // The full product in the long form; else all chunk sizes with one thread, or three of them where plain
                // code is slow, and two with more threads.
                const bool few = threads > 1 ? chunk == 31 || chunk == 129 : *cpu != 'p' || chunk == 3 || chunk > 128;
                if (!few && !test::long_tests())
                    continue;
                EXPECT_EQ(arch_run(path, ids, chunk, threads, cpu), want)
                    << cpu << " threads " << threads << " chunk " << chunk;
            }
}

// Windows that begin far behind the first pages, and inside attention's splits of 2048 tokens.
TEST(Arch, Gemma3SameBitsInLongContexts) {
    test::temp_dir dir;
    const std::string path =
        model_make(dir, arch_tiny + "--layers 2 --window-pattern 2 --window 100 --embd 32 --ctx 4096");
    const model_ids ids = arch_prompt(2250, 320);
    const arch_rows want = arch_run(path, ids, 512, 2);
    EXPECT_EQ(arch_run(path, ids, 200, 3), want);
    EXPECT_EQ(arch_run(path, ids, 129, 1, "avx2"), want);
    EXPECT_EQ(arch_run(path, ids, 1, 1), want);
}

// A layer with window 16 sees 15 tokens further back; three of them see 45 back, and nothing before that.
TEST(Arch, WindowLayersForgetOldTokens) {
    for (int layers : {1, 3}) {
        test::temp_dir dir;
        const std::string options = arch_tiny + "--window 16 --layers " + std::to_string(layers);
        model_ids ids = arch_prompt(200, 320), other = ids;
        other[0] = (ids[0] + 1) % 320;
        const size_t reach = size_t(layers) * 15;
        const std::string path = model_make(dir, options + " --window-pattern 0");
        for (int chunk : {1, 16, 17, 200}) {
            const arch_rows a = arch_run(path, ids, chunk), b = arch_run(path, other, chunk);
            for (size_t i = 0; i < a.size(); i++)
                EXPECT_EQ(a[i] == b[i], i > reach) << i << " with " << layers << " layers";
        }
        // With one layer that sees everything, all rows change.
        const std::string mixed = model_make(dir, options + " --window-pattern " + std::to_string(layers));
        const arch_rows a = arch_run(mixed, ids, 200), b = arch_run(mixed, other, 200);
        for (size_t i = 0; i < a.size(); i++)
            EXPECT_NE(a[i], b[i]) << i;
    }
}

// A window that is not full yet changes nothing: 15 and 16 tokens in a window of 16 are seen as in a large one.
TEST(Arch, WindowEdges) {
    test::temp_dir dir, dir_all;
    const std::string path = model_make(dir, arch_tiny + "--window 16"),
                      all = model_make(dir_all, arch_tiny + "--window 1000000000");
    for (int n : {1, 15, 16, 17, 18}) {
        const model_ids ids = arch_prompt(n, 320);
        const arch_rows a = arch_run(path, ids, 512), b = arch_run(all, ids, 512);
        for (size_t i = 0; i < a.size(); i++)
            EXPECT_EQ(a[i] == b[i], i < 16) << i << " of " << n;
    }
}

TEST(Arch, WindowLayersAfterRewind) {
    test::temp_dir dir;
    const std::string path = model_make(dir, arch_tiny + "--window 16");
    const model_ids ids = arch_prompt(300, 320);
    const arch_rows want = arch_run(path, ids, 512);
    engine_error err = {};
    engine_model *m = nullptr;
    engine_session *s = nullptr;
    ASSERT_EQ(engine_open(&m, path.c_str(), nullptr, &err), 0) << err.msg;
    ASSERT_EQ(engine_session_new(&s, m, nullptr, &err), 0) << err.msg;
    for (size_t keep : {size_t(300), size_t(299), size_t(200), size_t(129), size_t(128), size_t(16), size_t(1)}) {
        ASSERT_GE(engine_sync(s, ids.data(), ids.size(), &err), 0) << err.msg;
        ASSERT_EQ(engine_rewind(s, keep, &err), 0) << err.msg;
        const float *l = nullptr;
        ASSERT_EQ(engine_logits(s, &l, &err), 320) << err.msg;
        EXPECT_EQ(std::vector<float>(l, l + 320), want[keep - 1]) << keep;
        ASSERT_GE(engine_sync(s, ids.data(), ids.size(), &err), 0) << err.msg;
        ASSERT_EQ(engine_logits(s, &l, &err), 320) << err.msg;
        EXPECT_EQ(std::vector<float>(l, l + 320), want.back()) << keep;
    }
    engine_session_free(s);
    engine_close(m);
}

namespace {

// Windows of the layers that load_windows makes from the keys; an Error's text comes back in `error`.
std::string arch_windows(int n_layer, const std::function<void(gguf_writer &)> &add, bool base = true) {
    gguf_writer g;
    g.add_string("general.architecture", "gemma3");
    if (base)
        g.add_f32("gemma3.rope.freq_base", 1e6f);
    add(g);
    const std::string bytes = g.bytes();
    model_file f = parse_gguf(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), "windows.gguf");
    weights w;
    w.hp.n_rot = 8;
    w.layers.resize(size_t(n_layer));
    try {
        load_windows(f, "gemma3.", w);
    } catch (const Error &e) {
        return e.msg;
    }
    std::string out;
    for (const layer &l : w.layers) {
        EXPECT_EQ(l.rotary, l.window > 0);
        out += (out.empty() ? "" : " ") + std::to_string(l.window);
    }
    if (!w.freqs[1].empty()) {
        EXPECT_EQ(w.freqs[1].size(), 4u);
        out += strf("; %.3g", w.freqs[1][1]);
    }
    return out;
}

} // namespace

TEST(Arch, WindowPatterns) {
    const std::string window = "gemma3.attention.sliding_window", pattern = window + "_pattern";
    const auto with = [&](int n_layer, const std::function<void(gguf_writer &)> &add) {
        return arch_windows(n_layer, [&](gguf_writer &g) {
            g.add_u32(window, 9);
            add(g);
        });
    };
    EXPECT_EQ(with(7, [&](gguf_writer &) {}), "9 9 9 9 9 0 9; 0.1");
    EXPECT_EQ(with(4, [&](gguf_writer &g) { g.add_u32(pattern, 2); }), "9 0 9 0; 0.1");
    EXPECT_EQ(with(3, [&](gguf_writer &g) { g.add_u32(pattern, 0); }), "9 9 9; 0.1");
    EXPECT_EQ(with(3, [&](gguf_writer &g) { g.add_u32(pattern, 1); }), "0 0 0");
    EXPECT_EQ(with(3, [&](gguf_writer &g) { g.add_i32s(pattern, {1, 0, 1}); }), "9 0 9; 0.1");
    const auto bools = [&](const std::vector<uint8_t> &flags) {
        return with(3, [&](gguf_writer &g) { g.add_bools(pattern, flags); });
    };
    EXPECT_EQ(bools({0, 1, 1}), "0 9 9; 0.1");
    EXPECT_EQ(with(1, [&](gguf_writer &g) { g.add_f32("gemma3.rope.freq_base_swa", 160000.0f); }), "9; 0.05");

    const std::string file = "windows.gguf: ";
    EXPECT_EQ(bools({0, 1}), file + pattern + ": has 2 items, but the model has 3 layers");
    EXPECT_EQ(bools({}), file + pattern + ": has 0 items, but the model has 3 layers");
    for (const std::string &got : {with(3,
                                        [&](gguf_writer &g) {
                                            g.add_strings(pattern, {"a", "b", "c"});
                                        }),
                                   with(3, [&](gguf_writer &g) { g.add_string(pattern, "6"); }),
                                   with(3, [&](gguf_writer &g) { g.add_i32(pattern, -1); })})
        EXPECT_EQ(got.substr(0, file.size() + pattern.size() + 2), file + pattern + ": ");
    const std::string base = "gemma3.rope.freq_base_swa", error = file + base + ": ";
    for (float x : {0.5f, -1.0f, 1e13f})
        EXPECT_EQ(with(3, [&](gguf_writer &g) { g.add_f32(base, x); }).substr(0, error.size()), error);
    EXPECT_EQ(arch_windows(3, [](gguf_writer &) {}), file + window + ": is missing");
    EXPECT_EQ(arch_windows(3, [&](gguf_writer &g) { g.add_u32(window, 0); }).substr(0, 46),
              (file + window + ": ").substr(0, 46));
    EXPECT_EQ(arch_windows(
                  3, [&](gguf_writer &g) { g.add_u32(window, 9); }, false),
              file + "gemma3.rope.freq_base: is missing");
}

// Every number of the metadata replaced with numbers that trip a careless reader: a message, or logits that are
// numbers.
TEST(Arch, Gemma3WithWrongNumbers) {
    test::temp_dir dir;
    const std::string path =
        model_make(dir, arch_tiny + "--layers 2 --window-pattern 2 --rope-scaling linear --rope-factor 2");
    const std::string valid = test::read_file(path);
    const model_ids ids = arch_prompt(40, 320);
    int numbers = 0, opened = 0, refused = 0;
    for (size_t at = 0; (at = valid.find("gemma3.", at)) != std::string::npos; at++) {
        uint64_t length;
        uint32_t type;
        memcpy(&length, &valid[at - 8], 8);
        memcpy(&type, &valid[at + length], 4);
        if (type != GGUF_U32 && type != GGUF_F32)
            continue;
        numbers++;
        for (uint32_t value : {0u, 1u, 2u, 41u, 0x7fffffffu, 0x80000000u, 0xffffffffu, 0x7fc00000u, 0x7f800000u,
                               0x3f800000u, 0x00000001u, 0x60ad78ecu}) {
            std::string bytes = valid;
            memcpy(&bytes[at + length + 4], &value, 4);
            test::write_file(path, bytes);
            engine_error err = {};
            engine_model *m = nullptr;
            engine_session *s = nullptr;
            engine_open_options open = {};
            open.threads = 1;
            engine_session_options session = {};
            session.n_ctx = 64;
            const float *l = nullptr;
            int code = engine_open(&m, path.c_str(), &open, &err);
            if (code == 0)
                code = engine_session_new(&s, m, &session, &err);
            if (code == 0)
                code = engine_sync(s, ids.data(), ids.size(), &err);
            if (code >= 0)
                code = engine_logits(s, &l, &err);
            (code < 0 ? refused : opened)++;
            EXPECT_EQ(code < 0, *err.msg != 0) << err.msg;
            for (int i = 0; i < code; i++)
                EXPECT_TRUE(std::isfinite(l[i])) << valid.substr(at, length) << " " << value;
            engine_session_free(s);
            engine_close(m);
        }
    }
    EXPECT_GE(numbers, 14);
    EXPECT_GT(opened, 30);
    EXPECT_GT(refused, 60);
}
