#!/usr/bin/env bash
# Sluice's main job, from a fresh checkout: hides a sentence in War and Peace, asks for it at the
# end, and answers with the KV cache in host memory and a device tier of 2 MiB. The answer must be
# right and the cap must hold, else the exit status is 1.
#
#   scripts/demo.sh              6,000 and 32,000 tokens of the book
#   scripts/demo.sh TOKENS...    other lengths; the model was trained up to 131072
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cap_mib=2
answer=481926
work=build/demo

# build_prompt TOKENS FILE: about that many tokens of the book, the needle on a line of its own
# after a quarter of them, the question at the end.
build_prompt() {
  python3 - "$1" "$2" "$answer" <<'EOF'
import sys
from pathlib import Path

tokens, out, number = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
book = Path("data/war-and-peace.txt").read_text(encoding="utf-8")
characters = int(tokens * 2.87)  # of this book, per token of this model
start = book.index("\n", 100_000) + 1
middle = book.index("\n", start + characters // 4) + 1
end = book.rindex("\n", middle, start + characters) + 1
needle = f"The secret number of the amber falcon is {number}. Remember it.\n"
question = "Question: What is the secret number of the amber falcon?\nAnswer: "
out.write_text(book[start:middle] + needle + book[middle:end] + question, encoding="utf-8")
EOF
}

# verdict JSON: compares the answer and the device tier's peak with what was promised.
verdict() {
  python3 - "$1" "$answer" "$cap_mib" <<'EOF'
import json
import sys
from pathlib import Path

report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
answer, cap = sys.argv[2], int(sys.argv[3]) * 2**20
peak = report["memory"]["device_peak_bytes"]
right = answer in report["text"]
print(
    f"{'PASSED' if right and peak <= cap else 'FAILED'}:"
    f" hidden {answer}, answered {report['text'].split()[:1]};"
    f" {report['timings']['prefill_tokens']} tokens of context,"
    f" device tier at most {peak / 2**20:.2f} of {cap / 2**20:.0f} MiB"
)
sys.exit(0 if right and peak <= cap else 1)
EOF
}

run() {
  local tokens=$1 prompt=$work/prompt-$1.txt report=$work/report-$1.json
  build_prompt "$tokens" "$prompt" || return 1
  local command=(build/release/bin/sluice generate --model models/sluice-22m
    --prompt-file "$prompt" --device-memory "${cap_mib}MiB" --max-tokens 8 --json "$report")
  printf '\n== needle in about %d tokens\n$ %s\n\n' "$tokens" "${command[*]}"
  "${command[@]}" || return 1
  echo
  verdict "$report"
}

main() {
  local lengths=("$@") failures=0 tokens
  ((${#lengths[@]} > 0)) || lengths=(6000 32000)
  scripts/setup.sh
  scripts/build.sh release
  mkdir -p "$work"
  for tokens in "${lengths[@]}"; do
    run "$tokens" || failures=$((failures + 1))
  done
  if ((failures > 0)); then
    printf '\nDemo FAILED: %d of %d runs\n' "$failures" "${#lengths[@]}"
    return 1
  fi
  printf '\nDemo PASSED: every answer right, every byte under the cap\n'
}

main "$@"
