#!/usr/bin/env python3
"""Writes ruler.jsonl, longbench.jsonl and text.jsonl, samples of what `sluice eval --data` reads.

    data/tasks/make_tasks.py

The text is War and Peace, the questions are those of `--task needle` and `multiquery`, and the
forms those of the files of RULER and LongBench.
"""

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
BOOK = (HERE.parent / "war-and-peace.txt").read_text()
NUMBERS = {"amber falcon": "481926", "quiet harbour": "730514", "iron lantern": "265803",
           "velvet bridge": "918347"}  # fmt: skip


def passage(part: int, characters: int) -> str:
    """Whole lines of the book."""
    begin = BOOK.index("\n", part * len(BOOK) // 8) + 1
    return BOOK[begin : BOOK.index("\n", begin + characters) + 1]


def hidden(part: int, characters: int, names: list[str]) -> str:
    """A passage with a line for each of the names, spread evenly."""
    lines = passage(part, characters).splitlines(keepends=True)
    for i, name in reversed(list(enumerate(names))):
        at = (i + 1) * len(lines) // (len(names) + 1)
        lines.insert(at, f"The secret number of the {name} is {NUMBERS[name]}. Remember it.\n")
    return "".join(lines)


def question(name: str) -> str:
    return f"Question: What is the secret number of the {name}?\nAnswer: "


def write(name: str, lines: list[dict]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (HERE / name).write_text(text)


def main() -> None:
    names = list(NUMBERS)
    ruler = [{"index": i, "input": hidden(i + 1, 700, [name]) + "\n" + question(name),
              "outputs": [NUMBERS[name]]} for i, name in enumerate(names[:2])]  # fmt: skip
    both = "Question: What are the secret numbers of the {} and the {}?\nAnswer: The secret number of the {} is "
    ruler.append({"index": 2, "input": hidden(3, 700, names[2:]) + "\n" + both.format(*names[2:], names[2]),
                  "outputs": [NUMBERS[name] for name in names[2:]]})  # fmt: skip
    longbench = [{"_id": str(i), "dataset": "needle", "context": hidden(i + 4, 700, [name]).strip(),
                  "input": question(name), "answers": [NUMBERS[name]], "all_classes": None}
                 for i, name in enumerate(names[:3])]  # fmt: skip
    write("ruler.jsonl", ruler)
    write("longbench.jsonl", longbench)
    write("text.jsonl", [{"text": passage(part, 900)} for part in (0, 3, 6)])


if __name__ == "__main__":
    main()
