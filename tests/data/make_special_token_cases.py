#!/usr/bin/env python3
"""Records which ids transformers 4 and 5 give to texts with special tokens, file by file.

A case is a small checkpoint's tokenizer.json, changed by a merge patch (RFC 7386), with a config.json
and other files beside it. `follow` says whose answer Sluice gives: that of "both" versions, of "4"
or "5" alone where they differ (`why` says why), or a refusal. See README.md.

    python3 tests/data/make_special_token_cases.py [--venvs FOLDER]

The two versions are installed into FOLDER (a temporary one by default) and run from there.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent
PACKAGES = {"4": ["transformers==4.57.6", "tokenizers==0.22.2", "jinja2"],
            "5": ["transformers==5.24.0", "tokenizers==0.23.3", "jinja2"]}
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

TEXTS = [
    "<bos> abc<eos> ab", "<im>ab<im_end> <im>", "ab <pad> ab<unk>ab", "<user> \n ab <user>",
    "<s>ab</s><|endoftext|>ab", "e\u0301<n\u00e9>ab<me\u0301>", "<img><extra>ab <tool> x",
]


def flags(**on: bool) -> dict[str, bool]:
    return {**dict.fromkeys(FLAGS, False), **on}


def added(token_id: int, content: str, **on: bool) -> dict[str, Any]:
    return {"id": token_id, "content": content, **flags(**on)}


def special(token_id: int, content: str, **on: bool) -> dict[str, Any]:
    return added(token_id, content, special=True, **on)


def token(content: str, **on: bool) -> dict[str, Any]:
    """A token as tokenizer_config.json has it."""
    return {"__type": "AddedToken", "content": content, **flags(**on)}


def decoder(*tokens: dict[str, Any]) -> dict[str, Any]:
    return {str(one["id"]): {key: one[key] for key in one if key != "id"} for one in tokens}


def byte_symbols() -> list[str]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(code) for code in plain] + [chr(code) for code in range(0x100, 0x144)]


def base_tokenizer() -> dict[str, Any]:
    words = [*byte_symbols(), "ab", "abc"]
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [special(258, "<bos>"), special(259, "<eos>")],
        "normalizer": {"type": "NFC"},  # as Qwen2Tokenizer has it whatever the file says
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                          "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                    "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {word: i for i, word in enumerate(words)},
                  "merges": [["a", "b"], ["ab", "c"]]},
    }


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False,
              "use_regex": True}
SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}


def template(*before: tuple[str, int]) -> dict[str, Any]:
    return {"type": "TemplateProcessing",
            "single": [*({"SpecialToken": {"id": name, "type_id": 0}} for name, _ in before),
                       SEQUENCE],
            "pair": [SEQUENCE, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]}
                               for name, i in before}}


def merge_patch(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        result[key] = merge_patch(result.get(key), value)
    return result


CASES: list[dict[str, Any]] = []
NAMES = {"bos_token": "<bos>", "eos_token": "<eos>"}
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}
LLAMA = {"tokenizer_class": "LlamaTokenizerFast", **NAMES, "unk_token": None}
BASE = [special(258, "<bos>"), special(259, "<eos>")]


def case(name: str, config: dict[str, Any] | None = None, *, follow: str = "both", why: str = "",
         model_type: str = "llama", tokenizer: dict[str, Any] | None = None,
         prefix: list[int] | None = None, refusal: str = "", code: str = "unsupported",
         **files: dict[str, Any]) -> None:
    """`files` are named without ".json"; `prefix` is Sluice's own, `refusal` part of its message."""
    if config is not None:
        files["tokenizer_config"] = config
    entry = {"name": name, "follow": follow, "model_type": model_type, "tokenizer": tokenizer or {},
             "files": {key: json.dumps(value) for key, value in files.items()}}
    if prefix is not None:
        entry["prefix"] = prefix
    if refusal:
        entry |= {"refusal": refusal, "code": code}
    if why:
        entry["why"] = why
    CASES.append(entry)


# Where the tokens stand.
case("tokenizer.json alone, with a class", PLAIN)
case("decoder adds tokens", {**PLAIN, "added_tokens_decoder": decoder(
    *BASE, special(260, "<im>"), special(261, "<im_end>"), added(262, "<tool>"))})
case("additional_special_tokens", {**PLAIN, "additional_special_tokens": ["<im>", "<im_end>"]})
case("additional_special_tokens with flags",
     {**PLAIN, "additional_special_tokens": [token("<im>", rstrip=True, special=True), "<img>"]})
case("extra_special_tokens, a mapping",
     {**PLAIN, "extra_special_tokens": {"image_token": "<img>", "extra_token": "<extra>"}})
case("named tokens that are nowhere else",
     {**PLAIN, "pad_token": "<pad>", "unk_token": "<unk>", "sep_token": "<im>", "cls_token": "<im>",
      "mask_token": "<user>"})
case("a named token is a token of the model",
     {**PLAIN, "pad_token": "ab", "additional_special_tokens": ["abc"]})
case("named tokens that are null", {**PLAIN, "pad_token": None, "additional_special_tokens": None})
case("tokens of special_tokens_map.json", PLAIN, special_tokens_map={
    "pad_token": "<pad>", "unk_token": {"content": "<unk>", **flags(lstrip=True)}})
case("special_tokens_map.json stands before tokenizer_config.json",
     {**PLAIN, "pad_token": "<pad>"}, special_tokens_map={"pad_token": "<user>"})
case("additional_special_tokens of special_tokens_map.json", PLAIN,
     special_tokens_map={"additional_special_tokens": ["<im>", "<im_end>"]})
case("special_tokens_map.json beside a decoder is not read",
     {**PLAIN, "added_tokens_decoder": decoder(*BASE)},
     special_tokens_map={"pad_token": "<pad>", "additional_special_tokens": ["<im>"]})
case("added_tokens.json", PLAIN, added_tokens={"<im_end>": 261, "<im>": 260})
case("added_tokens.json, one of them special", {**PLAIN, "pad_token": "<pad>"},
     added_tokens={"<im>": 261, "<pad>": 260})
case("added_tokens.json, special by special_tokens_map.json", PLAIN,
     special_tokens_map={"additional_special_tokens": ["<im>"]}, added_tokens={"<im>": 260},
     follow="4", why="5 leaves it plain, although the file calls it special")
case("a plain token of tokenizer.json that has a name", {**PLAIN, "pad_token": "<tool>"},
     tokenizer={"added_tokens": [*BASE, added(260, "<tool>")]})
case("added_tokens.json beside a decoder is not read",
     {**PLAIN, "added_tokens_decoder": decoder(*BASE)}, added_tokens={"<im>": 260})
case("added_tokens.json of tokens that tokenizer.json has too", PLAIN,
     added_tokens={"<bos>": 258, "<eos>": 259, "<im>": 260})
case("added_tokens.json gives another token the id of one in tokenizer.json", PLAIN,
     added_tokens={"<im>": 259, "<im_end>": 260}, follow="refused",
     why="4 and 5 drop the token", code="corrupt", refusal='added_tokens.json: token "<im>" has the id 259')
case("all files", {**PLAIN, "additional_special_tokens": ["<img>"], "pad_token": "<pad>"},
     special_tokens_map={"unk_token": "<unk>"}, added_tokens={"<tool>": 260, "<im>": 261})
case("no tokenizer_config.json", follow="5", model_type="mistral", prefix=[258], why=(
    "4 takes LlamaTokenizerFast, whose <unk>, <s> and </s> the checkpoint does not have; "
    "Sluice puts the BOS token of config.json"))
case("no tokenizer_config.json, and a post-processor", follow="5",
     tokenizer={"post_processor": BYTE_LEVEL}, why="as before; tokenizer.json says what is put")
case("special_tokens_map.json without tokenizer_config.json", model_type="qwen2", prefix=[258],
     why="Sluice puts the BOS token of config.json",
     special_tokens_map={**NAMES, "pad_token": "<pad>"})
case("token names of models' own", {**PLAIN, "image_token": "<img>", "user_token": "<user>"},
     follow="5", why="4 takes no notice of names that it does not know")
case("extra_special_tokens, a list", {**PLAIN, "extra_special_tokens": ["<img>", "<extra>"]},
     follow="5", why="4 does not load a list")
case("extra_special_tokens, a list of objects",
     {**PLAIN, "extra_special_tokens": [token("<img>", lstrip=True), token("<extra>", special=True)]},
     follow="5", why="4 does not load a list")
case("extra_special_tokens beside additional_special_tokens",
     {**PLAIN, "extra_special_tokens": {"image_token": "<img>"},
      "additional_special_tokens": ["<im>"]},
     follow="refused", why="4 adds <im> first and 5 <img>",
     refusal='tokenizer_config.json: tokens "<img>" and "<im>" get their ids in another order')
case("a name of the model's own beside additional_special_tokens",
     {**PLAIN, "image_token": "<img>", "additional_special_tokens": ["<im>"]},
     follow="refused", why="4 adds <im> alone, so its id is another",
     refusal='tokenizer_config.json: tokens "<img>" and "<im>" get their ids in another order')
case("a list beside a list",
     {**PLAIN, "extra_special_tokens": ["<img>"], "additional_special_tokens": ["<im>"]},
     follow="5", why="4 does not load extra_special_tokens that is a list")
case("an empty list beside special_tokens_map.json", {**PLAIN, "extra_special_tokens": []},
     special_tokens_map={"additional_special_tokens": ["<im>"]},
     follow="5", why="4 does not load a list")
case("an object beside special_tokens_map.json",
     {**PLAIN, "extra_special_tokens": {"a_token": "<bos>"}},
     special_tokens_map={"additional_special_tokens": ["<im>"]})
case("an object beside both lists",
     {**PLAIN, "extra_special_tokens": {"a_token": "<bos>"},
      "additional_special_tokens": ["<im>"]},
     special_tokens_map={"additional_special_tokens": ["<im_end>"]},
     follow="refused", why="4 adds both, 5 <im_end> alone",
     refusal='the token "<im>" of additional_special_tokens is one for')
case("special_tokens_map.json with all kinds", PLAIN, special_tokens_map={
    "extra_special_tokens": ["<img>", {"content": "<extra>", "lstrip": True}], "pad_token": "<pad>"},
    follow="5", why="4 does not load a list")
case("special_tokens_map.json with names of the model's own", PLAIN, special_tokens_map={
    "user_token": "<user>", "image_token": "<img>"},
    follow="5", why="4 takes no notice of names that it does not know")
case("the same, listed by a decoder",
     {**PLAIN, "extra_special_tokens": {"image_token": "<img>"},
      "additional_special_tokens": ["<im>"],
      "added_tokens_decoder": decoder(*BASE, special(260, "<im>"))})
case("additional_special_tokens of both files",
     {**PLAIN, "additional_special_tokens": ["<im>"]},
     special_tokens_map={"additional_special_tokens": ["<im>", "<im_end>"]},
     follow="refused", why="4 adds <im_end> and 5 does not",
     refusal='the token "<im_end>" of additional_special_tokens is one for')
case("split_special_tokens", {**PLAIN, "split_special_tokens": True},
     follow="refused", why="Sluice always finds special tokens",
     refusal="tokenizer_config.json: split_special_tokens is true")
case("an empty extra_special_tokens beside additional_special_tokens",
     {**PLAIN, "extra_special_tokens": {}, "additional_special_tokens": ["<im>"]})

# Which flags they have.
for flag in ("lstrip", "rstrip", "normalized"):
    case(f"decoder sets {flag} of a token of tokenizer.json", {
        **PLAIN, "added_tokens_decoder": decoder(*BASE, special(260, "<user>", **{flag: True}))},
        tokenizer={"added_tokens": [*BASE, special(260, "<user>")]})
case("decoder sets single_word", {
    **PLAIN, "added_tokens_decoder": decoder(*BASE, special(260, "<user>", single_word=True))},
    follow="refused", why="Sluice does not find single words",
    refusal='tokenizer_config.json: added_tokens_decoder: token "<user>" has \'single_word\'')
case("decoder takes flags back", {
    **PLAIN, "added_tokens_decoder": decoder(*BASE, special(260, "<user>"))},
    tokenizer={"added_tokens": [*BASE, special(260, "<user>", lstrip=True, rstrip=True)]})
case("decoder makes a token special", {
    **PLAIN, "added_tokens_decoder": decoder(*BASE, special(260, "<tool>"))},
    tokenizer={"added_tokens": [*BASE, added(260, "<tool>")]})
case("decoder makes a special token plain", {
    **PLAIN, "added_tokens_decoder": decoder(*BASE, added(260, "<tool>"))},
    tokenizer={"added_tokens": [*BASE, special(260, "<tool>")]})
case("decoder without flags", {
    **PLAIN, "added_tokens_decoder": {"260": {"content": "<tool>"},
                                      "261": {"content": "<im>", "special": True}}})
case("a named token that the decoder calls plain", {
    **PLAIN, "pad_token": "<pad>", "added_tokens_decoder": decoder(*BASE, added(260, "<pad>"))})
case("an additional token that the decoder calls plain", {
    **PLAIN, "additional_special_tokens": ["<tool>"],
    "added_tokens_decoder": decoder(*BASE, added(260, "<tool>"))},
    follow="5", why="4 makes it special")
case("named tokens with flags", {
    **PLAIN, "pad_token": token("<pad>", lstrip=True, rstrip=True),
    "unk_token": token("<unk>", normalized=True)})
case("a named token with flags that tokenizer.json has without", {
    **PLAIN, "bos_token": token("<bos>", rstrip=True), "added_tokens_decoder": {}},
    follow="5", why="4 adds tokens with flags anew, so that theirs hold")
case("the same without a decoder", {**PLAIN, "bos_token": token("<bos>", rstrip=True)})
case("normalized tokens", {**PLAIN, "added_tokens_decoder": decoder(
    *BASE, special(260, "<n\u00e9>"), added(261, "<me\u0301>", normalized=True))})

# Ids.
case("decoder in another order than its ids", {**PLAIN, "added_tokens_decoder": dict(reversed(
    decoder(*BASE, special(260, "<im>"), special(261, "<im_end>")).items()))})
case("decoder with gaps", {**PLAIN, "added_tokens_decoder": decoder(
    *BASE, special(270, "<im>"), special(280, "<im_end>"))})
case("decoder with other ids than tokenizer.json", {**PLAIN, "added_tokens_decoder": decoder(
    special(259, "<bos>"), special(258, "<eos>"), special(260, "<im>"))})
case("decoder's ids as numbers, not as text", {**PLAIN, "added_tokens_decoder": decoder(
    *BASE, special(1000, "<im>"), special(261, "<im_end>"))})
case("gaps in tokenizer.json", PLAIN, tokenizer={
    "added_tokens": [*BASE, special(270, "<im>"), special(280, "<im_end>")]})
case("another order in tokenizer.json", PLAIN, tokenizer={
    "added_tokens": [special(261, "<im>"), special(260, "<im_end>"), *BASE]})
case("a gap, and the decoder fills it", {**PLAIN, "added_tokens_decoder": decoder(
    *BASE, special(260, "<im_end>"), special(261, "<im>"))},
    tokenizer={"added_tokens": [*BASE, special(261, "<im>")]})
case("tokens of the vocabulary", {**PLAIN, "added_tokens_decoder": decoder(
    *BASE, added(256, "ab"), special(260, "<im>"))},
    tokenizer={"model": {"vocab": {"<bos>": 258, "<eos>": 259}}})
case("ids beyond the model", {**PLAIN, "additional_special_tokens": [
    f"<im{i or ''}>" for i in range(50)]})

# Which class. Those of GPT-2 and Qwen2 have a normalizer and a pre-tokenizer of their own in 5.
for class_name, normalizer in (("GPT2Tokenizer", None), ("Qwen2Tokenizer", {"type": "NFC"})):
    case(f"{class_name} with its default tokens", {"tokenizer_class": class_name, **NAMES},
         tokenizer={"normalizer": normalizer})
    case(f"{class_name} without default tokens", {
        "tokenizer_class": class_name, **NAMES, "unk_token": None, "pad_token": None},
         tokenizer={"normalizer": normalizer})
    case(f"{class_name} whose decoder lacks a token of tokenizer.json", {
        "tokenizer_class": class_name, **NAMES, "unk_token": None, "pad_token": None,
        "added_tokens_decoder": decoder(*BASE)},
        tokenizer={"added_tokens": [*BASE, special(260, "<im>")]},
        follow="4", why="5 forgets the added tokens of tokenizer.json with this class")
case("GPT2Tokenizer beside another normalizer", {"tokenizer_class": "GPT2Tokenizer", **NAMES},
     follow="4", why="5 takes no notice of the normalizer in tokenizer.json with this class")
case("qwen2 without a class", NAMES, model_type="qwen2")
case("qwen3 without a class", NAMES, model_type="qwen3")
case("qwen2 with another class", {**LLAMA, "added_tokens_decoder": decoder(*BASE)},
     model_type="qwen2", follow="5", why="4 puts the BOS token that LlamaTokenizerFast puts")
case("qwen3 with another class", PLAIN, model_type="qwen3")
case("mistral with another class", {"tokenizer_class": "GPT2Tokenizer", **NAMES},
     model_type="mistral", follow="5", why="4 adds the class's <|endoftext|>")
case("llama without a class", NAMES, follow="5", why=(
    "4 takes LlamaTokenizerFast, whose <unk> the checkpoint does not have, and its BOS token"))
case("LlamaTokenizer with its default tokens", {"tokenizer_class": "LlamaTokenizer", **NAMES},
     follow="5", why="4 adds the class's <unk> and puts its BOS token")
case("TokenizersBackend", {"tokenizer_class": "TokenizersBackend", **NAMES, "pad_token": "<pad>"},
     follow="5", why="4 does not know the class")
case("PreTrainedTokenizer", {"tokenizer_class": "PreTrainedTokenizer", **NAMES,
                             "pad_token": "<pad>"})

# What a prompt begins with.
CLASSES = ("PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizerFast")
PROCESSORS = {"no post-processor": None, "ByteLevel": BYTE_LEVEL,
              "a template": template(("<bos>", 258)), "an empty template": template()}
for class_name in CLASSES:
    for name, processor in PROCESSORS.items():
        for add in (None, False, True):
            asked = {} if add is None else {"add_bos_token": add}
            begins = name == "a template"
            llama = class_name == "LlamaTokenizerFast"
            differ = llama and begins != (add is not False)
            case(f"{class_name}, {name}, add_bos_token {json.dumps(add)}", {
                "tokenizer_class": class_name, **NAMES, "unk_token": None, "pad_token": None,
                **asked}, tokenizer={
                    "post_processor": processor,
                    "normalizer": None if class_name == "GPT2Tokenizer" else {"type": "NFC"}},
                follow="both" if not differ else "5" if add is None else "4",
                why="" if not differ else "4 puts what this class is told or puts by itself, 5 what "
                    "tokenizer.json says; what is told holds")
case("a template of two tokens", PLAIN,
     tokenizer={"post_processor": template(("<bos>", 258), ("<eos>", 259))})
case("a template in a sequence", PLAIN, tokenizer={"post_processor": {
    "type": "Sequence", "processors": [BYTE_LEVEL, template(("<bos>", 258))]}})
case("LlamaTokenizerFast, a BOS token that is nowhere else",
     {**LLAMA, "bos_token": "<im>", "add_bos_token": True},
     follow="4", why="5 takes no notice of add_bos_token")
case("LlamaTokenizerFast, a template of another BOS token, add_bos_token true",
     {**LLAMA, "bos_token": "<im>", "add_bos_token": True},
     tokenizer={"post_processor": template(("<bos>", 258))},
     follow="4", why="5 takes no notice of add_bos_token")
case("LlamaTokenizerFast, bos_token null", {**LLAMA, "bos_token": None, "add_bos_token": False})
case("LlamaTokenizerFast, add_bos_token true and bos_token null",
     {**LLAMA, "bos_token": None, "add_bos_token": True},
     follow="5", why="4 refuses it")
case("LlamaTokenizerFast, add_eos_token", {
    **LLAMA, "add_bos_token": True, "add_eos_token": True},
    tokenizer={"post_processor": template(("<bos>", 258))},
    follow="5", why="4 ends texts with the EOS token, behind which nothing can be continued")
case("PreTrainedTokenizerFast, add_eos_token", {**PLAIN, "add_eos_token": True})


# What a version says.

def write_checkpoint(folder: Path, entry: dict[str, Any]) -> None:
    tokenizer = merge_patch(base_tokenizer(), entry["tokenizer"])
    # A merge patch drops what is null; the library wants to see some of it.
    tokenizer = {"post_processor": None, "normalizer": None, **tokenizer}
    config = {"model_type": entry["model_type"], "vocab_size": 300, "bos_token_id": 258}
    texts = {"tokenizer": json.dumps(tokenizer), "config": json.dumps(config), **entry["files"]}
    for name, text in texts.items():
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


def answer(entry: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), entry)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # whatever a version cannot load
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:120]}
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    whole, part = tokenizer.encode("ab"), tokenizer.encode("ab", add_special_tokens=False)
    begin = whole.index(part[0])
    known = tokenizer.get_added_vocab()
    dropped = sorted(i for i in known.values()
                     if tokenizer.decode([i], skip_special_tokens=True)
                     != tokenizer.decode([i], skip_special_tokens=False))
    return {"ids": [" ".join(map(str, one)) for one in ids], "prefix": whole[:begin],
            "suffix": whole[begin + len(part):], "special": dropped}


def record_here() -> None:
    import logging
    logging.disable(logging.WARNING)
    print(json.dumps([answer(entry) for entry in json.load(sys.stdin)]))


def python_of(folder: Path, version: str) -> Path:
    python = folder / f"transformers{version}" / "bin" / "python"
    if not python.exists():
        venv.create(python.parent.parent, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES[version]], check=True)
    return python


def answers(folder: Path, version: str) -> list[dict[str, Any]]:
    done = subprocess.run([python_of(folder, version), __file__, "--record"], check=True,
                          input=json.dumps(CASES), capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venvs", type=Path)
    parser.add_argument("--record", action="store_true", help="with the version that runs this")
    arguments = parser.parse_args()
    if arguments.record:
        return record_here()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.venvs or Path(temporary)
        four, five = answers(folder, "4"), answers(folder, "5")
    wrong = []
    for entry, old, new in zip(CASES, four, five, strict=True):
        entry["answers"] = {"both": old} if old == new else {"4": old, "5": new}
        follow = entry["follow"]
        if follow != "refused" and "error" in entry["answers"].get(follow, {"error": ""}):
            keys = [key for key in old if old[key] != new.get(key)]
            wrong.append(f"{entry['name']} follows {follow}, but they differ in {keys}:"
                         + "".join(f"\n  {a}\n  {b}" for key in keys
                                   for a, b in [(old[key], new.get(key, new))]))
    if wrong:
        sys.exit("\n".join(wrong))
    lines: dict[str, int] = {}
    for entry in CASES:
        for one in entry["answers"].values():
            one["ids"] = [lines.setdefault(ids, len(lines)) for ids in one.get("ids", [])]
    head = json.dumps({"made_with": PACKAGES, "texts": TEXTS, "base": base_tokenizer(),
                       "ids": list(lines)})[:-1]
    cases = ",\n".join(json.dumps(entry) for entry in CASES)
    (DATA / "special_token_cases.json").write_text(f'{head}, "cases": [\n{cases}\n]}}\n',
                                                   encoding="utf-8")


if __name__ == "__main__":
    main()
