#!/usr/bin/env python3
"""Writes engine/unicode/tables.cc: categories, scripts and case folding of one Unicode version.

The version is 16.0, that of Oniguruma in Hugging Face's tokenizers 0.23, because expressions in a
tokenizer.json were made for it. Categories and scripts come from the Unicode character database
(unicodedataplus). Case folding comes from queries to the engine for each pair of characters.

    python3 -m venv build/venv
    build/venv/bin/pip install tokenizers==0.23.3 unicodedataplus==16.0.0
    build/venv/bin/python scripts/make_unicode_tables.py
"""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Callable, Iterable

import unicodedataplus as ucd
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

VERSION = "16.0.0"
OUTPUT = Path(__file__).resolve().parent.parent / "engine" / "unicode" / "tables.cc"
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]


def matched(expression: str, code_points: Iterable[int]) -> set[int]:
    """The code points that the engine matches with an expression for one character."""
    points = list(code_points)
    kept: set[int] = set()
    split = Split(Regex(expression), "removed")
    for _, (begin, end) in split.pre_tokenize_str("".join(map(chr, points))):
        kept.update(range(begin, end))
    return {point for index, point in enumerate(points) if index not in kept}


def runs(value: Callable[[int], int]) -> list[tuple[int, int]]:
    """(first code point, value) wherever the value changes."""
    result: list[tuple[int, int]] = []
    for point in range(0x110000):
        here = value(point)
        if not result or result[-1][1] != here:
            result.append((point, here))
    return result


def knows(name: str) -> bool:
    try:
        Regex(r"\p{%s}" % name)
    except Exception:  # the binding has no narrower type
        return False
    return True


def plain(name: str) -> str:
    return name.replace("_", "").replace(" ", "").replace("-", "").lower()


def literal(points: Iterable[int]) -> str:
    return "".join("\\x{%x}" % point for point in points)


def fold_pairs() -> dict[int, int]:
    """Each code point that (?i) equates with others -> the one that represents all of them."""
    cased = [
        c for c in CODE_POINTS
        if any(f(chr(c)) != chr(c) for f in (str.lower, str.upper, str.title, str.casefold))
        or ucd.category(chr(c)) in ("Lu", "Ll", "Lt")
    ]
    groups: dict[int, set[int]] = {}
    for point in cased:
        if point in groups:
            continue
        # A negated class has no foldings to several characters, so it finds only pairs.
        group = set(cased) - matched("(?i:[^\\x{%x}])+" % point, cased)
        for member in group:
            groups[member] = group
    rest = [c for c in CODE_POINTS
            if c not in groups and ucd.category(chr(c)) not in ("Cn", "Co", "Cs")]

    def check(part: list[int], of: list[int]) -> bool:
        return matched("(?i:[^%s])+" % literal(part), of) == set(of) - set(part)

    assert check(cased, CODE_POINTS), "a case pair of a character that was not asked"
    for bit in range(18):
        part = [c for c in rest if c >> bit & 1]
        for begin in range(0, len(part), 9000):  # a class of the engine has at most 10,000 ranges
            assert check(part[begin:begin + 9000], rest), f"a case pair of {begin} of bit {bit}"
    pairs = {}
    for group in {frozenset(g) for g in groups.values() if len(g) > 1}:
        folded = [c for c in group if chr(c).casefold() == chr(c)]
        stands = min(folded) if folded else min(group)
        pairs.update({member: stands for member in group if member != stands})
    return pairs


def fold_runs(pairs: dict[int, int]) -> list[tuple[int, int, int, int]]:
    """Ranges (first, last, step, offset to add), so that alphabets take one line each."""
    left = dict(sorted(pairs.items()))
    result = []
    while left:
        first = next(iter(left))
        delta = left[first] - first
        best = [first]
        for step in (1, 2):
            run = [first]
            while left.get(run[-1] + step, -1) - (run[-1] + step) == delta:
                run.append(run[-1] + step)
            if len(run) > len(best):
                best = run
        step = best[1] - best[0] if len(best) > 1 else 1
        result.append((first, best[-1], step, delta))
        for point in best:
            del left[point]
    return result


def full_folds(pairs: dict[int, int]) -> list[tuple[int, list[int]]]:
    """Each code point that (?i) equates with a sequence of several -> that sequence."""
    result = []
    for point in CODE_POINTS:
        folded = [ord(c) for c in chr(point).casefold()]
        if len(folded) > 1:
            found = Split(Regex("(?i:%s)" % literal(folded)), "removed").pre_tokenize_str(chr(point))
            assert not found, f"U+{point:04X} has another folding"
            result.append((point, [pairs.get(c, c) for c in folded]))
    return result


def array(kind: str, name: str, rows: list[str]) -> str:
    body = ", ".join(rows)
    return f"constexpr std::array<{kind}, {len(rows)}> {name} = {{{{\n{body}\n}}}};\n"


def main() -> int:
    assert ucd.unidata_version == VERSION
    categories = sorted({ucd.category(chr(c)) for c in range(0x110000)})
    scripts = sorted({ucd.script(chr(c)) for c in range(0x110000)})
    names: dict[str, int] = {}
    aliases = defaultdict(set)
    for alias, long_name in [(a, n) for n in scripts
                             for a in ucd.property_value_aliases["script"].get(n, [])]:
        aliases[long_name].add(alias)
    for index, script in enumerate(scripts):
        for name in {script, *aliases[script]}:
            if knows(name):
                names[plain(name)] = index
    pairs = fold_pairs()
    parts = [
        "// Written by scripts/make_unicode_tables.py from Unicode %s.\n" % VERSION,
        '#include "engine/unicode/tables.h"\n',
        "namespace sluice::unicode {\nnamespace {\n",
        array("std::string_view", "kCategoryNames", [f'"{c}"' for c in categories]),
        array("std::uint32_t", "kCategories",
              ["0x%x" % (p * 256 + v)
               for p, v in runs(lambda c: categories.index(ucd.category(chr(c))))]),
        array("ScriptName", "kScriptNames",
              ['{"%s", %d}' % (n, i) for n, i in sorted(names.items())]),
        array("std::uint32_t", "kScripts",
              ["0x%x" % (p * 256 + v) for p, v in runs(lambda c: scripts.index(ucd.script(chr(c))))]),
        array("FoldRun", "kFolds",
              ["{0x%x, 0x%x, %d, %d}" % run for run in fold_runs(pairs)]),
        array("FullFold", "kFullFolds",
              ["{0x%x, {%s}}" % (p, ", ".join("0x%x" % c for c in to))
               for p, to in full_folds(pairs)]),
        "}  // namespace\n",
        "std::span<const std::string_view> category_names() { return kCategoryNames; }",
        "std::span<const ScriptName> script_names() { return kScriptNames; }",
        "std::span<const std::uint32_t> categories() { return kCategories; }",
        "std::span<const std::uint32_t> scripts() { return kScripts; }",
        "std::span<const FoldRun> fold_runs() { return kFolds; }",
        "std::span<const FullFold> full_folds() { return kFullFolds; }\n",
        "}  // namespace sluice::unicode\n",
    ]
    OUTPUT.write_text("\n".join(parts))
    subprocess.run(["clang-format-14", "-i", str(OUTPUT)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
