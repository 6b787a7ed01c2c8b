"""Notes about element types for verdicts, with advice which argument to pass."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.scenario import LowPrecision, MixedPrecision
from equivcheck.training.threads import one_thread
from equivcheck.user.precision.policy import Precision
from equivcheck.user.reference import SingleDeviceRun, eps_of, trace_of
from equivcheck.user.task import Task
from equivcheck.user.traces.settings import UserTrace

KEPT = "keep_dtype: every cast to float32 was replaced by float64, on one device and on all ranks"
"""Note on a training under `keep_dtype`."""


def on_narrowing(run: SingleDeviceRun) -> tuple[str, ...]:
    """Return a note about modules that compute in a narrower type than the training, with advice how to prevent it."""
    kept = (KEPT,) if run.task.keep_dtype else ()
    found = narrowing_modules(run) if run.task.precision is None else ()
    if not found:
        return kept
    wide, narrow = (str(kind).removeprefix("torch.") for kind in (run.task.dtype, run.precision))
    more = f", and {len(found) - 1} more" if found[1:] else ""
    way = "" if kept or wide != "float64" else ". Pass keep_dtype=True to keep float64 and see smaller errors"
    return *kept, f"{wide} becomes {narrow} in {found[0]}{more}, so tolerances are those of {narrow}{way}"


def on_precision(task: Task, traces: tuple[UserTrace, ...], outcome: Outcome) -> tuple[str, ...]:
    """Return a note with the `precision` that ranks use. No note if the check used it too, or if the outcome is EQUIVALENT."""
    seen = next((trace.low_precision for trace in traces if trace.low_precision is not None), None)
    if outcome not in (Outcome.DIVERGED, Outcome.INCONCLUSIVE) or seen is None or _agree(seen, task.precision):
        return ()
    if task.precision is not None:
        return (f"precision is {task.precision!r}, but your ranks use {seen!r}",)
    also = " and dtype=torch.float32" if isinstance(seen, LowPrecision) else ""
    return (
        f"your ranks round to fewer digits than one device: try precision={seen!r}{also}, so that both round in the same way",
    )


def _agree(seen: Precision, given: Precision | None) -> bool:
    """Whether the given precision agrees with everything observed on ranks. Fields that were not observed may have any value."""
    if isinstance(seen, LowPrecision) or not isinstance(given, MixedPrecision):
        return seen == given
    return all(getattr(seen, field.name) in (None, getattr(given, field.name)) for field in fields(seen))


def narrowing_modules(run: SingleDeviceRun) -> tuple[str, ...]:
    """Describe the modules that compute in a narrower type than `dtype`, in execution order.

    Each text also names the function that returned the narrower type. Trains one more step with hooks on every module, but only
    if the run has already seen such a type.
    """
    task = run.task
    if task.dtype is None or eps_of(run.precision) <= eps_of(task.dtype):
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
        given = (value.dtype for value in (*arguments, *(keywords or {}).values()) if isinstance(value, torch.Tensor))
        is_narrow = isinstance(result, torch.Tensor) and result.is_floating_point() and eps_of(result.dtype) > eps_of(self._dtype)
        if is_narrow and self._dtype in given:
            where = self._inside[-1] if self._inside else "the loss or the step"
            self.seen.setdefault(where, f"{where} (function {getattr(function, '__name__', '')!r})")
        return result
