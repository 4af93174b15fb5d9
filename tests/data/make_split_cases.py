#!/usr/bin/env python3
r"""Records how Hugging Face's tokenizers library cuts text by split expressions. See README.md.

tests/engine/split_cases_test.cc cuts the same texts. Both make them by the rules here, so only
checksums are stored: CRC-32 of the ends of all pieces, in characters, as 32-bit little-endian.

- properties: \p{..}, escapes and classes, for each plane of Unicode all its code points. A block of
  256 code points that has an assigned one is written out with each twice, so that a match of one
  character can be told from none; other blocks with each once.
- expressions: for each plane all code points in FRAME or once, as above; and TEXTS texts of random
  fragments, one checksum for each GROUP.
- refused: expressions that the library takes and Sluice must refuse by name.
- broken: expressions that the library does not take.
"""

import json
import zlib
from array import array
from pathlib import Path
from typing import Iterator

import tokenizers
import unicodedataplus as ucd
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

DATA = Path(__file__).resolve().parent
TEXTS = 1500
GROUP = 50
FRAME = "%%a%1 % %\n"  # "%" stands for the code point

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
HAN_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
HAN_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
START = r"[^\r\n\p{L}\p{N}]?"
ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
DEEPSEEK_LETTERS = (
    "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    "ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛ"
    "Ꜣ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)

# Name -> the expressions of a tokenizer's Split steps, as its family has them or, from "own" on,
# made for one construct.
EXPRESSIONS: dict[str, list[str]] = {
    "gpt2": [GPT2],
    "gpt2 after digits, starcoder": [r"\p{N}", GPT2],
    "falcon": ["[0-9][0-9][0-9]", GPT2],
    "cl100k": [CONTRACTIONS + "|" + START + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES],
    "cl100k, possessive": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|"
        r"\s+(?!\S)|\s+"],
    "qwen2": [CONTRACTIONS + "|" + START + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES],
    "qwen3.5": [
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + SPACES],
    "o200k, llama 4": [
        START + UPPER + "*" + LOWER + "+" + CONTRACTIONS + "?|" + START + UPPER + "+" + LOWER + "*"
        + CONTRACTIONS + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES],
    "tekken": [
        START + UPPER + "*" + LOWER + "+|" + START + UPPER + "+" + LOWER
        + r"*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES],
    "kimi": [
        r"[\p{Han}]+|" + START + HAN_UPPER + "*" + HAN_LOWER + "+" + CONTRACTIONS + "?|" + START
        + HAN_UPPER + "+" + HAN_LOWER + "*" + CONTRACTIONS
        + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES],
    "deepseek v3": [
        r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
        ASCII_PUNCTUATION + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        + SPACES],
    "deepseek llm": [
        "[\r\n]", DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "deepseek coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "bloom": [r" ?[^(\s|[.,!?…。，、।۔،])]+"],
    "chatglm, glm 4": [
        CONTRACTIONS + "|" + START + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "digits from the right": [r"\d{1,3}(?=(?:\d{3})*\b)", GPT2],
    "digits from the right, superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))", GPT2],
    "viking": [r" ?[^(\s|[.,!?…。，、।۔،])]+", r"\p{N}"],
    "words": [r"\w+|[^\w\s]+"],
    "line by line": [r"[^\r\n]+|[\r\n]+"],
    "own: script names": [r"\p{Han}+|\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"],
    "own: arabic and devanagari": [r"\p{Arabic}+|\p{Devanagari}+| ?\P{Arabic}"],
    "own: kana, hangul, thai": [r"[\p{Hiragana}\p{Katakana}]+|\p{Hangul}{2}|\p{Thai}+?|\p{Common}"],
    "own: cyrillic, greek, ignoring case": [r"(?i:[\p{Cyrillic}]+|\p{Greek}+|[^\p{Latin}])"],
    "own: ignoring case": [r"(?i:[k-s]+|ÅK|ω|[^a-z\p{N}]{2}|ǆ|µ)"],
    "own: ignoring case from the middle": [r"(a(?i)b|c)d|(?i)'ll|É(?-i)é|x"],
    "own: without case folding": [r"(?i:\p{Lu}\p{Ll}|\w(?-i:a))"],
    "own: lines": [r"^.|.$|\A\s|\s\Z|a\z"],
    "own: line breaks": [r"\R|\N+|\O"],
    "own: word boundaries": [r"\b\w|\B.|\b"],
    "own: hexadecimal and controls": [r"\h+|\H\x{e9}|[\t\v\f\a\e]|\n\x41|\u4e00|[\x{3000}-\x{303f}]"],
    "own: negated classes": [r"[^\D1]|[^\S\n]+|[\P{L}&&\P{N}&&\S]+|\P{^Lu}|\p{^M}"],
    "own: classes in classes": [r"[a[^\p{L}\s]]+|[^[\p{L}&&[^a-m]]\n]|[\w&&[^\d_]]"],
    "own: hyphens in brackets": [r"[a-c-e]+|[-+]|[x-]|[--/]|[+--]|[\--/]|[^-a-z\]]"],
    "own: looking around": [r"(?<=\p{L})\p{N}|(?<!\s)\p{P}(?=\s)|\p{L}(?!\p{L}|\p{M})|(?<=\n|^)."],
    "own: atomic and possessive": [r"(?>\p{L}+)1|\p{L}*+a|\s++\S?+|(?>a|ab)c"],
    "own: lazy and counted": [r"\p{L}{2,4}?|\p{L}{,2}1|\s{2,}|\p{N}+?\.|.??a"],
    "own: empty matches": [r"(?=\p{Lu})|x*|(?<=\n)"],
    "own: groups": [r"((\p{L})(\p{N}|(?:\p{P}|))*)+|(?:a|(b))+\s?"],
    "own: braces": [r"a{x}|a{,}|{\p{L}}|]\}|\{"],
    "own: punctuation and symbols": [r"\p{Pd}+|[\p{Ps}\p{Pe}]|\p{Sc}\p{Nd}+|[\p{Sm}\p{So}\p{Sk}]+|\p{Pc}|\p{Po}"],
    "own: separators, controls and unassigned": [r"\p{Zs}+|[\p{Zl}\p{Zp}\p{Cc}]|\p{Cf}|\p{Co}+|\p{Cn}"],
    "own: cased letters and marks": [r"\p{LC}+\p{Mn}*|\p{Lm}|\p{Lo}+[\p{Mc}\p{Me}]*|\p{Nl}|\p{No}"],
}

ESCAPES = [
    r"\s", r"\S", r"\d", r"\D", r"\w", r"\W", r"[\w]", r"[^\w]", r"\h", r"\H", r"\N", r"\O", ".", r"[\s\S]", r"[^\s]",
    r"[^\d\s]", r"[\w&&\D]", r"(?i:\p{Lu})", r"(?i:[^\p{Lu}])", r"(?i:[^\p{Ll}])", r"(?i:[^a-z])",
    r"(?i:[^\p{Greek}])", r"(?i:[\p{Nl}])", r"(?i:k)", r"(?i:s)", r"(?i:\x{3c3})", r"(?i:[^\p{Lt}])",
    r"(?i:[^\p{M}])", r"(?i:[^\x{df}\x{1f80}-\x{1faf}])", r"\p{^L}", r"\P{^L}", r"\p{ han }", r"\p{l-u_}",
    r"\b.", r".\b", r"\B.", r".\B", r"\R", r"[^\n]",
]

FRAGMENTS = [
    " ", "  ", "   ", "\n", "\r\n", "\n\n", "\t", "\r", "\u00a0", "\u3000", "\u2028", "\u0085", "\v", "\f",
    "\x1c", "\u180e", "\u200b", "a", "b", "c", "d", "x", "A", "B", "É", "é", "e\u0301", "ab", "abc", "The",
    "hello", "World", "HTTPServer", "don't", "'s", "'S", "'ll", "'LL", "'re", "'ve", "'\u017f", "\u212a", "k",
    "K", "s", "\u017f", "ß", "ss", "ǅ", "ǆ", "µ", "Ω", "\u2126", "1", "12", "123", "1234567", "٣", "²", "Ⅷ",
    "½", "3.14", "$5", "€", "+", "-", "--", "=", "==", "!", "?!", "...", ",", ", ", ".", "(", ")", "[", "]",
    "{", "}", "a{x}", "a{,}", "_", "__init__", "/", "//", "\\", "&", "&&", "|", "^", "~", "#", "@", "漢字", "、",
    "。", "漢", "ひら", "カタ", "ー", "한국", "ไทย", "हिन्दी", "।", "عربي", "،", "۔", "Привет", "ЖЖ", "Ελλ", "ς", "😀",
    "👩\u200d💻", "\ufe0f", "\U0001f1e9", "\U000e0041", "\ue000", "\u0378", "\U0001e4d0", "\U000105c0",
    "\U00010d50", "\U00010d70", "\u1c89", "\u1c8a", "\ua7cb",
]

REFUSED = [
    r"\p{Letter}", r"\p{Punct}", r"\p{Alnum}", r"\P{Alpha}", r"\p{^Digit}", r"\p{Lowercase_Letter}", r"\p{Any}",
    r"\p{Assigned}", r"\p{ASCII}", r"\p{Alphabetic}", r"\p{White_Space}", r"\p{Uppercase}", r"\p{Emoji}",
    r"\p{Word}", r"\p{XDigit}", r"\p{In_Cyrillic}", r"\p{InGreek_and_Coptic}", r"\p{ID_Start}",
    r"[[:alpha:]]", r"[[:^punct:]a]", r"\X", r"\K", r"\G", r"\y", r"\Y",
    r"(a)\1", r"(?<n>a)", r"(?<n>a)\k<n>", r"(?<n>a)\g<n>", r"(?~a)", r"(?#c)a", r"(?m:.)",
    r"(?x: a)", r"(?im:a)", r"(?W:\w)", r"(?y{g})a", r"\xc3\xa9", r"\x4", r"\x", r"\x{41 42}", r"\x{d800}",
    r"\x{110000}", r"\101", r"\0", r"\cA", r"\C-a", r"\i", r"\p", r"\pL", r"\u", "[]a]", r"[^]a]",
    "[a-[b]]", "[[a]-c]", "[a-&&a]", "[a&&-b]", "[a-c--e]", r"[\b]", r"[\R]", "a{3,2}", "a{2}?", "a{2}+", "a**",
    "a+*", "a?+?", "a{2}{3}", "(?i:ss)", "(?i:ß)", "(?i:[ß])", r"(?i:[\p{L}])", "(?i:ﬁ)", "(?i:s(?:s))",
    r"(?:a|){2,}", r"(a?){2}", r"\b.+b", r"\B(.*)b", r"(?<!^)\N{1,}c", "(?<=a+)b", "(?<=(?:a|bc)d)e", r"(a)(?(1)b|c)",
]
BROKEN = [
    "(a", "a)", ")", "[a", "[a[b]", "[]", "*", "a|*", "(?:+)", "{2}", "^*", r"\b+", "(?=a)*", "[z-a]", r"[a-\d]",
    r"[\d-a]", r"\p{Nonsense}", r"\p{}", r"\p{Script=Han}", r"\u41", "a\\", "(?s:.)", "(?z)",
    "[[:nope:]]", "a{100001}",
]


def cut(steps: list[str], text: str) -> list[int]:
    """Ends of the pieces."""
    split = Sequence([Split(Regex(step), "isolated") for step in steps])
    return [end for _, (_, end) in split.pre_tokenize_str(text)]


def checksum(ends: list[int]) -> int:
    return zlib.crc32(array("I", ends).tobytes())


def blocks(plane: int) -> Iterator[tuple[bool, range]]:
    """(whether one of them is assigned, code points) for each 256, without surrogates."""
    for first in range(plane << 16, (plane + 1) << 16, 256):
        if not 0xD800 <= first <= 0xDFFF:
            points = range(first, first + 256)
            yield any(ucd.category(chr(c)) not in ("Cn", "Co") for c in points), points


def unassigned_runs() -> list[list[int]]:
    """First and last block of 256 of each run in which nothing is assigned."""
    runs: list[list[int]] = []
    for used, points in (block for plane in ALL_BLOCKS for block in plane):
        number = points[0] >> 8
        if not used and runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        elif not used:
            runs.append([number, number])
    return runs


def plane_text(plane: int, assigned: str) -> str:
    return "".join((assigned if used else "%").replace("%", chr(c))
                   for used, points in ALL_BLOCKS[plane] for c in points)


class Random:
    """SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def below(self, bound: int) -> int:
        mask = (1 << 64) - 1
        self.state = (self.state + 0x9E3779B97F4A7C15) & mask
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return (z ^ (z >> 31)) % bound


def random_text(seed: int) -> str:
    """Mostly fragments, and one in eight a code point below U+20000."""
    random = Random(seed)
    text = ""
    for _ in range(random.below(60)):
        if random.below(8) > 0:
            text += FRAGMENTS[random.below(len(FRAGMENTS))]
        else:
            point = random.below(0x20000)
            text += chr(point) if not 0xD800 <= point <= 0xDFFF else " "
    return text


def check_validity() -> None:
    for expression, valid in [(e, True) for e in REFUSED] + [(e, False) for e in BROKEN]:
        try:
            Regex(expression)
            taken = True
        except Exception:  # the binding has no narrower type
            taken = False
        assert taken == valid, expression


def property_names() -> list[str]:
    names = ["C", "L", "LC", "M", "N", "P", "S", "Z"]
    names += sorted({ucd.category(chr(c)) for c in range(0x110000)} - {"Cs"})
    for script in sorted({ucd.script(chr(c)) for c in range(0x110000)}):
        names += [script, *ucd.property_value_aliases["script"].get(script, [])]
    return names


def main() -> None:
    check_validity()
    doubled = [plane_text(plane, "%%") for plane in range(17)]
    framed = [plane_text(plane, FRAME) for plane in range(17)]
    texts = [random_text(seed) for seed in range(TEXTS)]
    properties = [r"\p{%s}" % name for name in property_names()] + ESCAPES
    result = {
        "tokenizers": tokenizers.__version__,
        "unicode": ucd.unidata_version,
        "frame": FRAME,
        "unassigned": unassigned_runs(),
        "fragments": FRAGMENTS,
        "texts": TEXTS,
        "group": GROUP,
        "properties": [],
        "expressions": [],
        "refused": REFUSED,
        "broken": BROKEN,
    }
    for expression in properties:
        result["properties"].append(
            {"expression": expression, "planes": [checksum(cut([expression], t)) for t in doubled]})
        print(expression, flush=True)
    for name, steps in EXPRESSIONS.items():
        groups = [checksum([end for text in texts[first:first + GROUP] for end in cut(steps, text)])
                  for first in range(0, TEXTS, GROUP)]
        result["expressions"].append({"name": name, "steps": steps,
                                      "planes": [checksum(cut(steps, t)) for t in framed],
                                      "texts": groups})
        print(name, flush=True)
    (DATA / "split_cases.json").write_text(json.dumps(result, ensure_ascii=True) + "\n")


ALL_BLOCKS = [list(blocks(plane)) for plane in range(17)]

if __name__ == "__main__":
    main()
