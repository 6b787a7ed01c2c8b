"""Replaces float32 by float64 wherever a model asks for float32.

Norms, softmaxes and losses in many models compute in float32, whatever the model's type is. No tolerance smaller than float32's
would hold for such models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from equivcheck.user.precision import autograd_private
from equivcheck.user.task import Task
from equivcheck.user.traces.optimizers import has_hooks
from equivcheck.user.usage import invalid


def require_kept(task: Task) -> None:
    """Check the argument `keep_dtype`. Raises `UsageError` if it is not a bool, or contradicts `dtype` or `precision`."""
    if not isinstance(task.keep_dtype, bool):
        raise invalid(f"keep_dtype {task.keep_dtype!r:.100}", "it is not a bool", "True or False")
    if task.keep_dtype and (task.dtype is not torch.float64 or task.precision is not None):
        given = f"dtype {task.dtype}" if task.precision is None else f"precision {task.precision!r}"
        expected = "dtype=torch.float64 and precision=None"
        raise invalid(f"keep_dtype True with {given}", "it replaces float32 by float64", expected)


@contextlib.contextmanager
def widened_float32(task: Task, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Inside the context, replace float32 by the task's `dtype` if its `keep_dtype` is set. Optimizer states keep their types."""
    if not task.keep_dtype or task.dtype is None:
        yield
        return
    with WidenFloat32(task.dtype) as kept:
        hooks = [
            hook
            for optimizer in filter(has_hooks, optimizers)
            for hook in (
                optimizer.register_step_pre_hook(lambda *_: kept.pause(1)),
                optimizer.register_step_post_hook(lambda *_: kept.pause(-1)),
            )
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class WidenFloat32(TorchFunctionMode):
    """Torch function mode: if a function is called with the dtype float32, it gets a wider dtype. Complex64 is replaced too."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._wider = {torch.float32: dtype, torch.complex64: dtype.to_complex()}
        self._num_paused = 0

    def pause(self, by: int) -> None:
        """Switch the mode off (`by` is 1) or on again (-1). Pauses may be nested; the mode is on again after all have ended."""
        self._num_paused += by

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if self._num_paused:
            return function(*arguments, **keywords)
        if function is torch.Tensor.float:
            return arguments[0].to(self._dtype, **keywords)
        if function is torch.Tensor.backward:
            return autograd_private.run_backward(self, *arguments, **keywords)
        widened = (self._widened(argument) for argument in arguments)
        return function(*widened, **{key: self._widened(value) for key, value in keywords.items()})

    def _widened(self, value: Any) -> Any:
        return self._wider.get(value, value) if isinstance(value, torch.dtype) else value
