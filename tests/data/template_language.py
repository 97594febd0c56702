# Writes template_language.txt beside it: small templates and what Jinja2 itself (the Python package) makes of them with the
# settings that Hugging Face uses. The records are described in ../template_oracle.mjs. Run by hand: python3 template_language.py
import json, os
from jinja2.sandbox import ImmutableSandboxedEnvironment

SNIPPETS = r'''
{{ 1 + 2 * 3 - 4 // 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7 // -1 }} {{ 7 % -1 }} {{ 2 ** 10 }} {{ 2 ** 3 ** 2 }}
{{ -5 | abs }} {{ (-5) | abs }} {{ - 3 + 5 }} {{ --4 }}
{{ 'a' ~ 1 ~ none ~ true }} {{ 'a' 'b' "c" }} {{ 'ab' * 3 }} {{ 'x' * -1 }}
{{ 1 + 1 ~ 2 }} {{ 2 * 3 ~ 4 }} {{ 'a' ~ 'b' == 'ab' }}
{{ [1, 2] + [3] }} {{ (1, 2) + (3,) == (1, 2, 3) }} {{ (1) }} {{ [] }} {{ {} }} {{ (1,) | length }} {{ () | length }}
{{ true == 1 }} {{ 'a' == 'b' }} {{ [1, 2] == [1, 2] }} {{ {'a': 1, 'b': 2} == {'b': 2, 'a': 1} }} {{ none == none }}
{{ 1 < 2 }} {{ 2 <= 2 }} {{ 'a' < 'b' }} {{ 1 != 2 }}
{{ not true }} {{ not 1 == 2 }} {{ true and false or true }} {{ 0 or 'x' }} {{ 1 and 'y' }} {{ '' or [] or none }} {{ not not 1 }}
{{ 'b' in 'abc' }} {{ 'x' not in 'abc' }} {{ 1 in [1, 2] }} {{ 3 in (1, 2) }} {{ 'k' in {'k': 1} }} {{ not 1 in [1] }} {{ '' in '' }}
{{ 'yes' if 1 else 'no' }} {{ 'yes' if 0 else 'no' }} [{{ 'yes' if 0 }}] {{ 1 if 0 else 2 if 0 else 3 }}
{{ true }} {{ True }} {{ false }} {{ False }} {{ none }} {{ None }}
{{ 'x' if missing is defined else 'no' }}
{{ [1, 'two', none, true, [4], {'k': 'v', 1: 2}] }}
{{ ["it's", 'say "hi"', 'both \' and "', 'a\nb\tc\\d'] }}
{{ 'q\'q' }} {{ "d\"d" }} {{ 'tab\tend' }} {{ 'é🦙' }} {{ 'un\known' }} {{ "{{ no }}" }} {{ '{% no %}' }}
{{ {'a': {'b': {'c': 1}}} }} {{ {'a': {'b': 2}}.a.b }} {{ {'a': {'b': 3}}['a']['b'] }}
{{ {'a': 1}.b is defined }} {{ {'a': 1}.b }}|{{ {'a': 1}['b'] }}
{{ [10, 20, 30][0] }} {{ [10, 20, 30][-1] }} {{ [10, 20, 30].1 }} [{{ [10][5] }}] {{ 'abc'[1] }} {{ 'aé🦙z'[2] }} {{ 'aé🦙z'[-1] }}
{{ [1,2,3,4,5][1:3] }} {{ [1,2,3,4,5][:2] }} {{ [1,2,3,4,5][3:] }} {{ [1,2,3,4,5][::-1] }} {{ [1,2,3,4,5][::2] }} {{ [1,2,3,4,5][-2:] }} {{ [1,2,3,4,5][:-1] }} {{ [1,2,3,4,5][4:1:-2] }} {{ [1,2][5:] }} {{ [1,2][-9:9] }}
{{ 'hello'[1:3] }} {{ 'hello'[::-1] }} {{ 'aé🦙z'[1:3] }} {{ 'hello'[-3:] }} {{ 'hello'[:-1] }} {{ 'hello'[3:1] }} {{ 'hello'[9:] }}
{{ undefined_name }}|{{ undefined_name | default('d') }}|{{ '' | default('d') }}|{{ '' | default('d', true) }}|{{ none | default('d') }}|{{ none | d('e', boolean=true) }}
{{ undefined_name.attribute }}
{{ undefined_name + 'x' }}
{{ undefined_name ~ 'x' }} {{ undefined_name == undefined_other }} {{ undefined_name is undefined }} {{ not undefined_name }} {{ undefined_name | length }} {{ 'x' in undefined_name }}
{{ undefined_function() }}
{{ 'x'.no_such_method() }}
{{ 1 + 'a' }}
{{ 'a' + 1 }}
{{ 'a' < 1 }}
{{ 1 // 0 }}
{{ 5 % 0 }}
{{ none.x }}|{{ 'a'.x }}
{{ '  a b  ' | trim }}|{{ '--a--' | trim('-') }}|{{ 'xyax' | trim(chars='xy') }}|{{ ' 　é \n' | trim }}|
{{ 'hello' | upper }} {{ 'HeLLo' | lower }} {{ 'hello wORLD foo-bar (x)' | title }} {{ 'hELLO' | capitalize }}
{{ 'a b c'.title() }} {{ 'hELLO wORLD'.capitalize() }} {{ 'Aé日'.lower() }}
{{ [1, 2] | length }} {{ 'aé🦙' | length }} {{ {'a': 1} | length }} {{ () | length }}
{{ [1, 'a', none] | join }} {{ [1, 2, 3] | join(', ') }} {{ 'abc' | join('-') }} {{ [{'n': 'x'}, {'n': 'y'}] | join('+', attribute='n') }} {{ ', '.join(['a', 'b']) }}
{{ 'abc' | list }} {{ {'a': 1, 'b': 2} | list }} {{ [1, 2] | string }} {{ 1 | string }}{{ true | string }}
{{ '42' | int }} {{ 'x' | int }} {{ 'x' | int(7) }} {{ true | int }} {{ '-7' | int }}
{{ [1, 2, 3] | first }} {{ [1, 2, 3] | last }} {{ 'abc' | first }} {{ 'abc' | last }} [{{ [] | first }}]
{{ [0, 1, '', 'a'] | select | list }} {{ [0, 1, '', 'a'] | reject | list }} {{ [1, 2, 3, 4] | select('even') | list }} {{ [1, 2, 3] | reject('equalto', 2) | list }} {{ [1, 'a'] | select('string') | list }} {{ [1, 5] | select('>', 2) | list }}
{{ [{'a': 1}, {'a': 2}, {}] | selectattr('a') | list }} {{ [{'a': 1}, {'a': 2}] | selectattr('a', 'equalto', 2) | list }} {{ [{'a': 1}, {}] | rejectattr('a', 'defined') | list }} {{ [{'a': {'b': 3}}, {'a': {'b': 4}}] | selectattr('a.b', 'eq', 4) | list }} {{ [{'a': 'x'}] | selectattr('a', 'in', ['x', 'y']) | list }}
{{ [{'a': 1}, {'a': 2}] | map(attribute='a') | list }} {{ ['a', 'b'] | map('upper') | list }} {{ ['a-b'] | map('replace', '-', '+') | list }} {{ [{'a': {'b': 1}}] | map(attribute='a.b') | list }} {{ [{}, {'a': 2}] | map(attribute='a', default=9) | list }}
{% for k, v in {'a': 1, 'b': 2} | items %}{{ k }}{{ v }}{% endfor %} {{ {'a': 1}.keys() | list }} {{ {'a': 1}.values() | list }} {{ {'a': 1}.get('a') }} {{ {'a': 1}.get('b') }} {{ {'a': 1}.get('b', 5) }}
{{ 'banana' | replace('a', 'o') }} {{ 'banana' | replace('a', 'o', 2) }} {{ 'banana'.replace('an', '') }} {{ 'aaa'.replace('a', 'b', 1) }} {{ 'x' | replace('xx', 'y') }}
{{ [3, 1, 2, 1] | sort }} {{ ['b', 'A', 'a', 'B'] | sort }} {{ ['b', 'A'] | sort(case_sensitive=true) }} {{ [3, 1] | sort(reverse=true) }} {{ [{'a': 2}, {'a': 1}] | sort(attribute='a') }}
{% for k, v in {'b': 1, 'a': 2, 'C': 3} | dictsort %}{{ k }}{{ v }}{% endfor %}
{{ [1, 2, 3] | reverse | list }} {{ 'abc' | reverse }}
{{ 'a' | safe }} {{ 'x' | unknown_filter }}
{{ {'a': [1, true, none, 'x"y\n\té/\\'], 'b': {}} | tojson }} {{ [] | tojson }} {{ 'a' | tojson }} {{ (1, 2) | tojson }}
{{ {'a': [1, {'b': 2}], 'c': {}, 'd': []} | tojson(indent=2) }}
{{ [1, {'a': 2}] | tojson(separators=(',', ':')) }} {{ 'é🦙' | tojson }} {{ 'é' | tojson(ensure_ascii=false) }}
{{ undefined_name | tojson }}
{{ '  a b '.strip() }}|{{ '  a '.lstrip() }}|{{ '  a '.rstrip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'abcab'.lstrip('ab') }}|{{ 'a\n\n'.rstrip('\n') }}|{{ 'éaé'.strip('é') }}|
{{ 'a b  c'.split() }} {{ ' a b '.split() }} {{ 'a,b,,c'.split(',') }} {{ 'a,b,c'.split(',', 1) }} {{ ''.split() }} {{ ''.split(',') }} {{ 'a  b c'.split(none, 1) }} {{ 'abc'.split('</x>')[-1] }} {{ ' a  b '.split(' ') }}
{{ 'abc'.split('') }}
{{ 'abc'.startswith('ab') }} {{ 'abc'.endswith('bc') }} {{ 'abc'.endswith('abcd') }} {{ ''.startswith('') }}
{{ 1 is number }} {{ true is number }} {{ '1' is number }} {{ 1 is integer }} {{ true is integer }} {{ 1 is float }} {{ true is boolean }} {{ 1 is boolean }}
{{ 'a' is string }} {{ 1 is string }} {{ {} is mapping }} {{ [] is mapping }} {{ [] is iterable }} {{ 'a' is iterable }} {{ 1 is iterable }} {{ {} is iterable }} {{ [] is sequence }} {{ 'a' is sequence }} {{ {} is sequence }} {{ 1 is sequence }}
{{ none is none }} {{ 1 is none }} {{ 1 is not none }} {{ none is not none }} {{ x is defined }} {{ x is not defined }} {{ not x is defined }} {{ x is undefined }} {{ x is none }}
{{ true is true }} {{ 1 is true }} {{ false is false }} {{ 0 is false }} {{ 3 is odd }} {{ 4 is even }} {{ 4 is odd }} {{ 9 is divisibleby(3) }} {{ 9 is divisibleby 2 }}
{{ 1 is equalto 1 }} {{ 1 is eq(2) }} {{ 1 is ne 2 }} {{ 1 is in [1, 2] }} {{ 3 is not in [1] }} {{ 1 is lt 2 }} {{ 1 is ge 2 }} {{ range is callable }} {{ none is sameas none }}
{{ 'a' is defined and 'b' is string or false }} {{ 1 is equalto 1 and 2 is equalto 2 }} {{ 1 + 1 is number }}
{{ 1 is unknown_test }}
{% for x in [1, 2, 3] %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }};{% endfor %}
{% for x in 'abc' %}{{ x }}.{% endfor %}{% for x in {'a': 1, 'b': 2} %}{{ x }}{% endfor %}{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}
{% for x in [1, 2, 3, 4] if x is even %}{{ loop.index }}:{{ x }} {% endfor %}{% for x in [] %}a{% else %}none{% endfor %}{% for x in [1] if false %}a{% else %}empty{% endfor %}
{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }} {% endfor %}{% for a, b in [[1]] %}{% endfor %}
{% for x in [1, 2, 3] %}{% if loop.previtem is defined %}{{ loop.previtem }}<{% endif %}{{ x }}{% if loop.nextitem is defined %}>{{ loop.nextitem }}{% endif %} {% endfor %}
{% for x in range(10) %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 5 %}{% break %}{% endif %}{{ x }}{% endfor %}
{% for i in range(2) %}{% for j in range(2) %}{{ i }}{{ j }}{{ loop.index }} {% endfor %}{{ loop.index }}|{% endfor %}
{{ range(3) | list }} {{ range(1, 4) | list }} {{ range(5, 0, -2) | list }} {{ range(0) | list }}
{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}
{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}
{% set ns = namespace(a=1) %}{% for i in [1, 2] %}{% set ns.a = ns.a + i %}{% set ns.b = i %}{% endfor %}{{ ns.a }}{{ ns.b }}[{{ ns.c }}]
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set t = (3, 4) %}{% set c, d = t %}{{ c }}{{ d }}
{% set block %}a{{ 1 }}b{% endset %}{{ block | upper }}
{% set x = 5 %}{% set x.y = 1 %}
{% macro m(a, b='B', c=a ~ '!') %}({{ a }},{{ b }},{{ c }}){% endmacro %}{{ m(1) }}{{ m(1, 2) }}{{ m(b=3, a=4) }}{{ m() }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(x=2) }}
{% macro f(n) %}{% if n > 0 %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}{{ f(2) | upper }}
{% set g = 'G' %}{% macro m() %}{{ g }}{% set g = 'L' %}{% endmacro %}{{ m() }}{{ g }}
{% if 1 %}a{% elif 2 %}b{% else %}c{% endif %}{% if 0 %}a{% elif 2 %}b{% else %}c{% endif %}{% if 0 %}a{% elif 0 %}b{% else %}c{% endif %}{% if 0 %}a{% endif %}
{{ dict(a=1, b='x') }} {{ namespace(a=[1]).a }}
{{ messages[0]['content'] }} {{ messages[0].role }} {{ messages | length }} {{ messages[-1].content }} {{ messages[1:] | length }} {{ (messages | last).content }}
{{ messages | map(attribute='role') | join(',') }} {{ messages[0] | tojson }} {{ messages[0] }}
{{ 'a' if messages[0].content is string and messages[0]['role'] == 'user' else 'b' }}
{{ 'a' | upper | lower ~ 'B' | lower }} {{ ('a' ~ 'b') | upper }} {{ 'x' ~ 'y' | upper }} {{ -1 | string ~ 'x' }}
{{ [1, 2, 3,] }} {{ {'a': 1,} }}
{{ "a" in ["a"] and "b" not in ["a"] }}
{{ 'a'.__class__ }}|{{ ''.__class__.__mro__ }}
{{ messages.append(1) }}
{{ {'a': 1}.update({'b': 2}) }}
{{ [1, 2].pop() }}
{{ [[1, [2]], {'a': [3]}] | string | length }} {{ 'ab' | first | upper }} {{ [3, 1, 2] | sort | first }}
{{ 'x' | trim(1) }}
{{ 'x' | upper('unexpected') }}
{% if %}a{% endif %}
{% if 1 %}a
{% endif %}
{% for x in %}{% endfor %}
{% for x in [1] %}a{% endif %}
{{ 'a' if false else 'b' if false else 'c' }} {{ ('a' if true else missing.x) if ('b' if true) else 'd' }} {{ [1 if 0 else 2, 3 if 1] }}
{% for x in [1, 2] %}{% if x == 1 %}{% continue %}{% else %}{{ x }}{% break %}{% endif %}{{ missing.x }}{% endfor %}
{{ false and missing.x }} {{ true or missing.x }} {% if false %}{{ missing.x }}{{ raise_exception('no') }}{% for i in missing.x %}{% else %}{% endfor %}{% elif true %}yes{% elif missing.x %}{% else %}{{ missing.x }}{% endif %}
{% macro m(a, b=missing.x) %}{{ a }}{% if a %}{% for i in [1] %}{% break %}{% endfor %}{% endif %}.{% endmacro %}{% for i in [1, 2] %}{{ m(i, 1) }}{% endfor %}
{{ (1 }}
{{ 1 2 }}
{{ }}
{{ a b }}
{{ 'open }}
{{ [1, 2 }}
{{ {'a' 1} }}
{{ x | }}
{{ x. }}
{{ 1 + }}
{% set x %}
{% unknown_tag %}
{% else %}
{% endfor %}
{# open
{{ open
{% open
{{ a ! b }}
{% macro (a) %}{% endmacro %}
{{ loop }}|{{ 'a' if loop is defined else 'b' }}
'''.strip("\n").split("\n")
MULTI = [
    "a{# comment #}b{#- c -#} c {#\nlines #}\nd\n",
    "{% if true %}\nx\n{% endif %}\ny\n", "  {% if true %}\n  x\n  {% endif %}\n  y", "a  {% if true %}  b  {% endif %}  c",
    "a \n {%- if true -%} \n b \n {%- endif -%} \n c", "a\n  {%+ if true +%}\n b\n{% endif %}\n", "{{ 1 }}\n{{ 2 }}\n", "{{ 1 -}}\n\n  x\n\n  {{- 2 }}\n\n",
    "\n\n{% set x = 1 %}\n\n{{ x }}\n\n", "\t{% set x = 1 %}\t\n{{ x }}", "  {# c #}\n  x", "  {#- c -#}\n  x", "a {{- ' b ' -}} c", "{{ 'x' }}  \n  {% if 1 %}y{% endif %}",
    "a\r\nb\rc\r\n", "{% for i in [1, 2] %}\n  {{ i }}\n{% endfor %}\nend", "{%- for i in [1, 2] -%}\n  {{ i }}\n{%- endfor -%}\nend", "x {% if 1 %}\n\n\ny{% endif %}\n\n",
    "{% set a = {\n  'k': [1,\n 2]\n} %}{{ a.k[1] }}", "{% if 1 %}{% if 0 %}\na{% else %}\n  b{% endif %}\n\n{% endif %}c", "", "\n", "\n\n", "no tags { at } all {", "{{'}}'}}{{ '%}' }}{{ \"#}\" }}",
    "  {{ 1 }}  \n  {%- set x = 2 %}  {{ x }}", "{% set x = 1 -%}\n   {% set y = 2 %}\n   z", "a{#-#}b", "{##}a", "é{% if 1 %}\n🦙{% endif %}",
]
MESSAGES = [{"role": "user", "content": "Hi \u00e9"}, {"role": "assistant", "content": " ok "}, {"role": "user", "content": "bye"}]
NUMBERS = [0.5, -0.1, 1.0, 0.0, 100.0, 1e15, 1e16, 123456789012345680.0, 0.0001, 0.00001, 1.5e-7, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, 2.5, 3]
WITH_NUMBERS = [
    "{{ numbers }}", "{{ numbers | tojson }}", "{% for n in numbers %}{{ n }} {{ n | int if n < 1000 else 0 }};{% endfor %}",
    "{% for n in numbers %}{{ n is number }}{{ n is float }}{{ n is integer }}{{ n is string }}{{ 1 if n else 0 }}{{ n == 1 }}{{ n == 3 }}{{ n > 0 }}{{ n <= 2 }} {% endfor %}",
    "{{ numbers | sort }}", "{{ 3 in numbers }}", "{{ numbers[0] ~ '|' ~ numbers[2] }}", "{{ ratio }}{{ {'a': ratio} }}{{ 'x' if ratio is defined }}",
]


def main():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    out = bytearray()

    def put(key, text):
        raw = text.encode()
        out.extend(b"%s %d\n%s\n" % (key.encode(), len(raw), raw))

    for source in SNIPPETS + MULTI + WITH_NUMBERS:
        put("template", source)
        put("name", "language")
        put("messages", json.dumps(MESSAGES, ensure_ascii=False))
        args = {"numbers": NUMBERS, "ratio": 0.25} if source in WITH_NUMBERS else {}
        for name, value in args.items():
            put("arg", name + "=" + json.dumps(value))
        try:
            put("text", env.from_string(source).render(messages=MESSAGES, **args))
        except Exception as e:
            put("error", type(e).__name__ + ": " + str(e))
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "template_language.txt"), "wb") as f:
        f.write(out)


main()
