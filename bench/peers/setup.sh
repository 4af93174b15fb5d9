#!/usr/bin/env bash
# Makes build/peers/venv with the programs that bench/peers/run.py compares Sluice with. llama.cpp
# is built from source for this processor, which takes minutes.
#
#   bench/peers/setup.sh           llama.cpp and Hugging Face transformers (several GB)
#   bench/peers/setup.sh --small   llama.cpp only
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=build/peers/venv
llama=(llama-cpp-python==0.3.36 gguf==0.19.0 tokenizers==0.23.3)
transformers=(torch==2.15.0 transformers==5.23.0)

main() {
  local wanted=("${llama[@]}" "${transformers[@]}")
  case "${1:-}" in
    "") ;;
    --small) wanted=("${llama[@]}") ;;
    *) echo "setup: unknown argument '$1'; usage: bench/peers/setup.sh [--small]" >&2 && return 2 ;;
  esac
  [[ -x $venv/bin/python ]] || python3 -m venv "$venv" ||
    { echo "setup: no venv; install the package python3-venv" >&2 && return 1; }
  CMAKE_ARGS="-DGGML_NATIVE=ON" "$venv/bin/pip" install --quiet "${wanted[@]}"
}

main "$@"
