"""Evidence for the diagnosis: traces, and the ranks' batches, initial parameters and shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from equivcheck.diagnosis.emulation.held_elements import held_elements
from equivcheck.diagnosis.evidence import Evidence, axis_combinations
from equivcheck.oracle.comparison.compare import compare
from equivcheck.oracle.reference.reference import Reference
from equivcheck.training.labels import IGNORED
from equivcheck.training.update.settings import Settings
from equivcheck.user.batches import convert_batch, microbatches, rank_batch, tensors_of
from equivcheck.user.diagnosis.observed import ObservedRuns
from equivcheck.user.ranks import build_model, rank_module, rank_reader
from equivcheck.user.task import Task
from equivcheck.user.traces.names import TensorNames
from equivcheck.user.traces.settings import UserTrace
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.meshes import device_mesh
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.moments import moments
from equivcheck.worlds.trace.pieces import TensorsByName
from equivcheck.worlds.trace.trace import Snapshot


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DivergedTraining(Evidence):
    """Evidence about a user's training whose ranks differ from one device."""

    task: Task
    """The training."""
    single: UserTrace
    """The single-device run's trace."""
    observed: ObservedRuns
    """Further runs, which record settings and numbers of calls."""
    shares: tuple[tuple[Any, ...], ...]
    """Each rank's part of every batch. Empty if the parts cannot be computed."""

    @property
    def has_own_rows(self) -> bool:
        """Whether ranks have different rows, and each rank's rows are known."""
        return bool(self.shares and self.data_axes)

    @property
    def right_settings_at_steps(self) -> tuple[Settings, ...]:
        """The single-device run's optimizer settings at each update."""
        return self.observed.device.settings

    @property
    def settings_at_steps(self) -> tuple[tuple[Settings, ...], ...]:
        """Each rank's optimizer settings at each update. Empty if they cannot be read."""
        return tuple(run.settings for run in self.observed.ranks)

    @property
    def right_initial_values(self) -> TensorsByName:
        """Parameters at the start of the single-device run."""
        own = parameters_by_name(build_model(self.task))
        return {name: value.detach().double().numpy() for name, value in own.items()}

    @property
    def fractions(self) -> dict[float, str]:
        """Factors by which values may wrongly be multiplied, each with a description.

        A factor is the number of labels in a batch at the first wrong step, or this number divided by a number of ranks.
        """
        found: dict[float, str] = {}
        for values in tensors_of(self.task.batches[self.first.step]):
            count = int((values != IGNORED).sum())
            if not values.is_floating_point() and count < values.numel():
                found[count] = f"the number of labels that are not {IGNORED}"
                for axes in axis_combinations(self.wide_axes):
                    words = f"{found[count]} ({count}), divided by the number of {self.ranks_kind(axes)}"
                    found.setdefault(count / self.size(axes), words)
        return found

    def call_counts(self, known: int) -> list[tuple[int, str]]:
        """Return counts in one step that may explain a wrong factor, each with a phrase that follows ``the number of``.

        Microbatches and backward passes are counted, and calls to a module on a rank for each call on one device. A count is left
        out if it is 1, or `known`, a number that has an explanation already.
        """
        passes = max((run.num_backward for run in self.observed.ranks), default=1)
        named = [(self.num_microbatches, "microbatches")]
        named += [(passes, "backward passes in a rank's step")] * (passes != self.num_microbatches)
        repeated = self.repeated_module()
        if repeated is not None and repeated[1] * self.observed.device.num_backward != passes:
            module = f"`{repeated[0]}`" if repeated[0] else "the model"
            named.append((repeated[1], f"calls of {module} on a rank for each call on one device"))
        return [(number, words) for number, words in named if number > 1 and number != known]

    def repeated_writes(self) -> str:
        """Describe the first wrong buffer that every rank writes several times as often as one device; empty if there is none."""
        single, runs = self.observed.device.writes, [run.writes for run in self.observed.ranks]
        for name in self.differing(Phase.BUFFER):
            counts = {run.get(name, 0) for run in runs}
            count, right = counts.pop() if len(counts) == 1 else 0, single.get(name, 0)
            if right and count > right and not count % right:
                times = "once" if right == 1 else f"{right} times"
                return f"each rank changes `{name}` in place {count} times in a step, and one device changes it {times}"
        return ""

    def repeated_module(self) -> tuple[str, int] | None:
        """Return the outermost module that every rank calls several times as often as one device, with that factor."""
        single, runs = self.observed.device.calls, [run.calls for run in self.observed.ranks]
        for name, count in single.items():
            times = {run[name] / count for run in runs if name in run}
            if len(times) == 1 and (number := times.pop()) > 1 and number.is_integer():
                return name, int(number)
        return None

    @property
    def right_settings(self) -> Settings:
        """The single-device run's optimizer settings after the last step, by parameter."""
        return self.single.settings


def split_dim(diverged: DivergedTraining, name: str, axis: str) -> int | None:
    """Return the dim along which ranks on `axis` shard the parameter `name`; None if they do not shard it."""
    if all(piece.name != name for piece in diverged.single.steps[0].parameters.pieces):
        return None  # for example a weight that is shared with an embedding, or computed by a parametrization
    for dim in range(held_elements(diverged).by(name, 0).dim()):
        first, *others = held_indices(diverged, name, axis, dim)
        if any(not torch.equal(first, each) for each in others):
            return dim
    return None


def held_indices(diverged: DivergedTraining, name: str, axis: str, dim: int) -> list[torch.Tensor]:
    """Return which of a parameter's indices along `dim` ranks hold, as one tensor for each index on the mesh axis `axis`."""
    found = []
    for index in range(diverged.size((axis,))):
        ranks = [rank.rank for rank in diverged.coordinates if rank.indices[axis] == index]
        mask = held_elements(diverged).by(name, *ranks).movedim(dim, 0)
        found.append(mask.reshape(len(mask), -1).any(1).nonzero().flatten())
    return found


def diverged_training(
    task: Task, reference: Reference, single: UserTrace, traces: Sequence[UserTrace], eps: float
) -> DivergedTraining | None:
    """Collect the evidence for a diagnosis. Returns None if no value differs."""
    found = compare(reference, traces).divergences
    if not found:
        return None
    shares, initial = _batches_and_start(task)
    parts = microbatches(task.batches[0])
    return DivergedTraining(
        reference=reference,
        traces=tuple(traces),
        found=tuple(zip(*map(moments, traces), strict=True)),
        divergences=found,
        task=task,
        single=single,
        observed=ObservedRuns(task),
        shares=shares,
        eps=eps,
        axis_sizes=dict(task.mesh),
        data_axes=tuple(name for name, size in task.mesh if size > 1 and name in task.data_axes),
        num_steps=len(task.batches),
        microbatch_rows=tuple(min((len(tensor) for tensor in tensors_of(each) if tensor.dim()), default=0) for each in parts),
        has_schedule=task.scheduler is not None,
        initial=initial,
        settings=tuple(trace.settings for trace in traces),
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
    """Return each distinct parameter of a single-device model by name."""
    return dict(TensorNames(model).parameters(model))
