#!/usr/bin/env python3
"""Tests scripts/demo.py: with the command itself on a short context, and with commands that fail."""

import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Writes what is said to the file that --json names.
FAKE = """#!/bin/sh
while [ "$1" != --json ]; do shift; done
cat >"$2" <<'END'
{report}
END
"""


def report(text: str, peak: int) -> str:
    miss = {"from": "host", "to": "device", "cause": "miss", "bytes": 1000, "rows": 1}
    return json.dumps({
        "text": text,
        "timings": {"prefill_tokens": 9, "prefill_seconds": 1, "seconds_per_output_token": 1},
        "plan": {"dense_bytes": 1},
        "memory": {"device_peak_bytes": peak},
        "ledger": {"decode": {"tokens": 10, "totals": [miss]}},
    })  # fmt: skip


class Demo(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def run_demo(self, sluice: Path) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["python3", ROOT / "scripts" / "demo.py", sluice, "3000", "--work", self.folder],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    def fake(self, text: str) -> Path:
        path = self.folder / "sluice"
        path.write_text(text)
        path.chmod(0o755)
        return path

    def test_both_answers_side_by_side(self) -> None:
        done = self.run_demo(Path(os.environ["SLUICE_BINARY"]))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.strip()}
        self.assertEqual((rows["dense"][1], rows["values"][1]), ("481926", "481926"))
        self.assertGreater(float(rows["dense"][2]), 50 * float(rows["values"][2]))  # MiB moved
        self.assertEqual(float(rows["dense"][4]), 0)  # MiB of index
        self.assertGreater(float(rows["values"][4]), 0)
        self.assertIn("Demo PASSED", done.stdout)

    def test_answers_and_caps_are_checked(self) -> None:
        for text, peak, words in (
            ("481926, and", 1 << 20, "Demo PASSED"),
            ("481925, and", 1 << 20, "the hidden number is 481926"),
            ("", 1 << 20, "the hidden number is 481926"),
            ("481926", 1 << 30, "the cap did not hold"),
        ):
            done = self.run_demo(self.fake(FAKE.format(report=report(text, peak))))
            self.assertIn(words, done.stdout)
            self.assertEqual(done.returncode, 0 if "PASSED" in words else 1)

    def test_a_command_that_fails(self) -> None:
        done = self.run_demo(self.fake("#!/bin/sh\necho no memory >&2\nexit 8\n"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("no memory", done.stderr)
        self.assertNotIn("Traceback", done.stderr)


if __name__ == "__main__":
    unittest.main()
