"""Runs the sluice command for the tests."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "sluice-22m"
GOLDEN = ROOT / "tests" / "data" / "golden"


def sluice(*arguments: object, stdin: str | bytes | None = "", **options) -> subprocess.CompletedProcess:
    """The finished command; stdout and stderr are text."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [os.environ["SLUICE_BINARY"], *map(str, arguments)],
        input=data,
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        timeout=300,
        **options,
    )
    done.stderr = done.stderr.decode()
    done.stdout = done.stdout.decode() if done.stdout is not None else ""
    return done


def peak_memory(*arguments: object) -> int:
    """Bytes that the command's process had in memory at most; it has to succeed."""
    command = [os.environ["SLUICE_BINARY"], *map(str, arguments)]
    nothing = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing) as running:
        _, status, usage = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
    if running.returncode != 0:
        raise subprocess.CalledProcessError(running.returncode, command)
    return usage.ru_maxrss * 1024
