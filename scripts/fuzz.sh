#!/usr/bin/env bash
# Runs over ten million changed inputs, under AddressSanitizer and UBSan, through every fuzzer: half an hour of one core, or an hour of a busy one. After a finding it goes on,
# leaves the input in build/fuzz and exits with 1 at the end. tests/fuzz/README.md has the results.
#
#   scripts/fuzz.sh           with the seed 1
#   scripts/fuzz.sh SEED
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Inputs per fuzzer, chosen so that each runs for some minutes.
declare -A runs=(
  [tokenizer]=150000 [safetensors]=500000 [config]=700000 [calibration]=750000
  [prompt]=2000000 [policy]=5900000 [template]=500000 [plan]=1000000 [quantized]=1000000
  [gguf]=500000 [eval_data]=3000000 [completion]=1000000 [http]=300000 [c_calls]=50000)

main() {
  local seed=${1:-1} root=$PWD names name failures=0
  mapfile -t names < <(printf '%s\n' "${!runs[@]}" | sort)
  scripts/build.sh asan "${names[@]/%/_fuzz}"
  mkdir -p build/fuzz
  cd build/fuzz
  for name in "${names[@]}"; do
    "$root/build/asan/bin/${name}_fuzz" --seed "$seed" --runs "${runs[$name]}" \
      "$root/tests/fuzz/corpus/$name" || failures=$((failures + 1))
  done
  ((failures == 0)) || {
    echo "fuzz: $failures of ${#runs[@]} fuzzers found something; see build/fuzz" >&2
    return 1
  }
}

main "$@"
