#!/usr/bin/env python3
"""Runs clang-tidy over the source files named on standard input, one per line.

A file that was clean is not looked at again until the file, a header of the project that it
reaches, its compile command, a .clang-tidy above it or the tool changes: build/lint-cache holds an
empty file named by the hash of all these. A file that no compile command mentions is skipped, and
said so.
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
from typing import NamedTuple, Optional

from check_layers import includes, resolve

ROOT = Path(__file__).resolve().parent.parent
TOOL = str(ROOT / "build/clang-tidy/bin/clang-tidy")
ATTEMPTS = 2
LAUNCHERS = {"ccache", "sccache", "distcc"}
# GCC reports warnings (-Werror in every preset), so clang does not need these flags.
GCC_ONLY = ("-W", "-fno-semantic-interposition", "-fpch-preprocess")


class Result(NamedTuple):
    """The result for one file."""

    file: str
    output: str
    clean: bool
    cached: bool
    seconds: float


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


def compile_commands(build: Path) -> dict[str, list[str]]:
    """Reads the compile command of each C++ file, without launcher and GCC's own flags."""
    commands = {}
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        words = entry.get("arguments") or shlex.split(entry["command"])
        if Path(words[0]).name in LAUNCHERS:
            words = words[1:]
        path = (Path(entry["directory"]) / entry["file"]).resolve()
        if path.is_relative_to(ROOT) and path.suffix == ".cc":
            own = without_precompiled(words)
            kept = [word for word in own if not word.startswith(GCC_ONLY)]
            commands[path.relative_to(ROOT).as_posix()] = kept + headers_of(words[0])
    return commands


def write_database(commands: dict[str, list[str]], folder: Path) -> None:
    """Writes the compile commands for clang-tidy to read."""
    entries = [
        {"directory": str(ROOT), "file": str(ROOT / file), "arguments": words}
        for file, words in sorted(commands.items())
    ]
    text = json.dumps(entries, indent=1)
    (folder / "compile_commands.json").write_text(text, encoding="utf-8")


def tool_version() -> str:
    return subprocess.run([TOOL, "--version"], check=True, capture_output=True, text=True).stdout


def configuration(file: str) -> str:
    """Returns the text of .clang-tidy in the file's folder and those above it."""
    folders = [folder for folder in (ROOT / file).parents if folder.is_relative_to(ROOT)]
    found = [folder / ".clang-tidy" for folder in folders]
    return "".join(path.read_text(encoding="utf-8") for path in found if path.exists())


def key(file: str, command: list[str], common: str) -> str:
    """Hashes everything that affects clang-tidy's result for `file`."""
    digest = hashlib.sha256((common + configuration(file)).encode())
    digest.update("\0".join(command).encode())
    for path in reachable(ROOT / file):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()


def check_file(file: str, stamp: Path, database: Path) -> Result:
    """Runs clang-tidy on one file unless `stamp` says that it was clean."""
    if stamp.exists():
        return Result(file, "", True, True, 0.0)
    start = time.monotonic()
    command = [TOOL, "-p", str(database), "--quiet", f"--header-filter=^{re.escape(str(ROOT))}/"]
    for _ in range(ATTEMPTS):
        done = subprocess.run([*command, file], cwd=ROOT, capture_output=True, text=True)
        # Killed, for example for lack of memory, which says nothing about the file.
        if done.returncode >= 0:
            break
    clean = done.returncode == 0
    if clean:
        stamp.touch()
    # stderr counts the warnings in other projects' headers, which are of no interest here.
    errors = [line for line in done.stderr.splitlines() if "warning" not in line]
    errors.append(f"{file}: clang-tidy ended with {done.returncode}")
    output = done.stdout if clean or done.stdout else "\n".join(errors) + "\n"
    return Result(file, "" if clean else output, clean, False, time.monotonic() - start)


def check_files(files: list[str], build: Path, cache: Path, jobs: int) -> list[Result]:
    """Checks all files on `jobs` threads, printing findings as they come."""
    cache.mkdir(parents=True, exist_ok=True)
    commands = compile_commands(build)
    write_database(commands, cache)
    common = tool_version() + Path(__file__).read_text(encoding="utf-8")

    def run(file: str) -> Optional[Result]:
        if file not in commands:
            print(f"clang-tidy: {file}: not compiled by this configuration, skipped")
            return None
        stamp = cache / key(file, commands[file], common)
        result = check_file(file, stamp, cache)
        if not result.clean:
            print(result.output, end="", flush=True)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        return [result for result in pool.map(run, files) if result]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build/release")
    parser.add_argument("--cache", type=Path, default=ROOT / "build/lint-cache")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--times", action="store_true", help="print the seconds of each file")
    args = parser.parse_args()
    files = [line.strip() for line in sys.stdin if line.strip()]
    results = check_files(files, args.build, args.cache, args.jobs)
    if args.times:
        for result in sorted(results, key=lambda r: r.seconds):
            print(f"{result.seconds:6.1f} s  {result.file}")
    bad = sum(not result.clean for result in results)
    cached = sum(result.cached for result in results)
    print(f"clang-tidy: {len(results)} files, {cached} unchanged, {bad} with findings")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
