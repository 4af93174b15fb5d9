#!/usr/bin/env bash
# Configures one preset of CMakePresets.json and builds it into build/<preset>. Prints first how
# much there is to build.
#
#   scripts/build.sh [PRESET [TARGET...]]    release, and everything in it, if not given
#   JOBS=4 scripts/build.sh                  with a fixed number of compilers at a time
#
# CUDA kernels are built if nvcc is on the PATH, for the GPUs of this machine. For others:
#
#   SLUICE_CUDA_ARCHITECTURES=90a-real scripts/build.sh    for one kind of GPU
#   SLUICE_CUDA_ARCHITECTURES=all scripts/build.sh         for every kind that there are kernels for
#   SLUICE_CUDA_ARCHITECTURES=none scripts/build.sh        for the CPU only
#   scripts/build.sh pretend           for scripts/gpu_tests.sh --pretend 8.0, 8.6 or 8.9, by the PTX of 8.0
#   SLUICE_CUDA_ARCHITECTURES=90a-real scripts/build.sh pretend     the same for 12.0
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

# architecture COMPUTE_CAPABILITY: the architecture whose kernels run on such a GPU; empty if none.
architecture() {
  case "$1" in
    8.0) echo 80-real ;;
    8.6 | 8.7) echo 86-real ;;
    8.9) echo 89-real ;;
    9.0) echo 90a-real ;;
    10.*) echo 100-real ;;
    12.*) echo 120-real ;;
  esac
}

# The value of SLUICE_CUDA_ARCHITECTURES for the GPUs of this machine.
gpus_here() {
  local capabilities capability kinds=()
  if capabilities=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null); then
    while read -r capability; do
      kinds+=("$(architecture "$capability")")
    done < <(sort -u <<<"$capabilities")
    capabilities=$(printf '%s\n' "${kinds[@]}" | sed '/^$/d' | sort -u | paste -sd ';')
    echo "${capabilities:-none}"
  elif [[ -e ${SLUICE_GPU_DEVICE:-/dev/nvidia0} ]]; then
    echo all # there is a GPU, but no tool that says which
  else
    echo none
  fi
}

# cuda_options ARCHITECTURES: CMake options, which replace the choice of an earlier build.
cuda_options() {
  case "$1" in
    none) echo -DSLUICE_CUDA=OFF ;;
    all) echo -USLUICE_CUDA_ARCHITECTURES ;;
    *) echo "-DSLUICE_CUDA_ARCHITECTURES=$1" ;;
  esac
}

# Core seconds for one source, and for one kernel per kind of GPU, measured with GCC 12 and nvcc
# 13.0.
source_seconds=3
kernel_seconds=10

# announce ARCHITECTURES JOBS BUILD_COMMAND...: prints the size of the build and its estimated time.
announce() {
  local architectures=$1 jobs=$2 plan sources kernels kinds seconds
  shift 2
  plan=$("$@" -- -n)
  sources=$(grep -c 'Building CXX' <<<"$plan" || true)
  kernels=$(grep -c 'Building CUDA' <<<"$plan" || true)
  ((sources + kernels > 0)) || return 0
  kinds=$(tr ';' '\n' <<<"$architectures" | wc -l)
  [[ $architectures != all ]] || kinds=6
  seconds=$(((sources * source_seconds + kernels * (source_seconds + kinds * kernel_seconds)) / jobs))
  printf 'build: %d sources' "$sources"
  ((kernels == 0)) || printf ' and %d CUDA kernels (%s)' "$kernels" "$architectures"
  printf ', about %d min with %d compilers at a time; less where ccache has them\n' \
    $((seconds / 60 + 1)) "$jobs"
}

main() {
  local preset=${1:-release} jobs=${JOBS:-$(job_count)} options=() build architectures
  shift $(($# > 0))
  architectures=${SLUICE_CUDA_ARCHITECTURES:-$(gpus_here)}
  [[ $preset != pretend ]] || architectures=${SLUICE_CUDA_ARCHITECTURES:-80-virtual}
  options+=("$(cuda_options "$architectures")")
  if command -v ccache >/dev/null; then
    # Objects are the same in every folder below build/.
    export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$PWD}
    # Without these ccache skips sources that use precompiled headers.
    export CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:+$CCACHE_SLOPPINESS,}pch_defines,time_macros
    options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
  fi
  if [[ -z ${SLUICE_CUDA_ARCHITECTURES:-} && $architectures != none ]] && ! command -v nvcc >/dev/null
  then
    echo "build: there is a GPU, but no nvcc on the PATH: without the device cuda"
  fi
  cmake --preset "$preset" "${options[@]}" --log-level=WARNING >/dev/null
  build=(cmake --build --preset "$preset" --parallel "$jobs")
  (($# == 0)) || build+=(--target "$@")
  announce "$architectures" "$jobs" "${build[@]}"
  "${build[@]}"
}

main "$@"
