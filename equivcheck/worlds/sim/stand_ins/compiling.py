"""Compiled functions, which ranks refuse to call; private, tried on torch 2.9 to 2.15.

What the compiler makes of a function is kept with its code, and so shared by threads, and holds what it took for constant: the
number of the rank that called first, for one. No guard tells ranks apart, and the others would get that rank's results.
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
"""What a compiled function asks, at each call, for the compiler; None and False where there is nothing to compile."""

REFUSAL = "torch.compile: simulated ranks are threads and would share what is compiled for one; compiled functions run over gloo"


_put_later: list[Any] = []
"""The compiler's own function, where ranks were the first to import the compiler."""


def place() -> Place:
    """What refuses: the compiler's function, or `torch.compile`, which imports the compiler, as long as nobody has."""
    module = sys.modules.get(_EVAL_FRAME)
    return (torch, "compile", _compiling_later) if module is None else (module, _CALLBACK, _refusing)


def undo() -> None:
    """Put back what was replaced during a run."""
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
