#!/usr/bin/env python3
"""Runs clang-tidy over the source files named on standard input, one per line.

A file that was clean is not looked at again until the file, a header of the project that it
reaches, its compile command, a .clang-tidy above it or the tool changes: build/lint-cache holds an
empty file named by the hash of all these. A file that no compile command mentions is skipped, and
said so.

Headers of other projects are most of the work, so files with the same flags are checked in groups:
one generated source includes them all. A group with a finding, or that does not compile as one, is
halved until single files are left, and only findings in these are reported.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Iterable, NamedTuple, Optional

from check_layers import includes, resolve

ROOT = Path(__file__).resolve().parent.parent
TOOL = str(ROOT / "build/clang-tidy/bin/clang-tidy")
ATTEMPTS = 2
LAUNCHERS = {"ccache", "sccache", "distcc"}
# Files in a group; a dozen tests take 1 GiB.
GROUP = 12
# Names of namespaces; clang-format leaves their definitions in the first column.
TYPES = re.compile(r"^(?:struct|class|union|enum(?: class)?) (\w+)", re.MULTILINE)
USED = re.compile(r"^using (?:\w*::)*(\w+)", re.MULTILINE)
OTHERS = re.compile(
    r"^(?!(?:namespace|using|struct|class|union|enum|template) )"
    r"[A-Za-z][^;={(\n]*[ *&](\w+) ?[;={(\[]",
    re.MULTILINE,
)
# Declarations that these checks look at only in the main source, which a group's file is not.
MAIN_ONLY = {
    "misc-unused-using-decls": re.compile(r"^\s*using (?:typename )?\w*(?:::\w+)+;", re.MULTILINE),
    "misc-unused-alias-decls": re.compile(r"^\s*namespace \w+ =", re.MULTILINE),
}
# GCC reports warnings (-Werror in every preset), and no code is generated.
UNUSED = ("-W", "-O", "-fPI", "-fno-semantic-interposition", "-fpch-preprocess")


class Result(NamedTuple):
    """The result for one file."""

    file: str
    clean: bool
    seconds: Optional[float]  # None if the file is unchanged


@lru_cache(maxsize=None)
def project_includes(file: Path) -> tuple[Path, ...]:
    """Returns the project's files that `file` includes directly."""
    found = (resolve(ROOT, file, include.name) for include in includes(file))
    return tuple(ROOT / name for name in found if name)


def reachable(file: Path) -> list[Path]:
    """Returns `file` and every file of the project that it includes, directly or not."""
    seen = {file}
    waiting = [file]
    while waiting:
        for header in project_includes(waiting.pop()):
            if header not in seen:
                seen.add(header)
                waiting.append(header)
    return sorted(seen)


@lru_cache(maxsize=None)
def headers_of(compiler: str) -> list[str]:
    """Returns the flags by which clang-tidy finds headers that only the compiler has: omp.h."""
    ask = [compiler, "-print-file-name=include"]
    folder = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    return ["-idirafter", folder]


def without_precompiled(words: list[str]) -> list[str]:
    """Drops `-include HEADER`, which is for GCC only; sources must include what they use."""
    kept = iter(words)
    return [word for word in kept if word != "-include" or not next(kept)]


def compile_commands(build: Path) -> dict[str, tuple[str, ...]]:
    """Reads the flags of each C++ file, without GCC's own and what only code generation needs."""
    commands = {}
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        words = entry.get("arguments") or shlex.split(entry["command"])
        if Path(words[0]).name in LAUNCHERS:
            words = words[1:]
        path = (Path(entry["directory"]) / entry["file"]).resolve()
        if path.is_relative_to(ROOT) and path.suffix == ".cc":
            own = without_precompiled(words[1 : words.index("-o")])
            kept = [word for word in own if not word.startswith(UNUSED)]
            commands[path.relative_to(ROOT).as_posix()] = (*kept, *headers_of(words[0]))
    return commands


def tool_version() -> str:
    return subprocess.run([TOOL, "--version"], check=True, capture_output=True, text=True).stdout


def configurations(file: str) -> list[Path]:
    """Returns .clang-tidy of the file's folder and those above it, the nearest first."""
    folders = [folder for folder in (ROOT / file).parents if folder.is_relative_to(ROOT)]
    return [path for folder in folders if (path := folder / ".clang-tidy").exists()]


def key(file: str, command: tuple[str, ...], common: str) -> str:
    """Hashes everything that affects clang-tidy's result for `file`."""
    texts = [path.read_text(encoding="utf-8") for path in configurations(file)]
    digest = hashlib.sha256("".join([common, *texts]).encode())
    digest.update("\0".join(command).encode())
    for path in reachable(ROOT / file):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run_clang_tidy(source: str, flags: Iterable[str], config: Path) -> tuple[bool, str]:
    """Returns if `source` is clean, and what there is to print."""
    command = [TOOL, "--quiet", f"--header-filter=^{re.escape(str(ROOT))}/"]
    command += [f"--config-file={config}", source, "--", *flags]
    for _ in range(ATTEMPTS):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        # Killed, for example for lack of memory, which says nothing about the file.
        if done.returncode >= 0:
            break
    if done.returncode == 0:
        return True, ""
    # stderr counts the warnings in other projects' headers, which are of no interest here.
    errors = [line for line in done.stderr.splitlines() if "warning" not in line]
    errors.append(f"{source}: clang-tidy ended with {done.returncode}")
    return False, done.stdout or "\n".join(errors) + "\n"


@lru_cache(maxsize=None)
def names(pattern: re.Pattern, file: Path) -> frozenset[str]:
    return frozenset(pattern.findall(file.read_text(encoding="utf-8")))


class Group:
    """Files that are likely to compile as one source."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.own: set[str] = set()  # names that the files define
        self.all: set[str] = set()  # and names that they use, or see in the project's headers

    def add(self, file: str) -> bool:
        """Adds the file, unless the group is full or would have two meanings of a name."""
        path = ROOT / file
        own = names(TYPES, path) | names(OTHERS, path)
        seen = (names(TYPES, each) | names(USED, each) for each in reachable(path))
        reached = own.union(*seen)
        if len(self.files) == GROUP or own & self.all or self.own & reached:
            return False
        self.files.append(file)
        self.own |= own
        self.all |= reached
        return True


def is_alone(file: str) -> bool:
    """Returns if the file's findings, or its meaning, would change in a group."""
    text = (ROOT / file).read_text(encoding="utf-8")
    checks = configurations(file)[0].read_text(encoding="utf-8")
    unseen = (
        f"-{check}" not in checks and declaration.search(text)
        for check, declaration in MAIN_ONLY.items()
    )
    # Highway includes a file by its name, once for each kind of processor.
    return "HWY_TARGET_INCLUDE" in text or any(unseen)


def groups_of(files: list[str], commands: dict[str, tuple[str, ...]]) -> list[list[str]]:
    """Puts files together that have the same flags and checks, neighbours first."""
    groups: dict[tuple, list[Group]] = {}
    for file in files:
        alone = file if is_alone(file) else ""
        same = groups.setdefault((alone, configurations(file)[0], commands[file]), [])
        if not any(group.add(file) for group in same):
            same.append(Group())
            same[-1].add(file)
    return [group.files for same in groups.values() for group in same]


class Checker:
    """Checks files of the project and stamps those that are clean."""

    def __init__(self, build: Path, cache: Path) -> None:
        cache.mkdir(parents=True, exist_ok=True)
        self.cache = cache
        self.commands = compile_commands(build)
        self.common = tool_version() + Path(__file__).read_text(encoding="utf-8")

    def stamp(self, file: str) -> Path:
        return self.cache / key(file, self.commands[file], self.common)

    def source_of(self, files: list[str]) -> str:
        """Returns one source of all files, which is written if they are several."""
        if len(files) == 1:
            return files[0]
        text = "".join(
            f'#include "{ROOT / file}"  // NOLINT(bugprone-suspicious-include)\n' for file in files
        )
        path = self.cache / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.cc"
        path.write_text(text, encoding="utf-8")
        return str(path)

    def check(self, files: list[str]) -> list[Result]:
        """Checks a group; prints the findings of single files, to which others are split."""
        start = time.monotonic()
        source = self.source_of(files)
        flags = self.commands[files[0]]
        if len(files) > 1:
            flags += ("-Wfatal-errors",)
        clean, output = run_clang_tidy(source, flags, configurations(files[0])[0])
        if len(files) > 1:
            Path(source).unlink()
        if len(files) > 1 and not clean:
            half = len(files) // 2
            return self.check(files[:half]) + self.check(files[half:])
        print(output, end="", flush=True)
        if clean:
            for file in files:
                self.stamp(file).touch()
        seconds = (time.monotonic() - start) / len(files)
        return [Result(file, clean, seconds) for file in files]


def check_files(files: list[str], build: Path, cache: Path, jobs: int) -> list[Result]:
    """Checks all files on `jobs` threads, printing findings as they come."""
    checker = Checker(build, cache)
    for file in files:
        if file not in checker.commands:
            print(f"clang-tidy: {file}: not compiled by this configuration, skipped")
    files = [file for file in files if file in checker.commands]
    stale = [file for file in files if not checker.stamp(file).exists()]
    with ThreadPoolExecutor(jobs) as pool:
        groups = pool.map(checker.check, groups_of(stale, checker.commands))
        checked = [result for results in groups for result in results]
    return checked + [Result(file, True, None) for file in set(files) - set(stale)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build/debug")
    parser.add_argument("--cache", type=Path, default=ROOT / "build/lint-cache")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--times", action="store_true", help="print the seconds of each file")
    args = parser.parse_args()
    files = [line.strip() for line in sys.stdin if line.strip()]
    results = check_files(files, args.build, args.cache, args.jobs)
    if args.times:
        for result in sorted(results, key=lambda r: r.seconds or 0):
            print(f"{result.seconds or 0:6.1f} s  {result.file}")
    bad = sum(not result.clean for result in results)
    cached = sum(result.seconds is None for result in results)
    print(f"clang-tidy: {len(results)} files, {cached} unchanged, {bad} with findings")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
