"""A diagnosis starts here: the ranks' traces next to the reference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
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
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.read import buffer_snapshot, snapshot
from equivcheck.training.settings import FLAGS, Settings, settings_of
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
    recorded: tuple[tuple[Settings, ...], ...]
    """Each rank's optimizer settings at each update, then after the last step; empty if they could not be recorded."""

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
    def axis_sizes(self) -> dict[str, int]:
        """Mesh axes with their number of ranks, outermost first."""
        return {axis.name: axis.size for axis in self.mesh.axes}

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
    def num_steps(self) -> int:
        """Number of training steps."""
        return self.training.steps

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches in a step."""
        return len(self.training.data.microbatches)

    @property
    def microbatch_rows(self) -> tuple[int, ...]:
        """Number of rows in each microbatch."""
        return self.training.data.microbatches

    @property
    def has_schedule(self) -> bool:
        """Whether the training has a learning-rate schedule."""
        return self.training.schedule is not None

    @property
    def right_settings(self) -> Settings:
        """One device's optimizer settings after the last step, by parameter."""
        return _right_settings(self.training)[-1]

    @property
    def right_settings_at_steps(self) -> tuple[Settings, ...]:
        """One device's optimizer settings at each step's update."""
        return _right_settings(self.training)[:-1]

    @property
    def settings(self) -> tuple[Settings, ...]:
        """Each rank's optimizer settings after the last step, by parameter; empty if they could not be recorded."""
        return tuple(each[-1] for each in self.recorded)

    @property
    def settings_at_steps(self) -> tuple[tuple[Settings, ...], ...]:
        """Each rank's optimizer settings at each step's update; empty if they could not be recorded."""
        return tuple(each[:-1] for each in self.recorded)

    @property
    def initial_parameters(self) -> tuple[Snapshot, ...]:
        """Each rank's initial parameters; empty if they could not be recorded."""
        return tuple(each.parameters for each in self.initial)

    @property
    def has_own_rows(self) -> bool:
        """Whether ranks have different rows, and one device can compute each rank's part."""
        return bool(self.data_axes) and self.can_be_emulated


def run_again(
    scenario: Scenario, alter: Callable[[Setup], None] | None, world: str | Ranks, deadline: float = 60.0
) -> DivergedRun | None:
    """Run a scenario's ranks again; None if no value differs. Raises `RanksFailed`."""
    initial: dict[int, InitialValues] = {}
    settings: dict[int, list[Settings]] = {}
    sees = world == "sim" and scenario.resume is None and not scenario.layout.execution.is_compiled
    result = Runner(world=world, deadline=deadline, alter=_recording(alter, initial, settings) if sees else alter).run(scenario)
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
        recorded=tuple(tuple(found) for _, found in sorted(settings.items())),
        divergences=divergences,
    )


@lru_cache(maxsize=4)
def _right_settings(training: Training) -> tuple[Settings, ...]:
    setup, found = single_device_setup(training), list[Settings]()
    _record_settings(setup, found)
    train(setup)
    return tuple(found)


def _record_settings(setup: Setup, found: list[Settings]) -> None:
    """Append the settings at each update and after the last step."""

    def record(optimizer: torch.optim.Optimizer, flags: Collection[str]) -> None:
        found.append(settings_of([optimizer], setup.find_slots(setup.model), flags))

    setup.before_update.append(lambda optimizer, _step: record(optimizer, FLAGS))
    setup.after_training.append(lambda optimizer, _schedule: record(optimizer, ()))


def _recording(
    alter: Callable[[Setup], None] | None, initial: dict[int, InitialValues], settings: dict[int, list[Settings]]
) -> Callable[[Setup], None]:
    """Apply `alter` and record each rank's initial values and settings. Needs ranks that are threads of this process."""

    def change(setup: Setup) -> None:
        if alter is not None:
            alter(setup)
        _record_settings(setup, settings.setdefault(dist.get_rank(), []))
        setup.before_training.append(lambda _optimizer, _schedule: initial.update({dist.get_rank(): initial_values(setup)}))

    return change


def initial_values(setup: Setup) -> InitialValues:
    """A rank's current parameters and buffers."""
    slots = setup.find_slots(setup.model)
    pieces = tuple(piece for slot in slots for piece in slot.pieces)
    parameters = snapshot(slots, pieces, [slot.parameter for slot in slots])
    return InitialValues(parameters=parameters, buffers=buffer_snapshot(setup.model))
