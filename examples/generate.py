"""Answers a prompt from Python, with the KV cache capped at 2 MiB of device memory."""

import sys

import sluice


def main(model: str, prompt: str) -> None:
    engine = sluice.Engine(model, device_memory=2 << 20)
    tokens = engine.encode(prompt)
    session = engine.new_session(context=len(tokens) + 32)
    for text in session.generate(tokens, max_tokens=32):
        print(text, end="", flush=True)
    print(f"\ndevice tier, at its peak: {engine.memory()['device_peak']} B", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: generate.py MODEL_DIRECTORY PROMPT")
    try:
        main(*sys.argv[1:])
    except sluice.Error as error:
        sys.exit(f"{error.code}: {error}")
