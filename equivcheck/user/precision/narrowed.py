"""Modules that compute in a narrower element type than the training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from equivcheck.training.threads import one_thread
from equivcheck.user.reference import SingleDeviceRun, trace_of
from equivcheck.user.task import Task


def where_narrowed(run: SingleDeviceRun) -> tuple[str, ...]:
    """Return modules with a narrower type in forward, and the function that returns it, in execution order.

    Trains one more step with hooks on every module, but only if the run has already seen such a type.
    """
    task = run.task
    if task.dtype is None or _eps(run.precision) <= _eps(task.dtype):
        return ()
    found = _Narrowing(task.dtype)

    def spread(module: nn.Module) -> tuple[nn.Module, Task]:
        found.follow(module)
        return module, task

    with one_thread(), found:
        trace_of(replace(task, batches=task.batches[:1]), seed=task.seed, spread=spread)
    return tuple(found.seen.values())


class _Narrowing(TorchFunctionMode):
    """Records functions that take the wide type and return a narrower one, once per module."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.seen: dict[str, str] = {}
        self._dtype = dtype
        self._inside: list[str] = []

    def follow(self, model: nn.Module) -> None:
        """Track which module is running."""
        for path, module in model.named_modules():
            name = f"{type(module).__name__} {path!r}" if path else type(module).__name__
            module.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name))
            module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def _leave(self) -> None:
        self._inside.pop()

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        if self._is_narrow(result) and any(map(self._is_wide, _tensors(arguments, keywords or {}))):
            where = self._inside[-1] if self._inside else "the loss or the step"
            self.seen.setdefault(where, f"{where} ({getattr(function, '__name__', 'a function')})")
        return result

    def _is_narrow(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point() and _eps(value.dtype) > _eps(self._dtype)

    def _is_wide(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype is self._dtype


def _tensors(arguments: Any, keywords: dict[str, Any]) -> Iterator[torch.Tensor]:
    return (value for value in (*arguments, *keywords.values()) if isinstance(value, torch.Tensor))


def _eps(kind: torch.dtype) -> float:
    return float(torch.finfo(kind).eps)
