#!/usr/bin/env bash
# Makes build/lm_eval with the clients that bench/lm_eval/run.py runs: 800 MB, without torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

[[ -x build/lm_eval/bin/python ]] || python3 -m venv build/lm_eval
build/lm_eval/bin/pip install --quiet "lm-eval[api]==0.4.13" openai==3.57.0 transformers==5.17.0
