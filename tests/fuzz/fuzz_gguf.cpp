// fuzz_gguf: any bytes as a model file. Each input goes through the loader, and of what it accepts every byte is read;
// the vocabulary that it may have turns a text into ids and back.
//     clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined tests/fuzz/fuzz_gguf.cpp -o fuzz_gguf -lpthread
//     ./fuzz_gguf -max_len=8192 -malloc_limit_mb=64 tests/fuzz/corpus_gguf
#ifndef UNIT_H
#include "../../engine.cpp"
#endif

static uint64_t fuzz_gguf_vocab(const model_file &f) {
    static const string_view text = "a b  abab<s></s> <|x|>\n\xc3\xa9\xe2\x96\x81\xff 12";
    uint64_t sum = 0;
    const vocab v = load_vocab(f);
    for (bool special : {false, true}) {
        vector<int32_t> ids;
        tokenize(v, text, special, nullptr, ids);
        for (int32_t id : ids) {
            if (id < 0 || id >= v.n || (!special && v.type[size_t(id)] == TOKEN_CONTROL && id != v.unk))
                __builtin_trap();
            sum += token_bytes(v, id, special).size() + is_end(v, id);
        }
        sum += detokenize(v, ids.data(), ids.size(), special).size();
    }
    return sum;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static volatile uint64_t sink;
    uint64_t sum = 0;
    try {
        model_file f = parse_gguf(data, size, "fuzz");
        for (const meta_value &v : f.keys) {
            if (f.meta(v.key) != &v)
                __builtin_trap();
            sum += meta_text(v).size();
            if (v.item == META_STRING && v.type == META_ARRAY)
                for (string_view s : f.get_array(v.key, KIND_STRING))
                    sum += s.empty() ? 0 : uint8_t(s.front()) + uint8_t(s.back());
            else
                for (uint64_t i = 0; i < v.bytes; i++)
                    sum += v.data[i];
        }
        for (const tensor_info &t : f.tensors) {
            if (f.find(t.name) != &t)
                __builtin_trap();
            for (uint64_t i = 0; i < t.bytes; i++)
                sum += t.data[i];
        }
        f.get_int("general.alignment", 0, INT64_MIN, INT64_MAX); // the loader has checked it
        if (f.meta("tokenizer.ggml.model"))
            sum += fuzz_gguf_vocab(f);
    } catch (const Error &e) {
        // The rules for messages hold for any input.
        if (e.msg.compare(0, 6, "fuzz: ") != 0 || e.msg.size() >= sizeof(engine_error::msg))
            __builtin_trap();
        for (char c : e.msg)
            if (c < 0x20 || c > 0x7e)
                __builtin_trap();
    }
    sink = sum;
    (void)sink;
    return 0;
}
