"""The training loop for users' modules, on one device and on every rank."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from equivcheck.scenario import LowPrecision
from equivcheck.training.accumulate import scalar_value
from equivcheck.training.update.settings import settings_of
from equivcheck.user.batches import microbatches
from equivcheck.user.diagnosis.interception import call_before_clipping, observe_clipping
from equivcheck.user.messages.hints import invalid_loss, note_on_outputs
from equivcheck.user.precision.kept import widened_float32
from equivcheck.user.resuming.parts import WHOLE, Part
from equivcheck.user.task import Loss, Task, TrainStep, takes_names
from equivcheck.user.traces.names import TensorNames
from equivcheck.user.traces.optimizers import GradientReader, optimizers_in
from equivcheck.user.traces.reader import Reader
from equivcheck.user.traces.reported import named_tensors, reported_snapshot, with_reports_at_all_steps
from equivcheck.user.traces.settings import TrainingState, UserTrace, numbers_in
from equivcheck.user.usage import invalid
from equivcheck.worlds.marks import mark
from equivcheck.worlds.trace.stage import Stage
from equivcheck.worlds.trace.trace import Step


def train(  # noqa: PLR0913, PLR0917 - the training, its place, and the part to run
    task: Task, reader: Reader, batches: Sequence[Any], step: TrainStep | None, loss_scale: float, part: Part = WHOLE
) -> UserTrace:
    """Train `reader`'s model on `batches`, and return a trace of every step.

    `step` replaces the built-in step. Each loss is multiplied by `loss_scale` before backward. `part` has the number of the first
    step, and functions that load a checkpoint before it and save one at the end.
    """
    optimizer = build_optimizer(task, reader.names, reader.module)
    if step is None and not callable(getattr(optimizer, "step", None)):
        raise invalid(
            f"optimizer {type(optimizer).__name__}",
            "the built-in step calls only one optimizer",
            "an optimizer, or step=fn to call several",
        )
    scheduler = None if task.scheduler is None else task.scheduler(optimizer)
    read = GradientReader(reader, optimizers_in(optimizer))
    take_step = step or default_step(task)
    called, loss = reader.module, _scale_loss(task.loss, loss_scale)
    if step is None and isinstance(task.precision, LowPrecision):
        called, loss = _autocast(called, task.precision), _autocast(loss, task.precision)
    kept, checkpoint = [], None
    if part.load is not None:
        part.load(reader.module, optimizer, scheduler, part.folder)
        checkpoint = _state_between_steps(reader, read, scheduler)
    with read.hooks(), widened_float32(task, read.optimizers), _before_clipping(task, read):
        for index, batch in enumerate(batches, part.first_step):
            mark(Stage.COMPUTE, index)
            read.begin(index)
            value, reported = _loss_and_others(take_step(called, batch, optimizer, loss))
            mark(Stage.READING, index)  # communication from here on belongs to the check, not to the training
            gradients = read.gradients()
            reported |= {} if task.also is None else _state_outside(task.also(called, optimizer))
            kept.append(
                Step(
                    loss=value,
                    gradients=gradients,
                    clip_norm=None,
                    clipped=None,
                    parameters=reader.parameters(),
                    reported=reported_snapshot(reported) if reported else None,
                    buffers=reader.step_buffers(),
                )
            )
            if scheduler is not None:
                scheduler.step()
    if part.save is not None:
        checkpoint = _state_between_steps(reader, read, scheduler)
        part.save(reader.module, optimizer, scheduler, part.folder)
    settings = settings_of(read.optimizers, reader.slots())
    steps = with_reports_at_all_steps(kept) if any(each.reported for each in kept) else tuple(kept)
    state, buffers = reader.state(read.optimizers), reader.buffers()
    return UserTrace(steps=steps, state=state, buffers=buffers, settings=settings, checkpoint=checkpoint)


@contextlib.contextmanager
def _before_clipping(task: Task, read: GradientReader) -> Iterator[None]:
    """Read gradients before clipping, if the trainer on ranks reads them before clipping."""
    if not task.reads_unclipped:
        yield
        return
    with observe_clipping(), call_before_clipping(read.keep_unclipped):
        yield


def _state_between_steps(reader: Reader, read: GradientReader, scheduler: Any) -> TrainingState:
    return TrainingState(
        parameters=reader.parameters(),
        state=reader.state(read.optimizers),
        buffers=reader.buffers(),
        settings=settings_of(read.optimizers, reader.slots()),
        progress=numbers_in(scheduler.state_dict()) if hasattr(scheduler, "state_dict") else {},
    )


def default_step(task: Task) -> TrainStep:
    """Return the built-in training step: forward and backward for each microbatch, then the optimizer's update.

    The step returns the mean of the microbatches' losses; with ``reduction="sum"``, it returns their sum.
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
        value = _loss_of(call_model(model, inputs), targets, loss)
        try:
            (value if share == 1.0 else value * share).backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            unfit = invalid_loss(value)
            if unfit is None:
                raise
            raise unfit from error
        total += scalar_value(value) * share
    return total


def _loss_of(outputs: Any, targets: Any, loss: Loss) -> torch.Tensor:
    try:
        return loss(outputs, targets)
    except Exception as error:
        for note in note_on_outputs(outputs):
            error.add_note(note)
        raise


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model with its inputs. A tuple holds positional arguments, and a dict holds keywords."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def build_optimizer(task: Task, names: TensorNames, module: nn.Module) -> Any:
    """Call the user's `optimizer`, and return its result. Raises `UsageError` if the result contains no optimizer."""
    parameters: list[Any] = list(module.parameters())
    if takes_names(task.optimizer):
        known = {id(parameter): name for name, parameter in names.parameters(module)}
        parameters = [(known.get(id(parameter), name), parameter) for name, parameter in module.named_parameters()]
    optimizer = task.optimizer(parameters)
    if not optimizers_in(optimizer):
        raise invalid("optimizer", f"it returned {optimizer!r:.100}", "a torch.optim.Optimizer, or several in a list or dict")
    return optimizer


def _autocast(function: Callable[..., Any], kind: LowPrecision) -> Any:
    dtype: torch.dtype = getattr(torch, kind.value)

    def call_under_autocast(*arguments: Any, **keywords: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            return function(*arguments, **keywords)

    return call_under_autocast


def _scale_loss(loss: Loss, factor: float) -> Loss:
    return loss if factor == 1.0 else lambda outputs, targets: loss(outputs, targets) * factor


def _loss_and_others(value: Any) -> tuple[float | None, dict[str, torch.Tensor]]:
    """Return a step's loss, and the other values that the step returned."""
    if not isinstance(value, Mapping):
        return _loss_value(value), {}
    return _loss_value(value.get("loss")), named_tensors({key: other for key, other in value.items() if key != "loss"})


def _state_outside(objects: Any) -> dict[str, torch.Tensor]:
    if not isinstance(objects, Mapping):
        raise invalid("`also`", f"it returned {objects!r:.100}", "a dict of objects by name")
    named = ((name, named_tensors(value)) for name, value in objects.items())
    return {f"{key}/{name}" if key else str(name): tensor for name, tensors in named for key, tensor in tensors.items()}


def _loss_value(value: Any) -> float | None:
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return scalar_value(value)
    raise invalid("step", f"it returned {value!r:.100}", "the loss (a number, or a tensor with one element), a dict, or None")
