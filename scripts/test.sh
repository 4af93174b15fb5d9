#!/usr/bin/env bash
# Runs every check that must pass: lint, the release build with all tests, the quick tests and 15
# seconds of each fuzzer under AddressSanitizer and UBSan, and the tests of shared state under
# ThreadSanitizer. Every step runs unless a step that it needs failed; the exit status is 0 only if
# all passed.
#
#   scripts/test.sh            all of it
#   scripts/test.sh --quick    release build and its quick tests only
#
# With SLUICE_TEST_SECONDS=N, a machine that has needed half of N seconds before the sanitized tests
# runs every third of the quick ones, others with each commit; what would begin after four fifths of
# N is skipped. The summary says both.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# With nvcc, two architectures stand for all of a release: the oldest, and the one with its own
# kernels.
export SLUICE_CUDA_ARCHITECTURES=${SLUICE_CUDA_ARCHITECTURES:-80-real;90a-real}
# Tests run in parallel, so idle OpenMP threads must not spin on a core.
export OMP_WAIT_POLICY=passive
export ASAN_OPTIONS=${ASAN_OPTIONS:-strict_string_checks=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}

summary=()
failures=0
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# step NAME COMMAND...: runs the command, notes the result and the time, and returns its status.
step() {
  local name=$1 start=$SECONDS status=0 word=passed
  shift
  printf '\n== %s\n' "$name"
  "$@" 2>&1 | tee "$logs/step" || status=${PIPESTATUS[0]}
  if ((status != 0)); then
    word=FAILED
    failures=$((failures + 1))
    { printf '\n== how "%s" ended\n' "$name" && tail -n 40 "$logs/step"; } >>"$logs/failed"
  fi
  summary+=("$(printf '%-28s %-7s %4d s' "$name" "$word" $((SECONDS - start)))")
  return "$status"
}

# is_late NUMERATOR DENOMINATOR: true if this part of SLUICE_TEST_SECONDS is over.
is_late() {
  local most=${SLUICE_TEST_SECONDS:-0}
  ((most > 0 && SECONDS > most * $1 / $2))
}

# sanitized PRESET WHICH FOLDERS CTEST_OPTIONS...: build_and_test if there is time.
sanitized() {
  if is_late 4 5; then
    summary+=("$(printf '%-28s skipped: no time is left' "$1, $2")")
  else
    build_and_test "$@"
  fi
}

# build_and_test PRESET WHICH FOLDERS CTEST_OPTIONS...: tests of these folders, or of all if empty.
build_and_test() {
  local preset=$1 which=$2 folders targets
  read -ra folders <<<"$3"
  targets=("${folders[@]/%//all}")
  shift 3
  if step "build $preset" scripts/build.sh "$preset" "${targets[@]/#/tests/}"; then
    step "test $preset, $which" \
      ctest --preset "$preset" --parallel "$(nproc)" --no-tests=error --progress "$@" || true
  fi
}

# Prints failures last, because readers look at the end first.
report() {
  ((failures == 0)) || cat "$logs/failed"
  printf '\n== summary\n'
  printf '%s\n' "${summary[@]}"
  if ((failures > 0)); then
    echo "FAILED: $failures step(s), $SECONDS s in all"
    return 1
  fi
  echo "PASSED: all ${#summary[@]} steps, $SECONDS s in all"
}

main() {
  local quick=0 late='^offload/(simulation|host_attention)/' which="quick, fuzzers" part=()
  case "${1:-}" in
    "") ;;
    --quick) quick=1 ;;
    *)
      echo "test: unknown argument '$1'; usage: scripts/test.sh [--quick]" >&2
      return 2
      ;;
  esac
  if ((quick)); then
    if step "setup" scripts/setup.sh --python; then build_and_test release "quick" "" -LE slow; fi
  elif step "setup" scripts/setup.sh --lint --python; then
    step "lint" scripts/lint.sh --tidy || true
    build_and_test release "all" ""
    # The golden answers, the tests that walk plans to their ends, the command and full simulations
    # take too long under a sanitizer. Detecting uses of returned functions' variables is three
    # times slower still, so it is on only for tests whose work runs after the call that asked for
    # it.
    if is_late 1 2; then
      which="a third of the quick ones"
      part=(-I "$((0x$(git rev-parse --short=8 HEAD) % 3 + 1)),,3")
    fi
    sanitized asan "$which" "lib io offload engine fuzz" "${part[@]}" \
      -R '^(lib|io|offload|engine|fuzz)/' -E "(golden|plan_|$late)"
    SLUICE_SIMULATIONS=50 ASAN_OPTIONS=$ASAN_OPTIONS:detect_stack_use_after_return=1 \
      sanitized asan "late work" "offload" -R "$late"
    sanitized tsan "threads" "threads" -R '^threads/'
  fi
  report
}

main "$@"
