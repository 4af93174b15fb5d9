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
