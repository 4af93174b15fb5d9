#!/usr/bin/env bash
# Configures and builds one preset of CMakePresets.json into build/<preset>.
#
#   scripts/build.sh [PRESET]    release if none is given
#   JOBS=4 scripts/build.sh      with a fixed number of compilers at a time
#   SLUICE_CUDA_ARCHITECTURES=90a-real scripts/build.sh      CUDA kernels for one processor only
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# One compiler per core, but no more than fit memory at 1.5 GiB each.
job_count() {
  local cores available fitting
  cores=$(nproc)
  available=$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)
  fitting=$((available / (1536 * 1024)))
  ((fitting >= 1)) || fitting=1
  echo $((cores < fitting ? cores : fitting))
}

main() {
  local preset=${1:-release} jobs=${JOBS:-$(job_count)} options=()
  if command -v ccache >/dev/null; then
    options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
  fi
  if [[ -n ${SLUICE_CUDA_ARCHITECTURES:-} ]]; then
    options+=("-DSLUICE_CUDA_ARCHITECTURES=$SLUICE_CUDA_ARCHITECTURES")
  else
    options+=(-USLUICE_CUDA_ARCHITECTURES) # what an earlier build was narrowed to
  fi
  cmake --preset "$preset" "${options[@]}" --log-level=WARNING >/dev/null
  cmake --build --preset "$preset" --parallel "$jobs"
}

main "$@"
