"""Adds up a module's partial sums, and runs the ranks again. If they are right now, this sum was missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.batches import map_tensors
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.place.modules import Key
from equivcheck.user.diagnosis.place.where import Where, noun_of
from equivcheck.user.diagnosis.repair import CONFIRMED, is_right_with
from equivcheck.user.lazy_diagnosis import UserDiagnosis
from equivcheck.user.loop import default_step, train
from equivcheck.user.ranks import reader_and_batches, task_and_mesh
from equivcheck.user.task import Task
from equivcheck.user.traces.settings import UserTrace


def missing_sum(diverged: DivergedTraining, place: Where) -> UserDiagnosis | None:
    """Find the sum that ranks left out between two modules. With this sum, ranks agree with one device in every step.

    `place` is the first place with wrong values. Returns None if there is no such sum.
    """
    for key, axes in place.partial if not diverged.first.step else ():
        for way, divisor in (("summed", 1), ("averaged", diverged.size(axes))):
            if is_right_with(diverged, _summing_rank, key, axes, divisor):
                cause = Cause.PARTIAL_INPUT_GRADIENT if key.is_gradient else Cause.PARTIAL_OUTPUT
                what = f"the {noun_of(key)} of {f'`{key.module}`' if key.module else 'the full model'}"
                words = f"{what} is not {way} over {diverged.ranks_text(axes)}: each rank continues with its own part"
                return UserDiagnosis(cause=f"{words} {CONFIRMED.format('this reduction')}", kinds=(cause,))
    return None


def _summing_rank(task: Task, key: Key, axes: Sequence[str], divisor: int) -> UserTrace:
    """Train on this rank, and reduce one tensor in each call to a module, or the tensor's gradient."""
    task, mesh = task_and_mesh(task)
    reader, batches = reader_and_batches(task, mesh)
    owner = dict(reader.names.modules(reader.module))[key.module]
    function = _ReducedGradient if key.is_gradient else _Reduced
    reduced = partial(function.apply, [mesh.get_group(axis) for axis in axes], divisor)
    change = partial(_change_tensor, key.number, reduced)
    if key.is_input:
        owner.register_forward_pre_hook(partial(_before, change), with_kwargs=True)
    else:
        owner.register_forward_hook(lambda _owner, _inputs, outputs: change(outputs))
    return train(task, reader, batches, task.rank_step or default_step(task), task.loss_scale)


def _before(change: Callable[[Any], Any], _owner: nn.Module, arguments: Any, keywords: dict[str, Any]) -> Any:
    values = change([*arguments, *keywords.values()])
    return tuple(values[: len(arguments)]), dict(zip(keywords, values[len(arguments) :], strict=True))


def _change_tensor(number: int, change: Callable[[torch.Tensor], Any], values: Any) -> Any:
    """Change the tensor with this number among all tensors in nested values."""
    seen: list[torch.Tensor] = []

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return change(tensor) if len(seen) - 1 == number else tensor

    return map_tensors(values, apply)


def _reduce(value: torch.Tensor, groups: Sequence[dist.ProcessGroup], divisor: int) -> torch.Tensor:
    total = value.detach().contiguous().clone()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total / divisor


class _Reduced(torch.autograd.Function):
    """Reduce a tensor over ranks. Its gradient remains unchanged."""

    @staticmethod
    def forward(_context: Any, groups: Sequence[dist.ProcessGroup], divisor: int, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' values, divided by `divisor`."""
        return _reduce(value, groups, divisor)

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        """Return the gradient unchanged, because only the value is reduced."""
        return None, None, gradient


class _ReducedGradient(torch.autograd.Function):
    """Reduce a tensor's gradient over ranks."""

    @staticmethod
    def forward(context: Any, groups: Sequence[dist.ProcessGroup], divisor: int, value: torch.Tensor) -> torch.Tensor:
        """Return the value unchanged, because only its gradient is reduced."""
        context.groups, context.divisor = groups, divisor
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        """Return the sum of the ranks' gradients, divided by the `divisor` from forward."""
        return None, None, _reduce(gradient, context.groups, context.divisor)
