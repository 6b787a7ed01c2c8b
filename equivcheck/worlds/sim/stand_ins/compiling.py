"""Makes ranks refuse to call compiled functions. Private torch API, tested with torch 2.9 to 2.15.

The compiler stores its result with the function's code object, so threads share it. The result contains constants such as the
number of the first rank that called. No guard distinguishes ranks, so other ranks would get results for that rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from equivcheck.worlds.replacing import Place
from equivcheck.worlds.sim.refusals import CallRefused
from equivcheck.worlds.sim.torch_private import is_rank_thread

_EVAL_FRAME = "torch._dynamo.eval_frame"
_CALLBACK = "_callback_from_stance"
"""Function that each compiled function calls to get its compiler. None and False mean that nothing is compiled."""

REFUSAL = (
    "torch.compile: a simulated rank is not supported: ranks are threads and would share one rank's compiled code. Run over gloo."
)


_put_later: list[Any] = []
"""The compiler's original function, if a rank was the first to import the compiler."""


def place() -> Place:
    """Return a replacement for a function of torch's compiler, so that compiled functions raise on a rank.

    If the compiler is already imported, the function that selects a compiled function's compiler is replaced, otherwise
    `torch.compile`.
    """
    module = sys.modules.get(_EVAL_FRAME)
    return (torch, "compile", _compiling_later) if module is None else (module, _CALLBACK, _refusing)


def undo() -> None:
    """Restore the function that selects a compiled function's compiler, if it was replaced while ranks ran."""
    if _put_later:
        setattr(sys.modules[_EVAL_FRAME], _CALLBACK, _put_later.pop())


@cache
def _compiling_later(original: Any) -> Callable[..., Any]:
    def compile_function(*arguments: Any, **options: Any) -> Any:
        from torch._dynamo import eval_frame

        if not _put_later:
            _put_later.append(getattr(eval_frame, _CALLBACK))
            setattr(eval_frame, _CALLBACK, _refusing(_put_later[0]))
        return original(*arguments, **options)

    return compile_function


@cache
def _refusing(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def callback_of(callback: Any) -> Any:
        found = original(callback)
        if found not in (None, False) and is_rank_thread():
            raise CallRefused(REFUSAL)
        return found

    return callback_of
