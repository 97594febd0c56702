// fuzz_tokenize: any bytes as text, for toy vocabularies of every pre-tokenizer and of SentencePiece's kind. The first
// byte chooses the vocabulary, the second whether special tokens are parsed and whether the rest is text, or half of it
// text and half the mask of what a user wrote.
//     clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined tests/fuzz/fuzz_tokenize.cpp -o fuzz_tokenize
//     -lpthread
//     ./fuzz_tokenize -max_len=512 tests/fuzz/corpus_tokenize
#ifndef UNIT_H
#include "../../engine.cpp"
#endif

#include "../gguf_writer.h"

static const int CONTROLS = 2; // each vocabulary begins with them

static vocab make_toy(const char *pre) {
    vector<string> tokens = {"<|im_start|>", "<s>"}, merges;
    vector<int32_t> types = {3, 3};
    vector<float> scores;
    gguf_writer w;
    w.add_string("tokenizer.ggml.model", pre ? "gpt2" : "llama");
    if (pre)
        w.add_string("tokenizer.ggml.pre", pre);
    for (const char *user : {"<think>", "<|x|>", "<|x", "\xc3\xa9"})
        tokens.push_back(user), types.push_back(4);
    for (int b = 0, other = 256; b < 256; b++) {
        const bool own = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        const int c = own ? b : other++;
        const string wide = {char(0xc0 | c >> 6), char(0x80 | (c & 63))};
        tokens.push_back(!pre ? strf("<0x%02X>", b) : c < 128 ? string(1, char(c)) : wide);
        types.push_back(pre ? 1 : 6);
    }
    const string space = pre ? "\xc4\xa0" : "\xe2\x96\x81"; // written as U+0120 or U+2581
    for (const string &c : {space, string("a"), string("b"), string("s")})
        if (!pre)
            tokens.push_back(c), types.push_back(1);
    const std::pair<string, string> pairs[] = {{"a", "b"},     {"a", "a"}, {"aa", "aa"}, {space, "a"},
                                               {space, space}, {"b", "a"}, {"ab", "ab"}};
    for (auto &p : pairs) {
        merges.push_back(p.first + " " + p.second);
        tokens.push_back(p.first + p.second), types.push_back(1);
    }
    for (size_t i = 0; i < tokens.size(); i++)
        scores.push_back(-float(i % 3)); // some are equal
    w.add_strings("tokenizer.ggml.tokens", tokens);
    w.add_i32s("tokenizer.ggml.token_type", types);
    w.add_strings("tokenizer.ggml.merges", merges);
    w.add_f32s("tokenizer.ggml.scores", scores);
    const string bytes = w.bytes();
    return load_vocab(parse_gguf(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), "toy"));
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const vector<vocab> toys = [] {
        vector<vocab> v;
        v.push_back(make_toy(nullptr));
        for (const pre_tokenizer &p : pre_tokenizers)
            v.push_back(make_toy(p.name));
        return v;
    }();
    if (size < 2)
        return 0;
    const vocab &v = toys[data[0] % toys.size()];
    const bool special = data[1] & 1, masked = data[1] & 2;
    const size_t n = masked ? (size - 2) / 2 : size - 2;
    const string text(reinterpret_cast<const char *>(data + 2), n);
    const uint8_t *literal = masked ? data + 2 + n : nullptr;
    vector<int32_t> ids;
    tokenize(v, text, special, literal, ids);

    // A space that was written as U+2581 comes back as a space.
    if ((v.pre || text.find("\xe2\x96\x81") == text.npos) && detokenize(v, ids.data(), ids.size(), true) != text)
        __builtin_trap();
    size_t controls = 0, open = n; // open: bytes that no user wrote
    for (int32_t id : ids)
        controls += id < CONTROLS;
    for (size_t i = 0; literal && i < n; i++)
        open -= literal[i] != 0;
    if (controls && (!special || open < 3 * controls))
        __builtin_trap();

    utf8_gate whole, bytes;
    string a = whole.push(text), b;
    for (char c : text)
        b += bytes.push({&c, 1});
    if (a + whole.finish() != b + bytes.finish())
        __builtin_trap();
    return 0;
}
