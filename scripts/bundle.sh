#!/usr/bin/env bash
# Packs executables with the libraries they need, for a machine that has only the C and C++ runtimes
# (and, for --device cuda, a driver and cuBLAS). On that machine: tar xf FILE, then run bin/NAME
# with LD_LIBRARY_PATH=lib.
#
#   scripts/bundle.sh FILE.tar.xz EXECUTABLE...
set -euo pipefail

# libraries EXECUTABLE...: paths of the shared libraries, except those of every machine.
libraries() {
  ldd "$@" | awk '$3 ~ /^\// {print $3}' | sort -u |
    grep -vE '/(ld-linux|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|cuda))[-.]' || true
}

main() {
  (($# >= 2)) || {
    echo "usage: scripts/bundle.sh FILE.tar.xz EXECUTABLE..." >&2
    return 2
  }
  local file=$1 stage
  shift
  stage=$(mktemp -d)
  mkdir "$stage/bin" "$stage/lib"
  cp "$@" "$stage/bin"
  libraries "$@" | xargs --no-run-if-empty cp -t "$stage/lib"
  strip "$stage"/bin/* "$stage"/lib/*
  mkdir -p "$(dirname "$file")"
  # The dictionary of -9 spans several executables, which mostly contain the same library.
  XZ_OPT="-9" tar -C "$stage" -cJf "$file" bin lib
  rm -r "$stage"
}

main "$@"
