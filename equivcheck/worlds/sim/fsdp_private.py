"""The private part of `FullyShardedDataParallel` that ranks as threads need; tried on torch 2.13.

It times what makes a state dict in a class that all threads share, and fails where two of them do that at once.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

_TIMING = "torch.distributed.fsdp._debug_utils"


@contextlib.contextmanager
def untimed_state_dicts() -> Iterator[None]:
    """While entered, nothing is timed; without effect where it is not in use."""
    timer = getattr(sys.modules.get(_TIMING), "SimpleProfiler", None)
    if timer is None:
        yield
        return
    originals = {name: vars(timer)[name] for name in ("profile", "dump_and_reset")}
    timer.profile = staticmethod(contextlib.nullcontext)
    timer.dump_and_reset = staticmethod(lambda _message: None)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(timer, name, original)
