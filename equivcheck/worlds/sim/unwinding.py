"""Closes contexts that a failed program has left open on its rank's thread."""

from __future__ import annotations

import traceback


def close_frames(error: BaseException) -> None:
    """Clear the frames of an exception, so that their generators end on the calling thread.

    A context inside a generator exits when the generator ends. If that happened later on another thread, its effect would stay on
    this thread: before torch 2.13, the saved-tensor hooks of activation checkpointing would run in every later program.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            pending += (one.__cause__, one.__context__)
            traceback.clear_frames(one.__traceback__)
