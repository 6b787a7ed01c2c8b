"""Runs a user's operation on one device or on a rank, and records its results and gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from equivcheck.errors import EquivCheckError
from equivcheck.programs.operation_check.task import Function, OperationTask, named_tensors
from equivcheck.programs.run.rank import moment, placement_text, torch_placements
from equivcheck.programs.run.reading import full_of
from equivcheck.programs.run.refusals import LONGEST, refusal
from equivcheck.programs.run.values import local_part, weights_of
from equivcheck.worlds.dtensor_caches import forget_shardings
from equivcheck.worlds.dtensor_rules import preserved_sharding_rules
from equivcheck.worlds.meshes import device_mesh
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.moments import ValueTrace

Tensors = dict[str, torch.Tensor | None]
Placements = tuple[tuple[str, ...] | None, ...]
"""For each tensor, a placement for each mesh axis; None for a plain tensor, which every rank holds in full."""
OF_LOCAL_MAP = r"local_map.*(mismatched placements|redistribute_inputs)"
"""Pattern for errors of `local_map` about placements that it does not accept."""


class OperationFailed(EquivCheckError):
    """The user's operation raised on a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRun:
    """Results recorded on one rank from a user's operation."""

    trace: ValueTrace | None
    """Full results, then gradients; None if the operation refused the placements."""
    outputs: tuple[str, ...] = ()
    """The results' placements as torch prints them; ``plain`` for a tensor other than a DTensor."""
    refusal: str = ""
    """Error with which the operation refused the placements; empty if it computed a result."""


def run_operation(task: OperationTask, function: Function, tensors: list[torch.Tensor], moved: Callable[..., Any]) -> ValueTrace:
    """Call a function with the task's arguments, and run backward. `tensors` replace the tensors among these arguments.

    The backward pass starts from a weighted sum over the results. `moved` is applied to each result, each gradient, and the
    weights in this sum. On ranks, it returns the full tensor. On one device, it may perturb the tensor.
    """
    remaining = iter(tensors)
    arguments = [next(remaining) if isinstance(each, torch.Tensor) else each for each in task.inputs]
    torch.manual_seed(task.seed)
    values: Tensors = {name: None if each is None else moved(each) for name, each in named_tensors(function(*arguments))}
    gradients: Tensors = {}
    names = [name for name, _ in task.tensors]
    if task.gradients:
        summed = [
            (each.double() * moved(weights_of(each.shape, number))).sum()
            for number, each in enumerate(values.values())
            if each is not None and each.requires_grad and not each.is_complex()
        ]
        if summed:
            sum(summed[1:], summed[0]).backward()
        leaves = {name: each for name, each in zip(names, tensors, strict=True) if each.requires_grad}
        gradients = {name: None if each.grad is None else moved(each.grad) for name, each in leaves.items()}
    else:
        values |= {f"{name} afterwards": moved(each) for name, each in zip(names, tensors, strict=True)}
    return ValueTrace(moments=(moment(Phase.VALUE, _real(values)), moment(Phase.GRADIENT, _real(gradients))))


def _real(tensors: Tensors) -> Tensors:
    """Convert complex tensors to pairs of real numbers."""
    return {name: torch.view_as_real(each) if each is not None and each.is_complex() else each for name, each in tensors.items()}


def run_on_rank(task: OperationTask, placements: Placements, raises: bool) -> OperationRun:
    """Run the user's operation on this rank with these placements.

    If torch refuses the placements with a clear error, the result contains this error. With `raises`, `OperationFailed` is raised
    instead.
    """
    if task.setup is None:
        return _run(task, placements, raises=raises)
    with preserved_sharding_rules():
        task.setup()
        return _run(task, placements, raises=raises)


def clear_caches() -> None:
    """Clear DTensor's caches on this rank, because they may hold results from other sharding rules."""
    forget_shardings()


def _run(task: OperationTask, placements: Placements, *, raises: bool) -> OperationRun:
    mesh = device_mesh(task.sizes, task.axis_names)
    outputs: list[str] = []

    def run_and_record(*arguments: Any) -> Any:
        found = (task.function if task.on_ranks is None else task.on_ranks(mesh))(*arguments)
        outputs.extend(_placements_text(each) for _, each in named_tensors(found) if each is not None)
        return found

    try:
        tensors = [_part(task, tensor, own, mesh) for (_, tensor), own in zip(task.tensors, placements, strict=True)]
        return OperationRun(trace=run_operation(task, run_and_record, tensors, full_of), outputs=tuple(outputs))
    except Exception as error:
        text = _refusal(error, task.refuses)
        if text is None or raises:
            raise OperationFailed(f"{type(error).__name__}: {error}") from error
        return OperationRun(trace=None, refusal=text)


def _refusal(error: BaseException, also: str) -> str | None:
    """Return the error in one line if DTensor or `local_map` refuses clearly, or the pattern `also` is found; else None."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if re.search(OF_LOCAL_MAP, text) or (also and re.search(also, text)):
        return text[:LONGEST]
    return refusal(error)


def _part(task: OperationTask, tensor: torch.Tensor, own: tuple[str, ...] | None, mesh: Any) -> torch.Tensor:
    if own is None:
        part = tensor.clone()
    else:
        local = local_part(tensor, task.sizes, mesh.get_coordinate(), own)
        part = DTensor.from_local(local, mesh, torch_placements(own), run_check=False, shape=tensor.shape, stride=tensor.stride())
    return part.requires_grad_() if task.is_differentiated(tensor) else part


def _placements_text(value: torch.Tensor) -> str:
    return ", ".join(map(placement_text, value.placements)) if isinstance(value, DTensor) else "plain"
