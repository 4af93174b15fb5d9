#!/usr/bin/env bash
# Sluice's main job, from a fresh checkout: answers the same question about 32,000 tokens of War and
# Peace twice, once with every row streamed through the device tier and once with the rows that a
# policy selects. Builds only the command, with CUDA only if there is a GPU (see scripts/build.sh).
#
#   scripts/demo.sh              32,000 tokens of the book
#   scripts/demo.sh TOKENS...    other lengths; the model was trained up to 131072
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
scripts/build.sh release sluice_cli
exec python3 scripts/demo.py build/release/bin/sluice "$@"
