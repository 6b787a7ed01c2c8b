"""The training loop for users' modules, on one device and on every rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from equivcheck.scenario import LowPrecision
from equivcheck.training.accumulate import scalar_value
from equivcheck.user.batches import microbatches
from equivcheck.user.precision.kept import widened_float32
from equivcheck.user.task import Loss, Task, TrainStep
from equivcheck.user.traces.reader import Reader
from equivcheck.user.traces.settings import UserTrace, settings_of
from equivcheck.user.usage import invalid
from equivcheck.worlds.marks import mark
from equivcheck.worlds.trace.stage import Stage
from equivcheck.worlds.trace.trace import Snapshot, Step


def train(task: Task, reader: Reader, batches: Sequence[Any], step: TrainStep | None, loss_scale: float) -> UserTrace:
    """Train the reader's module on `batches` and return a trace of every step.

    Each loss is multiplied by `loss_scale` before backward.
    """
    optimizer = build_optimizer(task, reader.module)
    scheduler = None if task.scheduler is None else task.scheduler(optimizer)
    found = _Gradients(reader, optimizer)
    take_step = step or default_step(task)
    called, loss = reader.module, _scale_loss(task.loss, loss_scale)
    if step is None and isinstance(task.precision, LowPrecision):
        called, loss = _autocast(called, task.precision), _autocast(loss, task.precision)
    kept = []
    with widened_float32(task, optimizer):
        for index, batch in enumerate(batches):
            mark(Stage.COMPUTE, index)
            found.begin(index)
            value = _loss_value(take_step(called, batch, optimizer, loss))
            mark(Stage.READING, index)  # communication from here on belongs to the check, not to the training
            gradients = found.taken or reader.gradients()
            kept.append(Step(loss=value, gradients=gradients, clip_norm=None, clipped=None, parameters=reader.parameters()))
            if scheduler is not None:
                scheduler.step()
    settings = settings_of(optimizer, reader.slots())
    return UserTrace(steps=tuple(kept), state=reader.state(optimizer), buffers=reader.buffers(), settings=settings)


def default_step(task: Task) -> TrainStep:
    """Return the built-in step: forward and backward for each microbatch, then the optimizer.

    It returns the mean of the microbatches' losses, or their sum with ``reduction="sum"``.
    """
    return functools.partial(_step, averages=task.reduction == "mean")


def _step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Loss, *, averages: bool) -> float:
    kind: Any = type(optimizer)
    share = 1.0 / len(microbatches(batch)) if averages else 1.0
    if _requires_closure(kind):
        return float(optimizer.step(lambda: _accumulate(model, batch, optimizer, loss, share)))
    total = _accumulate(model, batch, optimizer, loss, share)
    optimizer.step()
    return total


@functools.cache
def _requires_closure(kind: Any) -> bool:
    """Whether an optimizer class requires a closure, such as LBFGS."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _accumulate(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Loss, share: float) -> float:
    optimizer.zero_grad()
    total = 0.0
    for inputs, targets in microbatches(batch):
        value = loss(_call(model, inputs), targets)
        (value if share == 1.0 else value * share).backward()  # type: ignore[no-untyped-call]
        total += scalar_value(value) * share
    return total


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def build_optimizer(task: Task, module: nn.Module) -> torch.optim.Optimizer:
    """Call the user's `optimizer`. Raises `UsageError` if the result is not an optimizer."""
    optimizer = task.optimizer(list(module.parameters()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise invalid("optimizer", f"it returned {optimizer!r:.100}", "a torch.optim.Optimizer")
    return optimizer


class _Gradients:
    """Reads gradients in the optimizer's pre-step hook, at the last step in each batch.

    Under a closure (LBFGS) the gradients do not exist yet at the hook, so none are read there.
    """

    def __init__(self, reader: Reader, optimizer: torch.optim.Optimizer) -> None:
        self.taken: Snapshot | None = None
        self._reader, self._index = reader, 0
        optimizer.register_step_pre_hook(self._take)

    def begin(self, index: int) -> None:
        self.taken, self._index = None, index

    def _take(self, _optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        closures = (*arguments[1:], *keywords.values())
        mark(Stage.READING, self._index)
        self.taken = None if any(map(callable, closures)) else self._reader.gradients()
        mark(Stage.UPDATE, self._index)


def _autocast(function: Callable[..., Any], kind: LowPrecision) -> Any:
    dtype: torch.dtype = getattr(torch, kind.value)

    def call_under_autocast(*arguments: Any, **keywords: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            return function(*arguments, **keywords)

    return call_under_autocast


def _scale_loss(loss: Loss, factor: float) -> Loss:
    return loss if factor == 1.0 else lambda outputs, targets: loss(outputs, targets) * factor


def _loss_value(value: Any) -> float | None:
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return scalar_value(value)
    raise invalid("step", f"it returned {value!r:.100}", "the loss as a tensor with one element or a number, or None")
