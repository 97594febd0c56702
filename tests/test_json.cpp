// Chapter FILES: the JSON reader, against nlohmann's.
#include "unit.h"

#include <nlohmann/json.hpp>

#include "mutate.h"

namespace {

using json_other = nlohmann::ordered_json;

json_other json_convert(const json_value &v) {
    switch (v.kind) {
    case JSON_NULL:
        return nullptr;
    case JSON_BOOL:
        return v.i != 0;
    case JSON_INT:
        return v.i;
    case JSON_FLOAT:
        return v.f;
    case JSON_STRING:
        return string(v.text());
    case JSON_ARRAY: {
        json_other a = json_other::array();
        for (const json_value *item = v.begin(); item != v.end(); item = item->next())
            a.push_back(json_convert(*item));
        EXPECT_EQ(a.size(), v.n);
        return a;
    }
    default:
        json_other o = json_other::object();
        for (const json_value *key = v.begin(); key != v.end(); key = key[1].next())
            o[string(key->text())] = json_convert(key[1]);
        EXPECT_EQ(o.size(), v.n);
        return o;
    }
}

// The message of the error, or "no error".
string json_error(const string &text) {
    try {
        parse_json(text, ENGINE_EINVAL, "x");
        return "no error";
    } catch (const Error &e) {
        EXPECT_EQ(e.code, ENGINE_EINVAL);
        return e.msg;
    }
}

// What only this one refuses: repeated keys, depth, NULs.
bool json_stricter(const string &error) {
    return error.find("found '?'") != string::npos || error.find(" twice") != string::npos ||
           error.find("nested more") != string::npos;
}

// Both accept with equal values, or both refuse; says which.
bool json_compare(const string &text) {
    const json_other other = json_other::parse(text, nullptr, false);
    const string error = json_error(text);
    if (json_stricter(error))
        return false;
    EXPECT_EQ(error == "no error", !other.is_discarded()) << error << "\n" << text;
    if (error != "no error" || other.is_discarded())
        return false;
    const json_document d = parse_json(text, ENGINE_EINVAL, "x");
    EXPECT_EQ(json_convert(d.root()), other) << text;
    return true;
}

string json_repeat(const string &s, int n) {
    string r;
    for (int i = 0; i < n; i++)
        r += s;
    return r;
}

const char *const json_good[] = {
    "null",
    " true ",
    "\t\r\nfalse\n",
    "0",
    "-0",
    "-1",
    "9223372036854775807",
    "-9223372036854775808",
    "9223372036854775808",
    "18446744073709551616",
    "1.0",
    "1e3",
    "1E+3",
    "0.1",
    "-0.0",
    "1.5e-7",
    "5e-324",
    "1e-400",
    "1.7976931348623157e308",
    "123456789012345678901234567890",
    "0.1000000000000000055511151231257827",
    "2.2250738585072014e-308",
    "\"\"",
    "\"a\"",
    "\"\xc3\xa9\xf0\x9f\xa6\x99\"",
    R"("\"\\\/\b\f\n\r\t")",
    R"("\u0041\u00e9\u20ac\ud83e\udd99\u0000z")",
    R"("\uD83E\uDD99\uABCD\uabcd")",
    "\"\x7f\"",
    "[]",
    "{}",
    "[ ]",
    "{ }",
    "[1,2,3]",
    "[[],[[]],{},[{}]]",
    R"({"a":1,"b":[true,null],"c":{"d":"e"}})",
    R"( { "a" : 1 , "" : 2 , "A" : 3 } )",
    R"({"z":1,"a":2,"m":3})",
    R"({"\u0061b":"\n","c\td":"x"})",
};
const char *const json_bad[] = {
    "",
    " ",
    "nul",
    "nullx",
    "True",
    "NaN",
    "Infinity",
    "-",
    "+1",
    "01",
    "-01",
    "1.",
    ".5",
    "1e",
    "1e+",
    "0x10",
    "1 2",
    "1e400",
    "\"",
    "\"a",
    "'a'",
    "\"\\",
    "\"\\x\"",
    "\"\\u12\"",
    "\"\\u12g4\"",
    R"("\ud800")",
    R"("\ud800\u0041")",
    R"("\udc00")",
    R"("\ud800\ud800")",
    R"("\ud83ex")",
    "\"a\nb\"",
    "\"a\tb\"",
    "\"\x80\"",
    "\"\xc3\"",
    "\"\xed\xa0\x80\"",
    "\"\xf5\x80\x80\x80\"",
    "\"\xc0\xaf\"",
    "[",
    "]",
    "[1",
    "[1,",
    "[1,]",
    "[,1]",
    "[1 2]",
    "[1,,2]",
    "[}",
    "{",
    "}",
    "{\"a\"",
    "{\"a\":",
    "{\"a\":1",
    "{\"a\":1,",
    "{\"a\":1,}",
    "{\"a\" 1}",
    "{a:1}",
    "{1:1}",
    "{\"a\":1]",
    "{,}",
    "[1]]",
    "[1] x",
    "// c\n1",
    "\xef\xbb\xbf x",
};

} // namespace

TEST(Json, EqualsAnotherReader) {
    for (const char *text : json_good)
        EXPECT_TRUE(json_compare(text)) << text;
    for (const char *text : json_bad) {
        EXPECT_FALSE(json_compare(text)) << text;
        EXPECT_NE(json_error(text), "no error") << text;
    }
    EXPECT_FALSE(json_compare(string("\"a\0b\"", 5)));
    EXPECT_NE(json_error(string("1\0", 2)), "no error"); // which ends the text for the other one
}

TEST(Json, DamagedTextsEqualAnotherReader) {
    string all = "[";
    for (const char *text : json_good)
        all += string(all.size() > 1 ? ",\n" : "") + text;
    all += "]";
    ASSERT_TRUE(json_compare(all));
    int good = 0;
    test::mutate(all, all.size(), test::long_tests() ? 200000 : 10000, 1,
                 [&](const string &text, int) { good += json_compare(text); });
    EXPECT_GT(good, 500);
}

TEST(Json, ValuesAndOrder) {
    const string text = R"({"b": [1, -2, 2.5, "x"], "a\u0000c": {"k": true}, "e": "\u00e9"})";
    const json_document d = parse_json(text, ENGINE_EFORMAT, "x");
    const json_value &o = d.root();
    EXPECT_EQ(o.kind, JSON_OBJECT);
    EXPECT_EQ(o.n, 3u);
    vector<string> keys;
    for (const json_value *key = o.begin(); key != o.end(); key = key[1].next())
        keys.emplace_back(key->text());
    EXPECT_EQ(keys, (vector<string>{"b", string("a\0c", 3), "e"}));
    const json_value *b = o.find("b");
    ASSERT_TRUE(b);
    EXPECT_EQ(b->n, 4u);
    EXPECT_EQ(b->begin()[1].kind, JSON_INT);
    EXPECT_EQ(b->begin()[1].i, -2);
    EXPECT_EQ(b->begin()[2].kind, JSON_FLOAT);
    EXPECT_EQ(b->begin()[2].f, 2.5);
    EXPECT_EQ(b->begin()[3].text().data(), text.data() + text.find("x\"]")); // not copied
    EXPECT_EQ(o.find("e")->text(), "\u00e9");
    EXPECT_EQ(o.find("k"), nullptr);
    EXPECT_EQ(b->find("b"), nullptr);
    // A document may be moved, short strings included.
    json_document small = parse_json("\"\\n\"", ENGINE_EFORMAT, "x"), moved = std::move(small);
    EXPECT_EQ(moved.root().text(), "\n");
}

TEST(Json, NumbersIgnoreTheLocale) {
    const char *old = setlocale(LC_ALL, nullptr);
    const string saved = old ? old : "C";
    for (const char *name : {"de_DE.UTF-8", "fr_FR.UTF-8", "C.UTF-8"})
        if (setlocale(LC_ALL, name))
            break;
    EXPECT_EQ(parse_json("1.5", ENGINE_EFORMAT, "x").root().f, 1.5);
    EXPECT_EQ(tpl_float_text(1.5), "1.5");
    setlocale(LC_ALL, saved.c_str());
}

TEST(Json, ErrorsSayWhere) {
    EXPECT_EQ(json_error(""), "x: line 1, column 1: expected a value, but the text ends");
    EXPECT_EQ(json_error("{\n  \"a\": 1,\n  \"b\" 2\n}"), "x: line 3, column 7: expected ':', found '2'");
    EXPECT_EQ(json_error("[\"\xc3\xa9\", x]"), "x: line 1, column 7: expected a value, found 'x'");
    EXPECT_EQ(json_error("[1\n 2]"), "x: line 2, column 2: expected ',' or ']', found '2'");
    EXPECT_EQ(json_error("{\"a\": 1, 2}"), "x: line 1, column 10: expected a key in quotes, found '2'");
    EXPECT_EQ(json_error("[1] 2"), "x: line 1, column 5: expected the end of the text, found '2'");
    EXPECT_EQ(json_error("\"abc"), "x: line 1, column 1: a string is not closed");
    EXPECT_EQ(json_error("\"a\\q\""), "x: line 1, column 3: unknown escape in a string");
    EXPECT_EQ(json_error("\"\\ud800\""), "x: line 1, column 2: \\u escape of half a surrogate pair");
    EXPECT_EQ(json_error("\"a\nb\""), "x: line 1, column 3: a control character in a string is not escaped");
    EXPECT_EQ(json_error("\"a\x80\""), "x: line 1, column 3: the text is not valid UTF-8");
    EXPECT_EQ(json_error("-x"), "x: line 1, column 2: expected a digit, found 'x'");
    EXPECT_EQ(json_error("[1e999]"), "x: line 1, column 2: the number is too large");
    EXPECT_EQ(json_error("{\"a\": 1,\n\"\\u0061\": 2}"),
              "x: line 2, column 12: the object that ends here has the key 'a' twice");
    EXPECT_EQ(json_error("{\"k\": {\"a\": {}, \"b\": 1, \"a\": []}}").substr(0, 22), "x: line 1, column 32: ");
    EXPECT_EQ(json_error(string(256, '[') + string(256, ']')), "no error");
    EXPECT_EQ(json_error(string(257, '[') + string(257, ']')), "x: line 1, column 257: nested more than 256 deep");
}

// Memory stays within a few times the text, and nothing takes time that grows faster than it: the suite runs under a
// time limit.
TEST(Json, HostileTexts) {
    const int million = 1000000;
    string members = "{", items = "[";
    for (int i = 0; i < million; i++) {
        members += strf("%s\"k%d\":%d", i ? "," : "", i, i);
        items += i ? ",0" : "0";
    }
    members += "}", items += "]";
    const struct {
        string text;
        const char *outcome; // how the message begins
        double times;        // memory, of the text's size
    } cases[] = {
        {string(10000, '['), "x: line 1, column 257: nested", 20},
        {json_repeat("{\"a\":", 10000), "x: line 1, column 1281: nested", 20},
        {"\"" + json_repeat("\\n", 5 << 20) + "\"", "no error", 1.1},
        {"\"" + json_repeat("\\u00e9", 2 << 20) + "\"", "no error", 1.1},
        {"\"" + json_repeat("\\", 10 << 20) + "\"", "no error", 1.1},
        {members, "no error", 5},
        {items, "no error", 9},
        {"[" + json_repeat(",", 10 << 20), "x: line 1, column 2: expected a value", 0.1},
        {json_repeat("[],", million), "x: line 1, column 3: expected the end", 12},
        {"[" + json_repeat("{},", million) + "0]", "no error", 12},
        {"[" + json_repeat("\"\",", million) + "0]", "no error", 9},
        {"0." + string(10 << 20, '1'), "no error", 2.5},
        {string(10 << 20, '9'), "x: line 1, column 1: the number is too large", 2.5},
        {string(10 << 20, ' '), "x: line 1, column 10485761: expected a value", 0.1},
        {json_repeat("\n", 10 << 20) + "x", "x: line 10485761, column 1: expected", 0.1},
    };
    for (const auto &c : cases) {
        const test::heap_meter meter;
        EXPECT_EQ(json_error(c.text).compare(0, strlen(c.outcome), c.outcome), 0) << c.text.substr(0, 20);
        EXPECT_LE(double(meter.peak()), c.times * double(c.text.size()) + 8192) << c.text.substr(0, 20);
    }
}
