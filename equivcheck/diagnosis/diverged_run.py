"""A diagnosis starts here: the ranks' traces next to the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.distributed as dist

from equivcheck.diagnosis.evidence import Evidence
from equivcheck.layouts.base.rounding import Rounding
from equivcheck.layouts.composition.registry import rounding_of
from equivcheck.layouts.composition.running import Runner
from equivcheck.oracle.comparison.compare import compare
from equivcheck.oracle.reference.noise import eps_of
from equivcheck.oracle.reference.reference import ReferenceRun
from equivcheck.scenario import Layout, Mesh, Scenario, Training
from equivcheck.scenario.mesh import DP, EP, REPLICATE, SHARD
from equivcheck.training.read import buffer_snapshot, snapshot
from equivcheck.training.setup import Setup
from equivcheck.worlds.ranks import Ranks
from equivcheck.worlds.trace.moments import moments, moments_of_steps
from equivcheck.worlds.trace.pieces import values_by_piece
from equivcheck.worlds.trace.tensors import Vector
from equivcheck.worlds.trace.trace import Piece, Snapshot, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialValues:
    """One rank's parameters and buffers before training."""

    parameters: Snapshot
    """Parameter snapshot."""
    buffers: Snapshot
    """Buffer snapshot."""

    def parts(self) -> Iterator[tuple[Piece, Vector]]:
        """Each piece with its values."""
        for kept in (self.parameters, self.buffers):
            for piece, values in values_by_piece(kept):
                if values is not None and piece.name:
                    yield piece, values


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DivergedRun(Evidence):
    """A diverged scenario with the traces of its ranks."""

    scenario: Scenario
    """The scenario."""
    before: tuple[Trace, ...]
    """Traces from another layout's ranks, if it ran the first steps; usually empty."""
    initial: tuple[InitialValues, ...]
    """Initial values per rank; empty if they could not be recorded."""

    @property
    def training(self) -> Training:
        """The scenario's training."""
        return self.scenario.training

    @property
    def layout(self) -> Layout:
        """The scenario's layout."""
        return self.scenario.layout

    @property
    def mesh(self) -> Mesh:
        """The layout's mesh."""
        return self.layout.mesh

    @property
    def wide_axes(self) -> tuple[str, ...]:
        """Mesh axes with more than one rank, outermost first."""
        return tuple(name for name in self.mesh.names if self.mesh.size(name) > 1)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Wide axes along which ranks compute on different rows."""
        return tuple(name for name in self.wide_axes if name in (DP, REPLICATE, SHARD, EP))

    @property
    def rounding(self) -> Rounding | None:
        """Rounding done by the layout; None if it does none."""
        return rounding_of(self.layout, self.training.precision)

    @property
    def resumes(self) -> bool:
        """Whether another layout ran the first steps."""
        return self.scenario.resume is not None

    @property
    def can_be_emulated(self) -> bool:
        """Whether one device can emulate each rank: one layout runs all steps and rounds nothing."""
        return self.rounding is None and not self.resumes

    @property
    def eps(self) -> float:
        """Machine epsilon of the training's precision."""
        return eps_of(self.training.precision.value)

    @property
    def counts(self) -> dict[int, str]:
        """Axis sizes, microbatch count and rank count, each with its description."""
        mesh = self.mesh
        counts = {axis.size: f"the {axis.size} {axis.name} ranks" for axis in mesh.axes if axis.size > 1}
        counts.setdefault(len(self.training.data.microbatches), "the microbatches")
        counts.setdefault(mesh.num_ranks, f"the {mesh.num_ranks} ranks")
        return counts


def run_again(
    scenario: Scenario, alter: Callable[[Setup], None] | None, world: str | Ranks, deadline: float = 60.0
) -> DivergedRun | None:
    """Run a scenario's ranks again; None if no value differs. Raises `RanksFailed`."""
    initial: dict[int, InitialValues] = {}
    sees = world == "sim" and scenario.resume is None and not scenario.layout.execution.is_compiled
    result = Runner(world=world, deadline=deadline, alter=_recording(alter, initial) if sees else alter).run(scenario)
    reference = ReferenceRun.of(scenario).confirming_reference()
    divergences = compare(reference, result.run.values, result.before).divergences
    if not divergences:
        return None
    found = [*moments_of_steps(result.before), *zip(*map(moments, result.run.values), strict=True)]
    return DivergedRun(
        scenario=scenario,
        reference=reference,
        before=tuple(result.before),
        traces=tuple(result.run.values),
        found=tuple(found),
        initial=tuple(values for _, values in sorted(initial.items())),
        divergences=divergences,
    )


def _recording(alter: Callable[[Setup], None] | None, initial: dict[int, InitialValues]) -> Callable[[Setup], None]:
    """Apply `alter` and record each rank's initial values. Needs ranks that are threads, because they share `initial`."""

    def change(setup: Setup) -> None:
        if alter is not None:
            alter(setup)
        setup.before_training.append(lambda _optimizer, _schedule: initial.update({dist.get_rank(): initial_values(setup)}))

    return change


def initial_values(setup: Setup) -> InitialValues:
    """A rank's current parameters and buffers."""
    slots = setup.find_slots(setup.model)
    pieces = tuple(piece for slot in slots for piece in slot.pieces)
    parameters = snapshot(slots, pieces, [slot.parameter for slot in slots])
    return InitialValues(parameters=parameters, buffers=buffer_snapshot(setup.model))
