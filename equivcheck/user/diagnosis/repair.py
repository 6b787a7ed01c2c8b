"""Reduces gradients that are not reduced, and runs again. If the ranks are right now, the reduction was missing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from equivcheck.diagnosis.emulation.held_elements import held_elements
from equivcheck.diagnosis.evidence import axis_combinations, peers_of
from equivcheck.diagnosis.words import gradients, rows_of_tensor
from equivcheck.oracle.comparison.compare import compare
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.training.read import local_values
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.loop import default_step, train
from equivcheck.user.ranks import reader_and_batches, task_and_mesh
from equivcheck.user.task import Task
from equivcheck.user.traces.optimizers import hook_steps
from equivcheck.user.traces.settings import UserTrace
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.trace.differences import Difference, Phase
from equivcheck.worlds.trace.pieces import values_by_piece
from equivcheck.worlds.trace.tensors import Vector
from equivcheck.worlds.trace.trace import Trace

CONFIRMED = "(with {}, your ranks agree with one device in every step)"
"""Ends the sentence about a repair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Reduction of gradients over mesh axes, which ranks may have left out."""

    axes: tuple[str, ...]
    """Mesh axes along which the ranks' gradients are added up."""
    divisor: int
    """Number by which the sum is divided: 1 for a sum, the number of ranks for a mean."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MissingReduction:
    """A reduction that one parameter's gradient lacks, perhaps only in some elements."""

    reduction: Reduction
    """The reduction."""
    elements: tuple[npt.NDArray[np.bool_], ...]
    """Mask for each rank over its own elements: True if the reduction is missing."""


def missing_reductions(diverged: DivergedTraining) -> list[Diagnosis]:
    """Find gradient reductions that ranks left out. With these reductions, ranks agree with one device in every step.

    Empty if there are none.
    """
    first = diverged.first
    if first.phase is not Phase.GRADIENT:
        return []
    own = flat_gradients(diverged.traces, first.step)
    missing = {name: missing_reduction(diverged, name, own) for name in diverged.differing(Phase.GRADIENT)}
    found = {name: reduction for name, reduction in missing.items() if reduction is not None}
    if len(found) < len(missing) or not is_right_with(diverged, reducing_rank, found, first.step):
        return []
    by_reduction: dict[Reduction, dict[str, MissingReduction]] = {}
    for name, each in found.items():
        by_reduction.setdefault(each.reduction, {})[name] = each
    words = [_describe(diverged, reduction, lacking) for reduction, lacking in by_reduction.items()]
    what = "this reduction" if len(words) == 1 else "these reductions"
    sentence = f"{', and '.join(words)} {CONFIRMED.format(what)}"
    return [Diagnosis(cause=Cause.NOT_REDUCED, sentence=sentence, exact=True)]


def _describe(diverged: DivergedTraining, reduction: Reduction, lacking: dict[str, MissingReduction]) -> str:
    way = "summed" if reduction.divisor == 1 else "averaged"
    what = gradients(diverged, tuple(lacking))
    if not all(mask.all() for each in lacking.values() for mask in each.elements):
        rows = {name: _full_mask(diverged, name, each) for name, each in lacking.items()}
        what = f"the gradients of {rows_of_tensor(rows)} are"
    return f"{what} not {way} over {diverged.ranks_text(reduction.axes)}: each rank keeps its own part"


def _full_mask(diverged: DivergedTraining, name: str, lacking: MissingReduction) -> npt.NDArray[np.bool_]:
    mask = np.zeros(diverged.expected_values(diverged.first.step, Phase.GRADIENT)[name].shape, dtype=np.bool_)
    for rank, elements in enumerate(lacking.elements):
        mask[held_elements(diverged).by(name, rank).numpy()] |= elements
    return mask


def missing_reduction(
    diverged: DivergedTraining,
    name: str,
    own_gradients: Sequence[Mapping[str, Vector]],
    divisors: Callable[[Sequence[str]], Sequence[int]] | None = None,
) -> MissingReduction | None:
    """Return the reduction over the fewest axes with which a gradient is right at the first wrong step.

    `own_gradients` has each rank's gradients as flat arrays. `divisors` gives the divisors to try for some axes: by default, 1
    and the number of ranks.
    """
    expected = diverged.expected_values(diverged.first.step, Phase.GRADIENT).get(name)
    if expected is None or name not in diverged.updated:
        return None
    held = [held_elements(diverged).by(name, rank).numpy() for rank in range(diverged.task.num_ranks)]
    nothing = np.empty(0)
    own = [values.get(name, nothing) for values in own_gradients]
    if any(values.size != mask.sum() for mask, values in zip(held, own, strict=True)):
        return None
    for axes in sorted(axis_combinations(diverged.wide_axes), key=len):
        lines = {tuple(peers_of(diverged.coordinates, rank, axes)) for rank in range(diverged.task.num_ranks) if held[rank].any()}
        if any(not np.array_equal(held[line[0]], held[rank]) for line in lines for rank in line):
            continue
        parts = {line: (expected[held[line[0]]], np.stack([own[rank] for rank in line])) for line in lines}
        for chosen in ({line: _all_elements(each) for line, each in parts.items()}, _wrong_elements(parts, diverged.eps)):
            for divisor in (1, diverged.size(axes)) if divisors is None else divisors(axes):
                if chosen and all(_is_sum(*parts[line], divisor, mask, diverged.eps) for line, mask in chosen.items()):
                    elements = {rank: mask for line, mask in chosen.items() for rank in line}
                    none = [np.zeros(values.size, dtype=np.bool_) for values in own]
                    return MissingReduction(
                        reduction=Reduction(axes=axes, divisor=divisor),
                        elements=tuple(elements.get(rank, none[rank]) for rank in range(len(own))),
                    )
    return None


Line = tuple[int, ...]
"""Ranks along some axes."""
Part = tuple[Vector, Vector]
"""Expected elements on each rank along a line, and the ranks' own values, a row for each rank."""


def _all_elements(part: Part) -> npt.NDArray[np.bool_]:
    return np.ones(part[0].size, dtype=np.bool_)


def _wrong_elements(parts: Mapping[Line, Part], eps: float) -> dict[Line, npt.NDArray[np.bool_]]:
    """Return, for each line with wrong elements, a mask of the elements that are wrong on some rank or zero on every rank."""
    found = {}
    for line, (right, values) in parts.items():
        is_wrong = (np.abs(values - right) > eps**0.5 * np.abs(right).max(initial=0.0)).any(axis=0)
        if is_wrong.any():
            found[line] = is_wrong | ~values.any(axis=0)
    return found


def _is_sum(right: Vector, values: Vector, divisor: int, mask: npt.NDArray[np.bool_], eps: float) -> bool:
    """Whether the sum over ranks gives the right elements.

    If all ranks have equal values, a factor is wrong and no reduction is missing.
    """
    right, values = right[mask], values[:, mask]
    return bool(np.ptp(values, axis=0).any()) and _is_close(values.sum(0) / divisor, right, eps)


def _is_close(values: Vector, right: Vector, eps: float) -> bool:
    """Whether values agree within a loose tolerance. The run with the reduction decides later."""
    return bool(np.linalg.norm(values - right) <= eps**0.5 * np.linalg.norm(right))


def flat_gradients(traces: Sequence[Trace], step: int) -> list[dict[str, Vector]]:
    """Return each rank's gradients at a step as flat arrays, limited to the elements that the rank holds."""
    found = []
    for trace in traces:
        parts: dict[str, list[np.ndarray]] = {}
        for piece, values in values_by_piece(trace.steps[step].gradients):
            if values is not None:
                parts.setdefault(piece.name, []).append(values.reshape(-1))
        found.append({name: np.concatenate(each) for name, each in parts.items()})
    return found


def is_right_with(diverged: DivergedTraining, train_rank: Callable[..., UserTrace], *arguments: Any) -> bool:
    """Whether ranks agree with one device in every step if each rank runs ``train_rank(task, *arguments)``."""
    members = ranks("sim", diverged.task.num_ranks)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traces = members.run(train_rank, diverged.task, *arguments).values
    except RanksFailed:
        return False
    kinds = (Difference.VALUE, Difference.RANKS_DISAGREE, Difference.NAN)
    return not any(each.difference in kinds for each in compare(diverged.reference, traces).divergences)


def reducing_rank(task: Task, reductions: dict[str, MissingReduction], first: int, after_backward: bool = False) -> UserTrace:
    """Train on this rank, and reduce some gradients before they are read, from step `first` on.

    With `after_backward`, the gradients that backward leaves are reduced, not those that the step has changed since.
    """
    task, mesh = task_and_mesh(task)
    reader, batches = reader_and_batches(task, mesh)
    parameters = reader.names.parameters(reader.module)
    meant = [(parameter, reductions[name]) for name, parameter in parameters if name in reductions]
    own, steps, kept = task.rank_step or default_step(task), list[int](), dict[int, torch.Tensor]()

    def keep(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            kept[id(parameter)] = parameter.grad.detach().clone()

    for parameter, _ in meant if after_backward else ():
        parameter.register_post_accumulate_grad_hook(keep)  # type: ignore[no-untyped-call]

    def reduce(optimizer: Any, *_: Any) -> None:
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for parameter, lacking in meant if len(steps) > first else ():
            if id(parameter) in ids:
                parameter.grad = kept.get(id(parameter), parameter.grad)
                groups = [mesh.get_group(axis) for axis in lacking.reduction.axes]
                _reduce(parameter, groups, lacking.reduction.divisor, lacking.elements[dist.get_rank()])

    def step(*arguments: Any) -> Any:
        steps.append(len(steps))
        return own(*arguments)

    return train(
        task.with_new_optimizers(lambda optimizer: hook_steps(optimizer, reduce)), reader, batches, step, task.loss_scale
    )


@torch.no_grad()
def _reduce(parameter: torch.Tensor, groups: Sequence[dist.ProcessGroup], divisor: int, elements: npt.NDArray[np.bool_]) -> None:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    own = local_values(gradient)
    total = own.clone()
    for group in groups:
        dist.all_reduce(total, group=group)
    total = torch.where(torch.from_numpy(elements).reshape(own.shape), total / divisor, own)
    if isinstance(gradient, DTensor):
        gradient.to_local().copy_(total)
    parameter.grad = gradient if isinstance(gradient, DTensor) else total
