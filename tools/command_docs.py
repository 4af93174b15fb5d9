#!/usr/bin/env python3
"""Writes the man page and the bash completion of the sluice command from its --help text.

    command_docs.py BINARY FOLDER    FOLDER/sluice.1 and FOLDER/sluice.bash
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

COLUMN = 30  # of what stands beside a flag or a command


class Entry(NamedTuple):
    """A flag or a subcommand: '-m,--model TEXT REQUIRED', and its help text."""

    head: str
    text: str

    def names(self) -> list[str]:
        return self.head.split(" ")[0].split(",")

    def takes_value(self) -> bool:
        return re.match(r"\S+ [A-Z]{3}", self.head) is not None

    def values(self) -> list[str]:
        listed = re.search(r"\{(.*)\}", self.head)
        return listed.group(1).split(",") if listed else []


class Help(NamedTuple):
    description: str
    options: list[Entry]
    commands: list[Entry]
    rest: str  # below the lists


def entries(block: str) -> list[Entry]:
    found: list[Entry] = []
    for line in block.splitlines()[1:]:
        head, text = line[:COLUMN].strip(), line[COLUMN:].strip()
        if line.startswith("  -") and len(line) > COLUMN and line[COLUMN - 1] != " ":
            head, text = line.strip(), ""  # too long to have text beside it
        if head:
            found.append(Entry(head, text))
        else:
            found[-1] = Entry(found[-1].head, f"{found[-1].text} {text}".strip())
    return found


def read_help(binary: str, *command: str) -> Help:
    text = subprocess.run([binary, *command, "--help"], check=True, capture_output=True, text=True).stdout
    blocks = text.rstrip().split("\n\n")
    lists = {block.split(":")[0]: entries(block) for block in blocks[1:]
             if re.match(r"(Options|Subcommands):\n", block)}  # fmt: skip
    rest = [block for block in blocks[1:] if not re.match(r"(Options|Subcommands):\n", block)]
    return Help(blocks[0].splitlines()[0], lists.get("Options", []), lists.get("Subcommands", []),
                "\n\n".join(rest))  # fmt: skip


def roff(text: str) -> str:
    """Escapes text, so that roff prints it literally."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


def as_it_is(text: str) -> list[str]:
    return [".nf", roff(text), ".fi"]


def option_lines(options: list[Entry]) -> list[str]:
    lines = []
    for option in options:
        lines += [".TP", f".B {roff(option.head)}", roff(option.text)]
    return lines


def part(text: str, begin: str, end: str) -> str:
    return text[text.index(begin) : text.index(end)].strip() if begin in text else ""


def man_page(version: str, top: Help, commands: dict[str, Help]) -> str:
    name, summary = top.description.split(": ")
    lines = [
        f'.TH SLUICE 1 "" "{version}" "User Commands"',
        ".SH NAME", f"{name.lower()} \\- {roff(summary)}",
        ".SH SYNOPSIS", ".B sluice", ".I COMMAND", "[options]",
        ".SH DESCRIPTION",
        "The keys and values of all tokens are kept in host memory. In front of them stands a device",
        "tier with a hard cap, and every byte that crosses between the two is counted.",
        ".SH OPTIONS", *option_lines(top.options),
        ".SH COMMANDS",
    ]  # fmt: skip
    policies = ""
    for command, text in commands.items():
        own = text.rest.split("Policies:")[0].split("Exit codes:")[0].strip()
        policies = policies or part(text.rest, "Policies:", "Exit codes:")
        lines += [f".SS sluice {command}", roff(text.description) + ".", *option_lines(text.options)]
        lines += [".PP", *as_it_is(own)] if own else []
    codes = top.rest[top.rest.index("Exit codes:") + len("Exit codes:") :]
    lines += [".SH POLICIES", *as_it_is(policies), ".SH EXIT STATUS", roff(" ".join(codes.split()))]
    return "\n".join(lines) + "\n"


def cases(commands: dict[str, Help], presets: list[str]) -> list[str]:
    """The words that may follow a command, and those that may follow its flags."""
    after: dict[str, list[str]] = {}  # words, and behind what they may stand
    for command, text in commands.items():
        for option in filter(Entry.takes_value, text.options):
            values = option.values()
            if "--policy" in option.names():
                values = ["auto", *presets] if "=auto" in option.head else presets
            places = after.setdefault(" ".join(values), [])
            places += [f"'{command} {name}'" for name in option.names()]
    for command, text in commands.items():
        flags = [name for option in text.options for name in option.names()]
        after[" ".join(flags)] = [f"'{command} '*"]
    lines = []
    for words, places in after.items():
        lines += [f"    {' | '.join(places)})", f"      words='{words}' ;;"]
    return lines


def completion(top: Help, commands: dict[str, Help]) -> str:
    policies = next(part(text.rest, "Policies:", "Settings of a policy")
                    for text in commands.values() if "Policies:" in text.rest)  # fmt: skip
    presets = re.findall(r"^  (\w+) ", policies, flags=re.MULTILINE)
    words = [*commands, *(name for option in top.options for name in option.names())]
    return "\n".join([
        "# bash completion for sluice; file names where nothing else is known",
        "_sluice() {",
        "  local current=${COMP_WORDS[COMP_CWORD]} words=",
        "  if ((COMP_CWORD == 1)); then",
        f"    mapfile -t COMPREPLY < <(compgen -W '{' '.join(words)}' -- \"$current\")",
        "    return",
        "  fi",
        "  case \"${COMP_WORDS[1]} ${COMP_WORDS[COMP_CWORD - 1]}\" in",
        *cases(commands, presets),
        "  esac",
        "  mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$current\")",
        "}",
        "complete -o default -F _sluice sluice",
    ]) + "\n"  # fmt: skip


def main() -> None:
    binary, folder = sys.argv[1], Path(sys.argv[2])
    top = read_help(binary)
    commands = {entry.head: read_help(binary, entry.head) for entry in top.commands}
    version = subprocess.run([binary, "--version"], check=True, capture_output=True, text=True)
    folder.mkdir(parents=True, exist_ok=True)
    page = man_page(version.stdout.strip(), top, commands)
    (folder / "sluice.1").write_text(page, encoding="utf-8")
    (folder / "sluice.bash").write_text(completion(top, commands), encoding="utf-8")


if __name__ == "__main__":
    main()
