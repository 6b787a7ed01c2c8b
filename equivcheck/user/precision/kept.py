"""A training in which float32 that is asked for is the wider type that everything else has, on one device and on ranks alike.

Norms, softmaxes and losses of many models compute in float32 whatever the type of a model is, so that no tolerance below that of
float32 holds for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from equivcheck.errors import UsageError
from equivcheck.user.precision import autograd_private
from equivcheck.user.task import Task


def require_kept(task: Task) -> None:
    """Raises `UsageError` where there is no type to be kept."""
    if not isinstance(task.keep_dtype, bool):
        raise UsageError(f"check_training: keep_dtype is {task.keep_dtype!r:.100}; allowed: True, False")
    if task.keep_dtype and (task.dtype is not torch.float64 or task.precision is not None):
        given = f"dtype {task.dtype}" if task.precision is None else f"precision {task.precision!r}"
        raise UsageError(f"check_training: keep_dtype is True with {given}; allowed with dtype=torch.float64 and precision=None")


@contextlib.contextmanager
def kept_type(task: Task, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep a task's type while it trains, if it says so; optimizers keep the types of their own state."""
    if not task.keep_dtype or task.dtype is None:
        yield
        return
    with KeptType(task.dtype) as kept:
        hooks = [
            optimizer.register_step_pre_hook(lambda *_: kept.pause(paused=True)),
            optimizer.register_step_post_hook(lambda *_: kept.pause(paused=False)),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class KeptType(TorchFunctionMode):
    """Gives every function of torch a wider type where it is told float32, or complex numbers of that."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._wider = {torch.float32: dtype, torch.complex64: dtype.to_complex()}
        self._paused = False

    def pause(self, *, paused: bool) -> None:
        """Leave functions alone for a time."""
        self._paused = paused

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if self._paused:
            return function(*arguments, **keywords)
        if function is torch.Tensor.float:
            return arguments[0].to(self._dtype, **keywords)
        if function is torch.Tensor.backward:
            return autograd_private.run_backward(self, *arguments, **keywords)
        widened = (self._widened(argument) for argument in arguments)
        return function(*widened, **{key: self._widened(value) for key, value in keywords.items()})

    def _widened(self, value: Any) -> Any:
        return self._wider.get(value, value) if isinstance(value, torch.dtype) else value
