#!/usr/bin/env bash
# Makes build/peers/venv with the programs that bench/peers/run.py compares Sluice with. llama.cpp
# is built from source for this processor, which takes minutes.
#
#   bench/peers/setup.sh           llama.cpp and Hugging Face transformers (several GB)
#   bench/peers/setup.sh --small   llama.cpp only
#   bench/peers/setup.sh --server  llama-server of the same llama.cpp, as build/peers/llama-server,
#                                  and models/sluice-22m for it, as build/peers/sluice-22m.gguf
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

work=build/peers
venv=$work/venv
llama=(llama-cpp-python==0.3.36 gguf==0.19.0 tokenizers==0.23.3)
transformers=(torch==2.15.0 transformers==5.23.0)

install() { CMAKE_ARGS="-DGGML_NATIVE=ON" "$venv/bin/pip" install --quiet "$@"; }

# The Python package's source has all of llama.cpp in it, but builds the library alone.
build_server() {
  local source=$work/source build=$work/server
  if [[ ! -d $source ]]; then
    rm -rf "$source.new" && mkdir -p "$source.new"
    "$venv/bin/pip" download --quiet --no-deps --no-binary :all: -d "$source.new" "${llama[0]}"
    tar -xzf "$source.new"/*.tar.gz -C "$source.new" --strip-components=1
    mv "$source.new" "$source"
  fi
  { cmake -S "$source/vendor/llama.cpp" -B "$build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF &&
    cmake --build "$build" --target llama-server -j "$(nproc)"; } >"$work/server.log" 2>&1 ||
    { tail -n 20 "$work/server.log" >&2 && echo "setup: llama-server was not built" >&2 && return 1; }
  cp "$build/bin/llama-server" "$work/llama-server"
}

main() {
  local wanted=("${llama[@]}" "${transformers[@]}") server=0
  case "${1:-}" in
    "") ;;
    --small) wanted=("${llama[@]}") ;;
    --server) wanted=("${llama[1]}") server=1 ;;
    *)
      echo "setup: unknown argument '$1'; usage: bench/peers/setup.sh [--small | --server]" >&2
      return 2
      ;;
  esac
  [[ -x $venv/bin/python ]] || python3 -m venv "$venv" ||
    { echo "setup: no venv; install the package python3-venv" >&2 && return 1; }
  install "${wanted[@]}"
  ((server == 0)) || {
    build_server
    "$venv/bin/python" bench/peers/export_gguf.py models/sluice-22m "$work/sluice-22m.gguf"
  }
}

main "$@"
