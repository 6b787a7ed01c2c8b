"""Input of a scenario's diagnosis: the ranks' traces and the single-device run."""

from __future__ import annotations

from collections.abc import Callable, Collection
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
from equivcheck.training.read import buffer_slots, snapshot
from equivcheck.training.setup import Setup
from equivcheck.training.update.settings import FLAGS, Settings, settings_of
from equivcheck.worlds.ranks import Ranks
from equivcheck.worlds.trace.moments import moments, moments_of_steps
from equivcheck.worlds.trace.pieces import TensorsByName, full_tensors_of
from equivcheck.worlds.trace.trace import Snapshot


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DivergedRun(Evidence):
    """A scenario whose ranks differ from the single-device run, with the ranks' traces."""

    scenario: Scenario
    """The scenario."""
    recorded: tuple[tuple[Settings, ...], ...]
    """Each rank's optimizer settings at each update, then after the last step. Empty if they could not be recorded."""
    updated_by_rank: tuple[Collection[str], ...]
    """Parameters updated by each rank, by name. Empty if no optimizer splits updates over ranks, or if this is unknown."""

    @property
    def updates(self) -> tuple[Collection[str], ...]:
        """Parameters updated by each rank, by name. Empty if they are unknown."""
        return self.updated_by_rank

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
    def rounding(self) -> Rounding | None:
        """Element types to which the layout rounds; None if it only uses the training's type."""
        return rounding_of(self.layout, self.training.precision)

    @property
    def resumes(self) -> bool:
        """Whether the scenario resumes from a checkpoint, so that another layout ran the first steps."""
        return self.scenario.resume is not None

    @property
    def can_be_emulated(self) -> bool:
        """Whether one device can emulate each rank.

        True if one layout runs all steps and does not round to lower-precision dtypes.
        """
        return self.rounding is None and not self.resumes

    @property
    def has_own_rows(self) -> bool:
        """Whether ranks train on different rows, and one device can repeat each rank's training."""
        return bool(self.data_axes) and self.can_be_emulated

    @property
    def right_settings(self) -> Settings:
        """The single-device run's optimizer settings after the last step, by parameter."""
        return _right_settings(self.training)[-1]

    @property
    def right_settings_at_steps(self) -> tuple[Settings, ...]:
        """The single-device run's optimizer settings at each update."""
        return _right_settings(self.training)[:-1]

    @property
    def settings_at_steps(self) -> tuple[tuple[Settings, ...], ...]:
        """Each rank's optimizer settings at each update. Empty if they could not be recorded."""
        return tuple(each[:-1] for each in self.recorded)

    @property
    def right_initial_values(self) -> TensorsByName:
        """Parameters and buffers at the start of the single-device run."""
        return full_tensors_of(_initial_values(single_device_setup(self.training)))


def run_again(
    scenario: Scenario, alter: Callable[[Setup], None] | None, world: str | Ranks, deadline: float = 60.0
) -> DivergedRun | None:
    """Run a scenario's ranks again, and return the diverged run. Returns None if no value differs.

    Pass in `alter` the bug with which the scenario first diverged; None without a planted bug. Raises `RanksFailed` if a rank
    fails.
    """
    initial: dict[int, Snapshot] = {}
    settings: dict[int, list[Settings]] = {}
    updates: dict[int, Collection[str]] = {}
    sees = world == "sim" and scenario.resume is None and not scenario.layout.execution.is_compiled
    altered = _recording(alter, initial, settings, updates) if sees else alter
    result = Runner(world=world, deadline=deadline, alter=altered).run(scenario)
    reference = ReferenceRun.of(scenario).confirming_reference()
    divergences = compare(reference, result.run.values, result.before).divergences
    if not divergences:
        return None
    training, axes = scenario.training, scenario.layout.mesh.axes
    recorded = tuple(tuple(found) for _, found in sorted(settings.items()))
    return DivergedRun(
        scenario=scenario,
        reference=reference,
        traces=tuple(result.run.values),
        found=(*moments_of_steps(result.before), *zip(*map(moments, result.run.values), strict=True)),
        divergences=divergences,
        eps=eps_of(training.precision.value),
        axis_sizes={axis.name: axis.size for axis in axes},
        data_axes=tuple(axis.name for axis in axes if axis.size > 1 and axis.name in (DP, REPLICATE, SHARD, EP)),
        num_steps=training.steps,
        microbatch_rows=training.data.microbatches,
        has_schedule=training.schedule is not None,
        initial=tuple(values for _, values in sorted(initial.items())),
        settings=tuple(each[-1] for each in recorded),
        recorded=recorded,
        updated_by_rank=tuple(names for _, names in sorted(updates.items())),
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
    alter: Callable[[Setup], None] | None,
    initial: dict[int, Snapshot],
    settings: dict[int, list[Settings]],
    updates: dict[int, Collection[str]],
) -> Callable[[Setup], None]:
    """Apply `alter` and record each rank's initial values, settings and updated parameters.

    The ranks must be threads of this process.
    """

    def change(setup: Setup) -> None:
        if alter is not None:
            alter(setup)
        _record_settings(setup, settings.setdefault(dist.get_rank(), []))

        def record(optimizer: torch.optim.Optimizer, _schedule: object) -> None:
            initial[dist.get_rank()] = _initial_values(setup)
            inner = getattr(optimizer, "optim", None)  # ZeroRedundancyOptimizer's optimizer for this rank's parameters
            if inner is not None:
                updates[dist.get_rank()] = settings_of([inner], setup.find_slots(setup.model)).keys()

        setup.before_training.append(record)

    return change


def _initial_values(setup: Setup) -> Snapshot:
    """Return a rank's current parameters and buffers."""
    slots = (*setup.find_slots(setup.model), *buffer_slots(setup.model))
    return snapshot(slots, tuple(piece for slot in slots for piece in slot.pieces), [slot.parameter for slot in slots])
