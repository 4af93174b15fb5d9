"""The README shows examples/generate.cc as it is compiled."""

import sys
from pathlib import Path


def main() -> int:
    readme, example = (Path(name).read_text(encoding="utf-8") for name in sys.argv[1:3])
    if f"```cpp\n{example}```" in readme:
        return 0
    print("README.md does not contain examples/generate.cc word for word")
    return 1


if __name__ == "__main__":
    sys.exit(main())
