#!/usr/bin/env bash
# Runs the tests that need a GPU straight from their executables, without ctest: for a machine that
# has only the executables of a build, such as those from scripts/bundle.sh. Runs every case of
# kernels_*, and of all others the cases with cuda in their names. Prints a line per executable, and
# the output of failed ones. An executable that skips all its cases because it finds no GPU has
# failed, too.
#
#   scripts/gpu_tests.sh build/release/bin                  all of them
#   scripts/gpu_tests.sh build/release/bin 'parity_*'       executables of that name only
#   scripts/gpu_tests.sh --pretend 8.9 build/pretend/bin    as on a GPU of that compute capability: 8.0,
#                                                           8.6, 8.9 or 12.0, on a GPU of 9.0; scripts/build.sh
#                                                           says how to build for it
#
# Tests of whole models read models/ and tests/data where the checkout was when they were built.
set -euo pipefail

limit=300 # seconds for one executable
log=$(mktemp)
trap 'rm -f "$log"' EXIT

cases_of() {
  case "$(basename "$1")" in
    kernels_*) echo '*' ;;
    *) echo '*cuda*' ;;
  esac
}

# number WORD: the count in the log's last line of that kind, as in "[  PASSED  ] 12 tests."
number() {
  local count
  count=$(grep -E "^\[ +$1 +\] [0-9]+ test" "$log" | tail -n 1 | grep -oE '[0-9]+' | head -n 1) || true
  echo "${count:-0}"
}

# run TEST: prints its line; the status is 0 if cases ran and all passed.
run() {
  local test=$1 start=$SECONDS status=0 word=passed
  timeout "$limit" "$test" --gtest_filter="$(cases_of "$test")" --gtest_brief=1 >"$log" 2>&1 ||
    status=$?
  if ((status != 0)); then
    word=FAILED
  elif (($(number PASSED) == 0)); then
    status=1 word=SKIPPED
  fi
  printf '%-8s %4d s  %4d passed %4d skipped  %s\n' "$word" $((SECONDS - start)) \
    "$(number PASSED)" "$(number SKIPPED)" "$(basename "$test")"
  if ((status == 124)); then echo "took longer than $limit s" >>"$log"; fi
  if [[ $word == FAILED ]]; then tail -n 40 "$log"; fi
  return "$status"
}

# Succeeds if an executable has cases for a GPU.
concerns_gpu() {
  "$1" --gtest_list_tests --gtest_filter="$(cases_of "$1")" 2>/dev/null | grep -q '^  '
}

# pretend CAPABILITY: the GPU that the executables should assume. On first use the driver compiles
# and caches the executables' 8.0 code.
pretend() {
  export SLUICE_PRETEND_GPU=$1 CUDA_CACHE_MAXSIZE=$((2 << 30))
  limit=$((limit * 2))
}

main() {
  if (($# >= 2)) && [[ $1 == --pretend ]]; then
    pretend "$2"
    shift 2
  fi
  if (($# < 1 || $# > 2)) || [[ ! -d $1 ]]; then
    echo "usage: scripts/gpu_tests.sh [--pretend 8.0|8.6|8.9|12.0] BIN_DIR [FILTER]" >&2
    return 2
  fi
  local bin=$1 filter=${2:-*} test executables=0 failures=0 passed=0
  # Libraries of a bundle.
  export LD_LIBRARY_PATH="$bin/../lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  for test in "$bin"/*_test; do
    # shellcheck disable=SC2053  # a pattern
    if [[ ! -x $test || $(basename "$test") != $filter ]] || ! concerns_gpu "$test"; then continue; fi
    executables=$((executables + 1))
    run "$test" || failures=$((failures + 1))
    passed=$((passed + $(number PASSED)))
  done
  if ((executables == 0)); then
    echo "gpu_tests: no test '$filter' with cases for a GPU in $bin" >&2
    return 1
  fi
  if ((failures > 0)); then
    echo "FAILED: $failures of $executables executables"
    return 1
  fi
  echo "PASSED: $passed cases of $executables executables"
}

main "$@"
