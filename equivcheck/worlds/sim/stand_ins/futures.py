"""Makes a rank pass the baton while it waits for a future that C++ derived from a work's future.

Private torch API: `torch._C.Future`; tested with torch 2.9 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from equivcheck.worlds.replacing import Place
from equivcheck.worlds.sim.process_group import board_of_rank
from equivcheck.worlds.sim.torch_private import is_rank_thread


def _settling(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def wait(future: Any) -> Any:
        if is_rank_thread() and not future.done():
            board, rank = board_of_rank()
            for work in board.works_with_futures(rank):
                if not future.done():
                    work.wait()
        return original(future)

    return wait


# `torch.futures.Future` inherits `wait` from this C++ class, and futures that C++ creates have no Python subclass to override.
_wait = _settling(torch._C.Future.wait)
PLACES: tuple[Place, ...] = ((torch._C.Future, "wait", lambda _: _wait),)
