"""Lets one rank at a time use torch's profiler. Private torch API, tested with torch 2.9 to 2.15.

A process has one profiler, and starting it in a second thread causes a segmentation fault. The profiler records only the thread
that started it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from torch.autograd import profiler

from equivcheck.worlds.replacing import Place
from equivcheck.worlds.sim.refusals import CallRefused
from equivcheck.worlds.sim.torch_private import is_rank_thread

REFUSAL = (
    "torch's profiler: a second simulated rank is not supported: the process has one profiler, and it is in use. "
    "Profile one rank at a time, or run over gloo."
)

_profiling: threading.Thread | None = None
"""Rank thread that started the profiler."""


def end_profiling() -> None:
    """Stop torch's profiler if the calling rank started it and left it running."""
    if _profiling is threading.current_thread():
        with contextlib.suppress(RuntimeError):
            # The public context manager of the profiler is gone with the program's frames.
            profiler._disable_profiler()  # type: ignore[attr-defined]


@cache
def _starting(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(*arguments: Any, **options: Any) -> Any:
        global _profiling  # noqa: PLW0603 - there is one profiler
        if is_rank_thread():
            if _profiling not in (None, threading.current_thread()) or (_profiling is None and profiler._is_profiler_enabled):
                raise CallRefused(REFUSAL)
            _profiling = threading.current_thread()
        return original(*arguments, **options)

    return start


@cache
def _ending(original: Callable[[], Any]) -> Callable[[], Any]:
    def end() -> Any:
        global _profiling  # noqa: PLW0603 - there is one profiler
        if _profiling is threading.current_thread():
            _profiling = None
        return original()

    return end


PLACES: tuple[Place, ...] = (
    (profiler, "_prepare_profiler", _starting),
    (profiler, "_enable_profiler", _starting),
    (profiler, "_disable_profiler", _ending),
)
