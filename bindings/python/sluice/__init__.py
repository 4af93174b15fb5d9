"""Sluice: long-context LLM inference with the KV cache off the device.

    engine = sluice.Engine("models/sluice-22m", device_memory=8 << 20)
    session = engine.new_session(context=4096, policies=["values"])
    for text in session.generate("Well, Prince,", max_tokens=32):
        print(text, end="", flush=True)
    print(session.ledger()["decode"]["totals"])

Errors are sluice.Error, with a class and a `code` for each kind. Calls that compute release the
GIL. A session, a sequence or a step is for one thread at a time.
"""

import asyncio

from ._sluice import (
    Batcher,
    CapError,
    Constraint,
    CorruptError,
    Engine,
    Error,
    Generation,
    InternalError,
    KvCache,
    KvSequence,
    KvStep,
    NotFoundError,
    NumericError,
    Piece,
    PromptError,
    Session,
    StorageError,
    Stream,
    TokenizerError,
    UnsupportedError,
    UsageError,
    __version__,
    parse_policy,
    value_basis,
)

__all__ = [
    "Batcher",
    "CapError",
    "Constraint",
    "CorruptError",
    "Engine",
    "Error",
    "Generation",
    "InternalError",
    "KvCache",
    "KvSequence",
    "KvStep",
    "NotFoundError",
    "NumericError",
    "Piece",
    "PromptError",
    "Session",
    "StorageError",
    "Stream",
    "TokenizerError",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "parse_policy",
    "pieces",
    "value_basis",
]


async def pieces(stream: Stream):
    """Yields a stream's pieces in an asyncio program. Cancelling the task cancels the request."""
    try:
        while True:
            piece = await asyncio.to_thread(stream.next_within, 0.2)
            if piece is not None:
                yield piece
            elif stream.ended:
                return
    except (asyncio.CancelledError, GeneratorExit):
        stream.cancel()
        raise
