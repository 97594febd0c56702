// Whole models through the C API: golden values, exactness, sessions, bad arguments, and the shape of the source.
#include "unit.h"

#include "gguf_writer.h"
#include "mutate.h"
#include "opened.h"

#include <nlohmann/json.hpp>

#include <chrono>
#include <map>
#include <regex>
#include <set>

namespace {

using nlohmann::json;
json model_json(const std::string &path) { return json::parse(test::read_file(path)); }

// ---- an independent forward pass ---------------------------------------------------------------------------------

// The model's logits after the last of `ids`, in double from the decoded weights, by the formulas of the architectures'
// papers. With `halves` keys and values are rounded to f16, as the cache does.
struct model_reference {
    model_file f;
    std::string arch;
    int n_layer, d, n_head, n_kv, hd, n_ff;
    double eps, base;
    typedef std::vector<double> vec;

    explicit model_reference(const std::string &path) : f(open_model_file(path.c_str(), false)) {
        arch = std::string(f.need_string("general.architecture"));
        const auto key = [&](const char *k, int64_t fallback) {
            return int(f.get_int(arch + "." + k, fallback, 0, 1 << 30));
        };
        n_layer = key("block_count", 0), d = key("embedding_length", 0), n_ff = key("feed_forward_length", 0);
        n_head = key("attention.head_count", 0), n_kv = key("attention.head_count_kv", n_head);
        hd = key("attention.key_length", d / n_head);
        eps = f.get_float(arch + ".attention.layer_norm_rms_epsilon", 0);
        base = f.get_float(arch + ".rope.freq_base", 10000);
    }
    vec times(const std::string &name, const vec &x, bool with_bias = true) {
        const tensor_info *t = f.find(name + ".weight"), *b = f.find(name + ".bias");
        EXPECT_TRUE(t) << name;
        vec y(t->dims[1]);
        std::vector<float> row(t->dims[0]), bias(y.size());
        if (b && with_bias)
            decode_row(b->type, b->data, bias.data(), int64_t(bias.size()));
        for (size_t o = 0; o < y.size(); o++) {
            decode_row(t->type, t->data + o * (t->bytes / y.size()), row.data(), int64_t(row.size()));
            y[o] = double(bias[o]);
            for (size_t i = 0; i < row.size(); i++)
                y[o] += double(row[i]) * x[i];
        }
        return y;
    }
    void norm(double *x, int n, const std::string &name) {
        const tensor_info *t = f.find(name + ".weight");
        std::vector<float> w(size_t(n), 1.0f);
        EXPECT_TRUE(t) << name;
        decode_row(t->type, t->data, w.data(), n);
        double sum = 0;
        for (int i = 0; i < n; i++)
            sum += x[i] * x[i];
        for (int i = 0; i < n; i++)
            x[i] *= double(w[size_t(i)]) / std::sqrt(sum / n + eps);
    }
    void rotate(double *x, int pos) {
        for (int i = 0; i < hd / 2; i++) {
            double angle = pos * std::pow(base, -2.0 * i / hd);
            if (f.get_string(arch + ".rope.scaling.type", "") == "linear")
                angle /= f.get_float(arch + ".rope.scaling.factor", 1);
            if (const tensor_info *factors = f.find("rope_freqs.weight")) {
                float divisor;
                memcpy(&divisor, factors->data + 4 * i, 4);
                angle /= double(divisor);
            }
            double &a = arch == "llama" ? x[2 * i] : x[i], &b = arch == "llama" ? x[2 * i + 1] : x[i + hd / 2];
            const double a0 = a, b0 = b;
            a = a0 * std::cos(angle) - b0 * std::sin(angle);
            b = a0 * std::sin(angle) + b0 * std::cos(angle);
        }
    }
    vec run(const model_ids &ids, bool halves) {
        const auto kept = [&](double v) { return halves ? double(half_to_float(float_to_half(float(v)))) : v; };
        std::vector<vec> xs;
        for (int32_t id : ids) {
            const tensor_info *t = f.find("token_embd.weight");
            std::vector<float> row(size_t(d), 0.0f);
            decode_row(t->type, t->data + size_t(id) * (t->bytes / t->dims[1]), row.data(), d);
            xs.emplace_back(row.begin(), row.end());
        }
        for (int l = 0; l < n_layer; l++) {
            const std::string blk = "blk." + std::to_string(l) + ".";
            std::vector<vec> ks, vs;
            for (size_t t = 0; t < ids.size(); t++) {
                vec h = xs[t];
                norm(h.data(), d, blk + "attn_norm");
                vec q = times(blk + "attn_q", h), k = times(blk + "attn_k", h), v = times(blk + "attn_v", h);
                for (int i = 0; i < n_head; i++) {
                    if (arch == "qwen3")
                        norm(&q[size_t(i * hd)], hd, blk + "attn_q_norm");
                    rotate(&q[size_t(i * hd)], int(t));
                }
                for (int i = 0; i < n_kv; i++) {
                    if (arch == "qwen3")
                        norm(&k[size_t(i * hd)], hd, blk + "attn_k_norm");
                    rotate(&k[size_t(i * hd)], int(t));
                }
                for (double &x : k)
                    x = kept(x);
                for (double &x : v)
                    x = kept(x);
                ks.push_back(k), vs.push_back(v);
                vec att(size_t(n_head * hd), 0.0);
                for (int i = 0; i < n_head; i++) {
                    const int kv = i / (n_head / n_kv);
                    vec p(t + 1);
                    double z = 0;
                    for (size_t s = 0; s <= t; s++) {
                        double dot = 0;
                        for (int c = 0; c < hd; c++)
                            dot += q[size_t(i * hd + c)] * ks[s][size_t(kv * hd + c)];
                        z += p[s] = std::exp(dot / std::sqrt(double(hd)));
                    }
                    for (size_t s = 0; s <= t; s++)
                        for (int c = 0; c < hd; c++)
                            att[size_t(i * hd + c)] += p[s] / z * vs[s][size_t(kv * hd + c)];
                }
                const vec o = times(blk + "attn_output", att);
                for (int i = 0; i < d; i++)
                    xs[t][size_t(i)] += o[size_t(i)];
                h = xs[t];
                norm(h.data(), d, blk + "ffn_norm");
                vec g = times(blk + "ffn_gate", h), u = times(blk + "ffn_up", h);
                for (size_t i = 0; i < g.size(); i++)
                    g[i] *= u[i] / (1 + std::exp(-g[i]));
                const vec y = times(blk + "ffn_down", g);
                for (int i = 0; i < d; i++)
                    xs[t][size_t(i)] += y[size_t(i)];
            }
        }
        norm(xs.back().data(), d, "output_norm");
        return times(f.find("output.weight") ? "output" : "token_embd", xs.back(), false);
    }
};

// The largest difference from the reference, as a share of the logits' deviation.
double model_distance(const std::vector<float> &got, const std::vector<double> &want) {
    EXPECT_EQ(got.size(), want.size());
    double most = 0, squares = 0;
    for (size_t i = 0; i < want.size(); i++) {
        most = std::max(most, std::fabs(double(got[i]) - want[i]));
        squares += want[i] * want[i];
    }
    return most / std::sqrt(squares / double(want.size()));
}

// ---- golden values of other people's implementations ----------------------------------------------------------

TEST(Model, StoriesGreedyIsThePublishedText) {
    NEED_SHARED(dir, "stories260K");
    const json want = model_json(dir + "/expected.json");
    const model_ids ids = want["greedy_from_bos"];
    for (const char *type : {"f32", "f16", "bf16"}) {
        open_model m(dir + "/stories260K-" + type + ".gguf");
        open_session s(m.m);
        EXPECT_EQ(m.encode(want["prompt"].get<std::string>(), ENGINE_ADD_BOS), want["prompt_ids"].get<model_ids>());
        s.sync({1});
        const model_ids got = s.greedy(int(ids.size()));
        EXPECT_EQ(got, ids) << type;
        model_ids first(got.begin(), got.begin() + 200); // the published run: 200 steps, the first of which is BOS
        const std::string text = want["greedy_text_expected_200_steps"];
        EXPECT_EQ(m.decode(first).substr(0, text.size()), text) << type;

        s.sync(want["prompt_ids"].get<model_ids>());
        const std::vector<float> l = s.logits(), expect = want["prompt_last_logits"].get<std::vector<float>>();
        ASSERT_EQ(l.size(), expect.size());
        if (type == std::string("f32")) { // the values are of these weights, and of exact cache rows; ours are f16
            EXPECT_LT(model_distance(l, std::vector<double>(expect.begin(), expect.end())), 1e-3);
        }
    }
}

// Mean negative log-likelihood of ids[1…) in nats, as a sum and a count; written apart from the engine's own.
void model_score(open_session &s, const model_ids &ids, int n_vocab, double *sum, int64_t *count) {
    struct state {
        const model_ids &ids;
        int n_vocab;
        double sum;
        int64_t count;
    } st{ids, n_vocab, 0, 0};
    s.sync({});
    const auto fn = [](void *user, size_t i, const float *l) {
        state &a = *static_cast<state *>(user);
        if (i + 1 < a.ids.size()) {
            long double z = 0;
            for (int k = 0; k < a.n_vocab; k++)
                z += expl((long double)l[k]);
            a.sum += double(logl(z) - (long double)l[a.ids[i + 1]]);
            a.count++;
        }
        return 0;
    };
    EXPECT_EQ(engine_eval_all(s.s, ids.data(), ids.size(), fn, &st, &s.err), 0) << s.err.msg;
    *sum += st.sum;
    *count += st.count;
}

TEST(Model, StoriesLikelihood) {
    NEED_SHARED(dir, "stories260K");
    const std::string all = test::read_file(dir + "/tinystories_10k.txt"), mark = "<|endoftext|>";
    for (const char *type : {"f32", "f16"}) {
        open_model m(dir + "/stories260K-" + type + ".gguf", 2);
        open_session s(m.m);
        double sum = 0;
        int64_t count = 0;
        size_t at = 0;
        for (int i = 0; i < 60; i++) {
            const size_t end = std::min(all.find(mark, at), all.size());
            std::string story = all.substr(at, end - at);
            story.erase(0, story.find_first_not_of(" \n\r\t"));
            story.erase(story.find_last_not_of(" \n\r\t") + 1);
            at = end + mark.size();
            model_ids ids = m.encode(story, ENGINE_ADD_BOS);
            if (ids.size() > 512)
                ids.resize(512);
            model_score(s, ids, 512, &sum, &count);
        }
        EXPECT_NEAR(sum / double(count), 1.3008460, 0.001) << type;
    }
}

TEST(Model, TinyChatGolden) {
    NEED_SHARED(dir, "tiny-chat");
    open_model m(dir + "/tiny-chat-f16.gguf", 2);
    open_session s(m.m);
    const json golden = model_json(dir + "/golden.json");
    ASSERT_EQ(golden["cases"].size(), 4u);
    for (const json &c : golden["cases"]) {
        const model_ids prompt = c["prompt_ids"], want = c["greedy_ids"];
        EXPECT_EQ(m.encode(c["prompt"].get<std::string>(), ENGINE_PARSE_SPECIAL), prompt);
        s.sync(prompt);
        const std::vector<float> l = s.logits();
        double l2 = 0;
        for (float x : l)
            l2 += double(x) * double(x);
        EXPECT_NEAR(std::sqrt(l2), c["logits_l2"].get<double>(), 2e-3 * std::sqrt(2048.0)); // each within 2e-3
        for (const json &top : c["logits_top10"])
            EXPECT_NEAR(l[top[0].get<size_t>()], top[1].get<float>(), 2e-3);
        size_t n = 0; // up to the first margin below 0.01
        while (n < want.size() && c["margins"][n].get<double>() >= 0.01)
            n++;
        EXPECT_EQ(s.greedy(int(n)), model_ids(want.begin(), want.begin() + std::ptrdiff_t(n)));
    }
}

TEST(Model, TinyChatPerplexity) {
    NEED_SHARED(dir, "tiny-chat");
    const std::string text = test::read_file(dir + "/heldout.txt");
    const struct {
        const char *type;
        double tolerance;
    } rows[] = {{"f16", 0.01}, {"q8_0", 0.003 * 21.066}, {"q4_0", 0.025 * 21.066}, {"q4_k_m", 0.025 * 21.066}};
    for (const auto &row : rows) {
        open_model m(dir + "/tiny-chat-" + row.type + ".gguf", 2);
        open_session s(m.m, 512);
        const model_ids ids = m.encode(text, 0);
        EXPECT_EQ(ids.size(), 33507u);
        double sum = 0;
        int64_t count = 0;
        for (size_t i = 0; i < ids.size(); i += 512)
            model_score(
                s,
                model_ids(ids.begin() + std::ptrdiff_t(i), ids.begin() + std::ptrdiff_t(std::min(i + 512, ids.size()))),
                2048, &sum, &count);
        EXPECT_EQ(count, 33441);
        EXPECT_NEAR(std::exp(sum / double(count)), 21.066, row.tolerance) << row.type;
    }
}

// ---- the same tokens give the same bits -------------------------------------------------------------------------

// The last logits of `ids` evaluated in one way, for comparison with ==.
std::vector<float> model_run(engine_model *m, const model_ids &ids, int chunk) {
    open_session s(m, int(ids.size()), chunk);
    s.sync(ids);
    return s.logits();
}

void model_check_invariance(const std::string &path, int n_tokens) {
    open_model base(path, 1, "plain");
    engine_model_info info = {};
    engine_info(base.m, &info, nullptr);
    const model_ids ids = model_prompt(n_tokens, info.n_vocab);
    const std::vector<float> want = model_run(base.m, ids, n_tokens);
    for (const char *cpu : {"plain", "avx2", "avx512"})
        for (int threads : {1, 2, 3}) {
            open_model m(path, threads, cpu);
            for (int chunk : {1, 2, 3, 5, 31, 127, 128, 129, 512}) {
                // The full product in the long form; else all chunk sizes with two threads, two of them with others.
                if (test::long_tests())
                    ;
                else if ((threads != 2 && chunk != 1 && chunk != 129) || (*cpu == 'p' && (threads != 2 || chunk < 31)))
                    continue;
                EXPECT_EQ(model_run(m.m, ids, chunk), want)
                    << path << " " << cpu << " threads " << threads << " chunk " << chunk;
            }
        }
}

TEST(Model, SameBitsForEveryChunkThreadAndInstructionSet) { model_check_invariance(model_shipped, 300); }

TEST(Model, SameBitsSharedFiles) {
    NEED_SHARED(dir, "stories260K");
    for (const char *f : {"f32", "f16", "bf16", "q8_0", "q5_1", "q4_0"})
        model_check_invariance(dir + "/stories260K-" + f + ".gguf", 140);
    if (!test::long_tests())
        return;
    for (const char *f : {"f16", "q4_0", "q4_k_m"})
        model_check_invariance(dir + "/../tiny-chat/tiny-chat-" + f + ".gguf", 140);
}

TEST(Model, SameBitsForEveryRowOfLogits) {
    open_model m(model_shipped);
    const model_ids ids = model_prompt(150, 2048);
    open_session all(m.m, 256, 64), one(m.m, 256);
    std::vector<std::vector<float>> rows;
    const auto keep = [](void *user, size_t i, const float *l) {
        auto &rows = *static_cast<std::vector<std::vector<float>> *>(user);
        EXPECT_EQ(i, rows.size());
        rows.emplace_back(l, l + 2048);
        return 0;
    };
    ASSERT_EQ(engine_eval_all(all.s, ids.data(), ids.size(), keep, &rows, &all.err), 0) << all.err.msg;
    ASSERT_EQ(rows.size(), ids.size());
    for (size_t i = 0; i < ids.size(); i++) {
        engine_eval(one.s, &ids[i], 1, nullptr);
        EXPECT_EQ(one.logits(), rows[i]) << i;
    }
}

TEST(Model, SameBitsWithoutMmap) {
    open_model a(model_shipped), b(model_shipped, 1, "", true);
    const model_ids ids = model_prompt(40, 2048);
    EXPECT_EQ(model_run(a.m, ids, 512), model_run(b.m, ids, 512));
}

TEST(Model, SameBitsAfterReuseAndRewind) {
    open_model cold(model_shipped); // one of its own, with which no pages are shared
    const model_ids ids = model_prompt(400, 2048);
    for (size_t keep :
         {size_t(0), size_t(1), size_t(127), size_t(128), size_t(129), size_t(300), size_t(399), size_t(400)}) {
        open_model m(model_shipped);
        open_session s(m.m, 512);
        model_ids other = ids;
        for (size_t i = keep; i < other.size(); i++)
            other[i] = (other[i] + 1) % 2048;
        other.resize(std::min(other.size(), keep + 7));
        s.sync(other);
        // The last token is evaluated again when only its logits are missing.
        EXPECT_EQ(s.sync(ids), int(keep));
        EXPECT_EQ(s.logits(), model_run(cold.m, ids, 512)) << keep;
        if (keep > 0) {
            ASSERT_EQ(engine_rewind(s.s, keep, &s.err), 0) << s.err.msg;
            EXPECT_EQ(s.logits(), model_run(cold.m, model_ids(ids.begin(), ids.begin() + std::ptrdiff_t(keep)), 512))
                << keep;
        }
    }
}

// Every architecture in odd shapes: with float weights only the cache's f16 rows differ from the exact result, and with
// the reference rounding these as well the rest is float rounding.
TEST(Model, EqualsAnIndependentForwardPass) {
    const char *const options[] = {
        "--arch llama --layers 3 --embd 96 --heads 6 --kv-heads 2 --ffn 172 --vocab 300 --type F32",
        "--arch llama --layers 2 --embd 60 --heads 3 --kv-heads 3 --head-dim 20 --ffn 33 --vocab 301 --tied --type F32",
        "--arch qwen2 --layers 3 --embd 56 --heads 7 --kv-heads 1 --ffn 100 --vocab 400 --type F16",
        "--arch qwen3 --layers 3 --embd 64 --heads 4 --kv-heads 2 --head-dim 48 --ffn 96 --vocab 333 --type BF16",
        "--arch qwen3 --layers 2 --embd 80 --heads 5 --kv-heads 5 --head-dim 34 --ffn 70 --vocab 300 --tied --type F32",
        "--arch llama --layers 2 --embd 64 --heads 4 --ffn 70 --vocab 300 --rope-factors --type F32",
        "--arch qwen2 --embd 64 --heads 4 --ffn 70 --vocab 300 --rope-scaling linear --rope-factor 4 --type F32",
    };
    for (const char *o : options) {
        test::temp_dir dir;
        const std::string path = model_make(dir, o);
        open_model m(path, 2);
        engine_model_info info = {};
        engine_info(m.m, &info, nullptr);
        model_reference reference(path);
        for (int n : {1, 2, 131}) {
            const model_ids ids = model_prompt(n, info.n_vocab);
            open_session s(m.m);
            s.sync(ids);
            const std::vector<float> got = s.logits();
            EXPECT_LT(model_distance(got, reference.run(ids, true)), 1e-3) << o << " " << n;
            EXPECT_LT(model_distance(got, reference.run(ids, false)), 1e-2) << o << " " << n;
        }
    }
}

// Quantized weights: the int8 activations are the only other difference.
TEST(Model, EveryFormatIsNearTheIndependentForwardPass) {
    for (const format &f : formats) {
        test::temp_dir dir;
        const std::string path = model_make(
            dir, std::string(
                     "--arch llama --layers 2 --embd 256 --heads 4 --kv-heads 2 --ffn 512 --vocab 300 --pure --type ") +
                     f.name);
        open_model m(path);
        const model_ids ids = model_prompt(12, 300);
        const std::vector<float> want = model_run(m.m, ids, 12);
        EXPECT_LT(model_distance(want, model_reference(path).run(ids, true)), 0.1) << f.name;
        for (const char *cpu : {"plain", "avx2", "avx512"}) {
            open_model other(path, 2, cpu);
            EXPECT_EQ(model_run(other.m, ids, 5), want) << f.name << " " << cpu;
            if (*cpu != 'p') {
                EXPECT_EQ(model_run(other.m, ids, 1), want) << f.name << " " << cpu;
            }
        }
    }
}

// ---- rotary scaling against formulas written apart --------------------------------------------------------------

// The table of frequencies that load_rotary makes from the given keys, for head size n and a trained context of 4096.
weights model_rotary(int n, const std::vector<std::pair<std::string, std::string>> &strings,
                     const std::vector<std::pair<std::string, float>> &floats, const std::vector<float> &factors) {
    gguf_writer g;
    g.add_string("general.architecture", "llama");
    for (const auto &kv : strings)
        g.add_string(kv.first, kv.second);
    for (const auto &kv : floats)
        g.add_f32(kv.first, kv.second);
    g.add_u32("llama.rope.scaling.original_context_length", 4096);
    if (!factors.empty())
        g.add_floats("rope_freqs.weight", {factors.size()}, factors);
    const std::string bytes = g.bytes();
    model_file f = parse_gguf(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), "rotary.gguf");
    weights w;
    w.hp = {};
    w.hp.n_rot = n;
    w.hp.n_ctx_train = 4096;
    load_rotary(f, "llama.", w);
    return w;
}

TEST(Model, RotaryPlainLinearAndFactors) {
    const weights plain = model_rotary(64, {}, {{"llama.rope.freq_base", 500000.0f}}, {});
    const weights linear = model_rotary(64, {{"llama.rope.scaling.type", "linear"}},
                                        {{"llama.rope.freq_base", 500000.0f}, {"llama.rope.scaling.factor", 4.0f}}, {});
    std::vector<float> factors;
    for (int i = 0; i < 32; i++)
        factors.push_back(1.0f + float(i) / 4);
    const weights llama3 = model_rotary(64, {}, {{"llama.rope.freq_base", 500000.0f}}, factors);
    for (int i = 0; i < 32; i++) {
        const double f = std::pow(500000.0, -2.0 * i / 64);
        EXPECT_NEAR(plain.freqs[0][size_t(i)] / f, 1, 1e-14);
        EXPECT_NEAR(linear.freqs[0][size_t(i)] / (f / 4), 1, 1e-14);
        EXPECT_NEAR(llama3.freqs[0][size_t(i)] / (f / (1.0 + i / 4.0)), 1, 1e-14);
    }
    EXPECT_EQ(plain.hp.rope_scale, 1);
}

// Independent reading of the YaRN paper in terms of wavelengths: a pair that turns more than beta_fast times within the
// original context is kept, one that turns fewer than beta_slow times is divided by s.
TEST(Model, RotaryYarn) {
    const double s = 8, base = 10000, ctx = 4096;
    const int n = 128;
    const weights w =
        model_rotary(n, {{"llama.rope.scaling.type", "yarn"}}, {{"llama.rope.scaling.factor", float(s)}}, {});
    int kept = 0, divided = 0, between = 0;
    for (int i = 0; i < n / 2; i++) {
        const double f = std::pow(base, -2.0 * i / n), turns = ctx * f / (2 * M_PI), ratio = w.freqs[0][size_t(i)] / f;
        if (turns > 32 * 1.2) { // the ramp's ends are rounded to whole pairs
            EXPECT_NEAR(ratio, 1, 1e-12);
            kept++;
        } else if (turns < 1 / 1.2) {
            EXPECT_NEAR(ratio, 1 / s, 1e-12);
            divided++;
        } else {
            EXPECT_GE(ratio, 1 / s - 1e-12);
            EXPECT_LE(ratio, 1 + 1e-12);
            between++;
        }
    }
    EXPECT_GT(kept, 5);
    EXPECT_GT(divided, 5);
    EXPECT_GT(between, 5);
    EXPECT_NEAR(w.hp.rope_scale, 0.1 * std::log(s) + 1, 1e-6);
    // Pair by pair: the ramp runs linearly over whole pairs, from the one that turns 32 times to the one that turns
    // once.
    const double low = std::floor(n * std::log(ctx / (32 * 2 * M_PI)) / (2 * std::log(base)));
    const double high = std::ceil(n * std::log(ctx / (1 * 2 * M_PI)) / (2 * std::log(base)));
    for (int i = 0; i < n / 2; i++) {
        const double keep = 1 - std::min(std::max((i - low) / (high - low), 0.0), 1.0);
        const double f = std::pow(base, -2.0 * i / n);
        EXPECT_NEAR(w.freqs[0][size_t(i)] / (f / s * (1 - keep) + f * keep), 1, 1e-12) << i;
    }
    const weights implied = model_rotary(n, {}, {{"llama.rope.scaling.factor", 4.0f}}, {});
    EXPECT_NEAR(implied.freqs[0][1] / (std::pow(10000.0, -2.0 / n) / 4), 1, 1e-12)
        << "a factor without a type is linear";
    for (const char *type : {"longrope", "yarn", "linear", "xyz"}) {
        EXPECT_THROW(model_rotary(n, {{"llama.rope.scaling.type", type}}, {}, {}), Error)
            << type << " without a factor";
        EXPECT_THROW(model_rotary(n, {{"llama.rope.scaling.type", type}}, {{"llama.rope.scaling.factor", 0.5f}}, {}),
                     Error);
    }
    EXPECT_THROW(model_rotary(n, {{"llama.rope.scaling.type", "longrope"}}, {{"llama.rope.scaling.factor", 2.0f}}, {}),
                 Error);
    EXPECT_THROW(model_rotary(4, {}, {}, {1.0f, 1e-30f}), Error);
}

TEST(Model, OwnElementaryFunctions) {
    uint64_t x = 1;
    for (int i = 0; i < 200000; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        const double u = double(x >> 11) * 0x1p-53;
        double s, c;
        const double angle = u * (i % 2 ? 1e6 : 10);
        exact_sin_cos(angle, &s, &c);
        EXPECT_NEAR(s, std::sin(angle), 3e-16 + 1e-16 * angle * 0x1p-20);
        EXPECT_NEAR(c, std::cos(angle), 3e-16 + 1e-16 * angle * 0x1p-20);
        const double e = (u - 0.5) * 1400;
        EXPECT_NEAR(exact_exp(e) / std::exp(e), 1, 4e-16 * (1 + std::fabs(e) / 350)) << e;
        EXPECT_NEAR(exact_log(std::exp(e)), std::log(std::exp(e)), 4e-16 * (1 + std::fabs(e)));
    }
    EXPECT_EQ(exact_exp(-1000), 0);
    EXPECT_EQ(exact_exp(0), 1);
    EXPECT_EQ(exact_exp(1000), HUGE_VAL);
    EXPECT_EQ(exact_log(1), 0);
}

// ---- sessions ------------------------------------------------------------------------------------------------

TEST(Session, ContextIsNeverExceeded) {
    open_model m(model_shipped);
    open_session s(m.m, 64);
    const model_ids ids = model_prompt(100, 2048);
    EXPECT_EQ(engine_sync(s.s, ids.data(), 100, &s.err), ENGINE_ECONTEXT);
    EXPECT_NE(std::string(s.err.msg).find("100"), std::string::npos);
    EXPECT_NE(std::string(s.err.msg).find("64"), std::string::npos);
    EXPECT_NE(std::string(s.err.msg).find("exceeds the available context size"), std::string::npos);
    EXPECT_EQ(engine_tokens(s.s, nullptr, 0), 0);

    s.sync(model_ids(ids.begin(), ids.begin() + 60));
    engine_generate_options o = {};
    o.max_tokens = 50;
    o.ignore_end = 1;
    engine_result r = {};
    s.generate(o, &r);
    EXPECT_EQ(r.reason, ENGINE_STOP_CONTEXT);
    EXPECT_EQ(engine_tokens(s.s, nullptr, 0), 64);
    EXPECT_EQ(engine_eval(s.s, ids.data(), 1, &s.err), ENGINE_ECONTEXT);
    EXPECT_EQ(engine_tokens(s.s, nullptr, 0), 64);
}

TEST(Session, ChatAnswersAndStops) {
    open_model m(model_shipped);
    open_session s(m.m);
    s.sync(
        m.chat({{"user", "Hello"}, {"assistant", "Hello! How can I help you today?"}, {"user", "What is your name?"}}));
    engine_result r = {};
    engine_generate_options o = {};
    EXPECT_EQ(s.generate(o, &r), "My name is tiny-chat. I am a very small language model.");
    EXPECT_EQ(r.reason, ENGINE_STOP_END);

    engine_rewind(s.s, size_t(engine_tokens(s.s, nullptr, 0) - r.n_tokens), nullptr);
    const char *stops[] = {"zzz", "chat. I"};
    o.stops = stops;
    o.n_stops = 2;
    EXPECT_EQ(s.generate(o, &r), "My name is tiny-");
    EXPECT_EQ(r.reason, ENGINE_STOP_STRING);
    EXPECT_EQ(r.stop, stops[1]);

    engine_rewind(s.s, size_t(engine_tokens(s.s, nullptr, 0) - r.n_tokens), nullptr);
    o.n_stops = 0;
    o.max_tokens = 3;
    const std::string three = s.generate(o, &r);
    EXPECT_EQ(r.reason, ENGINE_STOP_LENGTH);
    EXPECT_EQ(r.n_tokens, 3);
    EXPECT_EQ(three, std::string("My name is tiny-chat").substr(0, three.size()));
    // Going on gives the rest, as if it had not been stopped.
    o.max_tokens = 0;
    EXPECT_EQ(three + s.generate(o, &r), "My name is tiny-chat. I am a very small language model.");
}

TEST(Session, MarkersInUserTextStayText) {
    open_model m(model_shipped);
    const model_ids ids = m.chat({{"user", "a<|im_end|>b"}});
    EXPECT_EQ(std::count(ids.begin(), ids.end(), 2047), 1);
    EXPECT_EQ(m.decode(ids, 1), "<|im_start|>user\na<|im_end|>b<|im_end|>\n<|im_start|>assistant\n");
    EXPECT_EQ(m.encode("<|im_end|>", ENGINE_PARSE_SPECIAL), model_ids{2047});
    EXPECT_GT(m.encode("<|im_end|>", 0).size(), 3u);
}

TEST(Session, CancelStopsPrefillAndNothingIsLost) {
    open_model m(model_shipped);
    open_session s(m.m, 2048, 16);
    const model_ids ids = model_prompt(600, 2048);
    const auto fn = [](void *user, int64_t done, int64_t total) {
        EXPECT_EQ(total, 600);
        if (done >= 64)
            engine_cancel(static_cast<engine_session *>(user));
        return 0;
    };
    engine_on_progress(s.s, fn, s.s);
    EXPECT_EQ(engine_sync(s.s, ids.data(), ids.size(), &s.err), ENGINE_ECANCELLED);
    EXPECT_EQ(engine_tokens(s.s, nullptr, 0), 64);
    engine_on_progress(s.s, nullptr, nullptr);
    EXPECT_EQ(s.sync(ids), 64);
    EXPECT_EQ(s.logits(), model_run(m.m, ids, 512));

    engine_cancel(s.s); // before the call: the next one ends at once
    engine_generate_options o = {};
    EXPECT_EQ(engine_generate(s.s, &o, nullptr, nullptr, nullptr, &s.err), ENGINE_ECANCELLED);
    EXPECT_EQ(s.logits(), model_run(m.m, ids, 512));

    engine_on_progress(
        s.s, [](void *, int64_t, int64_t) { return 1; }, nullptr);
    EXPECT_EQ(engine_sync(s.s, ids.data() + 1, 300, &s.err), ENGINE_ECANCELLED);
}

TEST(Session, CancelLosesNoTokenOfTheTimeline) {
    open_model m(model_shipped);
    open_session s(m.m, 512);
    const model_ids ids = model_prompt(100, 2048);
    s.sync(ids);
    const auto length = [&] { return engine_tokens(s.s, nullptr, 0); };
    const float *l;
    engine_rewind(s.s, 40, nullptr);
    engine_cancel(s.s);
    EXPECT_EQ(engine_logits(s.s, &l, &s.err), ENGINE_ECANCELLED);
    EXPECT_EQ(length(), 40);
    engine_generate_options o = {};
    o.max_tokens = 3;
    o.ignore_end = 1;
    s.generate(o); // leaves one token pending
    EXPECT_EQ(length(), 43);
    engine_cancel(s.s);
    EXPECT_EQ(engine_sample(s.s, nullptr, &s.err), ENGINE_ECANCELLED);
    EXPECT_EQ(length(), 43);
    // What the callback has seen stays in the timeline, and the result counts it.
    engine_result r = {};
    o.max_tokens = 50;
    const auto stop = [](void *user, const char *, size_t) {
        engine_cancel(static_cast<engine_session *>(user));
        return 0;
    };
    EXPECT_EQ(engine_generate(s.s, &o, stop, s.s, &r, &s.err), ENGINE_ECANCELLED);
    EXPECT_EQ(r.reason, ENGINE_STOP_CANCELLED);
    EXPECT_EQ(length(), 43 + r.n_tokens);
    // A request that comes too late is dropped with the call, not kept for the next.
    engine_logits(s.s, &l, nullptr);
    engine_eval_all(
        s.s, ids.data(), 1,
        [](void *user, size_t, const float *) {
            engine_cancel(static_cast<engine_session *>(user));
            return 0;
        },
        s.s, nullptr);
    EXPECT_GT(engine_logits(s.s, &l, &s.err), 0) << s.err.msg;

    engine_rewind(s.s, 0, nullptr);
    engine_cancel(s.s);
    EXPECT_EQ(engine_sync(s.s, ids.data(), 100, &s.err), ENGINE_ECANCELLED);
    engine_session_stats st = {};
    engine_stats(s.s, &st, nullptr);
    EXPECT_EQ(st.n_tokens, 0);
    EXPECT_EQ(st.kv_bytes, 0);
}

TEST(Session, CancelFromAnotherThread) {
    open_model m(model_shipped, 2);
    const model_ids ids = model_prompt(300, 2048);
    const std::vector<float> want = model_run(m.m, ids, 512);
    std::vector<std::thread> threads;
    std::vector<std::unique_ptr<open_session>> sessions;
    for (int i = 0; i < 4; i++)
        sessions.emplace_back(new open_session(m.m, 512, 32));
    std::atomic<int> running{4}, wrong{0}, cancelled{0};
    for (auto &s : sessions)
        threads.emplace_back([&, session = s->s] {
            for (int round = 0; round < 20; round++) {
                const float *l = nullptr;
                const int code = engine_sync(session, ids.data(), ids.size(), nullptr);
                cancelled += code == ENGINE_ECANCELLED;
                if (code < 0 && code != ENGINE_ECANCELLED)
                    wrong++;
                if (code >= 0 && engine_logits(session, &l, nullptr) > 0 && !std::equal(want.begin(), want.end(), l))
                    wrong++;
                engine_rewind(session, size_t(round * 7), nullptr);
            }
            running--;
        });
    for (unsigned i = 0; running.load(); i++) {
        engine_cancel(sessions[i % 2]->s); // two of the four
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
    for (std::thread &t : threads)
        t.join();
    EXPECT_EQ(wrong.load(), 0);
    EXPECT_GT(cancelled.load(), 0);
}

TEST(Session, CallbacksMayNotComputeOnTheirSession) {
    open_model m(model_shipped);
    open_session s(m.m, 512, 16);
    const model_ids ids = model_prompt(100, 2048);
    struct state {
        engine_session *s;
        int calls;
    } st{s.s, 0};
    const auto fn = [](void *user, int64_t done, int64_t total) {
        state &a = *static_cast<state *>(user);
        const int32_t one = 1;
        EXPECT_LT(done, total);
        EXPECT_EQ(engine_eval(a.s, &one, 1, nullptr), ENGINE_EINVAL);
        EXPECT_EQ(engine_rewind(a.s, 0, nullptr), ENGINE_EINVAL);
        a.calls++;
        return 0;
    };
    engine_on_progress(s.s, fn, &st);
    s.sync(ids);
    EXPECT_EQ(st.calls, 6); // between the seven chunks
    engine_generate_options o = {};
    o.max_tokens = 5;
    s.generate(o);
    EXPECT_EQ(st.calls, 6);
    engine_on_progress(s.s, nullptr, nullptr);
}

TEST(Session, FailedAllocationLeavesOtherSessionsAlone) {
    open_model m(model_shipped);
    open_session s(m.m, 512, 32);
    const model_ids ids = model_prompt(100, 2048);
    static int left;
    static const backend_ops *real;
    backend_ops failing = *m.m->ops;
    real = m.m->ops;
    failing.alloc = [](backend *be, uint64_t bytes) { return left-- > 0 ? real->alloc(be, bytes) : mem{nullptr, 0}; };
    m.m->ops = &failing;
    for (int n = 0; n < 16; n++) {
        left = n;
        engine_session *none = nullptr;
        engine_session_options o = {};
        o.chunk = 2048;
        EXPECT_EQ(engine_session_new(&none, m.m, &o, &s.err), ENGINE_ENOMEM) << n;
        EXPECT_EQ(none, nullptr);
    }
    m.m->ops = real;
    s.sync(ids);
    EXPECT_EQ(s.logits(), model_run(m.m, ids, 512));
}

TEST(Session, BackendErrorsKeepTheirWords) {
    open_model m(model_shipped);
    open_session s(m.m, 64);
    cpu_error(m.m->be.get(), "out of something", true);
    const int32_t one = 1;
    EXPECT_EQ(engine_sync(s.s, &one, 1, &s.err), ENGINE_ENOMEM);
    EXPECT_STREQ(s.err.msg, "out of something");
    EXPECT_EQ(engine_sync(s.s, &one, 1, &s.err), 0) << "an error is reported once";
}

TEST(Session, LogitsThatAreNotFiniteAreAnError) {
    test::temp_dir dir;
    const std::string path = model_make(dir, "--layers 1 --embd 32 --heads 2 --ffn 32 --vocab 280 --type F32");
    std::string bytes = test::read_file(path);
    const model_file f = parse_gguf(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), path);
    const tensor_info *t = f.find("token_embd.weight");
    const float nan = NAN;
    memcpy(&bytes[size_t(t->data - reinterpret_cast<const uint8_t *>(bytes.data())) + 5 * 32 * 4], &nan, 4); // token 5
    test::write_file(path, bytes);
    open_model m(path);
    open_session s(m.m, 64);
    const int32_t ids[] = {1, 2, 5, 7};
    EXPECT_EQ(engine_sync(s.s, ids, 2, &s.err), 0) << s.err.msg;
    EXPECT_EQ(engine_eval(s.s, ids + 2, 1, &s.err), ENGINE_ENUMERIC);
    EXPECT_EQ(engine_tokens(s.s, nullptr, 0), 2);
    EXPECT_EQ(engine_eval_all(
                  s.s, ids + 1, 3, [](void *, size_t, const float *) { return 0; }, nullptr, &s.err),
              ENGINE_ENUMERIC);
    EXPECT_NE(std::string(s.err.msg).find("after token 3"), std::string::npos) << s.err.msg;
}

TEST(Model, TensorsThatWouldBeLeftOutAreErrors) {
    test::temp_dir dir;
    const std::string path = model_make(dir, "--layers 1 --embd 32 --heads 2 --ffn 32 --vocab 280 --type F32");
    const std::string valid = test::read_file(path);
    const auto renamed = [&](const std::string &from, const std::string &to) {
        std::string bytes = valid;
        const size_t at = bytes.find(from);
        EXPECT_NE(at, std::string::npos);
        bytes.replace(at, from.size(), to);
        test::write_file(path, bytes);
        engine_model *m = nullptr;
        engine_error err = {};
        const int code = engine_open(&m, path.c_str(), nullptr, &err);
        engine_close(m);
        return std::make_pair(code, std::string(err.msg));
    };
    // output.weight under another name: the model would count as tied and be wrong.
    auto r = renamed(std::string("\0output.weight", 14), std::string("\0outpux.weight", 14));
    EXPECT_EQ(r.first, ENGINE_EUNSUPPORTED);
    EXPECT_NE(r.second.find("outpux.weight"), std::string::npos) << r.second;
    r = renamed("blk.0.ffn_up.weight", "blk.0.ffn_uq.weight");
    EXPECT_EQ(r.first, ENGINE_EFORMAT);
    EXPECT_NE(r.second.find("blk.0.ffn_up.weight is missing"), std::string::npos) << r.second;
}

TEST(Session, TwoModelsInTwoThreadsAndTwoSessionsOnOne) {
    open_model a(model_shipped, 2), b(model_shipped, 1);
    const model_ids ids = model_prompt(200, 2048);
    const std::vector<float> want = model_run(a.m, ids, 512);
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (engine_model *m : {a.m, b.m, a.m, b.m})
        threads.emplace_back([&, m] {
            for (int i = 0; i < 5; i++)
                if (model_run(m, ids, 17 + i) != want)
                    wrong++;
        });
    for (std::thread &t : threads)
        t.join();
    EXPECT_EQ(wrong.load(), 0);
}

TEST(Session, StatsCount) {
    open_model m(model_shipped);
    open_session s(m.m, 512);
    const model_ids ids = model_prompt(100, 2048);
    s.sync(model_ids(ids.begin(), ids.begin() + 60));
    s.sync(ids);
    engine_generate_options o = {};
    o.max_tokens = 5;
    o.ignore_end = 1;
    s.generate(o);
    engine_session_stats st = {};
    ASSERT_EQ(engine_stats(s.s, &st, &s.err), 0) << s.err.msg;
    EXPECT_EQ(st.prompt_tokens, 100);
    EXPECT_EQ(st.reused_tokens, 60);
    EXPECT_EQ(st.decode_tokens, 4); // the fifth token is sampled and not evaluated
    EXPECT_EQ(st.n_tokens, 105);
    EXPECT_GT(st.decode_seconds, 0);
    EXPECT_LE(st.itl_p50, st.itl_p99);
    EXPECT_EQ(st.kv_bytes, 128 * 4 * 2 * 4 * 32 * 2); // one page: 4 layers, K and V, 4 heads of 32 halves
}

// ---- bad calls -------------------------------------------------------------------------------------------------

TEST(Api, BadArgumentsAreErrors) {
    open_model m(model_shipped);
    open_session s(m.m, 128);
    engine_error err = {};
    engine_model *none = nullptr;
    EXPECT_EQ(engine_open(&none, "/nonexistent/x.gguf", nullptr, &err), ENGINE_EIO);
    EXPECT_NE(std::string(err.msg).find("/nonexistent/x.gguf"), std::string::npos);
    EXPECT_EQ(engine_open(nullptr, "x", nullptr, &err), ENGINE_EINVAL);
    EXPECT_EQ(engine_open(&none, nullptr, nullptr, nullptr), ENGINE_EINVAL);
    engine_open_options oo = {};
    oo.threads = -1;
    EXPECT_EQ(engine_open(&none, model_shipped.c_str(), &oo, &err), ENGINE_EINVAL);
    engine_session_options so = {};
    so.chunk = 5000;
    engine_session *ns = nullptr;
    EXPECT_EQ(engine_session_new(&ns, m.m, &so, &err), ENGINE_EINVAL);
    so.chunk = 0, so.n_ctx = -5;
    EXPECT_EQ(engine_session_new(&ns, m.m, &so, &err), ENGINE_EINVAL);
    so.n_ctx = 1 << 28;
    EXPECT_EQ(engine_session_new(&ns, m.m, &so, &err), ENGINE_ENOMEM) << err.msg;
    EXPECT_EQ(engine_logits(s.s, nullptr, &err), ENGINE_EINVAL);
    const float *l;
    EXPECT_EQ(engine_logits(s.s, &l, &err), ENGINE_EINVAL) << "the timeline is empty";
    EXPECT_EQ(engine_sample(s.s, nullptr, &err), ENGINE_EINVAL);
    for (int32_t bad : {-1, 2048, INT32_MAX, INT32_MIN}) {
        EXPECT_EQ(engine_eval(s.s, &bad, 1, &err), ENGINE_EINVAL);
        EXPECT_EQ(engine_detokenize(m.m, &bad, 1, 0, nullptr, 0, &err), ENGINE_EINVAL);
        EXPECT_EQ(engine_piece(m.m, bad, 0, nullptr, 0, &err), ENGINE_EINVAL);
        EXPECT_EQ(engine_token_is_end(m.m, bad), 0);
    }
    EXPECT_EQ(engine_eval(s.s, nullptr, 3, &err), ENGINE_EINVAL);
    EXPECT_EQ(engine_rewind(s.s, 1, &err), ENGINE_EINVAL);
    EXPECT_EQ(engine_rewind(s.s, size_t(-1), &err), ENGINE_EINVAL);
    engine_sampling sm = {};
    sm.top_p = 2;
    EXPECT_EQ(engine_sample(s.s, &sm, &err), ENGINE_EINVAL);
    sm.top_p = NAN;
    EXPECT_EQ(engine_sample(s.s, &sm, &err), ENGINE_EINVAL);
    engine_generate_options go = {};
    const char *stops[] = {""};
    go.stops = stops, go.n_stops = 1;
    EXPECT_EQ(engine_generate(s.s, &go, nullptr, nullptr, nullptr, &err), ENGINE_EINVAL);
    EXPECT_EQ(engine_meta(m.m, "no.such.key", nullptr, 0, &err), ENGINE_EINVAL);
    EXPECT_EQ(engine_tokenize(m.m, nullptr, 5, 0, nullptr, 0, &err), ENGINE_EINVAL);
    EXPECT_EQ(engine_tokenize(m.m, nullptr, size_t(-1), 0, nullptr, 0, &err), ENGINE_EINVAL);
    EXPECT_EQ(engine_tokenize(m.m, nullptr, 0, 0, nullptr, 0, &err), 0);
    EXPECT_EQ(engine_tokenize(m.m, "x", 1, 64, nullptr, 0, &err), ENGINE_EINVAL);
    engine_close(nullptr);
    engine_session_free(nullptr);
    engine_cancel(nullptr);
    engine_on_progress(nullptr, nullptr, nullptr);
    EXPECT_EQ(engine_tokens(nullptr, nullptr, 0), ENGINE_EINVAL);
    // and the session still works
    s.sync({1, 2, 3});
    EXPECT_EQ(s.logits().size(), 2048u);
}

TEST(Api, OptionStructsOfOlderAndNewerCallers) {
    open_model m(model_shipped);
    engine_error err = {};
    struct newer {
        engine_session_options known;
        int unknown[8];
    } n = {};
    n.known.size = sizeof n;
    n.known.n_ctx = 100;
    engine_session *s = nullptr;
    ASSERT_EQ(engine_session_new(&s, m.m, &n.known, &err), 0) << err.msg;
    EXPECT_EQ(engine_session_ctx(s), 100);
    engine_session_free(s);
    n.known.size = offsetof(engine_session_options, n_ctx); // a caller that has the size alone
    ASSERT_EQ(engine_session_new(&s, m.m, &n.known, &err), 0) << err.msg;
    EXPECT_EQ(engine_session_ctx(s), 2048);
    engine_session_free(s);
    n.known.size = 3;
    EXPECT_EQ(engine_session_new(&s, m.m, &n.known, &err), ENGINE_EINVAL);
}

TEST(Api, TextFollowsSnprintf) {
    open_model m(model_shipped);
    char buf[8];
    memset(buf, 'x', sizeof buf);
    const int n = engine_meta(m.m, "general.architecture", buf, 4, nullptr);
    EXPECT_EQ(n, 5);
    EXPECT_STREQ(buf, "qwe");
    EXPECT_EQ(buf[4], 'x');
    EXPECT_GT(engine_meta(m.m, nullptr, nullptr, 0, nullptr), 500);
    int32_t ids[2] = {-7, -7};
    EXPECT_GT(engine_tokenize(m.m, "one two three", size_t(-1), 0, ids, 1, nullptr), 1);
    EXPECT_NE(ids[0], -7);
    EXPECT_EQ(ids[1], -7);
}

TEST(Api, InfoIsFilled) {
    open_model m(model_shipped, 2);
    engine_model_info i = {};
    ASSERT_EQ(engine_info(m.m, &i, nullptr), 0);
    EXPECT_STREQ(i.arch, "qwen3");
    EXPECT_EQ(i.n_vocab, 2048);
    EXPECT_EQ(i.n_layer, 4);
    EXPECT_EQ(i.n_params, 3672576);
    EXPECT_EQ(i.threads, 2);
    EXPECT_EQ(i.kv_token_bytes, 4 * 2 * 4 * 32 * 2);
    EXPECT_EQ(i.eos, 2047);
    EXPECT_EQ(i.has_template, 1);
    EXPECT_EQ(std::string(i.types).find("Q8_0"), 0u);
    EXPECT_STREQ(i.generic_ops, "");
}

// ---- damaged files, all the way through --------------------------------------------------------------------------

// A damaged model is refused with a message, or opens and works: it is asked for everything a program would ask. Pages
// of address space in use are measured on the way. Returns whether it opened.
bool model_use(const std::string &path, int64_t *pages) {
    engine_error err = {};
    engine_model *m = nullptr;
    engine_open_options oo = {};
    oo.threads = 1;
    const int code = engine_open(&m, path.c_str(), &oo, &err);
    if (code < 0) {
        EXPECT_EQ(code, err.code);
        EXPECT_NE(std::string(err.msg).find(path), std::string::npos) << err.msg;
        return false;
    }
    engine_model_info info = {};
    EXPECT_EQ(engine_info(m, &info, &err), 0) << err.msg;
    engine_meta(m, nullptr, nullptr, 0, nullptr);
    int32_t ids[64];
    int n = engine_tokenize(m, "Hello, w\xc3\xb6rld <|im_end|>", size_t(-1), ENGINE_ADD_BOS | ENGINE_PARSE_SPECIAL, ids,
                            16, &err);
    n = std::min(std::max(n, 0), 16);
    char text[256];
    EXPECT_GE(engine_detokenize(m, ids, size_t(n), 1, text, sizeof text, &err), 0) << err.msg;
    const engine_message hi = {"user", "hi"};
    engine_render_chat(m, &hi, 1, nullptr, nullptr, 0, &err);
    engine_session *s = nullptr;
    engine_session_options so = {};
    so.n_ctx = 32;
    if (engine_session_new(&s, m, &so, &err) == 0) {
        if (engine_sync(s, ids, size_t(n), &err) >= 0) {
            engine_generate_options go = {};
            go.max_tokens = 2;
            engine_generate(s, &go, nullptr, nullptr, nullptr, &err);
        }
        if (FILE *f = fopen("/proc/self/statm", "r")) {
            long long now = 0;
            EXPECT_EQ(fscanf(f, "%lld", &now), 1);
            *pages = std::max<int64_t>(*pages, now);
            fclose(f);
        }
    }
    engine_session_free(s);
    engine_close(m);
    return true;
}

TEST(Api, DamagedModelsAreRefusedOrWork) {
    test::temp_dir dir;
    const std::string valid =
        test::read_file(model_make(dir, "--layers 1 --embd 32 --heads 2 --ffn 32 --vocab 280 --type Q4_0"));
    const std::string path = dir / "damaged.gguf";
    const size_t head = valid.size() - 280 * 18 - 7000;
    int64_t start = 0, most = 0;
    test::write_file(path, valid);
    ASSERT_TRUE(model_use(path, &start));
    int opened = 0, refused = 0;
    test::heap_meter meter;
    const auto check = [&](const std::string &bytes) {
        test::write_file(path, bytes);
        (model_use(path, &most) ? opened : refused)++;
    };
    test::mutate(valid, head, test::long_tests() ? 100000 : 3000, 2,
                 [&](const std::string &bytes, int) { check(bytes); });
    EXPECT_GT(opened, 100);
    EXPECT_GT(refused, 1000);
    opened = 0;
    for (size_t n = 0; n < valid.size(); n += test::long_tests() ? 1 : 53)
        check(valid.substr(0, n));
    EXPECT_EQ(opened, 0) << "every file that ends early is refused";
    EXPECT_LT(meter.peak(), 64 << 20);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(__clang__)
    EXPECT_LT((most - start) * sysconf(_SC_PAGESIZE), 64 << 20);
#endif
}

// ---- the source ------------------------------------------------------------------------------------------------

std::string model_chapter(const std::string &source, const char *from, const char *to) {
    const size_t a = source.find(from), b = source.find(to);
    EXPECT_NE(a, std::string::npos) << from;
    EXPECT_NE(b, std::string::npos) << to;
    return source.substr(a, b - a);
}

TEST(Source, ForwardNamesNoArchitecture) {
    const std::string source = test::read_file(test::root_path("engine.cpp"));
    const std::string body = model_chapter(source, "\n// 10. FORWARD", "\n// 11. SAMPLER");
    for (const arch &a : arch_table)
        EXPECT_EQ(body.find(a.name), std::string::npos) << a.name;
    for (const char *word : {"arch_table", "general.architecture", "cpu_", "llama", "qwen"})
        EXPECT_EQ(body.find(word), std::string::npos) << word;
}

TEST(Source, ContentsEqualTheBanners) {
    const std::string source = test::read_file(test::root_path("engine.cpp"));
    const std::regex banner("\n// -{20,}\n// (\\d+\\. [A-Z]+)\n"), entry("\n//  +(\\d+\\. [A-Z]+)  ");
    std::vector<std::string> banners, contents;
    for (std::sregex_iterator i(source.begin(), source.end(), banner), end; i != end; ++i)
        banners.push_back((*i)[1]);
    for (std::sregex_iterator i(source.begin(), source.end(), entry), end; i != end; ++i)
        contents.push_back((*i)[1]);
    EXPECT_EQ(contents, banners);
    EXPECT_GE(banners.size(), 12u);
}

TEST(Source, ReadsFewEnvironmentVariables) {
    std::set<std::string> names;
    const std::regex use("\\bgetenv\\(\"(\\w+)\"\\)"), any("\\bgetenv\\(");
    for (const char *file : {"engine.cpp", "cli.cpp"}) {
        const std::string source = test::read_file(test::root_path(file));
        size_t uses = 0, all = 0;
        for (std::sregex_iterator i(source.begin(), source.end(), use), end; i != end; ++i, uses++)
            names.insert((*i)[1]);
        for (std::sregex_iterator i(source.begin(), source.end(), any), end; i != end; ++i)
            all++;
        EXPECT_EQ(uses, all) << file << ": a variable's name must stand in its getenv call";
    }
    EXPECT_LE(names.size(), 6u);
    const std::string manual = test::read_file(test::root_path("README.md"));
    for (const std::string &n : names)
        EXPECT_NE(manual.find(n), std::string::npos) << n << " is not in README.md";
}

TEST(Source, EveryOperationOfTheTableIsDeclared) {
    const std::string source = test::read_file(test::root_path("backend.h"));
    for (const char *op :
         {"alloc",  "free",      "weights", "put",    "get",     "sync",     "embed",  "rows",   "norm",
          "matmul", "matmul_id", "rope",    "kv_put", "attend",  "glu",      "add",    "scale",  "route",
          "mix",    "topk",      "pool",    "index",  "requant", "hc_split", "hc_pre", "hc_post"})
        EXPECT_NE(source.find(std::string("(*") + op + ")(struct backend *"), std::string::npos) << op;
}

} // namespace
