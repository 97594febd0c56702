// fuzz_json: any bytes as JSON. What is accepted is walked through as its readers walk, written out again and read
// back.
//     clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined tests/fuzz/fuzz_json.cpp -o fuzz_json -lpthread
//     ./fuzz_json -max_len=8192 -malloc_limit_mb=64 tests/fuzz/corpus_json
#ifndef UNIT_H
#include "../../engine.cpp"
#endif

static void fuzz_json_write(const json_value &v, string &out) {
    switch (v.kind) {
    case JSON_NULL:
        out += "null";
        break;
    case JSON_BOOL:
        out += v.i ? "true" : "false";
        break;
    case JSON_INT:
        out += std::to_string(v.i);
        break;
    case JSON_FLOAT:
        out += strf("%.17e", v.f);
        break;
    case JSON_STRING:
        out += '"';
        for (char c : v.text())
            out += uint8_t(c) < 0x20 || c == '"' || c == '\\' ? strf("\\u%04x", c) : string(1, c);
        out += '"';
        break;
    default:
        const bool object = v.kind == JSON_OBJECT;
        uint32_t n = 0;
        out += object ? '{' : '[';
        for (const json_value *item = v.begin(); item != v.end(); item = item->next(), n++) {
            out += n ? "," : "";
            if (object) {
                if (item->kind != JSON_STRING || v.find(item->text()) != item + 1)
                    __builtin_trap();
                fuzz_json_write(*item++, out);
                out += ':';
            }
            fuzz_json_write(*item, out);
        }
        if (n != v.n)
            __builtin_trap();
        out += object ? '}' : ']';
    }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const string_view text(reinterpret_cast<const char *>(data), size);
    try {
        const json_document d = parse_json(text, ENGINE_EFORMAT, "fuzz");
        if (d.root().next() != d.values.data() + d.values.size())
            __builtin_trap();
        string first, second;
        fuzz_json_write(d.root(), first);
        fuzz_json_write(parse_json(first, ENGINE_EINTERNAL, "again").root(), second);
        if (first != second)
            __builtin_trap();
    } catch (const Error &e) {
        if (e.code != ENGINE_EFORMAT || e.msg.compare(0, 11, "fuzz: line ") != 0)
            __builtin_trap();
    }
    return 0;
}
