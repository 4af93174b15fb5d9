"""libsluice_c exports what sluice.h declares, and nothing else.

    exports_test.py LIBRARY
"""

import re
import subprocess
import sys
import unittest
from pathlib import Path

HEADER = Path(__file__).resolve().parents[2] / "bindings" / "c" / "sluice.h"
# What a program links, and by that what later versions have to keep.
LIBRARY = ""


class Exports(unittest.TestCase):
    def test_are_those_of_the_header(self):
        declared = re.findall(r"^SLUICE_API .*?(sluice_\w+)\(", HEADER.read_text(), re.MULTILINE)
        symbols = subprocess.run(["nm", "--dynamic", "--defined-only", LIBRARY],
                                 capture_output=True, text=True, check=True).stdout  # fmt: skip
        exported = [line.split()[-1] for line in symbols.splitlines()]
        self.assertGreater(len(declared), 50)
        self.assertEqual(sorted(exported), sorted(declared))


if __name__ == "__main__":
    LIBRARY = sys.argv.pop()
    unittest.main()
