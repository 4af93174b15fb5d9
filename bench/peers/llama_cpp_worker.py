"""llama.cpp's turn, through the C API that llama-cpp-python binds. See worker.py."""

import argparse
import ctypes
from pathlib import Path
from typing import Sequence

import llama_cpp
import numpy as np
from worker import check_golden, read_job, report

KV_TYPES = {"f16": 1, "bf16": 30}  # enum ggml_type


class LlamaCpp:
    """A model and its context, fed `batch` tokens at a time."""

    def __init__(self, args: argparse.Namespace) -> None:
        llama_cpp.llama_backend_init()
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
        model_params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(args.model).encode(), model_params)
        self.context = llama_cpp.llama_init_from_model(self.model, self.context_params(args))
        if not self.context:
            raise SystemExit("llama.cpp made no context with these options")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocabulary_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.batch = args.batch

    @staticmethod
    def context_params(args: argparse.Namespace) -> llama_cpp.llama_context_params:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = args.context
        params.n_batch = args.batch
        params.n_ubatch = args.batch
        params.n_threads = args.threads
        params.n_threads_batch = args.threads
        params.type_k = KV_TYPES[args.kv]
        params.type_v = KV_TYPES[args.kv]
        params.flash_attn_type = args.flash
        return params

    def reset(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def feed(self, ids: Sequence[int]) -> int:
        for begin in range(0, len(ids), self.batch):
            piece = ids[begin : begin + self.batch]
            tokens = (llama_cpp.llama_token * len(piece))(*piece)
            batch = llama_cpp.llama_batch_get_one(tokens, len(piece))
            if llama_cpp.llama_decode(self.context, batch) != 0:
                raise SystemExit("llama_decode failed")
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self.vocabulary_size,))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--flash", type=int, choices=(0, 1), default=1)
    parser.add_argument("--kv", choices=sorted(KV_TYPES), default="f16")
    args = parser.parse_args()
    job = read_job(args.job)
    runner = LlamaCpp(args)
    check_golden(runner, job)
    report(runner, job)


if __name__ == "__main__":
    main()
