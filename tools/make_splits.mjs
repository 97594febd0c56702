// make_splits.mjs: writes tests/data/splits.txt, for the test of the pre-tokenizers in chapter VOCAB: their published
// regular expressions, run by node on strings that are hard to split.   node tools/make_splits.mjs > tests/data/splits.txt
// A line is a pre-tokenizer and the pieces of a string in hexadecimal; the string is all pieces together.
import { casedLetters } from './make_unicode.mjs';

// Where the published expressions have \s and \S: JavaScript's differ from White_Space in U+0085 and U+FEFF.
const S = '\\p{White_Space}', NS = '\\P{White_Space}';
const short = "'s|'t|'re|'ve|'m|'ll|'d";
const anyCase = "'[sSſ]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]";
const gpt2 = `${short}| ?\\p{L}+| ?\\p{N}+| ?[^${S}\\p{L}\\p{N}]+|${S}+(?!${NS})|${S}+`;
const llama3 = (n) => `${anyCase}|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}${n}| ?[^${S}\\p{L}\\p{N}]+[\\r\\n]*|${S}*[\\r\\n]+|` +
    `${S}+(?!${NS})|${S}+`;
const deepseek3 = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|" +
    ` ?[\\p{P}\\p{S}]+[\\r\\n]*|${S}*[\\r\\n]+|${S}+(?!${NS})|${S}+`;
const hangul = '[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+';

// Each stage splits every piece of the stage before.
const stages = {
    'default': ['[\\p{P}$+<=>\\^~\\|]+', gpt2, '\\p{N}+', '[0-9][0-9][0-9]'],
    'gpt-2': [gpt2],
    'llama-bpe': [llama3('{1,3}')],
    'qwen2': [llama3('')],
    'smollm': ['\\p{N}', gpt2],
    'deepseek-llm': ['[\\r\\n]', `${S}?[${casedLetters}]+`, `${S}?[!-/:-~！-／：-～‘-‟\u3000-。]+`, `${S}+$`, hangul, '\\p{N}+'],
    'deepseek-coder': ['[\\r\\n]', `${S}?\\p{L}+`, `${S}?\\p{P}+`, hangul, '\\p{N}'],
    'joyai-llm': ['\\p{N}{1,3}', '[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+', deepseek3],
};

function split(text, list) {
    if (list.length === 0)
        return [text];
    const pieces = [];
    let gap = 0;
    for (const m of text.matchAll(new RegExp(list[0], 'gu'))) {
        if (m.index > gap)
            pieces.push(text.slice(gap, m.index));
        pieces.push(m[0]);
        gap = m.index + m[0].length;
    }
    if (gap < text.length)
        pieces.push(text.slice(gap));
    return pieces.flatMap((p) => split(p, list.slice(1)));
}

const strings = [
    'Hello, world! How are you?', "I'm you're HE'S WE'VE they'Ll 'd 'D ''s 'ſ 're'", "don't'tt 'llama 'rex", '  leading and trailing  ',
    'tabs\tand\t\tmore \t x', 'line\nline\r\n\r\nline\n\n\n  indented\n   \n', ' \n \r\n  x\n', '\n', '   ', '\u00a0\u00a0x\u3000\u3000', 'a\u0085b\u2028c\ufeffd',
    '1 12 123 1234 12345 1234567 3.14159 1,000,000', 'a1b22c333d4444', '٣٤٥ ⅷ ² ½ ௧௨௩௪', '中文字符和English混排，没有空格。', '日本語のテキスト、カタカナとひらがな',
    '한국어 텍스트 사이', 'ไทย ภาษาไทย', 'हिन्दी में पाठ', 'العربية نص', 'e\u0301te\u0301 \u0301x x\u0301\u0302', '\u0300\u0301', ' \u0301a', '!\u0301a',
    'foo(bar)[baz]{qux}->x != y && z || w', '#include <stdio.h>\nint main() { return 0; }\n', '$100 +5% <a href="x">~`^|\\', '!!!???...---===', '!a ?B .c -D _e (f',
    '🚀🦙😶‍🌫️ emoji 👩‍👩‍👧', 'x🚀y 🚀 z', 'ÄÖÜ äöü ß ẞ Ⅷ ⓐ ª º ƻ ǅ ʔ', 'ᏣᎳᎩ Ꭰꭰ', '\u{10400}\u{10428} \u{1e900}\u{1e922}', '“quotes” ‘single’ «guillemets» „low“', '。、！？「」（）：；～',
    '\u0000\u0001\u007f x\u0000y', '\u{e0001}\u{f0000}\ufffd\uffff', '1\u0301 2\u{20e3}', 'a\r\nb\rc\n\rd', ' \u3000\n\u3000 \t', '_under_score__ __dunder__', 'CamelCaseXMLHttp2Request',
    'https://example.com/a?b=c&d=%20#frag', '   \u4e2d', '\u4e2d   ', ' 1', '  1', '\t1', '\n 1', "'", "''", "'\u0301s", '<|im_start|>user\nHi<|im_end|>', 'ｆｕｌｌｗｉｄｔｈ　ＴＥＸＴ１２３！',
];
// The same random strings every time.
let state = 12345;
const random = (n) => {
    state = (Math.imul(state, 1103515245) + 12345) >>> 0;
    return (state >>> 8) % n;
};
const alphabet = [..." \u00a0\u3000\t\n\r'sStTdlreEvVmaAzZ019²٣½é\u0301ªǅʔßžжЖ中一龥あア가힣ा्!?.,-_$+<=>^~|`“。～，🦙€\u0000\u200b\u{10400}"];
for (let i = 0; i < 60; i++)
    strings.push(Array.from({ length: 3 + random(16) }, () => alphabet[random(alphabet.length)]).join(''));
for (let i = 0; i < 40; i++)
    strings.push(Array.from({ length: 3 + random(16) }, () => [..." \n\t's1a!中"][random(9)]).join(''));

for (const [name, list] of Object.entries(stages))
    for (const s of strings)
        console.log(name + ' ' + split(s, list).map((p) => Buffer.from(p).toString('hex')).join(' '));
