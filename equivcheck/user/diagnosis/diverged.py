"""Evidence for the diagnosis: traces, and the ranks' batches, initial parameters and shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from typing import Any

import numpy as np
import torch
from torch import nn

from equivcheck.diagnosis.emulation.coordinates import RankCoordinate
from equivcheck.diagnosis.emulation.held_elements import HeldElements, held_masks
from equivcheck.diagnosis.evidence import Evidence
from equivcheck.oracle.comparison.compare import compare
from equivcheck.oracle.reference.reference import Reference
from equivcheck.user.batches import convert_batch, microbatches, rank_batch
from equivcheck.user.diagnosis.observed import observed_device, observed_ranks
from equivcheck.user.ranks import rank_module, rank_reader
from equivcheck.user.task import Task
from equivcheck.user.traces.names import TensorNames
from equivcheck.user.traces.settings import UserTrace
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.meshes import device_mesh
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.moments import moments
from equivcheck.worlds.trace.pieces import TensorsByName, fill, select_piece, values_by_piece
from equivcheck.worlds.trace.trace import Snapshot

Masks = Mapping[str, torch.Tensor]
"""Selected elements by tensor name."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DivergedTraining(Evidence):
    """A user's training whose ranks differ from one device."""

    task: Task
    """The training."""
    single: UserTrace
    """Trace on one device."""
    unit: float
    """Machine epsilon for the training's narrowest element type."""
    shares: tuple[tuple[Any, ...], ...]
    """Each rank's part of every batch; empty if the parts cannot be computed."""
    initial: tuple[Snapshot, ...]
    """Each rank's initial parameters; empty if they cannot be read."""

    @property
    def eps(self) -> float:
        """Machine epsilon for the narrowest element type."""
        return self.unit

    @property
    def counts(self) -> dict[int, str]:
        """Possible wrong factors above 1. Equal numbers, such as axis sizes and microbatches, share a name with all of them."""
        ranks = [(self.size(axes), self.ranks_text(axes)) for axes in sorted(axis_subsets(self.wide_axes), key=len)]
        counts: dict[int, list[str]] = {}
        for number, words in (*ranks, *self.call_counts(1)):
            counts.setdefault(number, []).append(words)
        return {number: " or of ".join(words) for number, words in counts.items()}

    def call_counts(self, known: int) -> list[tuple[int, str]]:
        """Return how many microbatches, backward passes and calls a step has, with names; without the `known` number."""
        passes = max((run.num_backward for run in observed_ranks(self)), default=1)
        named = [(self.num_microbatches, f"the {self.num_microbatches} microbatches")]
        named += [(passes, f"the {passes} backward passes in a rank's step")] * (passes != self.num_microbatches)
        named += [each for each in self._repeated_calls() if each[0] * observed_device(self).num_backward != passes]
        return [(number, words) for number, words in named if number > 1 and number != known]

    def _repeated_calls(self) -> list[tuple[int, str]]:
        """The outermost module that every rank calls several times as often as one device, with that number."""
        single, runs = observed_device(self).calls, [run.calls for run in observed_ranks(self)]
        for name, count in single.items():
            times = {run[name] / count for run in runs if name in run}
            if len(times) == 1 and (number := times.pop()) > 1 and number.is_integer():
                module = f"`{name}`" if name else "the model"
                return [(int(number), f"a rank's calls of {module} for each call on one device")]
        return []

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches in the first step."""
        return len(microbatches(self.task.batches[0]))

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Data axes with more than one rank."""
        return tuple(name for name, size in self.task.mesh if size > 1 and name in self.task.data_axes)

    @property
    def wide_axes(self) -> tuple[str, ...]:
        """Axes with more than one rank."""
        return tuple(name for name, size in self.task.mesh if size > 1)

    @property
    def same_row_axes(self) -> tuple[str, ...]:
        """Axes with more than one rank whose ranks have the same rows."""
        return tuple(name for name in self.wide_axes if name not in self.data_axes)

    @property
    def has_own_rows(self) -> bool:
        """Whether ranks have different rows, and these are known."""
        return bool(self.shares and self.data_axes)

    @property
    def coordinates(self) -> tuple[RankCoordinate, ...]:
        """Each rank's mesh coordinates."""
        places = product(*(range(size) for size in self.task.shape))
        return tuple(
            RankCoordinate(rank=rank, indices=dict(zip(self.task.axis_names, place, strict=True)))
            for rank, place in enumerate(places)
        )

    def size(self, axes: Sequence[str]) -> int:
        """Number of ranks along some axes."""
        return math.prod(size for name, size in self.task.mesh if name in axes)

    def ranks_text(self, axes: Sequence[str]) -> str:
        """Ranks along some axes in words: ``the 2 dp ranks``."""
        sizes = " x ".join(str(size) for name, size in self.task.mesh if name in axes)
        return f"the {sizes} {' x '.join(name for name in self.task.axis_names if name in axes)} ranks"


@lru_cache(maxsize=2)
def held_elements(diverged: DivergedTraining) -> HeldElements:
    """Return each rank's elements, and the only rank with optimizer state for a replicated tensor."""
    held, owners = held_masks(diverged), dict[str, int]()
    for name, masks in held.items():
        holders = [rank for rank, trace in enumerate(diverged.traces) if _has_state(trace, name)]
        if len(holders) == 1 and all(mask.all() for mask in masks):
            owners[name] = holders[0]
    return HeldElements(diverged.coordinates, held, owners)


def split_dim(diverged: DivergedTraining, name: str, axis: str) -> int | None:
    """Return the dim along which ranks with different indices on an axis hold different indices of a parameter, if any."""
    if all(piece.name != name for piece in diverged.single.steps[0].parameters.pieces):
        return None  # for example a weight that is shared with an embedding, or computed by a parametrization
    for dim in range(held_elements(diverged).by(name, 0).dim()):
        first, *others = held_indices(diverged, name, axis, dim)
        if any(not torch.equal(first, each) for each in others):
            return dim
    return None


def held_indices(diverged: DivergedTraining, name: str, axis: str, dim: int) -> list[torch.Tensor]:
    """Return, for each index on an axis, the indices of a parameter along a dim that its ranks hold together."""
    found = []
    for index in range(diverged.size((axis,))):
        ranks = [rank.rank for rank in diverged.coordinates if rank.indices[axis] == index]
        mask = held_elements(diverged).by(name, *ranks).movedim(dim, 0)
        found.append(mask.reshape(len(mask), -1).any(1).nonzero().flatten())
    return found


def initial_values(diverged: DivergedTraining) -> TensorsByName:
    """Return the full parameters with which ranks start; NaN where no rank holds an element.

    Shards with an unknown position are left out.
    """
    found: TensorsByName = {}
    shapes = {piece.name: piece.shape for piece in diverged.single.steps[0].parameters.pieces}
    for initial in reversed(diverged.initial):
        for piece, values in values_by_piece(initial):
            if values is not None and shapes.get(piece.name) == piece.shape:
                fill(found.setdefault(piece.name, np.full(piece.shape, np.nan)), piece, values)
    return found


def _has_state(trace: UserTrace | Any, name: str) -> bool:
    return any(piece.name.rpartition("/")[0] == name for piece in trace.state.pieces)


def wrong_elements(diverged: DivergedTraining, phase: Phase) -> dict[str, torch.Tensor]:
    """Return masks for elements that differ on any rank, in one phase at the first wrong step.

    Only tensors that the comparison reports count, because an element's limit is only its share of the tensor's tolerance.
    """
    masks: dict[str, np.ndarray] = {}
    differing = diverged.differing(phase)
    for expected, found in zip(diverged.reference.moments, diverged.found, strict=True):
        if (expected.step, expected.phase) != (diverged.first.step, phase):
            continue
        expected_full = diverged.expected_values(expected.step, phase)
        for moment in found:
            for piece, values in values_by_piece(moment.snapshot):
                right = expected_full.get(piece.name)
                if piece.name in differing and right is not None and values is not None and right.shape == piece.shape:
                    # A batch may use few rows of an embedding, so the tolerance comes from the elements that are not zero.
                    count = int(np.count_nonzero(right)) or 1
                    limit = float(expected.tolerances[expected.table.rows[piece.name]]) / math.sqrt(count) / 2
                    places = select_piece(np.arange(right.size).reshape(right.shape), piece)
                    mask = masks.setdefault(piece.name, np.zeros(right.shape, dtype=np.bool_)).reshape(-1)
                    mask[places] |= np.abs(values - right.reshape(-1)[places]) > limit
    return {name: torch.from_numpy(mask) for name, mask in masks.items() if mask.any()}


def suspects(diverged: DivergedTraining) -> tuple[Masks | None, ...]:
    """Return sets of elements with possibly wrong gradients: the first that differ, and all (None)."""
    if diverged.first.phase is not Phase.GRADIENT:
        return (None,)
    masks = {name: mask for name, mask in wrong_elements(diverged, Phase.GRADIENT).items() if name in diverged.updated}
    full = {name: torch.ones_like(mask) if mask.sum() >= MOSTLY * mask.numel() else mask for name, mask in masks.items()}
    if not masks or (set(full) >= set(diverged.updated) and all(mask.all() for mask in full.values())):
        return (None,)
    names = {name: torch.ones_like(mask) for name, mask in masks.items()}
    same = all(mask.all() for mask in full.values())
    return (full, None) if same else (names, full, None)


MOSTLY = 0.75
"""Share of wrong elements above which the whole tensor counts as wrong. The other elements may differ too little to be noticed.
"""


def axis_subsets(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all non-empty subsets, the largest first."""
    return [chosen for count in range(len(axes), 0, -1) for chosen in combinations(axes, count)]


def diverged_training(
    task: Task, reference: Reference, single: UserTrace, traces: Sequence[UserTrace], eps: float
) -> DivergedTraining | None:
    """Collect the evidence; None if no value differs."""
    found = compare(reference, traces).divergences
    if not found:
        return None
    shares, initial = _batches_and_start(task)
    return DivergedTraining(
        reference=reference,
        traces=tuple(traces),
        found=tuple(zip(*map(moments, traces), strict=True)),
        divergences=found,
        task=task,
        single=single,
        unit=eps,
        shares=shares,
        initial=initial,
    )


def _batches_and_start(task: Task) -> tuple[tuple[tuple[Any, ...], ...], tuple[Snapshot, ...]]:
    """Each rank's batches and initial parameters, computed on simulated ranks without training."""
    shares = _on_ranks(_shares, task)
    return shares, _on_ranks(_initial, task) if shares else ()


def _on_ranks(function: Callable[[Task], Any], task: Task) -> tuple[Any, ...]:
    try:
        return tuple(ranks("sim", task.num_ranks).run(function, task).values)
    except RanksFailed:
        return ()


def _shares(task: Task) -> tuple[Any, ...]:
    mesh = device_mesh(task.shape, task.axis_names)
    return tuple(rank_batch(task, convert_batch(batch, task.dtype), mesh) for batch in task.batches)


def _initial(task: Task) -> Snapshot:
    mesh = device_mesh(task.shape, task.axis_names)
    names, module = rank_module(task, mesh)
    return rank_reader(task, names, module, mesh).parameters()


def parameters_by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """Distinct parameters by name, in a single-device model."""
    return dict(TensorNames(model).parameters(model))
