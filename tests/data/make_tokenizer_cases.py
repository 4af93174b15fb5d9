#!/usr/bin/env python3
"""Records what Hugging Face's tokenizers library makes of texts with variants of a tokenizer.

Every variant is an RFC 7386 merge patch of models/sluice-22m/tokenizer.json. See README.md.
"""

import json
import random
from pathlib import Path
from typing import Any

import tokenizers

DATA = Path(__file__).resolve().parent
BASE = DATA.parent.parent / "models" / "sluice-22m" / "tokenizer.json"

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
BYTES_ONLY = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
              "use_regex": False}
GPT2 = {**BYTES_ONLY, "use_regex": True}
BEGIN = {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [BEGIN, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [BEGIN, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|begin_of_text|>": {"id": "<|begin_of_text|>", "ids": [0],
                                             "tokens": ["<|begin_of_text|>"]}},
}

TEXTS = [
    "", " ", "\r\n\r\n", " \n x", "a  b   c    d", "\u00a0\u1680\u180e\u2003\u3000x\u0085y\u200bz",
    "It's we'LL I\u2019m 'S '\u017f they'Re", "1 12 123 1234 12345 \u0661\u0662\u0663\u00bd\u2167",
    "<|begin_of_text|>Once<|end_of_text|>", "<|end_of_text", "<|end_of_text|>|>", "e\u0301 \u00e9 E\u0323\u0302 \u1ec6",
    "\u1112\u1161\u11ab\u1100\u1173\u11af \ud55c\uae00 \ucbd4\u11a7", "\u212b \u2126 \ufb01 \u0958 \u2adc",
    "a\u0315\u0300\u05ae\u0327b", "<tool>call</tool> <tool>x", "a <L> b <R> c <LR>\u3000\n d<L><R>",
    "x  \u00e9q e\u0301q", "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3001\u6f22\u5b57123", "a\0b\x7f\x01",
    "!?!?...--//\\\\ [](){}<>@#$%^&*_+=~`|;:,\"'", "\U0001f469\u200d\U0001f469\u200d\U0001f467\ufe0f\U0001f1eb\U0001f1f7",
    "int main() {\n\treturn 0;\r\n}\n\n\n", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "                                                                 x", "\ud7ff\ue000\uffff\U0010ffff\U00010000",
]


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def added(token_id: int, content: str, **flags: bool) -> dict[str, Any]:
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": token_id, "content": content, **off, **flags}


ADDED = [
    added(0, "<|begin_of_text|>", special=True), added(1, "<|end_of_text|>", special=True),
    added(4096, "<tool>"), added(4097, "<tool>x", special=True), added(4098, "  ", normalized=True),
    added(4099, "<L>", lstrip=True), added(4100, "<R>", rstrip=True, special=True),
    added(4101, "<LR>", lstrip=True, rstrip=True, normalized=True),
    added(4102, "\u6f22\u5b57", normalized=True), added(4103, "e\u0301\u65e5", normalized=True),
]

VARIANTS: dict[str, dict[str, Any]] = {
    "unchanged": {},
    "qwen": {"normalizer": {"type": "NFC"}, "pre_tokenizer": sequence(split(QWEN), BYTES_ONLY),
             "post_processor": GPT2, "model": {"ignore_merges": False}},
    "gpt2": {"pre_tokenizer": GPT2, "model": {"ignore_merges": False, "end_of_word_suffix": "",
                                              "continuing_subword_prefix": ""}},
    "deepseek": {"pre_tokenizer": sequence(*map(split, DEEPSEEK), BYTES_ONLY),
                 "normalizer": {"type": "Sequence", "normalizers": []}},
    "digits": {"pre_tokenizer": sequence({"type": "Digits", "individual_digits": True}, GPT2)},
    "template": {"post_processor": {"type": "Sequence", "processors": [GPT2, TEMPLATE]}},
    "added": {"added_tokens": ADDED, "normalizer": {"type": "NFC"}},
}


def merge_patch(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        result[key] = merge_patch(result.get(key), value)
    return result


def random_texts(count: int) -> list[str]:
    """Mixtures of scripts, marks, spaces and added tokens, of characters as old as Unicode 3.2."""
    generator = random.Random(1869)
    ranges = [(0x20, 0x7F), (0xA0, 0x180), (0x300, 0x340), (0x390, 0x450), (0x5D0, 0x5EA),
              (0x1100, 0x1113), (0x1161, 0x1176), (0x11A8, 0x11C3), (0x2000, 0x2030),
              (0x3041, 0x30FF), (0x4E00, 0x9FA6), (0xAC00, 0xD7A4), (0x1D400, 0x1D455)]
    words = ["<tool>", "<L>", "<R>", "<LR>", "<|end_of_text|>", "'s", "\n", "  ", " the", "\r\n"]

    def piece() -> str:
        if generator.random() < 0.4:
            return generator.choice(words)
        low, high = generator.choice(ranges)
        return "".join(chr(generator.randrange(low, high)) for _ in range(generator.randrange(1, 4)))

    return ["".join(piece() for _ in range(20)) for _ in range(count)]


def record(name: str, patch: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    file = merge_patch(json.loads(BASE.read_text(encoding="utf-8")), patch)
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(file))
    cases = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        cases.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids),
                      "decoded_with_special": tokenizer.decode(ids, skip_special_tokens=False)})
    return {"name": name, "patch": patch, "prefix": tokenizer.encode("").ids, "cases": cases}


def main() -> None:
    texts = TEXTS + random_texts(12)
    variants = [record(name, patch, texts) for name, patch in VARIANTS.items()]
    lines = []
    for variant in variants:
        cases = ",\n".join(json.dumps(case) for case in variant.pop("cases"))
        lines.append(json.dumps(variant)[:-1] + ', "cases": [\n' + cases + "\n]}")
    head = json.dumps({"made_with": f"tokenizers {tokenizers.__version__}"})[:-1]
    (DATA / "tokenizer_more_cases.json").write_text(
        head + ', "variants": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
