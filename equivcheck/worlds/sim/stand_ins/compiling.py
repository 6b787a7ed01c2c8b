"""Compiled functions, which ranks refuse to call; private, tried on torch 2.9 to 2.15.

What the compiler makes of a function is kept with its code, and so shared by threads, and holds what it took for constant: the
number of the rank that called first, for one. No guard tells ranks apart, and the others would get that rank's results.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from equivcheck.worlds.sim.refusals import CallRefused
from equivcheck.worlds.sim.stand_ins.replacing import replaced
from equivcheck.worlds.sim.torch_private import is_rank_thread

_EVAL_FRAME = "torch._dynamo.eval_frame"
_CALLBACK = "_callback_from_stance"
"""What a compiled function asks, at each call, for the compiler; None and False where there is nothing to compile."""

REFUSAL = "torch.compile: simulated ranks are threads and would share what is compiled for one; compiled functions run over gloo"


@contextlib.contextmanager
def no_compiling() -> Iterator[None]:
    """While entered, a compiled function that a rank calls raises `CallRefused`."""
    with contextlib.ExitStack() as stack:
        if _EVAL_FRAME in sys.modules:
            stack.enter_context(replaced(sys.modules[_EVAL_FRAME], _CALLBACK, _refusing))
        else:
            stack.enter_context(replaced(torch, "compile", lambda original: _compile_later(original, stack)))
        yield


def _compile_later(original: Any, stack: contextlib.ExitStack) -> Callable[..., Any]:
    """`torch.compile` where the compiler has not been imported yet; the call imports it."""

    def compile_function(*arguments: Any, **options: Any) -> Any:
        from torch._dynamo import eval_frame

        if not hasattr(getattr(eval_frame, _CALLBACK), "refuses"):
            stack.enter_context(replaced(eval_frame, _CALLBACK, _refusing))
        return original(*arguments, **options)

    return compile_function


def _refusing(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def callback_of(callback: Any) -> Any:
        found = original(callback)
        if found not in (None, False) and is_rank_thread():
            raise CallRefused(REFUSAL)
        return found

    callback_of.refuses = True  # type: ignore[attr-defined]
    return callback_of
