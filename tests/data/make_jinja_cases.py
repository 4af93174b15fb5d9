#!/usr/bin/env python3
"""Records what Jinja makes of templates, set up as transformers does it. See README.md."""

import json
import random
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from make_tokenizer_cases import DATA

SEED = 20261123
VARIABLES: dict[str, Any] = {
    "s": " a\u00e9B b \n", "t": "one,two,,three", "u": "", "n": 7, "m": -3, "f": 2.5, "yes": True,
    "no": False, "nothing": None, "xs": ["p", "q", "r"], "ns": [3, 1, 2], "empty": [],
    "d": {"role": "user", "content": "Hi <b>"},
    "messages": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "What?\nNow!"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSo.", "tool_calls": []},
        {"role": "user", "content": "\u65e5\u672c"},
    ],
}  # fmt: skip

TEMPLATES = [
    # White space around tags.
    "", "\n", "a\n", "a\n\n", "a\r\nb\rc", "  {% if yes %}\n  a\n  {% endif %}\n b",
    "{%- if yes -%}\n  a \n {%- endif -%}  b", "x  {%+ if yes %} a{% endif +%}\nb",
    "{# c #}\na{#- c -#}\n b", "a {{- n -}} b", "a {{ n }}\nb", " \n  {{ n }}", "\t{% set x = 1 %}\n{{ x }}",
    "a\n  {#- c #}\n  {# c #}  b", "{% if yes %}{% endif %}  {% if yes %} b{% endif %}",
    "{{ '{{' }}{{ '%}' }}", "{{ {'a': {'b': 1}}['a']['b'] }}", "a{#%#}b", "{{ n\n}}\n",
    # Strings and numbers.
    r"{{ 'a\nb\t\'\"\\' }}", r"{{ '\u00e9\x41\U0001f600' }}", r"{{ '\q\/' }}", "{{ 'a' 'b' \"c\" }}",
    "{{ 'a\\\nb' }}", "{{ 1_000 }} {{ 1.0 }} {{ 0.1 + 0.2 }} {{ 5 }}", "{{ 12345678.9 }}",
    "{{ 1.0 * 10000000000000000 }} {{ 0.00001 * 1 }} {{ -0.5 }} {{ 7 / 2 }} {{ 6 / 2 }}",
    "{{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % -3 }} {{ -7 % 3 }} {{ 7.5 // 2 }} {{ -7.5 % 2 }}", "{{ 2 + 3 * 4 - 5 }} {{ (2 + 3) * 4 }}",
    "{{ -n }} {{ +n }} {{ - - n }} {{ -n + 1 }} {{ not n }}", "{{ 'ab' * 3 }} {{ 3 * 'ab' }} {{ 'a' * -1 }}|",
    "{{ 1 / 0 }}", "{{ 1 % 0 }}", "{{ 'a' + 1 }}", "{{ nothing + 'a' }}", "{{ [1] + ['a'] | list | length }}",
    # What is written for values.
    "{{ yes }} {{ no }} {{ nothing }} {{ missing }}|{{ n }} {{ f }} {{ true }} {{ none }}", "{{ yes + yes }}",
    # Precedence.
    "{{ 'a' + s | trim + 'b' }}", "{{ 'a' ~ n + 1 if no else 'z' }}", "{{ 1 ~ 2 + 3 ~ 4 if no else 1 }}",
    "{{ not yes or yes and no }}", "{{ no or nothing or 'x' }} {{ 'a' and n }}", "{{ not 'a' in t }} {{ 'one' not in t }}",
    "{{ n == 7 and s is defined and m < n }}", "{{ 'a' if no }}|", "{{ 'a' if yes else 'b' if yes else 'c' }}",
    "{{ -n | string + 'x' if no else 0 }}", "{{ (n, m) | length }} {{ () | length }} {{ (n) }}", "{{ n is number and f is number }}",
    "{{ 'x' is string == true }}", "{{ not n is defined }} {{ n is not none }} {{ n is not defined }}",
    # Comparisons.
    "{{ 1 == 1.0 }} {{ yes == 1 }} {{ 'a' == 'a' }} {{ 'a' == 1 }} {{ nothing == none }} {{ [1, 2] == [1, 2] }} {{ {'a': 1} == {'a': 1} }}",
    "{{ 1 < 2 }} {{ 'a' < 'b' }} {{ 2 >= 2 }} {{ 'b' <= 'a' }} {{ 1 != 2 }} {{ 1.5 > 1 }}", "{{ 'a' < 1 }}", "{{ none < 1 }}",
    "{{ 'p' in xs }} {{ 'z' in xs }} {{ 'role' in d }} {{ 'nope' in d }} {{ '' in 'abc' }} {{ 'x' in missing }}", "{{ 1 in 'abc' }}", "{{ 'a' in none }}",
    # Members.
    "{{ d.role }} {{ d['role'] }} {{ d.nope }}| {{ d['nope'] }}| {{ xs[0] }} {{ xs[-1] }} {{ xs[9] }}| {{ s[2] }} {{ t[-1] }}",
    "{{ missing.x }}", "{{ missing[0] }}", "{{ d.nope.x }}", "{{ nothing.x }}|", "{{ messages[1].content }} {{ messages.0.role }}",
    "{{ messages[1:] | length }} {{ xs[::-1] | join(',') }} {{ xs[1:2] | join }} {{ xs[:-1] | join }} {{ xs[-2:] | join }} {{ t[1:5:2] }} {{ s[:3] }}|",
    "{{ xs[5:] | length }} {{ xs[-9:9] | join }} {{ xs[2:0:-1] | join }} {{ xs[::2] | join }} {{ t[::-1] }}", "{{ xs[::0] }}", "{{ missing[1:] }}", "{{ n[1:] }}",
    # Filters.
    "[{{ s | trim }}] [{{ t | trim('e') }}] [{{ n | trim }}] [{{ missing | trim }}]", "{{ s | length }} {{ xs | count }} {{ d | length }} {{ missing | length }}", "{{ n | length }}",
    "{{ missing | default('x') }} {{ u | default('x') }}| {{ u | default('x', true) }} {{ no | d('y', boolean=true) }} {{ missing | d }}|",
    "{{ s | upper }} {{ s | lower }} {{ t | capitalize }}", "{{ xs | join(', ') }} {{ ns | join }} {{ messages | join('|', attribute='role') }} {{ 'abc' | join('-') }}",
    "{{ xs | first }} {{ xs | last }} {{ t | first }} {{ t | last }} {{ empty | first }}|", "{{ t | replace(',', ';') }} {{ t | replace(',', '', 1) }}",
    "{{ xs | reverse | join }} {{ t | reverse }} {{ 'ab' | list | join('-') }} {{ d | list | join }}", "{{ '12' | int + 1 }} {{ 'x' | int(5) }} {{ 2.9 | int }} {{ ' 3 ' | int }} {{ -2.9 | int }}",
    "{{ d | tojson }} {{ xs | tojson }} {{ nothing | tojson }} {{ yes | tojson }} {{ f | tojson }} {{ 'a\"\\\\\\n\\u0001\u00e9' | tojson }} {{ {} | tojson }}",
    "{% for k, v in d | items %}{{ k }}={{ v }};{% endfor %}{% for k, v in d.items() %}{{ k }}{% endfor %}",
    "{{ messages | map(attribute='role') | join(',') }} {{ xs | map('upper') | join }} {{ messages | map(attribute='name', default='-') | join }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ messages | rejectattr('role', '==', 'user') | map(attribute='role') | join }} {{ messages | selectattr('tool_calls', 'defined') | list | length }}",
    "{{ ns | select('odd') | join }} {{ ns | reject('gt', 1) | join }} {{ [0, 1, ''] | select | list | length }}", "{{ s | nosuchfilter }}", "{{ 5 | string + 'x' }}", "{{ none | selectattr('a') | list | length }}{{ 0 | map('upper') | list | length }}{{ no | reject | join }}",
    # Tests.
    "{{ s is string }} {{ n is string }} {{ d is mapping }} {{ xs is mapping }} {{ xs is iterable }} {{ d is iterable }} {{ s is iterable }} {{ n is iterable }} {{ xs is sequence }}",
    "{{ n is integer }} {{ f is float }} {{ yes is boolean }} {{ yes is true }} {{ no is false }} {{ n is true }} {{ nothing is none }} {{ yes is number }} {{ yes is integer }}",
    "{{ n is odd }} {{ n is even }} {{ m is odd }} {{ n is divisibleby 7 }} {{ n is divisibleby(2) }} {{ 'p' is in xs }} {{ n is eq 7 }} {{ n is gt(8) }} {{ n is ne 7 }}",
    "{{ missing is defined }} {{ missing is undefined }} {{ d.nope is defined }} {{ d.role is defined }} {{ missing.x is defined }}", "{{ 'abc' is lower }} {{ 'ABC' is upper }} {{ 'aB' is lower }}", "{{ n is nosuchtest }}",
    # Methods.
    "[{{ s.strip() }}] [{{ s.lstrip() }}] [{{ s.rstrip() }}] [{{ t.strip('eno') }}] [{{ s.rstrip('\\n') }}]", "{{ t.split(',') | join('|') }} {{ t.split(',', 1) | join('|') }} {{ s.split() | join('|') }} {{ s.split(none, 1) | join('|') }}",
    "{{ t.rsplit(',', 1) | join('|') }} {{ 'a  b c '.rsplit(none, 1) | join('|') }} {{ 'aaa'.split('aa') | join('|') }} {{ 'aaa'.rsplit('aa') | join('|') }} {{ ''.split(',') | length }} {{ ''.split() | length }}",
    "{{ t.startswith('one') }} {{ t.endswith(('x', 'three')) }} {{ t.startswith('two') }} {{ t.find('two') }} {{ s.find('B') }} {{ t.find('z') }} {{ t.count(',') }} {{ s.count('') }}",
    "{{ t.replace(',', '') }} {{ t.replace(',', '.', 2) }} {{ s.upper() }} {{ s.lower() }} {{ ','.join(xs) }} {{ t.removeprefix('one') }} {{ t.removesuffix('three') }} {{ t.removesuffix('z') }}",
    "{{ messages[1].content.splitlines() | join('|') }} {{ 'a\\r\\nb\\n\\n'.splitlines() | length }} {{ ' '.isspace() }} {{ 'aB'.capitalize() }}", "{{ \"they're bILL's 3rd-\u00e9t\u00c9\".title() }} {{ ''.title() }}|", "{{ t.split('') }}", "{{ t.nosuchmethod() }}", "{{ n.strip() }}", "{{ xs.append('x') }}",
    "{{ d.get('role') }} {{ d.get('x') }} {{ d.get('x', 'y') }} {{ d.keys() | list | join }} {{ d.values() | list | join }} {{ d.items() | list | length }}",
    "{{ messages[2].content.split('</think>')[-1].lstrip('\\n') }} {{ messages[2].content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') }}",
    # Statements.
    "{% if no %}a{% elif yes %}b{% else %}c{% endif %}{% if u %}d{% endif %}{% if empty or d %}e{% endif %}",
    "{% for x in xs %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ x }} {% endfor %}",
    "{% for x in xs %}{{ loop.depth }}{{ loop.depth0 }}{% endfor %} {{ '\u01c6\u01c4 \u01c6'.title() }}|{{ '\u01c6\u01c4'.capitalize() }}",
    "{% for x in xs %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }} {{ loop.previtem is defined }};{% endfor %}",
    "{% for x in empty %}a{% else %}b{% endfor %}{% for x in missing %}a{% else %}b{% endfor %}", "{% for x in n %}a{% endfor %}", "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% endfor %}",
    "{% for c in 'h\u00e9' %}{{ c }}.{% endfor %}{% for k in d %}{{ k }}.{% endfor %}{% for a, b in [[1, 2], [3, 4]] %}{{ a + b }}.{% endfor %}{% for (a, b) in [(1, 2)] %}{{ a }}{% endfor %}",
    "{% for a, b in [[1, 2, 3]] %}{{ a }}{% endfor %}", "{% for x in xs %}{% if loop.first %}{% continue %}{% endif %}{{ x }}{% if x == 'q' %}{% break %}{% endif %}{% endfor %}",
    "{% for x in xs %}{% for y in ns %}{% if y == 1 %}{% break %}{% endif %}{{ x }}{{ y }}{{ loop.index }}{% endfor %}{{ loop.index }}{% endfor %}", "{% break %}",
    "{% set x = 1 %}{% for y in ns %}{% set x = y %}{{ x }}{% endfor %}{{ x }}", "{% for y in ns %}{{ x is defined }}{% set x = y %}{% endfor %}", "{% set x = 1 %}{% if yes %}{% set x = 2 %}{% endif %}{{ x }}",
    "{% set q = namespace(a=1, b='x') %}{% for y in ns %}{% set q.a = q.a + y %}{% endfor %}{{ q.a }}{{ q.b }}{{ q.c is defined }}", "{% set q = namespace() %}{% set q.a = 5 %}{{ q.a }}", "{% set d.role = 'x' %}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set c = (1, 2) %}{{ c[1] }}{% set e = 1, %}{{ e | length }}", "{% set x %}a{{ n }}b{% endset %}{{ x }}{{ x | length }}", "{% set messages = messages[1:] %}{{ messages[0].role }}",
    "{% macro m(a, b=2, c='x') %}<{{ a }}{{ b }}{{ c }}>{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(1, c='z') }}{{ m() }}{{ m(b=1, a=n) }}", "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}", "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(z=2) }}",
    "{% set g = 5 %}{% macro m() %}{{ g }}{{ messages | length }}{% endmacro %}{{ m() }}{% set x = m() %}{{ x + 'y' }}{{ x | length }}", "{% macro f(n) %}{% if n > 0 %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}", "{{ nosuch() }}", "{{ n() }}",
    "{{ raise_exception('No!') }}", "{% if no %}{{ raise_exception('x') }}{% endif %}ok", "{{ range(3) | join }} {{ range(1, 4) | join }} {{ range(5, 0, -2) | join }} {{ range(2) | length }}", "{{ dict(a=1).a }} {{ dict(d, x=2) | length }}",
    "{{ raise_exception is defined }} {{ strftime_now is defined }} {{ nosuch is defined }} {{ range is callable }}", "{% generation %}a{{ n }}{% endgeneration %}b",
    # No Jinja at all.
    "{{ ", "{% if %}", "{% if yes %}", "{% endif %}", "{{ ) }}", "{{ (n }}", "{{ n n }}", "{{ 'a }}", "{# a", "{% nosuch %}", "{{ 1 + }}", "{{ [1, }}", "{% for x %}{% endfor %}", "{% set 1 = 2 %}", "{{ }}", "{{ n | }}", "{{ n is }}", "{{ a.}}", "{{ $ }}", "{{ {'a' 1} }}", "{% else %}",
]  # fmt: skip


class Generation(Extension):
    """The tag that transformers adds: it marks what a model is trained on, and writes its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> jinja2.Environment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: "now"
    made.filters["tojson"] = tojson
    return made


def expression(random_: random.Random, depth: int) -> str:
    """A random expression, most of them ones that can be computed."""
    if depth == 0 or random_.random() < 0.1:
        return random_.choice([*VARIABLES, "missing", "'a'", "'b '", "''", "0", "1", "-2", "1.5", "true", "none", "[1, 'b']", "d.content", "messages[1].content"])  # fmt: skip
    sub = [expression(random_, depth - 1) for _ in range(3)]
    forms = [
        "({0} + {1})", "({0} ~ {1})", "{0} ~ {1}", "({0} - {1})", "({0} * {1})", "({0} // {1})", "({0} % {1})", "({0} == {1})", "({0} < {1})", "({0} in {1})",
        "({0} and {1})", "({0} or {1})", "(not {0})", "({0} if {1} else {2})", "({0} if {1})", "{0} | trim", "({0}) | length", "({0}) | string | upper", "({0})[0]", "({0})[-1]",
        "({0})[1:]", "({0})[::-1]", "({0}) | default({1}, true)", "({0}) | string | replace('a', {1} | string)", "({0} is string)", "({0} is none)", "({0} is iterable)", "({0}) | list | join('-')", "({0} | string).split() | join(',')",
        "({0} | string).strip('a ')", "[{0}, {1}] | join('+')", "({0}) | tojson", "({0} | string).split({1} | string) | length", "({0} is eq({1}))", "{{'k': {0}}}['k']", "({0}).role", "({0} | string)[{1}]", "({0}) | first", "({0}) | last", "({0}) | reverse | list | length",
    ]  # fmt: skip
    return random_.choice(forms).format(*sub)


def generated(random_: random.Random) -> list[str]:
    templates = []
    for i in range(700):
        inner = expression(random_, random_.randint(1, 3))
        form = ["{{{{ {0} }}}}", "{{% if {0} %}}a{{% else %}}b{{% endif %}}", "{{% set v = {0} %}}{{{{ v }}}}", "{{% for x in {0} %}}{{{{ x }}}};{{% endfor %}}"][i % 4 if i % 8 < 4 else 0]  # fmt: skip
        templates.append(form.format(inner))
    return templates


def record(source: str) -> dict[str, Any]:
    case = {"template": source}
    try:
        case["text"] = environment().from_string(source).render(**VARIABLES)
    except Exception as error:  # noqa: BLE001: any of them is the answer
        case["error"] = type(error).__name__
    return case


def is_plain(case: dict[str, Any]) -> bool:
    """Whether the text shows no list or object, which chat templates never write on purpose."""
    text = case.get("text", "")
    return not any(mark in text for mark in ("[", "{'", "<generator", "<bound", "()", "(1", "dict_"))


def main() -> None:
    cases = [record(source) for source in TEMPLATES]
    made = map(record, generated(random.Random(SEED)))
    cases += [{**case, "generated": True} for case in made if is_plain(case)]
    lines = ",\n".join(json.dumps(case) for case in cases)
    head = json.dumps({"made_with": f"jinja2 {jinja2.__version__}", "seed": SEED, "variables": VARIABLES})
    (DATA / "jinja_cases.json").write_text(head[:-1] + ', "cases": [\n' + lines + "\n]}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
