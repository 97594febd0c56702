// Files: GGUF in one part or several, valid, damaged and hostile.
#include "unit.h"

#include "gguf_writer.h"
#include "mutate.h"

#include <cmath>
#include <limits>

namespace {

// A valid file with a key of every type and tensors of several shapes.
void files_fill(gguf_writer &w) {
    w.add_string("general.architecture", "test");
    w.add_u8("k.u8", 200);
    w.add_i8("k.i8", -100);
    w.add_u16("k.u16", 60000);
    w.add_i16("k.i16", -30000);
    w.add_u32("k.u32", 4000000000u);
    w.add_i32("k.i32", -2000000000);
    w.add_u64("k.u64", ~0ull);
    w.add_i64("k.i64", INT64_MIN);
    w.add_f32("k.f32", 0.1f);
    w.add_f64("k.f64", 1e-300);
    w.add_bool("k.true", true);
    w.add_bool("k.false", false);
    w.add_string("k.empty", "");
    w.add_strings("tokens", {"a", "", "\xff\xfe", "hello world"});
    w.add_f32s("scores", {0, -1.5f, 2, 3});
    w.add_f64s("doubles", {1e300, -1});
    w.add_i32s("types", {1, -2, 3, 99});
    w.add_u64s("big", {5, ~0ull});
    w.add_bools("flags", {0, 1, 1});
    w.add_strings("no.strings", {});
    w.add_u8s("no.bytes", {});
    w.add_floats("norm", {4}, {1, 2, 3, 4});
    w.add_tensor("q4", 2, {64, 3}, string(2 * 18 * 3, '\x11'));
    w.add_tensor("deep", 1, {2, 3, 4, 5}, string(240, '\x22'));
    w.add_tensor("ids", 26, {5}, string(20, '\x33'));
}
string files_valid() {
    gguf_writer w;
    files_fill(w);
    return w.bytes();
}

// What is wrong with these bytes, "" when nothing is. They are copied to a block of exactly their size, so that the
// address sanitizer sees any step beyond the end.
string files_error(const string &bytes, int *code = nullptr) {
    vector<uint8_t> exact(bytes.begin(), bytes.end());
    try {
        parse_gguf(exact.data(), exact.size(), "dir/t.gguf");
        return "";
    } catch (const Error &e) {
        if (code)
            *code = e.code;
        return e.msg;
    }
}

// One short line that begins with the file's name and has all of `parts`.
void files_rejects(const string &bytes, const vector<string> &parts, int code = ENGINE_EFORMAT) {
    int got = 0;
    string msg = files_error(bytes, &got);
    EXPECT_EQ(msg.substr(0, 12), "dir/t.gguf: ") << msg;
    EXPECT_LT(msg.size(), sizeof(engine_error::msg)) << msg;
    for (char c : msg)
        EXPECT_TRUE(c >= 0x20 && c < 0x7f) << msg;
    for (const string &part : parts)
        EXPECT_NE(msg.find(part), string::npos) << msg << "\n  lacks: " << part;
    EXPECT_EQ(got, code) << msg;
}

// The error of opening a path, "" when it opens.
string files_open_error(const string &path, bool no_mmap = false, int *code = nullptr) {
    try {
        open_model_file(path.c_str(), no_mmap);
        return "";
    } catch (const Error &e) {
        if (code)
            *code = e.code;
        return e.msg;
    }
}

// The error of a call on an open file.
template <class F> string files_message(F &&f) {
    try {
        f();
        return "";
    } catch (const Error &e) {
        EXPECT_EQ(e.code, ENGINE_EFORMAT);
        return e.msg;
    }
}

// Reads everything that a file offers; the sum keeps the compiler from leaving it out.
uint64_t files_use(const model_file &f) {
    uint64_t sum = 0;
    for (const meta_value &v : f.keys) {
        if (f.meta(v.key) != &v)
            ADD_FAILURE() << "a key is not found by its name";
        sum += meta_text(v).size();
        if (v.type != META_ARRAY)
            continue;
        meta_kind kind = meta_types[v.item].kind;
        meta_array a = f.get_array(v.key, kind);
        if (kind == KIND_STRING)
            for (string_view item : a)
                for (char c : item)
                    sum += uint8_t(c);
        for (uint64_t i = 0; i < a.count && kind != KIND_STRING; i++)
            sum += uint64_t(kind == KIND_INT     ? a.int_at(i)
                            : kind == KIND_FLOAT ? int64_t(a.float_at(i) == 0)
                                                 : a.data[i]);
    }
    for (const tensor_info &t : f.tensors) {
        if (f.find(t.name) != &t)
            ADD_FAILURE() << "a tensor is not found by its name";
        for (uint64_t i = 0; i < t.bytes; i++)
            sum += t.data[i];
    }
    return sum;
}

// The encoded entry of one tensor, for files with a wrong one.
string files_tensor(const string &name, const vector<uint64_t> &dims, uint32_t type, uint64_t offset) {
    string s = gguf_string(name) + gguf_raw(uint32_t(dims.size()));
    for (uint64_t d : dims)
        gguf_put(s, d);
    return s + gguf_raw(type) + gguf_raw(offset);
}
// A file that has only this tensor and `data` bytes of weights.
string files_one_tensor(const vector<uint64_t> &dims, uint32_t type, uint64_t offset = 0, size_t data = 64) {
    gguf_writer w;
    w.tensor_infos = files_tensor("X", dims, type, offset);
    w.extra_tensors = 1;
    return w.bytes() + string(data, '\0');
}
// A file that has only the key "K" with these bytes as its value, and `tail` bytes more.
string files_one_key(uint32_t type, const string &value, size_t tail = 64) {
    gguf_writer w;
    w.add_raw("K", type, value);
    return w.bytes() + string(tail, '\0');
}

} // namespace

TEST(Files, ReadsEveryTypeOfValue) {
    string bytes = files_valid();
    for (uint32_t version : {2u, 3u}) {
        memcpy(&bytes[4], &version, 4);
        model_file f = parse_gguf(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), "t.gguf");
        EXPECT_EQ(f.get_string("general.architecture", "?"), "test");
        EXPECT_EQ(f.need_int("k.u8", 0, 255), 200);
        EXPECT_EQ(f.need_int("k.i8", -128, 127), -100);
        EXPECT_EQ(f.need_int("k.u16", 0, 65535), 60000);
        EXPECT_EQ(f.need_int("k.i16", -32768, 0), -30000);
        EXPECT_EQ(f.need_int("k.u32", 0, INT64_MAX), 4000000000);
        EXPECT_EQ(f.need_int("k.i32", INT64_MIN, 0), -2000000000);
        EXPECT_EQ(f.need_int("k.i64", INT64_MIN, 0), INT64_MIN);
        EXPECT_EQ(float(f.get_float("k.f32", 0)), 0.1f);
        EXPECT_EQ(f.get_float("k.f64", 0), 1e-300);
        EXPECT_TRUE(f.get_bool("k.true", false));
        EXPECT_FALSE(f.get_bool("k.false", true));
        EXPECT_EQ(f.get_string("k.empty", "?"), "");

        EXPECT_EQ(f.get_int("none", -7, 0, 1), -7);
        EXPECT_EQ(f.get_float("none", 2.5), 2.5);
        EXPECT_TRUE(f.get_bool("none", true));
        EXPECT_EQ(f.get_string("none", "x"), "x");
        EXPECT_EQ(f.get_array("none", KIND_INT).data, nullptr);

        vector<string_view> strings;
        for (string_view s : f.need_array("tokens", KIND_STRING))
            strings.push_back(s);
        EXPECT_EQ(strings, (vector<string_view>{"a", "", "\xff\xfe", "hello world"}));
        meta_array scores = f.get_array("scores", KIND_FLOAT), doubles = f.get_array("doubles", KIND_FLOAT);
        ASSERT_EQ(scores.count, 4u);
        EXPECT_EQ(scores.float_at(1), -1.5);
        EXPECT_EQ(doubles.float_at(0), 1e300);
        meta_array types = f.get_array("types", KIND_INT), big = f.get_array("big", KIND_INT);
        EXPECT_EQ(types.int_at(1), -2);
        EXPECT_EQ(types.int_at(3), 99);
        EXPECT_EQ(big.int_at(0), 5);
        EXPECT_EQ(big.int_at(1), INT64_MAX);
        meta_array flags = f.get_array("flags", KIND_BOOL);
        EXPECT_EQ(flags.count, 3u);
        EXPECT_EQ(flags.data[0], 0);
        EXPECT_EQ(flags.data[2], 1);
        EXPECT_EQ(f.need_array("no.strings", KIND_STRING).count, 0u);
        EXPECT_EQ(f.need_array("no.bytes", KIND_INT).count, 0u);
        EXPECT_NE(f.need_array("no.bytes", KIND_INT).data, nullptr);
    }
}

TEST(Files, FindsTensors) {
    string bytes = files_valid();
    const uint8_t *data = reinterpret_cast<const uint8_t *>(bytes.data());
    model_file f = parse_gguf(data, bytes.size(), "t.gguf");
    ASSERT_EQ(f.tensors.size(), 4u);
    EXPECT_EQ(f.tensors[0].name, "norm");
    EXPECT_EQ(f.tensors[3].name, "ids");
    const tensor_info *t = f.find("deep");
    ASSERT_TRUE(t);
    EXPECT_EQ(t->n_dims, 4);
    EXPECT_EQ(t->dims[0], 2u);
    EXPECT_EQ(t->dims[3], 5u);
    EXPECT_EQ(t->bytes, 240u);
    t = f.find("q4");
    ASSERT_TRUE(t);
    EXPECT_EQ(t->type, 2);
    EXPECT_EQ(t->dims[1], 3u);
    EXPECT_EQ(t->dims[2], 1u);
    EXPECT_EQ(t->bytes, 108u);
    EXPECT_EQ(uint64_t(t->data - data) % 32, 0u);
    EXPECT_EQ(t->data[0], 0x11);
    EXPECT_EQ(t->data[107], 0x11);
    float second;
    memcpy(&second, f.find("norm")->data + 4, 4);
    EXPECT_EQ(second, 2.0f);
    for (const char *absent : {"", "a", "nor", "normx", "zzz"})
        EXPECT_EQ(f.find(absent), nullptr) << absent;
}

TEST(Files, SizesOfAllFormats) {
    for (uint32_t type = 0; type < 64; type++) {
        uint64_t values, size;
        gguf_writer w;
        if (!gguf_block(type, values, size))
            continue;
        w.add_tensor("t", type, {2 * values, 3, 2});
        string bytes = w.bytes();
        model_file f = parse_gguf(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), "t.gguf");
        EXPECT_EQ(f.tensors[0].bytes, 12 * size) << type;
        if (values > 1)
            files_rejects(files_one_tensor({2 * values + 1, 3}, type, 0, 10000), {"tensor X", "is no multiple of"});
    }
}

TEST(Files, ValuesAsText) {
    string bytes = files_valid();
    model_file f = parse_gguf(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), "t.gguf");
    string all;
    for (const meta_value &v : f.keys)
        all += string(v.key) + "=" + meta_text(v) + ";";
    EXPECT_EQ(all, "general.architecture=test;k.u8=200;k.i8=-100;k.u16=60000;k.i16=-30000;k.u32=4000000000;"
                   "k.i32=-2000000000;k.u64=18446744073709551615;k.i64=-9223372036854775808;k.f32=0.1;k.f64=1e-300;"
                   "k.true=true;k.false=false;k.empty=;tokens=[4 items];scores=[4 items];doubles=[2 items];"
                   "types=[4 items];big=[2 items];flags=[3 items];no.strings=[0 items];no.bytes=[0 items];");
    for (float v : {1e-5f, 10000.f, 500000.f, 1.f / 3, 16777216.f, 1e30f, INFINITY}) {
        string one = files_one_key(GGUF_F32, gguf_raw(v));
        model_file g = parse_gguf(reinterpret_cast<const uint8_t *>(one.data()), one.size(), "t.gguf");
        EXPECT_EQ(strtof(meta_text(g.keys[0]).c_str(), nullptr), v);
    }
    string one = files_one_key(GGUF_F32, gguf_raw(500000.f));
    model_file g = parse_gguf(reinterpret_cast<const uint8_t *>(one.data()), one.size(), "t.gguf");
    EXPECT_EQ(meta_text(g.keys[0]), "500000");
}

TEST(Files, GettersNameFileKeyAndReason) {
    gguf_writer w;
    files_fill(w);
    w.add_f32("k.nan", NAN);
    string bytes = w.bytes();
    model_file f = parse_gguf(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), "t.gguf");
    EXPECT_EQ(files_message([&] { f.get_int("k.u8", 0, 0, 199); }), "t.gguf: k.u8: is 200, expected 0 ... 199");
    EXPECT_EQ(files_message([&] { f.get_int("k.i8", 0, 0, 199); }), "t.gguf: k.i8: is -100, expected 0 ... 199");
    EXPECT_EQ(files_message([&] { f.get_int("k.u64", 0, 0, 9); }),
              "t.gguf: k.u64: is 18446744073709551615, expected 0 ... 9");
    EXPECT_EQ(files_message([&] { f.get_int("k.f32", 0, 0, 9); }), "t.gguf: k.f32: has type f32, expected an integer");
    EXPECT_EQ(files_message([&] { f.need_int("none", 0, 9); }), "t.gguf: none: is missing");
    EXPECT_EQ(files_message([&] { f.get_float("k.u8", 0); }), "t.gguf: k.u8: has type u8, expected a float");
    EXPECT_EQ(files_message([&] { f.get_float("k.nan", 0); }), "t.gguf: k.nan: is nan, expected a finite number");
    EXPECT_EQ(files_message([&] { f.get_bool("k.u8", false); }), "t.gguf: k.u8: has type u8, expected a bool");
    EXPECT_EQ(files_message([&] { f.get_string("tokens", ""); }), "t.gguf: tokens: has type array, expected a string");
    EXPECT_EQ(files_message([&] { f.need_string("none"); }), "t.gguf: none: is missing");
    EXPECT_EQ(files_message([&] { f.get_array("k.u8", KIND_INT); }), "t.gguf: k.u8: has type u8, expected an array");
    EXPECT_EQ(files_message([&] { f.get_array("tokens", KIND_INT); }),
              "t.gguf: tokens: is an array of string, expected an integer in each item");
    EXPECT_EQ(files_message([&] { f.get_array("types", KIND_FLOAT); }),
              "t.gguf: types: is an array of i32, expected a float in each item");
    EXPECT_EQ(files_message([&] { f.need_array("none", KIND_FLOAT); }), "t.gguf: none: is missing");
    EXPECT_EQ(files_message([&] { f.bad(string("a.") + "b", "%d is odd", 3); }), "t.gguf: a.b: 3 is odd");
}

// FIELD-CASES 3.1
TEST(Files, EveryPrefixIsRejected) {
    string bytes = files_valid();
    EXPECT_EQ(files_error(bytes), "");
    size_t with_end = 0;
    for (size_t n = 0; n < bytes.size(); n++) {
        SCOPED_TRACE(n);
        files_rejects(bytes.substr(0, n), {});
        with_end += files_error(bytes.substr(0, n)).find(strf(", file has %zu bytes", n)) != string::npos;
    }
    EXPECT_GT(with_end, 300u);
    files_rejects(bytes.substr(0, bytes.size() - 1),
                  {strf("tensor ids ends at %zu, file has %zu bytes", bytes.size(), bytes.size() - 1)});
}

// FIELD-CASES 3.2
TEST(Files, ZeroDimensions) {
    files_rejects(files_one_tensor({1, 0}, 0), {"dimension 1 of X is zero"});
    files_rejects(files_one_tensor({0}, 0), {"dimension 0 of X is zero"});
    files_rejects(files_one_tensor({0, 5}, 2), {"dimension 0 of X is zero"});
    files_rejects(files_one_tensor({1, 1, 1, 0}, 0), {"dimension 3 of X is zero"});
    files_rejects(files_one_tensor({1ull << 62, 1ull << 62, 0}, 0), {"dimension 2 of X is zero"});
}

// FIELD-CASES 3.3
TEST(Files, OverflowingSizes) {
    files_rejects(files_one_tensor({65536, 65536, 65536, 65536}, 0), {"tensor X", "overflows"});
    files_rejects(files_one_tensor({65536, 65536, 65536, 65536}, 2), {"tensor X", "overflows"});
    files_rejects(files_one_tensor({1ull << 62}, 0), {"tensor X", "overflows"});
    files_rejects(files_one_tensor({~0ull}, 0), {"tensor X", "overflows"});
    files_rejects(files_one_tensor({~0ull}, 24), {"tensor X", "overflows"});
    files_rejects(files_one_tensor({~31ull}, 8), {"tensor X", "overflows"});
    files_rejects(files_one_tensor({1ull << 63}, 24), {"tensor X", "overflows"});
    files_rejects(files_one_tensor({(1ull << 63) - 32}, 24), {"tensor X", "ends at 9223372036854775840"});
    files_rejects(files_one_tensor({1ull << 32, 1ull << 32}, 0), {"tensor X", "overflows"});
    files_rejects(files_one_tensor({1ull << 60}, 0), {"tensor X", "file has"});
    gguf_writer w; // sizes whose sum wraps
    w.tensor_infos = files_tensor("A", {1ull << 62}, 24, 0) + files_tensor("B", {1ull << 62}, 24, 1ull << 62) +
                     files_tensor("C", {1ull << 62}, 24, 1ull << 63) + files_tensor("D", {1ull << 62}, 24, 3ull << 62);
    w.extra_tensors = 4;
    files_rejects(w.bytes() + string(64, '\0'), {"tensor A ends at", "file has"});
}

// FIELD-CASES 3.4
TEST(Files, WrongOffsets) {
    EXPECT_EQ(files_error(files_one_tensor({16}, 0)), "");
    files_rejects(files_one_tensor({16}, 0, ~0ull - 31), {"tensor X", "overflow"});
    files_rejects(files_one_tensor({16}, 0, 1ull << 40), {"tensor X ends at", "file has"});
    files_rejects(files_one_tensor({16}, 0, 32), {"tensor X ends at", "file has"});
    files_rejects(files_one_tensor({8}, 0, 16), {"tensor X", "offset 16 is no multiple of the alignment 32"});
    files_rejects(files_one_tensor({33}, 2), {"tensor X", "row length 33 is no multiple of Q4_0's block 32"});
    files_rejects(files_one_tensor({33, 32}, 2), {"tensor X", "row length 33 is no multiple of Q4_0's block 32"});

    auto two = [](uint64_t offset) {
        gguf_writer w;
        w.add_tensor("A", 0, {16}).offset = 0;
        w.add_tensor("B", 0, {16}).offset = offset;
        return w.bytes();
    };
    EXPECT_EQ(files_error(two(64)), "");
    files_rejects(two(0), {"tensor", "overlaps tensor"});
    files_rejects(two(32), {"tensor B: overlaps tensor A"});
    gguf_writer w; // any order is fine, and holes are
    w.add_tensor("A", 0, {16}).offset = 128;
    w.add_tensor("B", 0, {8}).offset = 0;
    EXPECT_EQ(files_error(w.bytes() + string(128, '\0')), "");
}

// FIELD-CASES 3.5: lengths, counts and types that lie. None of these may take memory.
TEST(Files, LyingLengthsAndTypes) {
    test::heap_meter meter;
    auto raw_key = [](const string &s) {
        gguf_writer w;
        w.keys = s, w.n_keys = 1;
        return w.bytes() + string(64, '\0');
    };
    files_rejects(raw_key(gguf_string("K", 1ull << 63)), {"key", "9223372036854775808 bytes long"});
    files_rejects(raw_key(gguf_string("K", ~0ull)), {"key", "18446744073709551615 bytes long"});
    files_rejects(raw_key(gguf_string("K", 60000)), {"file ends inside key"});
    files_rejects(raw_key(gguf_string("", 0) + gguf_raw(uint32_t(0)) + "x"), {"key: is empty"});
    EXPECT_EQ(files_error(raw_key(gguf_string(string(65535, 'k')) + gguf_raw(uint32_t(0)) + "x")), "");
    files_rejects(raw_key(gguf_string(string(65536, 'k')) + gguf_raw(uint32_t(0)) + "x"), {"key", "65536 bytes long"});

    files_rejects(files_one_key(GGUF_STRING, gguf_string("v", 1ull << 40)), {"K", "1099511627776 bytes needed"});
    files_rejects(files_one_key(GGUF_STRING, gguf_string("v", ~0ull)), {"K", "18446744073709551615 bytes needed"});
    files_rejects(files_one_key(GGUF_ARRAY, gguf_array_head(GGUF_U8, 1ull << 60)), {"K", "1152921504606846976 items"});
    files_rejects(files_one_key(GGUF_ARRAY, gguf_array_head(GGUF_F64, 1ull << 61)), {"K", "2305843009213693952 items"});
    files_rejects(files_one_key(GGUF_ARRAY, gguf_array_head(GGUF_STRING, 1ull << 32)), {"K", "4294967296 items"});
    files_rejects(files_one_key(GGUF_ARRAY, gguf_array_head(GGUF_STRING, 2) + gguf_string("a") + gguf_string("b", 999)),
                  {"K", "999 bytes needed"});

    string nested = gguf_array_head(GGUF_ARRAY, 1);
    for (int i = 0; i < 100000; i++)
        nested += gguf_array_head(GGUF_ARRAY, 1);
    files_rejects(files_one_key(GGUF_ARRAY, nested), {"K", "arrays of arrays"}, ENGINE_EUNSUPPORTED);
    files_rejects(files_one_key(GGUF_ARRAY, gguf_array_head(GGUF_ARRAY, 0)), {"K", "arrays of arrays"},
                  ENGINE_EUNSUPPORTED);
    for (uint32_t type : {13u, 255u, 1u << 31, ~0u}) {
        files_rejects(files_one_key(type, "x"), {strf("K: value type %u is unknown", type)});
        files_rejects(files_one_key(GGUF_ARRAY, gguf_array_head(type, 1)), {strf("K: item type %u is unknown", type)});
    }
    for (int value : {2, 255}) {
        files_rejects(files_one_key(GGUF_BOOL, string(1, char(value))), {"K", strf("a bool has the value %d", value)});
        files_rejects(files_one_key(GGUF_ARRAY, gguf_array(GGUF_BOOL, vector<uint8_t>{0, 1, uint8_t(value)})),
                      {"K", strf("a bool has the value %d", value)});
    }

    for (uint64_t count : {1ull << 63, ~0ull, 1ull << 40, 65537ull, 100ull}) {
        gguf_writer keys, tensors;
        keys.n_keys = count, tensors.extra_tensors = count;
        files_rejects(keys.bytes() + string(128, '\0'), {strf("key count: is %llu", (unsigned long long)count)});
        files_rejects(tensors.bytes() + string(128, '\0'), {strf("tensor count: is %llu", (unsigned long long)count)});
    }
    for (uint32_t n_dims : {0u, 5u, ~0u}) {
        gguf_writer w;
        w.add_tensor("X", 0, {1, 1, 1, 1}).n_dims = n_dims;
        files_rejects(w.bytes() + string(64, '\0'), {"tensor X", strf("has %u dimensions", n_dims)});
    }

    for (uint32_t type : {4u, 5u, 31u, 33u, 36u, 38u})
        files_rejects(files_one_tensor({256}, type, 0, 4096), {"tensor X", strf("type %u was removed", type)},
                      ENGINE_EUNSUPPORTED);
    files_rejects(files_one_tensor({256}, 16, 0, 4096), {"tensor X", "type 16 (IQ2_XXS) is not supported"},
                  ENGINE_EUNSUPPORTED);
    for (uint32_t type : {99u, 1000000000u, 1u << 31, ~0u})
        files_rejects(files_one_tensor({256}, type, 0, 4096), {"tensor X", strf("type %u is unknown", type)});

    gguf_writer twice;
    twice.add_u32("a", 1), twice.add_u32("twin", 1), twice.add_u32("b", 1), twice.add_string("twin", "");
    files_rejects(twice.bytes(), {"twin: this key is in the file twice"});
    gguf_writer tensors;
    for (const char *name : {"b", "twin", "a", "twin", "c"})
        tensors.add_tensor(name, 0, {1});
    files_rejects(tensors.bytes(), {"twin: this tensor is in the file twice"});
    gguf_writer nameless, named, long_named;
    nameless.add_tensor("", 0, {1});
    named.add_tensor(string(256, 'n'), 0, {1});
    long_named.add_tensor(string(257, 'n'), 0, {1});
    files_rejects(nameless.bytes(), {"tensor name: is empty"});
    EXPECT_EQ(files_error(named.bytes()), "");
    files_rejects(long_named.bytes(), {"tensor name", "257 bytes long"});
    EXPECT_LT(meter.peak(), 16 << 20); // the nested file above has 1.2 MB, and is copied and printed here
}

// A claim costs nothing: the memory in use is bounded by the file's size.
TEST(Files, MemoryIsBoundedByTheFile) {
    string strings = files_one_key(GGUF_ARRAY, gguf_array_head(GGUF_STRING, 100000) + string(800000, '\0'));
    string bytes = files_one_key(GGUF_ARRAY, gguf_array_head(GGUF_U8, 1000000) + string(1000000, '\0'));
    string claim = files_one_key(GGUF_ARRAY, gguf_array_head(GGUF_U8, 1ull << 60));
    gguf_writer w;
    w.extra_tensors = 3, w.n_keys = 7;
    for (const string &s : {strings, bytes, claim, w.bytes() + string(150, '\0')}) {
        test::heap_meter meter;
        try {
            parse_gguf(reinterpret_cast<const uint8_t *>(s.data()), s.size(), "t.gguf");
        } catch (const Error &) {
        }
        EXPECT_LT(meter.peak(), 4096);
    }
}

// FIELD-CASES 3.6
TEST(Files, Alignment) {
    auto with = [](uint32_t type, const string &value, uint32_t real) {
        gguf_writer w;
        w.set_alignment(real); // for the layout; the value is replaced below
        w.keys.clear(), w.n_keys = 0;
        w.add_raw("general.alignment", type, value);
        w.add_tensor("A", 0, {1});
        w.add_tensor("B", 0, {1});
        return w.bytes();
    };
    for (uint32_t good : {8u, 16u, 32u, 64u, 4096u, 65536u, 1u << 20}) {
        string s = with(GGUF_U32, gguf_raw(good), good);
        EXPECT_EQ(files_error(s), "");
        model_file f = parse_gguf(reinterpret_cast<const uint8_t *>(s.data()), s.size(), "t.gguf");
        EXPECT_EQ(uint64_t(f.tensors[0].data - reinterpret_cast<const uint8_t *>(s.data())) % good, 0u);
        EXPECT_EQ(f.tensors[1].data - f.tensors[0].data, good);
    }
    for (uint32_t wrong : {0u, 1u, 2u, 4u, 1u << 21, 1u << 31, ~0u})
        files_rejects(with(GGUF_U32, gguf_raw(wrong), 32), {strf("general.alignment: is %u, expected 8 ...", wrong)});
    for (uint32_t wrong : {12u, 24u, 33u, 1000000u})
        files_rejects(with(GGUF_U32, gguf_raw(wrong), 32), {strf("general.alignment: is %u, expected a power", wrong)});
    files_rejects(with(GGUF_I32, gguf_raw(int32_t(32)), 32), {"general.alignment: has type i32, expected u32"});
    files_rejects(with(GGUF_U64, gguf_raw(uint64_t(32)), 32), {"general.alignment: has type u64, expected u32"});
    files_rejects(with(GGUF_STRING, gguf_string("32"), 32), {"general.alignment: has type string, expected u32"});
}

// FIELD-CASES 3.7, as far as types and ranges go; what the values mean is the vocabulary's matter.
TEST(Files, VocabularyArrays) {
    gguf_writer w;
    w.add_strings("tokens", vector<string>(8, "t"));
    w.add_u8s("scores", vector<uint8_t>(8));
    w.add_u32("bos", 8);
    w.add_u32("eos", ~0u);
    string s = w.bytes();
    model_file f = parse_gguf(reinterpret_cast<const uint8_t *>(s.data()), s.size(), "t.gguf");
    EXPECT_EQ(files_message([&] { f.get_array("scores", KIND_FLOAT); }),
              "t.gguf: scores: is an array of u8, expected a float in each item");
    EXPECT_EQ(files_message([&] { f.get_int("bos", -1, 0, 7); }), "t.gguf: bos: is 8, expected 0 ... 7");
    EXPECT_EQ(files_message([&] { f.get_int("eos", -1, 0, 7); }), "t.gguf: eos: is 4294967295, expected 0 ... 7");
}

// FIELD-CASES 3.8
TEST(Files, OtherKindsOfFiles) {
    string bytes = files_valid();
    auto with_magic = [&](const string &magic) { return magic + bytes.substr(magic.size()); };
    auto with_version = [&](uint32_t v) { return bytes.substr(0, 4) + gguf_raw(v) + bytes.substr(8); };
    for (const char *old : {"GGJT", "ggjt", "tjgg", "ggml", "lmgg", "ggmf", "fmgg"})
        files_rejects(with_magic(old), {"magic", "old GGML file"});
    files_rejects(with_magic("FUGG"), {"magic", "byte-swapped"});
    files_rejects(with_magic("gguf"), {"magic", "not a GGUF file"});
    files_rejects(with_magic("\x01\x02\xff\n"), {"magic", "not a GGUF file"});
    files_rejects(with_magic("<!DOCTYPE html>"), {"magic", "web page"});
    files_rejects(with_magic("version https://git-lfs"), {"magic", "Git LFS"});
    files_rejects(with_magic("PK\x03\x04"), {"magic", "ZIP"});
    files_rejects(with_magic(gguf_raw(uint64_t(100)) + "{\"a\""), {"magic", "safetensors"});
    files_rejects(with_version(0), {"version 0 unsupported"}, ENGINE_EUNSUPPORTED);
    files_rejects(with_version(1), {"version 1 unsupported"}, ENGINE_EUNSUPPORTED);
    files_rejects(with_version(4), {"version 4 is newer"}, ENGINE_EUNSUPPORTED);
    files_rejects(with_version(~0u), {"version 4294967295 is newer"}, ENGINE_EUNSUPPORTED);
    files_rejects(with_version(0x03000000), {"big-endian file"}, ENGINE_EUNSUPPORTED);
    files_rejects(with_version(0x02000000), {"big-endian file"}, ENGINE_EUNSUPPORTED);
}

// Text from a file is untrusted wherever it goes into a message, and a message stays short.
TEST(Files, MessagesAreOneShortLine) {
    string name = "\x1b[2J\n\xff" + string(200, 'n');
    gguf_writer w;
    w.add_tensor(name, 0, {1, 0});
    files_rejects(w.bytes(), {"dimension 1 of ?[2J??nnn", "... is zero"});
    gguf_writer k;
    k.add_raw(name, 77, "");
    files_rejects(k.bytes(), {"?[2J??nnn", "value type 77"});
    gguf_writer b;
    b.add_tensor("x" + name, 0, {16}).offset = 0;
    b.add_tensor("y" + name, 0, {16}).offset = 0;
    files_rejects(b.bytes(), {"overlaps"});
    string path = "/tmp/" + string(250, 'p') + ".gguf", msg;
    try {
        parse_gguf(reinterpret_cast<const uint8_t *>("GGUF"), 4, path);
    } catch (const Error &e) {
        msg = e.msg;
    }
    EXPECT_NE(msg.find("ppp.gguf: file ends inside the version"), string::npos) << msg;
    EXPECT_LT(msg.size(), 200u);
    string bytes = b.bytes();
    msg = files_message([&] { parse_gguf(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), path); });
    EXPECT_NE(msg.find("overlaps"), string::npos) << msg;
    EXPECT_LT(msg.size(), sizeof(engine_error::msg));
}

TEST(Files, MappedAndReadAreEqual) {
    test::temp_dir dir;
    string path = dir / "a.gguf";
    gguf_writer w(path);
    files_fill(w);
    w.add_tensor("big", 0, {1000, 1000});
    w.begin();
    for (const gguf_tensor &t : w.tensors)
        for (uint64_t i = 0; i < t.bytes;) {
            string piece(std::min<uint64_t>(t.bytes - i, 100000), char(i / 100000));
            w.write(piece.data(), piece.size());
            i += piece.size();
        }
    w.finish();
    model_file a = open_model_file(path.c_str(), false), b = open_model_file(path.c_str(), true);
    a.read_ahead();
    EXPECT_EQ(a.path, path);
    ASSERT_EQ(a.parts.size(), 1u);
    ASSERT_EQ(a.parts[0].size, b.parts[0].size);
    EXPECT_EQ(memcmp(a.parts[0].data, b.parts[0].data, a.parts[0].size), 0);
    ASSERT_EQ(a.tensors.size(), 5u);
    for (size_t i = 0; i < a.tensors.size(); i++) {
        EXPECT_EQ(a.tensors[i].name, b.tensors[i].name);
        ASSERT_EQ(a.tensors[i].bytes, b.tensors[i].bytes);
        EXPECT_EQ(memcmp(a.tensors[i].data, b.tensors[i].data, a.tensors[i].bytes), 0);
        // nothing was copied out of the file's bytes
        EXPECT_EQ(a.tensors[i].data - a.parts[0].data, b.tensors[i].data - b.parts[0].data);
    }
    EXPECT_EQ(files_use(a), files_use(b));
    model_file c = std::move(a); // views survive a move
    EXPECT_EQ(files_use(c), files_use(b));
    EXPECT_EQ(c.get_string("general.architecture", ""), "test");
}

TEST(Files, WhatCannotBeOpened) {
    test::temp_dir dir;
    string file = dir / "a.gguf", fifo = dir / "fifo", empty = dir / "empty", loop = dir / "loop", link = dir / "link";
    test::write_file(file, files_valid());
    test::write_file(empty, "");
    ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
    ASSERT_EQ(symlink("loop", loop.c_str()), 0);
    ASSERT_EQ(symlink("a.gguf", link.c_str()), 0);
    const struct {
        string path;
        const char *reason;
        int code;
    } cases[] = {
        {dir / "none", "No such file", ENGINE_EIO},   {file + "/x", "Not a directory", ENGINE_EIO},
        {dir.path, "is a directory", ENGINE_EIO},     {fifo, "is not a regular file", ENGINE_EIO},
        {loop, "symbolic links", ENGINE_EIO},         {dir / string(300, 'x'), "name too long", ENGINE_EIO},
        {empty, "the file is empty", ENGINE_EFORMAT},
    };
    for (bool no_mmap : {false, true}) {
        for (auto &c : cases) {
            int code = 0;
            string msg = files_open_error(c.path, no_mmap, &code);
            EXPECT_NE(msg.find(c.reason), string::npos) << msg;
            EXPECT_EQ(msg.find(show_path(c.path) + ": "), 0u) << msg;
            EXPECT_EQ(code, c.code) << msg;
        }
        int code = 0;
        EXPECT_EQ(files_open_error("", no_mmap, &code), "path: is empty");
        EXPECT_EQ(code, ENGINE_EINVAL);
        EXPECT_EQ(files_open_error(link, no_mmap), "");
    }
    if (geteuid() != 0) {
        ASSERT_EQ(chmod(file.c_str(), 0), 0);
        EXPECT_NE(files_open_error(file).find("Permission denied"), string::npos);
    }
    // A regular file that gives fewer bytes than its size says, where the system has one.
    const char *shrinks = "/sys/kernel/uevent_seqnum";
    struct stat st;
    if (stat(shrinks, &st) == 0 && S_ISREG(st.st_mode) && st.st_size == 4096) {
        EXPECT_NE(files_open_error(shrinks, true).find("cannot read: ended at byte"), string::npos);
        EXPECT_NE(files_open_error(shrinks, false).find("cannot map"), string::npos);
    }
}

TEST(Files, NoDescriptorOrMappingStays) {
    test::temp_dir dir;
    string good = dir / "a.gguf", bad = dir / "b.gguf", bytes = files_valid();
    test::write_file(good, bytes);
    test::write_file(bad, bytes.substr(0, bytes.size() - 1));
    int before = dup(0);
    close(before);
    for (int i = 0; i < 200; i++) {
        EXPECT_EQ(files_open_error(good, i % 2), "");
        EXPECT_NE(files_open_error(bad, i % 2), "");
    }
    int after = dup(0);
    close(after);
    EXPECT_EQ(before, after);
    string maps = test::exists("/proc/self/maps") ? test::read_file("/proc/self/maps") : "";
    EXPECT_EQ(maps.find(dir.path), string::npos);
}

namespace {

// Three parts of a split model in a folder; part i has i + 1 tensors.
struct files_split {
    test::temp_dir dir;
    int count = 3;
    string name(int i, int of = 3) const { return dir / strf("m-%05d-of-%05d.gguf", i + 1, of); }

    files_split() {
        for (int i = 0; i < count; i++)
            write(i, i, 3, 6);
    }
    void write(int i, int no, int of, int total, const string &extra = "") {
        gguf_writer w;
        w.add_u16("split.no", uint16_t(no));
        w.add_u16("split.count", uint16_t(of));
        w.add_i32("split.tensors.count", total);
        if (i == 0)
            w.add_string("general.name", "split");
        if (i == 2)
            w.set_alignment(64);
        for (int t = 0; t <= i; t++)
            w.add_tensor(strf("t.%d.%d", i, t), 0, {8}, string(32, char(10 * i + t)));
        if (!extra.empty())
            w.add_tensor(extra, 0, {8});
        test::write_file(name(i), w.bytes());
    }
    string error(bool no_mmap = false) const { return files_open_error(name(0), no_mmap); }
};

} // namespace

TEST(Files, OpensSplitModels) {
    files_split s;
    for (bool no_mmap : {false, true}) {
        model_file f = open_model_file(s.name(0).c_str(), no_mmap);
        EXPECT_EQ(f.parts.size(), 3u);
        ASSERT_EQ(f.tensors.size(), 6u);
        for (int i = 0; i < 3; i++)
            for (int t = 0; t <= i; t++) {
                const tensor_info *found = f.find(strf("t.%d.%d", i, t));
                ASSERT_TRUE(found);
                EXPECT_EQ(found->data[31], 10 * i + t);
            }
        EXPECT_EQ(f.get_string("general.name", ""), "split");
        model_file moved = std::move(f);
        files_use(moved);
    }
    int here = open(".", O_RDONLY | O_DIRECTORY);
    ASSERT_EQ(chdir(s.dir.path.c_str()), 0); // a bare name has no folder
    EXPECT_EQ(files_open_error("m-00001-of-00003.gguf"), "");
    EXPECT_NE(files_open_error("m-00002-of-00003.gguf").find("open the first part, m-00001-of-00003.gguf"),
              string::npos);
    ASSERT_EQ(fchdir(here), 0);
    close(here);
}

TEST(Files, SplitModelsThatAreIncomplete) {
    {
        files_split s;
        for (int i : {1, 2})
            EXPECT_EQ(files_open_error(s.name(i)),
                      show_path(s.name(i)) +
                          strf(": split.no: this is part %d of 3; open the first part, m-00001-of-00003.gguf", i + 1));
        ASSERT_EQ(unlink(s.name(1).c_str()), 0);
        int code = 0;
        EXPECT_EQ(files_open_error(s.name(0), false, &code),
                  show_path(s.name(1)) + ": part 2 of 3 of the model is missing");
        EXPECT_EQ(code, ENGINE_EIO);
        ASSERT_EQ(mkdir(s.name(1).c_str(), 0700), 0);
        EXPECT_EQ(s.error(), show_path(s.name(1)) + ": cannot open: is a directory");
    }
    {
        files_split s;
        ASSERT_EQ(rename(s.name(0).c_str(), (s.dir / "model.gguf").c_str()), 0);
        string msg = files_open_error(s.dir / "model.gguf");
        EXPECT_NE(msg.find("split.count: the other 2 parts cannot be found"), string::npos) << msg;
        EXPECT_NE(msg.find("-00001-of-00003.gguf"), string::npos) << msg;
        ASSERT_EQ(rename(s.name(2).c_str(), (s.dir / "c.gguf").c_str()), 0);
        msg = files_open_error(s.dir / "c.gguf");
        EXPECT_NE(msg.find("this is part 3 of 3; open the first part"), string::npos) << msg;
        // a name of another count
        ASSERT_EQ(rename((s.dir / "model.gguf").c_str(), s.name(0, 4).c_str()), 0);
        EXPECT_NE(files_open_error(s.name(0, 4)).find("split.count: the other 2 parts"), string::npos);
    }
}

TEST(Files, SplitModelsThatDoNotFit) {
    files_split s;
    auto fails = [&](const string &part, const string &reason) {
        for (bool no_mmap : {false, true})
            EXPECT_EQ(s.error(no_mmap), show_path(part) + ": " + reason);
    };
    s.write(1, 2, 3, 6);
    fails(s.name(1), "split.no: is 2, expected 1 ... 1");
    s.write(1, 1, 4, 6);
    fails(s.name(1), "split.count: is 4, expected 3 ... 3");
    s.write(1, 1, 3, 6, "t.0.0");
    fails(s.name(0), "split.tensors.count: is 6, but the 3 parts hold 7 tensors");
    s.write(0, 0, 3, 7);
    fails(s.name(0), "t.0.0: this tensor is in the file twice");
    s.write(1, 1, 3, 7);
    fails(s.name(0), "split.tensors.count: is 7, but the 3 parts hold 6 tensors");
    s.write(0, 0, 3, 6);
    EXPECT_EQ(s.error(), "");

    string good = test::read_file(s.name(1));
    test::write_file(s.name(1), good.substr(0, good.size() - 1));
    fails(s.name(1),
          strf("tensor t.1.1 ends at %zu, file has %zu bytes; it is cut off or damaged", good.size(), good.size() - 1));
    test::write_file(s.name(1), "");
    fails(s.name(1), "the file is empty");
    test::write_file(s.name(1), files_valid());
    fails(s.name(1), "split.no: is missing");
    test::write_file(s.name(1), good);
    EXPECT_EQ(s.error(), "");

    gguf_writer w; // keys of the first part that make no sense
    w.add_string("split.count", "3");
    test::write_file(s.name(0), w.bytes());
    fails(s.name(0), "split.count: has type string, expected an integer");
    for (int64_t count : {int64_t(-1), int64_t(100000), INT64_MAX}) {
        gguf_writer v;
        v.add_i64("split.count", count);
        test::write_file(s.name(0), v.bytes());
        fails(s.name(0), strf("split.count: is %lld, expected 0 ... 99999", (long long)count));
    }
    gguf_writer v;
    v.add_u16("split.count", 3);
    test::write_file(s.name(0), v.bytes());
    fails(s.name(0), "split.no: is missing");
}

// A split is a matter of metadata, never of the name.
TEST(Files, NamesThatOnlyLookLikeParts) {
    test::temp_dir dir;
    string path = dir / "m-00002-of-00003.gguf";
    test::write_file(path, files_valid());
    EXPECT_EQ(files_open_error(path), "");
    for (uint16_t count : {0, 1}) { // what tools leave behind in a merged file
        gguf_writer w;
        files_fill(w);
        w.add_u16("split.no", 0);
        w.add_u16("split.count", count);
        w.add_i32("split.tensors.count", 99);
        test::write_file(path, w.bytes());
        EXPECT_EQ(files_open_error(path), "");
    }
}

// Parts that were joined with cat open as what they are: a first part whose others are missing.
TEST(Files, JoinedParts) {
    files_split s;
    string all = test::read_file(s.name(0)) + test::read_file(s.name(1)) + test::read_file(s.name(2));
    string path = s.dir / "joined.gguf";
    test::write_file(path, all);
    EXPECT_NE(files_open_error(path).find("split.count: the other 2 parts cannot be found"), string::npos);
}

TEST(Files, TellsOfBytesThatItIgnores) {
    string log, bytes = files_valid();
    log_user = &log;
    log_fn = [](void *user, int level, const char *text) {
        *static_cast<string *>(user) += strf("%d %s\n", level, text);
    };
    EXPECT_EQ(files_error(bytes + string(31, '\0')), "");
    EXPECT_EQ(log, "");
    EXPECT_EQ(files_error(bytes + string(1000, '\0')), "");
    EXPECT_EQ(log, strf("%d dir/t.gguf: 1000 bytes after the last tensor are ignored\n", ENGINE_LOG_WARN));
    log_fn = nullptr;
    log_user = nullptr;
}

// As many keys and tensors as are allowed, in an order that is bad for naive sorting and searching; then one more.
TEST(Files, LargeTables) {
    gguf_writer w;
    for (int i = 0; i < 65536; i++)
        w.add_u8(strf("key.%d", i), uint8_t(i));
    const int n = 131072;
    string infos;
    for (int i = 0; i < n; i++)
        infos += files_tensor(strf("tensor.%d", i), {2}, 0, uint64_t(n - 1 - i) * 32);
    w.tensor_infos = infos, w.extra_tensors = n;
    string bytes = w.bytes() + string(size_t(n) * 32, '\0');
    test::heap_meter meter;
    {
        model_file f = parse_gguf(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), "t.gguf");
        EXPECT_EQ(f.get_int("key.65535", 0, 0, 255), 255);
        ASSERT_TRUE(f.find("tensor.131071"));
        EXPECT_EQ(f.find("tensor.131071")->data - f.find("tensor.131070")->data, -32);
        EXPECT_EQ(f.find("tensor.131072"), nullptr);
    }
    EXPECT_LT(meter.peak(), 32 << 20);
    w.extra_tensors++;
    files_rejects(w.bytes() + string(64, '\0'), {"tensor count: is 131073, more than 131072"});
    gguf_writer k;
    k.n_keys = 65537;
    files_rejects(k.bytes() + string(1 << 20, '\0'), {"key count: is 65537, more than 65536"});
}

TEST(Files, RealModels) {
    NEED_SHARED(path, "tiny-chat/tiny-chat-q4_k_m.gguf");
    model_file f = open_model_file(path.c_str(), false);
    EXPECT_EQ(f.tensors.size(), 46u);
    EXPECT_EQ(f.keys.size(), 31u);
    EXPECT_EQ(f.get_string("general.architecture", ""), "qwen3");
    EXPECT_EQ(f.need_array("tokenizer.ggml.tokens", KIND_STRING).count, 2048u);
    files_use(f);
    string v4 = test::shared_path("tiny-v4/v4-tiny-mxfp4.gguf"); // has integer tensors
    if (!v4.empty()) {
        EXPECT_EQ(open_model_file(v4.c_str(), true).tensors.size(), 178u);
    }
}

// 100,000 mutations, each opened from a block of exactly its size and used; some also through the file system.
TEST(Files, SurvivesMutations) {
    const int count = 100000;
    test::temp_dir dir;
    string valid = files_valid(), path = dir / "m.gguf";
    ASSERT_EQ(files_error(valid), "");
    size_t head = valid.size() - 500;
    int opened = 0;
    uint64_t sum = 0;
    test::heap_meter meter;
    test::mutate(valid, head, count, 1, [&](const string &bytes, int i) {
        vector<uint8_t> exact(bytes.begin(), bytes.end());
        bool good = false;
        try {
            sum += files_use(parse_gguf(exact.data(), exact.size(), "t.gguf"));
            opened++, good = true;
        } catch (const Error &e) {
            if (e.msg.compare(0, 8, "t.gguf: ") != 0 || e.msg.size() >= sizeof(engine_error::msg))
                ADD_FAILURE() << i << ": " << e.msg;
        }
        if (i % 64 == 0) {
            test::write_file(path, bytes);
            EXPECT_EQ(files_open_error(path, i % 128 != 0).empty(), good) << i;
        }
    });
    EXPECT_LT(meter.peak(), 1 << 20); // of a file of 2 KB
    EXPECT_GT(opened, count / 100);   // damage that goes unseen, as in a weight or a name
    EXPECT_LT(opened, count / 2);
    EXPECT_NE(sum, 0u);
}
