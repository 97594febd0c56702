// fuzz_template: any bytes as a chat template, for one fixed conversation and with small limits.
//     clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined tests/fuzz/fuzz_template.cpp -o fuzz_template
//     -lpthread
//     ./fuzz_template -max_len=4096 -malloc_limit_mb=64 tests/fuzz/corpus_template
#ifndef UNIT_H
#include "../../engine.cpp"
#endif

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    // With all that a conversation can bring: contents as text, in parts and absent, calls, numbers.
    static const string_view talk = R"([{"role": "system", "content": "Be brief."},
        {"role": "user", "content": " H\u00e9 <|x|>\n"},
        {"role": "assistant", "content": "<think>\na</think>b", "reasoning_content": "r"},
        {"role": "user", "content": [{"type": "text", "text": "p"}, {"type": "image"}]},
        {"role": "assistant", "content": null, "tool_calls": [{"type": "function", "id": "1",
            "function": {"name": "f", "arguments": {"a": [1, -2.5e-7, true, null, "s"]}}}]}])";
    static const json_document messages = parse_json(talk, ENGINE_EINVAL, "talk");
    chat_input in;
    in.messages = &messages.root(), in.add_generation_prompt = true, in.bos = "<s>", in.eos = "</s>";
    in.args = {{"tools", &messages.root()}, {"part", &messages.values[40]}};
    try {
        template_limits limits;
        limits.max_steps = 20000, limits.max_memory = 1 << 20, limits.now = 1700000000;
        const string_view source(reinterpret_cast<const char *>(data), size);
        chat_text text = render_template(source, in, limits);
        if (text.text.size() != text.literal.size())
            __builtin_trap();
    } catch (const Error &e) {
        if (e.code != ENGINE_ETEMPLATE || e.msg.compare(0, 14, "template line ") != 0)
            __builtin_trap();
    }
    return 0;
}
