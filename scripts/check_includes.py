#!/usr/bin/env python3
"""Checks that tests include the headers that tests/CMakeLists.txt precompiles for them.

No compiler would miss these includes: GCC has them precompiled, and clang-tidy looks at tests in
groups, where one file's includes serve the next. A test has to reach the header of what it uses
through itself and the project's headers. Prints one line per missing include and exits with 1 if
there is one.
"""

import re
import sys
from pathlib import Path

from check_layers import includes
from run_clang_tidy import ROOT, reachable

STD = r"\bstd::"
# Headers, the first to include and others that bring it, and what they are for.
USES = {
    ("gtest/gtest.h", "gmock/gmock.h"): r"^TEST\w*\(|\b(?:EXPECT|ASSERT)_(?!THAT)\w+\(",
    ("gmock/gmock.h",): r"\b(?:EXPECT|ASSERT)_THAT\(",
    ("algorithm",): STD + r"(?:ranges::)?(?:all_of|any_of|clamp|copy_n|count_if|equal|fill|fill_n|find_if"
    r"|generate|lower_bound|max|max_element|min|min_element|none_of|nth_element|reverse|shuffle"
    r"|sort|stable_sort|transform|unique|upper_bound)\(",
    ("cmath",): STD + r"(?:ceil|cos|exp|fabs|floor|fma|isfinite|isinf|isnan|ldexp|log|log2|lround|pow"
    r"|sin|sqrt|tanh)\(",
    ("functional",): STD + r"(?:function<|greater<|plus<|ref\()",
    ("memory",): STD + r"(?:unique_ptr<|shared_ptr<|make_unique<|make_shared<)",
    ("string",): STD + r"(?:string\b(?!_)|to_string\()",
    ("vector",): STD + r"vector<",
}  # fmt: skip


def missing(file: Path) -> list[str]:
    """Returns the headers that `file` uses but does not reach."""
    text = re.sub(r"//.*", "", file.read_text(encoding="utf-8"))
    reached = {include.name for path in reachable(file) for include in includes(path)}
    return [
        headers[0]
        for headers, use in USES.items()
        if not reached.intersection(headers) and re.search(use, text, re.MULTILINE)
    ]


def main() -> int:
    found = [
        f"{file.relative_to(ROOT)}: add #include <{header}>"
        for file in sorted((ROOT / "tests").rglob("*.cc"))
        for header in missing(file)
    ]
    print("\n".join(found) if found else "includes: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
