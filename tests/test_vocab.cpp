// Tokenizers: ids against published expectations, splits against regular expressions, and toy vocabularies whose
// answers can be worked out by hand.
#include "unit.h"

#include "gguf_writer.h"

#include <nlohmann/json.hpp>

#include <fstream>
#include <map>
#include <random>
#include <sstream>

namespace {

typedef std::vector<int32_t> vocab_ids;

vocab_ids vocab_encode(const vocab &v, const string &text, bool special = false, const char *literal = nullptr) {
    vocab_ids ids;
    tokenize(v, text, special, reinterpret_cast<const uint8_t *>(literal), ids);
    return ids;
}
string vocab_decode(const vocab &v, const vocab_ids &ids, bool special = false) {
    return detokenize(v, ids.data(), ids.size(), special);
}

// A file in memory and the vocabulary in it.
struct vocab_file {
    string bytes;
    model_file file;
    vocab v;

    explicit vocab_file(const gguf_writer &w) : bytes(w.bytes()) {
        file = parse_gguf(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), "toy.gguf");
        v = load_vocab(file);
    }
    int32_t id(const string &text) const {
        for (int32_t i = 0; i < v.n; i++)
            if (v.type[size_t(i)] != TOKEN_BYTE && token_bytes(v, i, true) == text)
                return i;
        return -1;
    }
    vocab_ids ids(const std::vector<string> &texts) const {
        vocab_ids r;
        for (const string &s : texts)
            r.push_back(id(s));
        return r;
    }
};

// What a toy vocabulary is made of; the test changes it before write().
struct vocab_toy {
    string model, pre;
    std::vector<string> tokens, merges;
    std::vector<float> scores;
    std::vector<int32_t> types;

    int32_t add(const string &text, int type = 1, float score = 0) {
        tokens.push_back(text), types.push_back(type), scores.push_back(score);
        return int32_t(tokens.size()) - 1;
    }
    void write(gguf_writer &w, const string &without = "") const {
        auto on = [&](const char *key) { return without != key; };
        w.add_string("tokenizer.ggml.model", model);
        if (!pre.empty())
            w.add_string("tokenizer.ggml.pre", pre);
        if (on("tokens"))
            w.add_strings("tokenizer.ggml.tokens", tokens);
        if (on("types"))
            w.add_i32s("tokenizer.ggml.token_type", types);
        if (on("scores") && model == "llama")
            w.add_f32s("tokenizer.ggml.scores", scores);
        if (on("merges") && model == "gpt2")
            w.add_strings("tokenizer.ggml.merges", merges);
    }
    vocab_file load() const {
        gguf_writer w;
        write(w);
        return vocab_file(w);
    }
};

string vocab_utf8(uint32_t c) {
    if (c < 0x80)
        return string(1, char(c));
    string s;
    for (int shift = c < 0x800 ? 6 : c < 0x10000 ? 12 : 18, first = 1; shift >= 0; shift -= 6, first = 0)
        s += char(first ? (shift == 6 ? 0xc0 : shift == 12 ? 0xe0 : 0xf0) | c >> shift : 0x80 | (c >> shift & 0x3f));
    return s;
}

// GPT-2's way of writing bytes as characters.
string vocab_byte_name(int b) {
    static const std::vector<uint32_t> names = [] {
        std::vector<uint32_t> n(256);
        uint32_t next = 256;
        for (uint32_t c = 0; c < 256; c++)
            n[c] = (c > 32 && c < 127) || (c > 160 && c < 256 && c != 173) ? c : next++;
        return n;
    }();
    return vocab_utf8(names[size_t(b)]);
}
string vocab_byte_names(const string &bytes) {
    string s;
    for (char c : bytes)
        s += vocab_byte_name(uint8_t(c));
    return s;
}

// Byte-level BPE with all bytes and merges given as raw "left right" pairs of bytes ("|" between); ids 0 ... 255 are
// the bytes.
vocab_toy vocab_bpe(const std::vector<std::pair<string, string>> &merges, const string &pre = "gpt-2") {
    vocab_toy t;
    t.model = "gpt2", t.pre = pre;
    for (int b = 0; b < 256; b++)
        t.add(vocab_byte_name(b));
    for (auto &m : merges) {
        t.merges.push_back(vocab_byte_names(m.first) + " " + vocab_byte_names(m.second));
        t.add(vocab_byte_names(m.first + m.second));
    }
    return t;
}

const char VOCAB_MARK[] = "\xe2\x96\x81"; // U+2581

// SentencePiece-style: 0 <unk>, 1 <s>, 2 </s>, 3 ... 258 the bytes, then pieces with the scores -1, -2 ...
vocab_toy vocab_spm(const std::vector<string> &pieces) {
    vocab_toy t;
    t.model = "llama";
    t.add("<unk>", 2), t.add("<s>", 3), t.add("</s>", 3);
    for (int b = 0; b < 256; b++)
        t.add(strf("<0x%02X>", b), 6);
    float score = 0;
    for (string s : pieces) {
        for (size_t at; (at = s.find('_')) != s.npos;)
            s.replace(at, 1, VOCAB_MARK);
        t.add(s, 1, --score);
    }
    return t;
}
const std::vector<string> vocab_hello = {"_",  "h",    "e",     "l",      "o",  "w",  "r",  "d",  "he",
                                         "ll", "hell", "hello", "_hello", "wo", "or", "_w", "_wo"};

// ---- published expectations ----

string vocab_published(const string &name) {
    const string path = test::root_path("tests/node_modules/vocabs/ggml-vocab-" + name + ".gguf");
    return test::exists(path) ? path : "";
}

#define NEED_VOCAB(var, name)                                                                                          \
    const string var = vocab_published(name);                                                                          \
    if (var.empty())                                                                                                   \
    GTEST_SKIP() << "[npm] no vocabularies in tests/node_modules: make deps"

std::vector<string> vocab_cut(string s, const string &separator) {
    std::vector<string> r;
    for (size_t at; (at = s.find(separator)) != s.npos; s.erase(0, at + separator.size()))
        r.push_back(s.substr(0, at));
    if (!s.empty())
        r.push_back(s);
    return r;
}

void vocab_check_published(const string &path, const string &describe) {
    const model_file f = open_model_file(path.c_str(), false);
    const vocab v = load_vocab(f);
    EXPECT_EQ(v.describe, describe);
    const auto texts = vocab_cut(test::read_file(path + ".inp"), "\n__ggml_vocab_test__\n");
    const auto lines = vocab_cut(test::read_file(path + ".out"), "\n");
    ASSERT_EQ(texts.size(), 46u);
    ASSERT_EQ(lines.size(), 46u);
    for (size_t i = 0; i < texts.size(); i++) {
        vocab_ids want;
        std::istringstream in(lines[i]);
        for (int32_t id; in >> id;)
            want.push_back(id);
        const vocab_ids got = vocab_encode(v, texts[i]);
        EXPECT_EQ(got, want) << texts[i];
        EXPECT_EQ(vocab_decode(v, got), texts[i]);
    }
}

TEST(VocabIds, Gpt2) {
    NEED_VOCAB(path, "gpt-2");
    vocab_check_published(path, "bpe gpt-2");
}
TEST(VocabIds, LlamaSpm) {
    NEED_VOCAB(path, "llama-spm");
    vocab_check_published(path, "spm");
}
TEST(VocabIds, LlamaBpe) {
    NEED_VOCAB(path, "llama-bpe");
    vocab_check_published(path, "bpe llama-bpe");
}
TEST(VocabIds, Qwen2) {
    NEED_VOCAB(path, "qwen2");
    vocab_check_published(path, "bpe qwen2");
}
TEST(VocabIds, DeepseekLlm) {
    NEED_VOCAB(path, "deepseek-llm");
    vocab_check_published(path, "bpe deepseek-llm");
}
TEST(VocabIds, DeepseekCoder) {
    NEED_VOCAB(path, "deepseek-coder");
    vocab_check_published(path, "bpe deepseek-coder");
}

TEST(VocabIds, FieldCases) {
    NEED_VOCAB(llama3, "llama-bpe");
    const string paths[] = {llama3, vocab_published("gpt-2"), vocab_published("llama-spm")};
    const struct {
        const char *text;
        vocab_ids ids[3];
    } rows[] = {
        {"Hello world", {{9906, 1917}, {15496, 995}, {15043, 3186}}},
        {" Hello world", {{22691, 1917}, {18435, 995}, {29871, 15043, 3186}}},
        {" this is \xf0\x9f\xa6\x99.cpp",
         {{420, 374, 11410, 99, 247, 13, 11055},
          {428, 318, 12520, 99, 247, 13, 20322},
          {29871, 445, 338, 29871, 243, 162, 169, 156, 29889, 8223}}},
        {"   ", {{262}, {220, 220, 220}, {268}}},
        {"\t\n", {{1602}, {197, 198}, {29871, 12, 13}}},
        {"\n\n\n", {{1432}, {628, 198}, {29871, 13, 13, 13}}},
        {"3333", {{8765, 18}, {24840}, {29871, 29941, 29941, 29941, 29941}}},
        {"    Hello\n    Hello",
         {{262, 22691, 198, 262, 22691},
          {220, 220, 220, 18435, 198, 220, 220, 220, 18435},
          {268, 15043, 13, 1678, 15043}}},
        {"F\xc3\xbchrer", {{37, 51853, 261}, {37, 9116, 71, 11751}, {383, 4000, 261}}},
        {"", {{}, {}, {}}},
    };
    for (int k = 0; k < 3; k++) {
        const model_file f = open_model_file(paths[k].c_str(), false);
        const vocab v = load_vocab(f);
        for (auto &r : rows)
            EXPECT_EQ(vocab_encode(v, r.text), r.ids[k]) << r.text;
        if (k == 0) {
            EXPECT_EQ(vocab_encode(v, "!!!!!!"), (vocab_ids{17523, 3001}));
            EXPECT_EQ(vocab_encode(v, "hello <|end_of_text|>", true), (vocab_ids{15339, 220, 128001}));
            EXPECT_TRUE(is_end(v, 128001) && is_end(v, 128009) && !is_end(v, 128000));
        }
    }
}

TEST(VocabIds, Stories) {
    NEED_SHARED(path, "stories260K/stories260K-f16.gguf");
    const model_file f = open_model_file(path.c_str(), false);
    const vocab v = load_vocab(f);
    const auto want = nlohmann::json::parse(test::read_file(test::shared_path("stories260K/expected.json")));
    vocab_ids ids = {v.bos};
    tokenize(v, want["prompt"].get<string>(), false, nullptr, ids);
    EXPECT_EQ(ids, want["prompt_ids"].get<vocab_ids>());
    EXPECT_TRUE(v.add_bos && !v.add_eos);
    EXPECT_EQ(v.describe, "spm");
    string text = vocab_decode(v, want["greedy_from_bos"].get<vocab_ids>()),
           published = want["greedy_text_expected_200_steps"];
    EXPECT_EQ(text.compare(0, published.size(), published), 0) << text;
    const string all = test::read_file(test::shared_path("stories260K/tinystories_10k.txt"));
    EXPECT_EQ(vocab_decode(v, vocab_encode(v, all)), all);
}

TEST(VocabIds, TinyChat) {
    NEED_SHARED(path, "tiny-chat/tiny-chat-f16.gguf");
    const model_file f = open_model_file(path.c_str(), false);
    const vocab v = load_vocab(f);
    const auto golden = nlohmann::json::parse(test::read_file(test::shared_path("tiny-chat/golden.json")));
    for (auto &c : golden["cases"]) {
        EXPECT_EQ(vocab_encode(v, c["prompt"], true), c["prompt_ids"].get<vocab_ids>()) << c["prompt"];
        EXPECT_EQ(vocab_decode(v, c["greedy_ids"].get<vocab_ids>(), true), c["greedy_text"].get<string>());
    }
    const string text = test::read_file(test::shared_path("tiny-chat/heldout.txt"));
    const vocab_ids ids = vocab_encode(v, text);
    EXPECT_EQ(ids.size(), golden["perplexity"]["tokens"].get<size_t>());
    EXPECT_EQ(vocab_decode(v, ids), text);
}

// ---- pre-tokenizers and Unicode ----

TEST(VocabSplit, AgreesWithRegularExpressions) {
    std::ifstream in(test::root_path("tests/data/splits.txt"));
    std::map<string, int> lines;
    for (string line; std::getline(in, line);) {
        std::istringstream words(line);
        string name, hex, text;
        std::vector<string> want, got;
        words >> name;
        while (words >> hex) {
            want.emplace_back();
            for (size_t i = 0; i < hex.size(); i += 2)
                want.back() += char(std::stoi(hex.substr(i, 2), nullptr, 16));
            text += want.back();
        }
        for (const pre_tokenizer &p : pre_tokenizers)
            if (name == p.name) {
                split_words(p.stages, char_table(), text.data(), text.data() + text.size(),
                            [&](const char *a, const char *b) { got.emplace_back(a, b); });
                lines[name]++;
            }
        EXPECT_EQ(got, want) << name << ": " << text;
    }
    EXPECT_EQ(lines.size(), 8u); // each set of expressions there is
    for (auto &l : lines)
        EXPECT_GE(l.second, 150) << l.first;
}

TEST(VocabSplit, KeepsEveryByte) {
    std::mt19937 random(1);
    for (int i = 0; i < 3000; i++) {
        string text;
        for (int n = int(random() % 40); n > 0; n--)
            text += random() % 3 ? " \n'sa1!\xe4\xb8\xad"[random() % 10] : char(random());
        for (const pre_tokenizer &p : pre_tokenizers) {
            string all;
            split_words(p.stages, char_table(), text.data(), text.data() + text.size(),
                        [&](const char *a, const char *b) {
                            EXPECT_LT(a, b);
                            all.append(a, b);
                        });
            ASSERT_EQ(all, text) << p.name;
        }
    }
}

// White space that no rule takes up to its end must not be looked through again from each of its characters.
TEST(VocabSplit, LongRuns) {
    for (const pre_tokenizer &p : pre_tokenizers)
        for (const string &unit : {string(" "), string("\n"), string("a"), string("1"), string("!"),
                                   string("\xe4\xb8\xad"), string("\xcc\x81")}) {
            string text;
            while (text.size() < 100000)
                text += unit;
            text += "\xe4\xb8\xad";
            size_t n = 0;
            split_words(p.stages, char_table(), text.data(), text.data() + text.size(),
                        [&](const char *a, const char *b) { n += size_t(b - a); });
            EXPECT_EQ(n, text.size());
        }
}

// Perl brings its own Unicode data, of a version that may differ: characters that are new to it do not count.
TEST(VocabUnicode, AgreesWithPerl) {
    const char *script = R"(no warnings; my $s = "";
        for my $c (0 .. 0x10ffff) {
            if ($c >= 0xd800 && $c < 0xe000) { $s .= "O"; next; }
            my $x = chr($c);
            $s .= $x =~ /\p{White_Space}/ ? "W" : $x =~ /\p{L}/ ? "L" : $x =~ /\p{M}/ ? "M" : $x =~ /\p{N}/ ? "N" : $x =~ /\p{P}/ ? "P" :
                  $x =~ /\p{S}/ ? "S" : $x =~ /\p{Assigned}/ ? "O" : "?";
        }
        print $s;)";
    const test::command_result r = test::run({"perl", "-e", script});
    ASSERT_EQ(r.code, 0) << r.err;
    ASSERT_EQ(r.out.size(), size_t(0x110000));
    const uint16_t *table = char_table();
    int compared = 0;
    for (size_t c = 0; c < r.out.size(); c++) {
        if (r.out[c] == '?')
            continue;
        const int bits = table[c] & (CH_L | CH_M | CH_N | CH_P | CH_S | CH_SPACE);
        const char got = bits == CH_L       ? 'L'
                         : bits == CH_M     ? 'M'
                         : bits == CH_N     ? 'N'
                         : bits == CH_P     ? 'P'
                         : bits == CH_S     ? 'S'
                         : bits == CH_SPACE ? 'W'
                         : bits             ? '!'
                                            : 'O';
        EXPECT_EQ(got, r.out[c]) << strf("U+%04zX", c);
        compared++;
    }
    EXPECT_GT(compared, 280000);
}

TEST(VocabUnicode, GateReplacesMaximalSubparts) {
    // The examples of the Unicode standard, chapter 3.9, and the ends of the ranges.
    const string bad = "\xef\xbf\xbd";
    const struct {
        string in, out;
    } rows[] = {
        {"\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41", bad + bad + bad + bad + bad + bad + bad + bad + "A"},
        {"\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41", bad + bad + bad + bad + bad + bad + bad + bad + "A"},
        {"\xf4\x91\x92\x93\xff\x41\x80\xbf\x42", bad + bad + bad + bad + bad + "A" + bad + bad + "B"},
        {"\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", bad + bad + bad + bad + "A"},
        {"\xf4\x8f\xbf\xbf\xed\x9f\xbf\xee\x80\x80\xe0\xa0\x80\xf0\x90\x80\x80\xc2\x80",
         "\xf4\x8f\xbf\xbf\xed\x9f\xbf\xee\x80\x80\xe0\xa0\x80\xf0\x90\x80\x80\xc2\x80"},
        {"a\xf0\x9f\xa6", "a" + bad},
        {"\xe2\x82", bad},
        {"\xf5\x80\xc1\x80", bad + bad + bad + bad},
        {string("a\0b", 3), string("a\0b", 3)},
    };
    for (auto &r : rows)
        for (size_t step : {size_t(1), size_t(2), size_t(3), r.in.size()}) {
            utf8_gate gate;
            string out;
            for (size_t i = 0; i < r.in.size(); i += step)
                out += gate.push(string_view(r.in).substr(i, step));
            EXPECT_EQ(out + gate.finish(), r.out);
            EXPECT_EQ(gate.finish(), "");
        }
}

TEST(VocabUnicode, CharacterAcrossTokens) {
    const vocab_file f = vocab_bpe({}).load();
    utf8_gate gate;
    std::vector<string> seen;
    for (int32_t id : {0xf0, 0x9f, 0xa6, 0x99})
        seen.push_back(gate.push(token_bytes(f.v, id, false)));
    EXPECT_EQ(seen, (std::vector<string>{"", "", "", "\xf0\x9f\xa6\x99"}));
    EXPECT_EQ(gate.finish(), "");
    EXPECT_EQ(gate.push(token_bytes(f.v, 0xf0, false)), "");
    EXPECT_EQ(gate.push(token_bytes(f.v, 0x9f, false)), "");
    EXPECT_EQ(gate.finish(), "\xef\xbf\xbd");
    EXPECT_EQ(vocab_decode(f.v, {0xf0, 0x9f}), "\xf0\x9f");
}

// ---- merging ----

// The rules said plainly: while any two neighbours merge, merge the leftmost pair of the lowest rank.
vocab_ids vocab_slow_merge(vocab_ids ids,
                           const std::map<std::pair<int32_t, int32_t>, std::pair<double, int32_t>> &rules) {
    for (;;) {
        size_t best = ids.size();
        double rank = 0;
        for (size_t i = 0; i + 1 < ids.size(); i++) {
            auto r = rules.find({ids[i], ids[i + 1]});
            if (r != rules.end() && (best == ids.size() || r->second.first < rank))
                best = i, rank = r->second.first;
        }
        if (best == ids.size())
            return ids;
        ids[best] = rules.at({ids[best], ids[best + 1]}).second;
        ids.erase(ids.begin() + std::ptrdiff_t(best) + 1);
    }
}

TEST(VocabMerge, BpeOrderOnShortAndLongWords) {
    std::mt19937 random(2);
    for (int round = 0; round < 20; round++) {
        // Merges of random pairs of what there is, in any order of ranks: also ones that no training would give.
        std::vector<string> have = {"a", "b", "c"};
        std::vector<std::pair<string, string>> merges;
        for (int i = 0; i < 30; i++) {
            auto m = std::make_pair(have[random() % have.size()], have[random() % have.size()]);
            if (std::find(have.begin(), have.end(), m.first + m.second) == have.end())
                merges.push_back(m), have.push_back(m.first + m.second);
        }
        std::shuffle(merges.begin(), merges.end(), random);
        const vocab_file f = vocab_bpe(merges).load();
        std::map<std::pair<int32_t, int32_t>, std::pair<double, int32_t>> rules;
        for (size_t i = 0; i < merges.size(); i++)
            rules[{f.id(merges[i].first), f.id(merges[i].second)}] = {double(i),
                                                                      f.id(merges[i].first + merges[i].second)};
        for (size_t n : {1, 2, 5, 24, 25, 26, 300}) {
            string text;
            vocab_ids ids;
            while (text.size() < n)
                text += "abc"[random() % (1 + random() % 3)], ids.push_back(uint8_t(text.back()));
            EXPECT_EQ(vocab_encode(f.v, text), vocab_slow_merge(ids, rules)) << text;
        }
    }
}

TEST(VocabMerge, SpmOrderWithEqualScores) {
    std::mt19937 random(3);
    for (int round = 0; round < 20; round++) {
        vocab_toy t = vocab_spm({});
        std::vector<string> have = {" ", "a", "b"};
        for (int i = 0; i < 25; i++) {
            const string s = have[random() % have.size()] + have[random() % have.size()];
            if (s.size() < 12 && std::find(have.begin(), have.end(), s) == have.end())
                have.push_back(s);
        }
        std::map<string, float> score;
        for (const string &s : have)
            t.add(s, 1, score[s] = -float(random() % 5));
        for (string &s : t.tokens)
            for (size_t at; (at = s.find(' ')) != s.npos;)
                s.replace(at, 1, VOCAB_MARK);
        const vocab_file f = t.load();
        std::map<std::pair<int32_t, int32_t>, std::pair<double, int32_t>> rules;
        for (const string &a : have)
            for (const string &b : have)
                if (score.count(a + b))
                    rules[{f.id(a), f.id(b)}] = {-score[a + b], f.id(a + b)};
        for (size_t n : {1, 2, 5, 23, 24, 25, 300}) {
            string text;
            vocab_ids ids = {f.id(" ")};
            while (text.size() < n)
                text += " ab"[random() % 3], ids.push_back(f.id(text.substr(text.size() - 1)));
            const vocab_ids got = vocab_encode(f.v, text);
            EXPECT_EQ(got, vocab_slow_merge(ids, rules)) << text;
            EXPECT_EQ(vocab_decode(f.v, got), text);
        }
    }
}

TEST(VocabMerge, OneWordOfAMegabyte) {
    std::vector<std::pair<string, string>> merges;
    for (const char *u : {"a", " ", "\xe4"})
        for (string s = u; s.size() < 16; s += s)
            merges.push_back({s, s});
    const vocab_file bpe = vocab_bpe(merges).load(), llama = vocab_bpe(merges, "llama-bpe").load();
    const vocab_file spm = vocab_spm({"_", "a", "aa", "aaaa", "__", "____"}).load();
    for (const string &unit : {string("a"), string(" "), string("ab"), string("\xe4")}) {
        string text;
        while (text.size() < 1 << 20)
            text += unit;
        for (const vocab_file *f : {&bpe, &llama, &spm}) {
            const vocab_ids ids = vocab_encode(f->v, text);
            EXPECT_EQ(vocab_decode(f->v, ids), text);
            EXPECT_TRUE(unit.size() > 1 || f != &llama || ids.size() == text.size() / 16) << ids.size();
        }
    }
}

TEST(VocabMerge, WholeWordsOfLlamaBpe) {
    for (const char *pre : {"llama-bpe", "gpt-2"}) {
        vocab_toy t = vocab_bpe({{"a", "b"}}, pre);
        t.add(vocab_byte_names(" abc")); // no merges lead to it
        const vocab_file f = t.load();
        EXPECT_EQ(vocab_encode(f.v, "ab abc"),
                  string(pre) == "gpt-2" ? f.ids({"ab", " ", "ab", "c"}) : f.ids({"ab", " abc"}));
    }
}

// ---- special tokens ----

TEST(VocabSpecial, OnlyOnRequest) {
    vocab_toy t = vocab_bpe({});
    const int32_t start = t.add("<|im_start|>", 3), end = t.add("<|im_end|>", 4), longer = t.add("<|im_end|>!", 3),
                  think = t.add("<think>", 4);
    t.add("[PAD]", 5);
    const vocab_file f = t.load();
    const string text = "<|im_start|>x<|im_end|>";
    EXPECT_EQ(vocab_encode(f.v, text, true), (vocab_ids{start, 'x', end}));
    const vocab_ids plain = vocab_encode(f.v, text);
    EXPECT_EQ(plain, vocab_ids(text.begin(), text.end()));
    EXPECT_EQ(vocab_encode(f.v, "<|im_end|>!<|im_end|>?", true), (vocab_ids{longer, end, '?'})); // the longest
    EXPECT_EQ(vocab_encode(f.v, "<<|im_start|><|im_start", true).front(), '<');
    EXPECT_EQ(vocab_encode(f.v, "<<|im_start|><|im_start", true)[1], start); // the earliest
    EXPECT_EQ(vocab_encode(f.v, "<<|im_start|><|im_start", true).size(), 2u + 10u);
    EXPECT_EQ(vocab_encode(f.v, "a<think>b"), (vocab_ids{'a', think, 'b'})); // an added token, whether asked for or not
    EXPECT_EQ(vocab_encode(f.v, "[PAD]", true), (vocab_ids{'[', 'P', 'A', 'D', ']'}));

    EXPECT_EQ(vocab_decode(f.v, {start, 'x', end, think}), "x<|im_end|><think>"); // user-defined tokens are text
    EXPECT_EQ(vocab_decode(f.v, {start, 'x'}, true), "<|im_start|>x");
    EXPECT_EQ(token_bytes(f.v, -1, true), "");
    EXPECT_EQ(token_bytes(f.v, f.v.n, true), "");
    EXPECT_TRUE(is_end(f.v, end));
    EXPECT_FALSE(is_end(f.v, start) || is_end(f.v, 'x') || is_end(f.v, -1) || is_end(f.v, think));
}

TEST(VocabSpecial, NeverInAUsersText) {
    vocab_toy t = vocab_bpe({{"a", "b"}, {"<", "|"}});
    const int32_t eot = t.add("<|eot|>", 3), think = t.add("<think>", 4);
    const vocab_file f = t.load();
    auto mask = [](const string &pattern) { // 'u': a user's byte
        string m;
        for (char c : pattern)
            m += char(c == 'u');
        return m;
    };
    const string text = "<|eot|>";
    EXPECT_EQ(vocab_encode(f.v, text, true, mask(".......").data()), (vocab_ids{eot}));
    for (size_t i = 0; i < text.size(); i++) { // one byte of it is the user's
        string p(7, '.');
        p[i] = 'u';
        EXPECT_EQ(vocab_decode(f.v, vocab_encode(f.v, text, true, mask(p).data())), text);
        for (int32_t id : vocab_encode(f.v, text, true, mask(p).data()))
            EXPECT_NE(id, eot);
    }
    EXPECT_EQ(vocab_encode(f.v, text + text, true, mask("uuuuuuu.......").data()).back(), eot);
    EXPECT_EQ(vocab_encode(f.v, text + text, true, mask("uuuuuuu.......").data()).size(), 6u + 1u);
    // What is matched anyway is matched in the user's text, but not across its edge.
    EXPECT_EQ(vocab_encode(f.v, "<think>", true, mask("uuuuuuu").data()), (vocab_ids{think}));
    EXPECT_EQ(vocab_encode(f.v, "<think>", true, mask("uuuu...").data()).size(), 7u);
    // Text merges across the edge.
    EXPECT_EQ(vocab_encode(f.v, "ab", true, mask(".u").data()), f.ids({"ab"}));
}

TEST(VocabSpecial, PlainTextNeverBecomesControl) {
    // Merges lead to the texts of both control tokens.
    vocab_toy t = vocab_spm({"<", "s", ">", "/", "<s", "</", "</s"});
    const vocab_file spm = t.load();
    for (int32_t id : vocab_encode(spm.v, "<s></s><unk>"))
        EXPECT_GT(id, 2);
    EXPECT_EQ(vocab_encode(spm.v, "<s></s>", true), (vocab_ids{1, 2}));
    vocab_toy b = vocab_bpe({{"o", "n"}}, "llama-bpe");
    b.types.back() = 3;
    EXPECT_EQ(vocab_encode(b.load().v, "on"), (vocab_ids{'o', 'n'}));
}

TEST(VocabSpecial, ManyWithOneStart) {
    vocab_toy t = vocab_bpe({});
    for (int i = 0; i < 2000; i++)
        t.add(strf("<|reserved_%d|>", i), 3);
    const vocab_file f = t.load();
    string text;
    for (int i = 0; i < 20000; i++)
        text += "<|reserved_1";
    EXPECT_EQ(vocab_encode(f.v, text, true).size(), text.size());
    EXPECT_EQ(vocab_encode(f.v, "<|reserved_1999|><|reserved_1|>", true),
              f.ids({"<|reserved_1999|>", "<|reserved_1|>"}));
}

// A token that ends a turn cannot be spelled from inside a message, whatever type the file gives it.
TEST(VocabSpecial, EndsOfTurnsOnlyOnRequest) {
    const std::vector<string> ends = {"</s>", "<EOT>", "<end_of_turn>", "[EOS]", "[EOM]", "[EOT]"};
    for (const string &end : ends) {
        vocab_toy t = vocab_bpe({});
        const int32_t id = t.add(end, 4), other = t.add("<b>", 4);
        gguf_writer w;
        t.write(w);
        const char *key = end == "[EOS]" ? "eos" : end == "[EOM]" ? "eom" : end == "[EOT]" ? "eot" : nullptr;
        if (key)
            w.add_u32(strf("tokenizer.ggml.%s_token_id", key), uint32_t(id));
        const vocab_file f(w);
        EXPECT_TRUE(is_end(f.v, id)) << end;
        const string text = "x" + end + "<b>";
        vocab_ids plain(text.begin(), text.end() - 3);
        plain.push_back(other);
        EXPECT_EQ(vocab_encode(f.v, text), plain) << end;
        EXPECT_EQ(vocab_encode(f.v, text, true, string(text.size(), 1).c_str()), plain) << end;
        EXPECT_EQ(vocab_encode(f.v, text, true), (vocab_ids{'x', id, other})) << end;
    }
}

// Tokens of more than 256 bytes are never looked for, so that the work for a text is bounded, whatever the file has.
TEST(VocabSpecial, LongOnes) {
    vocab_toy t = vocab_bpe({});
    const int32_t control = t.add(string(256, 'c'), 3), user = t.add(string(256, 'u'), 4);
    t.add(string(257, 'C'), 3), t.add(string(257, 'U'), 4);
    const vocab_file f = t.load();
    EXPECT_EQ(vocab_encode(f.v, string(256, 'c') + string(256, 'u'), true), (vocab_ids{control, user}));
    EXPECT_EQ(vocab_encode(f.v, string(257, 'C') + string(257, 'U'), true).size(), 2 * 257u);

    vocab_toy huge = vocab_bpe({}), many = vocab_bpe({});
    huge.add(string(1 << 20, 'a') + "b", 4);
    for (size_t n = 1; n < 255; n++)
        many.add(string(n, 'a') + "b", n % 2 ? 3 : 4);
    many.add(string(255, 'a') + "c", 4);
    const string text(40000, 'a');
    EXPECT_EQ(vocab_encode(huge.load().v, text, true).size(), text.size());
    EXPECT_EQ(vocab_encode(many.load().v, text, true).size(), text.size());
    EXPECT_EQ(vocab_encode(many.load().v, text + "b", true).size(), text.size() + 1 - 254);
    EXPECT_EQ(vocab_encode(many.load().v, text + "c", true).size(), text.size() + 1 - 255);
}

// ---- SentencePiece's rules ----

TEST(VocabSpm, SpacePrefix) {
    vocab_toy t = vocab_spm(vocab_hello);
    const vocab_file f = t.load();
    EXPECT_EQ(vocab_encode(f.v, "hello"), f.ids({" hello"}));
    EXPECT_EQ(vocab_encode(f.v, " hello"), f.ids({" ", " hello"}));
    EXPECT_EQ(vocab_encode(f.v, ""), vocab_ids());
    // One before each piece of raw text, none where there is no text.
    EXPECT_EQ(vocab_encode(f.v, "<s>hello</s> hello", true),
              (vocab_ids{1, f.id(" hello"), 2, f.id(" "), f.id(" hello")}));
    EXPECT_EQ(vocab_encode(f.v, "<s></s>", true), (vocab_ids{1, 2}));
    EXPECT_EQ(vocab_decode(f.v, vocab_encode(f.v, "<s>hello</s> hello", true), true), "<s>hello</s> hello");
    EXPECT_EQ(vocab_decode(f.v, vocab_encode(f.v, "<s>hello</s> hello", true)), "hello hello");

    gguf_writer w;
    t.write(w);
    w.add_bool("tokenizer.ggml.add_space_prefix", false);
    const vocab_file g(w);
    EXPECT_EQ(vocab_encode(g.v, "hello"), g.ids({"hello"}));
    EXPECT_EQ(vocab_encode(g.v, " hello"), g.ids({" hello"}));
    EXPECT_EQ(vocab_decode(g.v, g.ids({" hello"})), " hello");
}

TEST(VocabSpm, SpacesAreSqueezedWhenTheFileSaysSo) {
    gguf_writer w;
    vocab_spm(vocab_hello).write(w);
    w.add_bool("tokenizer.ggml.remove_extra_whitespaces", true);
    const vocab_file f(w);
    EXPECT_EQ(vocab_encode(f.v, "  hello   hello  "), f.ids({" hello", " hello"}));
    EXPECT_EQ(vocab_encode(f.v, "   "), vocab_ids());
}

TEST(VocabSpm, MarksAreSpaces) {
    vocab_toy t = vocab_spm(vocab_hello);
    const int32_t tag = t.add(string("<a") + VOCAB_MARK + "b>", 4);
    const vocab_file f = t.load();
    EXPECT_EQ(vocab_encode(f.v, string("hello") + VOCAB_MARK + "hello"), f.ids({" hello", " hello"}));
    EXPECT_EQ(vocab_encode(f.v, "<a b>"), (vocab_ids{tag}));
    EXPECT_EQ(token_bytes(f.v, tag, false), "<a b>");
}

TEST(VocabSpm, BytesAndUnknown) {
    const vocab_file f = vocab_spm(vocab_hello).load();
    EXPECT_EQ(vocab_encode(f.v, "\xe4\xb8\xad"), (vocab_ids{f.id(" "), 3 + 0xe4, 3 + 0xb8, 3 + 0xad}));
    EXPECT_EQ(vocab_encode(f.v, "\xff"), (vocab_ids{f.id(" "), 3 + 0xff}));
    EXPECT_EQ(token_bytes(f.v, 3 + 0x0a, false), "\n");

    vocab_toy t; // without byte tokens: one unknown token for a run of unknown characters
    t.model = "llama";
    t.add("<unk>", 2), t.add("<s>", 3), t.add(VOCAB_MARK), t.add("a");
    const vocab_file g = t.load();
    EXPECT_EQ(g.v.unk, 0);
    EXPECT_EQ(vocab_encode(g.v, "a\xe4\xb8\xadxa x"), (vocab_ids{2, 3, 0, 3, 2, 0}));
    EXPECT_EQ(vocab_decode(g.v, {2, 3, 0, 2, 3}), "a a");
}

// "b c" is a token, so a word's end is no border for merging.
TEST(VocabSpm, TokensOverWords) {
    const vocab_file f = vocab_spm({"_", "a", "b", "c", "_c", "b_c", "_a", "_ab"}).load();
    EXPECT_TRUE(f.v.whole_text);
    EXPECT_EQ(vocab_encode(f.v, "b c"), f.ids({" ", "b c"}));
    EXPECT_FALSE(vocab_spm(vocab_hello).load().v.whole_text);
}

// ---- any text ----

TEST(VocabText, RoundTrips) {
    std::vector<vocab_file> files;
    for (const pre_tokenizer &p : pre_tokenizers) {
        vocab_toy t = vocab_bpe(
            {{" ", "a"}, {"\xe4", "\xb8"}, {"\xe4\xb8", "\xad"}, {"\n", "\n"}, {"'", "s"}, {"1", "2"}}, p.name);
        t.add("<|x|>", 3), t.add("<y>", 4);
        files.push_back(t.load());
    }
    vocab_toy spm = vocab_spm(vocab_hello);
    spm.add("<y>", 4);
    files.push_back(spm.load());
    gguf_writer w;
    spm.write(w);
    w.add_bool("tokenizer.ggml.add_space_prefix", false);
    files.emplace_back(w);
    std::mt19937 random(4);
    for (int i = 0; i < 400; i++) {
        string valid, bytes;
        for (int n = int(random() % 30); n > 0; n--) {
            uint32_t c =
                random() % 2 ? " helowrd\n'sa12<|x>y"[random() % 20] : random() % (random() % 2 ? 0x3000 : 0x110000);
            c = (c >= 0xd800 && c < 0xe000) || c == 0x2581 ? ' ' : c;
            valid += random() % 16 ? vocab_utf8(c) : random() % 2 ? "<|x|>" : "<y>";
            bytes += random() % 3 ? char(random()) : " helo\xe4\xb8\xad\n"[random() % 9];
        }
        for (const vocab_file &f : files)
            for (bool special : {false, true}) {
                ASSERT_EQ(vocab_decode(f.v, vocab_encode(f.v, valid, special), true), valid) << f.v.describe;
                if (bytes.find(VOCAB_MARK) == bytes.npos) {
                    ASSERT_EQ(vocab_decode(f.v, vocab_encode(f.v, bytes, special), true), bytes) << f.v.describe;
                }
            }
    }
}

// Bytes that a vocabulary has only as an added token, written as the character for them, are not lost.
TEST(VocabText, BytesAsAddedTokens) {
    vocab_toy t = vocab_bpe({});
    t.tokens[0xf8] = "unused", t.types[0xf8] = 5;
    const int32_t id = t.add("\xc3\xb8", 4);
    const vocab_file f = t.load();
    EXPECT_EQ(vocab_encode(f.v, "\xf8"), (vocab_ids{id}));
    EXPECT_EQ(vocab_encode(f.v, "\xc3\xb8"), (vocab_ids{id}));
    EXPECT_EQ(token_bytes(f.v, id, false), "\xc3\xb8");
}

// ---- files ----

TEST(VocabFile, WhatIsAdded) {
    const struct {
        const char *model, *pre;
        bool add_bos;
    } rows[] = {{"llama", "", true},      {"gpt2", "llama-bpe", true}, {"gpt2", "llama3", true},
                {"gpt2", "gpt-2", false}, {"gpt2", "qwen2", false},    {"gpt2", "joyai-llm", false}};
    for (auto &r : rows)
        for (int given = -1; given < 2; given++) {
            vocab_toy t = string(r.model) == "llama" ? vocab_spm({}) : vocab_bpe({}, r.pre);
            gguf_writer w;
            t.write(w);
            w.add_u32("tokenizer.ggml.bos_token_id", 1);
            w.add_i32("tokenizer.ggml.eos_token_id", 2);
            w.add_u64("tokenizer.ggml.eot_token_id", 5);
            w.add_u8("tokenizer.ggml.eom_token_id", 6);
            if (given >= 0)
                w.add_bool("tokenizer.ggml.add_bos_token", given), w.add_bool("tokenizer.ggml.add_eos_token", given);
            const vocab_file f(w);
            EXPECT_EQ(f.v.add_bos, given >= 0 ? given == 1 : r.add_bos) << r.pre;
            EXPECT_EQ(f.v.add_eos, given == 1);
            EXPECT_EQ(f.v.bos, 1);
            EXPECT_EQ(f.v.eos, 2);
            for (int32_t id = 0; id < 8; id++)
                EXPECT_EQ(is_end(f.v, id), id == 2 || id == 5 || id == 6);
        }
    const vocab_file none = vocab_spm({}).load(); // nothing says which token BOS is
    EXPECT_EQ(none.v.bos, -1);
    EXPECT_FALSE(none.v.add_bos);
}

TEST(VocabFile, OldFilesWithoutTypesOrPreTokenizer) {
    vocab_toy t = vocab_bpe({{"1", "2"}, {"12", "3"}}, "");
    gguf_writer w;
    t.write(w, "types");
    const vocab_file f(w);
    EXPECT_EQ(f.v.describe, "bpe default");
    EXPECT_EQ(vocab_encode(f.v, "1234"), f.ids({"123", "4"}));
    gguf_writer s;
    vocab_spm(vocab_hello).write(s, "types");
    const vocab_file g(s);
    EXPECT_EQ(vocab_encode(g.v, "\xff"), (vocab_ids{g.id(" "), 3 + 0xff}));
}

TEST(VocabFile, EqualAndEmptyTokens) {
    vocab_toy t = vocab_bpe({{"a", "b"}});
    t.add("ab"), t.add("a"), t.add(""), t.add("", 3), t.add("", 4), t.add("<x>", 3), t.add("<x>", 3);
    const vocab_file f = t.load();
    EXPECT_EQ(vocab_encode(f.v, "ab<x>", true), (vocab_ids{256, f.id("<x>")}));
    vocab_toy s = vocab_spm(vocab_hello);
    const int32_t raw = s.add("\xff\xfe"); // no valid UTF-8: bytes
    s.add("hello"), s.add(VOCAB_MARK), s.add("");
    const vocab_file g = s.load();
    EXPECT_EQ(vocab_encode(g.v, "hello"), g.ids({" hello"}));
    EXPECT_EQ(token_bytes(g.v, raw, false), "\xff\xfe");
}

TEST(VocabFile, BadFilesAreRefused) {
    struct bad_row {
        const char *what, *without;  // key of the toy that is left out
        void (*add)(gguf_writer &w); // and what comes instead
        std::vector<string> says;    // all of this is in the message
        int code;
    };
    const std::vector<bad_row> spm = {
        {"no tokens", "tokens", [](gguf_writer &) {}, {"tokenizer.ggml.tokens"}, ENGINE_EFORMAT},
        {"empty",
         "tokens",
         [](gguf_writer &w) { w.add_strings("tokenizer.ggml.tokens", {}); },
         {"tokenizer.ggml.tokens"},
         ENGINE_EFORMAT},
        {"tokens are numbers",
         "tokens",
         [](gguf_writer &w) {
             w.add_u32s("tokenizer.ggml.tokens", {1, 2});
         },
         {"tokenizer.ggml.tokens"},
         ENGINE_EFORMAT},
        {"tokens are a string",
         "tokens",
         [](gguf_writer &w) { w.add_string("tokenizer.ggml.tokens", "x"); },
         {"tokenizer.ggml.tokens"},
         ENGINE_EFORMAT},
        {"no scores", "scores", [](gguf_writer &) {}, {"tokenizer.ggml.scores"}, ENGINE_EFORMAT},
        {"scores u8",
         "scores",
         [](gguf_writer &w) { w.add_u8s("tokenizer.ggml.scores", std::vector<uint8_t>(8, 0)); },
         {"tokenizer.ggml.scores"},
         ENGINE_EFORMAT},
        {"scores short",
         "scores",
         [](gguf_writer &w) { w.add_f32s("tokenizer.ggml.scores", std::vector<float>(7, 0)); },
         {"tokenizer.ggml.scores", "7"},
         ENGINE_EFORMAT},
        {"scores NaN",
         "scores",
         [](gguf_writer &w) { w.add_f32s("tokenizer.ggml.scores", std::vector<float>(259, NAN)); },
         {"tokenizer.ggml.scores"},
         ENGINE_EFORMAT},
        {"types short",
         "types",
         [](gguf_writer &w) { w.add_i32s("tokenizer.ggml.token_type", std::vector<int32_t>(7, 1)); },
         {"tokenizer.ggml.token_type", "7"},
         ENGINE_EFORMAT},
        {"type 99",
         "types",
         [](gguf_writer &w) { w.add_i32s("tokenizer.ggml.token_type", std::vector<int32_t>(259, 99)); },
         {"tokenizer.ggml.token_type", "99"},
         ENGINE_EFORMAT},
        {"type -1",
         "types",
         [](gguf_writer &w) { w.add_i32s("tokenizer.ggml.token_type", std::vector<int32_t>(259, -1)); },
         {"tokenizer.ggml.token_type", "-1"},
         ENGINE_EFORMAT},
        {"types are floats",
         "types",
         [](gguf_writer &w) { w.add_f32s("tokenizer.ggml.token_type", std::vector<float>(259, 1)); },
         {"tokenizer.ggml.token_type"},
         ENGINE_EFORMAT},
        {"byte that is none",
         "types",
         [](gguf_writer &w) { w.add_i32s("tokenizer.ggml.token_type", std::vector<int32_t>(259, 6)); },
         {"tokenizer.ggml.tokens", "<unk>"},
         ENGINE_EFORMAT},
        {"neither bytes nor unknown",
         "types",
         [](gguf_writer &w) { w.add_i32s("tokenizer.ggml.token_type", std::vector<int32_t>(259, 1)); },
         {"tokenizer.ggml.tokens", "256"},
         ENGINE_EFORMAT},
        {"bos = n",
         "",
         [](gguf_writer &w) { w.add_u32("tokenizer.ggml.bos_token_id", 259); },
         {"tokenizer.ggml.bos_token_id", "259"},
         ENGINE_EFORMAT},
        {"bos = 2^32 - 1",
         "",
         [](gguf_writer &w) { w.add_u32("tokenizer.ggml.bos_token_id", UINT32_MAX); },
         {"tokenizer.ggml.bos_token_id", "4294967295"},
         ENGINE_EFORMAT},
        {"eos = -2",
         "",
         [](gguf_writer &w) { w.add_i32("tokenizer.ggml.eos_token_id", -2); },
         {"tokenizer.ggml.eos_token_id", "-2"},
         ENGINE_EFORMAT},
        {"unk = 2^63",
         "",
         [](gguf_writer &w) { w.add_u64("tokenizer.ggml.unknown_token_id", 1ull << 63); },
         {"tokenizer.ggml.unknown_token_id"},
         ENGINE_EFORMAT},
        {"eot is a string",
         "",
         [](gguf_writer &w) { w.add_string("tokenizer.ggml.eot_token_id", "1"); },
         {"tokenizer.ggml.eot_token_id"},
         ENGINE_EFORMAT},
        {"add_bos is a number",
         "",
         [](gguf_writer &w) { w.add_u32("tokenizer.ggml.add_bos_token", 1); },
         {"tokenizer.ggml.add_bos_token"},
         ENGINE_EFORMAT},
    };
    const std::vector<bad_row> bpe = {
        {"no merges", "merges", [](gguf_writer &) {}, {"tokenizer.ggml.merges"}, ENGINE_EFORMAT},
        {"no space",
         "merges",
         [](gguf_writer &w) {
             w.add_strings("tokenizer.ggml.merges", {"a b", "ab"});
         },
         {"tokenizer.ggml.merges", "entry 1", "ab"},
         ENGINE_EFORMAT},
        {"only a space",
         "merges",
         [](gguf_writer &w) { w.add_strings("tokenizer.ggml.merges", {" "}); },
         {"tokenizer.ggml.merges"},
         ENGINE_EFORMAT},
        {"empty merge",
         "merges",
         [](gguf_writer &w) { w.add_strings("tokenizer.ggml.merges", {""}); },
         {"tokenizer.ggml.merges"},
         ENGINE_EFORMAT},
        {"half a merge",
         "merges",
         [](gguf_writer &w) { w.add_strings("tokenizer.ggml.merges", {"a "}); },
         {"tokenizer.ggml.merges"},
         ENGINE_EFORMAT},
        {"merges are numbers",
         "merges",
         [](gguf_writer &w) { w.add_u32s("tokenizer.ggml.merges", {1}); },
         {"tokenizer.ggml.merges"},
         ENGINE_EFORMAT},
        {"scores of a wrong length",
         "",
         [](gguf_writer &w) { w.add_f32s("tokenizer.ggml.scores", {1}); },
         {"tokenizer.ggml.scores"},
         ENGINE_EFORMAT},
    };
    auto refused = [](const gguf_writer &w, const bad_row &r) {
        try {
            vocab_file f(w);
            ADD_FAILURE() << r.what << " loads";
        } catch (const Error &e) {
            EXPECT_EQ(e.code, r.code) << r.what;
            for (string s : r.says)
                EXPECT_NE(e.msg.find(s), string::npos) << r.what << ": " << e.msg;
            EXPECT_EQ(e.msg.find("toy.gguf: "), 0u) << e.msg;
        }
    };
    for (const bad_row &r : spm) {
        gguf_writer w;
        vocab_spm({}).write(w, r.without);
        r.add(w);
        refused(w, r);
    }
    for (const bad_row &r : bpe) {
        gguf_writer w;
        vocab_bpe({}).write(w, r.without);
        r.add(w);
        refused(w, r);
    }
    vocab_toy unknown = vocab_bpe({}, "gpt-5");
    gguf_writer w;
    unknown.write(w);
    refused(w, {"unknown pre-tokenizer", "", nullptr, {"tokenizer.ggml.pre", "gpt-5"}, ENGINE_EUNSUPPORTED});
    unknown.model = "t5";
    gguf_writer m;
    unknown.write(m);
    refused(m, {"unknown model", "", nullptr, {"tokenizer.ggml.model", "t5"}, ENGINE_EUNSUPPORTED});
    gguf_writer empty;
    refused(empty, {"no tokenizer", "", nullptr, {"tokenizer.ggml.model"}, ENGINE_EFORMAT});
}

// What a vocabulary takes in memory beyond its file.
size_t vocab_memory(const vocab &v) {
    auto bytes = [](auto &x) { return x.capacity() * sizeof x[0]; };
    return bytes(v.arena) + bytes(v.text) + bytes(v.type) + bytes(v.pieces) + bytes(v.merges) + bytes(v.rank) +
           bytes(v.matched);
}

// Files made to need much memory: tokens that can be cut anywhere into two tokens, and many short merges.
TEST(VocabFile, MemoryIsBounded) {
    vocab_toy spm = vocab_spm({});
    std::mt19937 random(6);
    string letters;
    for (int i = 0; i < 400; i++)
        letters += char('a' + random() % 26);
    for (size_t from = 0; from < letters.size(); from++) // all pieces of one text
        for (size_t n = 1; n <= 128 && from + n <= letters.size(); n++)
            spm.add(letters.substr(from, n), 1, -float(n));
    vocab_toy bpe = vocab_bpe({});
    for (int i = 0; i < 300000; i++)
        bpe.merges.push_back({char('a' + i % 26), ' ', char('a' + i / 26 % 26)});
    for (const vocab_toy *t : {&spm, &bpe}) {
        const vocab_file f = t->load();
        EXPECT_GT(f.bytes.size(), 3u << 20);
        EXPECT_LT(f.bytes.size(), 5u << 20);
        EXPECT_LT(vocab_memory(f.v), f.bytes.size() + (32 << 20));
    }
    const vocab_file f = spm.load();
    EXPECT_EQ(vocab_decode(f.v, vocab_encode(f.v, letters + letters)), letters + letters);

    gguf_writer w;
    vocab_bpe({}).write(w, "merges");
    string list = gguf_array_head(GGUF_STRING, MAX_MERGES + 1);
    for (uint64_t i = 0; i <= MAX_MERGES; i++)
        list += gguf_string("a b");
    w.add_raw("tokenizer.ggml.merges", GGUF_ARRAY, list);
    try {
        vocab_file refused(w);
        ADD_FAILURE() << "too many merges load";
    } catch (const Error &e) {
        EXPECT_EQ(e.msg, "toy.gguf: tokenizer.ggml.merges: has 2097153 entries, more than 2097152");
    }
}

// As many tokens as the largest real vocabularies have, some of them long.
TEST(VocabFile, LargeVocabularies) {
    vocab_toy spm = vocab_spm({"_"}), bpe = vocab_bpe({});
    for (int i = 0; i < 256000; i++) {
        const string s = i % 1000 ? strf("%x", 0x100000 + i) : string(size_t(100 + i / 1000), 'z') + char('a' + i % 7);
        spm.add(s, 1, -float(i)), bpe.add(s);
        bpe.merges.push_back(s.substr(0, 1) + " " + s.substr(1));
        bpe.merges.push_back(s.substr(0, s.size() - 1) + " " + s.substr(s.size() - 1));
    }
    const vocab_file s = spm.load(), b = bpe.load();
    EXPECT_EQ(s.v.n, 256260);
    EXPECT_EQ(vocab_decode(s.v, vocab_encode(s.v, "100001 zzz")), "100001 zzz");
    EXPECT_EQ(vocab_decode(b.v, vocab_encode(b.v, "100001 zzz")), "100001 zzz");
}

// Whatever a damaged file says, it is refused with an Error or it works.
TEST(VocabFile, DamagedFiles) {
    std::mt19937 random(5);
    vocab_toy spm = vocab_spm(vocab_hello), bpe = vocab_bpe({{"h", "e"}, {"l", "l"}, {"he", "ll"}}, "llama-bpe");
    bpe.add("<s>", 3), bpe.add("<think>", 4);
    int loaded = 0, refused = 0;
    for (const vocab_toy *t : {&spm, &bpe}) {
        gguf_writer w;
        t->write(w);
        w.add_u32("tokenizer.ggml.bos_token_id", 1);
        w.add_u32("tokenizer.ggml.eos_token_id", 2);
        w.add_bool("tokenizer.ggml.add_space_prefix", true);
        const string valid = w.bytes();
        for (int i = 0; i < 4000; i++) {
            string bytes = valid;
            for (int n = 1 + int(random() % 3); n > 0; n--)
                bytes[random() % bytes.size()] = char(random() % 2 ? random() : 1u << random() % 8);
            try {
                const model_file f =
                    parse_gguf(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), "toy.gguf");
                const vocab v = load_vocab(f);
                const vocab_ids ids = vocab_encode(v, "<s>hello <think>\xff\xe4\xb8\xad", i % 2 == 0);
                for (int32_t id : ids)
                    ASSERT_TRUE(id >= 0 && id < v.n);
                vocab_decode(v, ids, true);
                loaded++;
            } catch (const Error &e) {
                ASSERT_TRUE(e.code == ENGINE_EFORMAT || e.code == ENGINE_EUNSUPPORTED) << e.msg;
                ASSERT_EQ(e.msg.find("toy.gguf: "), 0u) << e.msg;
                refused++;
            }
        }
    }
    EXPECT_GT(loaded, 500);
    EXPECT_GT(refused, 500);
}

// Merges that name no tokens are left out; two of the same pair are one.
TEST(VocabFile, MergesThatLeadNowhere) {
    vocab_toy t = vocab_bpe({{"a", "b"}});
    t.merges.insert(t.merges.begin(), "q r");
    t.merges.push_back("a b"), t.merges.push_back("zz y");
    const vocab_file f = t.load();
    EXPECT_EQ(vocab_encode(f.v, "abqr"), (vocab_ids{256, 'q', 'r'}));
}

} // namespace
