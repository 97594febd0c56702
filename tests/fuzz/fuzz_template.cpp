// fuzz_template: any bytes as a chat template, for one fixed conversation and with small limits.
//     clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined tests/fuzz/fuzz_template.cpp -o fuzz_template
//     -lpthread
//     ./fuzz_template -max_len=4096 -malloc_limit_mb=64 tests/fuzz/corpus_template
#ifndef UNIT_H
#include "../../engine.cpp"
#endif

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const vector<chat_message> talk = {
        {"system", "Be brief."}, {"user", " H\xc3\xa9 <|x|>\n"}, {"assistant", "<think>\na</think>b"}};
    try {
        template_limits limits;
        limits.max_steps = 20000, limits.max_memory = 1 << 20, limits.now = 1700000000;
        const string_view source(reinterpret_cast<const char *>(data), size);
        chat_text text = render_template(source, talk, true, "<s>", "</s>", limits);
        if (text.text.size() != text.literal.size())
            __builtin_trap();
    } catch (const Error &e) {
        if (e.code != ENGINE_ETEMPLATE || e.msg.compare(0, 14, "template line ") != 0)
            __builtin_trap();
    }
    return 0;
}
