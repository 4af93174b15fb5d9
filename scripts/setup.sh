#!/usr/bin/env bash
# Installs what Sluice needs to build and test, on Debian 12 or newer, as root or through sudo.
# Fast and silent if nothing is missing.
#
#   scripts/setup.sh                   what scripts/build.sh and scripts/demo.sh need
#   scripts/setup.sh --lint            also what scripts/lint.sh needs
#   scripts/setup.sh --python          also what the Python package and its tests need
#   scripts/setup.sh --transformers    the same with torch and transformers, 6 GB
#   scripts/setup.sh --browser         also Chromium, for the test of the server's page, 400 MB
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# ocl-icd-opencl-dev: libdnnl-dev's CMake package looks for it.
build_packages=(
  g++ cmake ninja-build ccache pkg-config git python3
  libdnnl-dev ocl-icd-opencl-dev libtbb-dev libhwloc-dev libhwy-dev
  nlohmann-json3-dev libcli11-dev libcpp-httplib-dev libpcre2-dev libutf8proc-dev libedit-dev groff-base
  liburing-dev libxxhash-dev libeigen3-dev
  libgtest-dev libgmock-dev libbenchmark-dev)
lint_packages=(clang-format-14 python3-venv shellcheck)
python_packages=(python3-dev python3-venv)
browser_packages=(chromium chromium-driver)
# Debian 12 has no nanobind.
nanobind_version=3.1.0
numpy_version=2.4.6
torch_version=2.15.0
transformers_version=5.17.0
accelerate_version=1.15.0 # for tensor parallelism
# From version 22 on clang-tidy skips other projects' headers and takes half the time of Debian's
# 19.
clang_tidy_version=22.1.8

fail() {
  echo "setup: $1" >&2
  exit 1
}

# Prints the packages among the arguments that are not installed.
missing_packages() {
  local installed
  installed=$(dpkg-query -W -f='${db:Status-Abbrev} ${binary:Package}\n' "$@" 2>/dev/null |
    sed -n 's/^.i. *\([^:]*\).*/\1/p' || true)
  comm -23 <(printf '%s\n' "$@" | sort) <(sort <<<"$installed")
}

as_root() {
  if [[ $EUID -eq 0 ]]; then "$@"; else sudo -n "$@"; fi
}

# apt_get ARGS...: up to three attempts; its output is shown only if all fail.
apt_get() {
  local log attempt
  log=$(mktemp)
  for attempt in 1 2 3; do
    if as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 \
      "$@" >"$log" 2>&1; then
      rm -f "$log"
      return
    fi
    [[ $attempt -eq 3 ]] || sleep $((attempt * 5))
  done
  tail -n 20 "$log" >&2
  rm -f "$log"
  fail "'apt-get $1' failed three times (its last lines are above); is a Debian mirror reachable?"
}

# Installs clang-tidy from PyPI into build/clang-tidy.
install_clang_tidy() {
  local venv=build/clang-tidy
  [[ $("$venv/bin/clang-tidy" --version 2>/dev/null) != *"version $clang_tidy_version"* ]] || return 0
  echo "setup: installing clang-tidy $clang_tidy_version"
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --retries 5 \
    "clang-tidy==$clang_tidy_version" || fail "no clang-tidy from PyPI; is it reachable?"
}

# install_python WANTED...: installs these from PyPI into build/python, whose Python then builds the
# package.
install_python() {
  local venv=build/python
  [[ $("$venv/bin/python3" -m pip freeze 2>/dev/null | grep -cxF "$(printf '%s\n' "$@")") -lt $# ]] ||
    return 0
  echo "setup: installing $*"
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --retries 5 "$@" ||
    fail "pip cannot install $*; is PyPI reachable?"
}

# install_packages DEBIAN_PACKAGE...: installs those that are missing.
install_packages() {
  local missing
  mapfile -t missing < <(missing_packages "$@")
  [[ ${#missing[@]} -gt 0 ]] || return 0
  [[ $EUID -eq 0 ]] || sudo -n true 2>/dev/null ||
    fail "needs root to install: ${missing[*]}"
  echo "setup: installing ${missing[*]}"
  apt_get update
  apt_get install -y --no-install-recommends "${missing[@]}"
}

main() {
  local wanted=("${build_packages[@]}") modules=() lint=0 argument
  for argument in "$@"; do
    case "$argument" in
      --lint) wanted+=("${lint_packages[@]}") lint=1 ;;
      --python | --transformers)
        wanted+=("${python_packages[@]}")
        modules+=("nanobind==$nanobind_version" "numpy==$numpy_version")
        ;;&
      --transformers) modules+=("transformers==$transformers_version" "torch==$torch_version"
          "accelerate==$accelerate_version") ;;
      --python) ;;
      --browser) wanted+=("${browser_packages[@]}") ;;
      *) fail "unknown argument '$argument'; usage: scripts/setup.sh [--lint] [--python | --transformers] [--browser]" ;;
    esac
  done
  command -v dpkg-query >/dev/null ||
    fail "not a Debian system; install the equivalents of: ${wanted[*]}"
  install_packages "${wanted[@]}"
  ((lint == 0)) || install_clang_tidy
  [[ ${#modules[@]} -eq 0 ]] || install_python "${modules[@]}"
}

main "$@"
