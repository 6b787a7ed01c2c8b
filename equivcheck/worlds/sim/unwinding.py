"""What a program that raised has left open on its rank's thread."""

from __future__ import annotations

import traceback


def close_frames(error: BaseException) -> None:
    """Drop what the functions that an error left still hold, so that generators among it end on the calling thread.

    A context that is entered in a generator is left when the generator ends. Where that happens later, on the thread that drops
    the traceback, what the context had switched on stays on here: hooks for saved tensors (those of activation checkpointing,
    before torch 2.13) would be called in the passes of every later program.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            pending += (one.__cause__, one.__context__)
            traceback.clear_frames(one.__traceback__)
