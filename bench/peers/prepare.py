"""Writes what the contestants read: prompt.txt, job.json and model.gguf."""

import argparse
import json
from pathlib import Path

from export_gguf import export
from tokenizers import Tokenizer


def prompt_of(tokenizer: Tokenizer, book: str, tokens: int) -> tuple[str, list[int]]:
    """Returns the longest beginning of `book` that is exactly `tokens` tokens, and its ids."""
    ends = tokenizer.encode(book[: tokens * 8]).offsets
    # Cutting between tokens may change the last ones, so look nearby for a cut that fits.
    for last in sorted(range(tokens - 32, tokens + 32), key=lambda i: abs(i - tokens + 1)):
        text = book[: ends[last][1]]
        ids = tokenizer.encode(text).ids
        if len(ids) == tokens:
            return text, ids
    raise ValueError(f"no beginning of the book is {tokens} tokens long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="checkpoint directory")
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--tokens", type=int, required=True, help="with the BOS token")
    parser.add_argument("--decode-tokens", type=int, required=True)
    parser.add_argument("--type", default="BF16", help="of the matrices of model.gguf")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    book = Path("data/war-and-peace.txt").read_text(encoding="utf-8")
    config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
    golden = json.loads(Path("tests/data/golden/sluice-22m.json").read_text(encoding="utf-8"))
    text, ids = prompt_of(tokenizer, book, args.tokens - 1)
    (args.out / "prompt.txt").write_text(text, encoding="utf-8")
    job = {
        "ids": [config["bos_token_id"], *ids],
        "decode_tokens": args.decode_tokens,
    }
    if args.type == "BF16":
        job["golden"] = {key: golden["prose_400"][key] for key in ("ids", "greedy")}
    (args.out / "job.json").write_text(json.dumps(job), encoding="utf-8")
    export(args.model, args.out / "model.gguf", args.type)


if __name__ == "__main__":
    main()
