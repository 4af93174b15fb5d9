#!/usr/bin/env bash
# Checks format, layering, includes of tests, static analysis and shell scripts over the sources
# that git tracks or could track. Prints every finding; exits with 1 if there is one. Clean results of clang-tidy are
# cached in build/lint-cache.
#
#   scripts/lint.sh            check
#   scripts/lint.sh --format   rewrite the sources in the project's format first
#   scripts/lint.sh --tidy     check, with clang-tidy, which takes a while the first time
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# sources PATTERN...: existing files that git tracks or does not ignore.
sources() {
  local file
  git ls-files --cached --others --exclude-standard -- "$@" | sort -u |
    while IFS= read -r file; do
      if [[ -f $file ]]; then echo "$file"; fi
    done
}

clang_format() {
  sources '*.h' '*.c' '*.cc' '*.cu' '*.cuh' | xargs --no-run-if-empty clang-format-14 "$@"
}

# The compile flags for clang-tidy come from the configuration of the preset debug, which has a
# command for each source.
clang_tidy() {
  cmake --preset debug --log-level=WARNING >/dev/null
  sources '*.cc' | python3 scripts/run_clang_tidy.py
}

shell_check() {
  { sources '*.sh' && echo .ci/run; } | xargs shellcheck
}

main() {
  local failed=() tool tidy=0
  for tool in clang-format-14 build/clang-tidy/bin/clang-tidy shellcheck; do
    command -v "$tool" >/dev/null ||
      {
        echo "lint: $tool is missing; run scripts/setup.sh --lint" >&2
        return 1
      }
  done
  case "${1:-}" in
    "") ;;
    --format) clang_format -i ;;
    --tidy) tidy=1 ;;
    *)
      echo "lint: unknown argument '$1'; usage: scripts/lint.sh [--format | --tidy]" >&2
      return 2
      ;;
  esac
  clang_format --dry-run -Werror || failed+=(format)
  python3 scripts/check_layers.py || failed+=(layers)
  python3 scripts/check_includes.py || failed+=(includes)
  shell_check || failed+=(shell)
  ((tidy == 0)) || clang_tidy || failed+=(clang-tidy)
  if ((${#failed[@]} > 0)); then
    echo "lint: FAILED: ${failed[*]}" >&2
    return 1
  fi
  echo "lint: clean"
}

main "$@"
