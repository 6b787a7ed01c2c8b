"""What a diagnosis starts from: what the ranks left, beside what they should have left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isclose

import numpy as np
import torch.distributed as dist

from equivcheck.comparison.compare import compare
from equivcheck.composition.registry import rounding_of
from equivcheck.composition.running import Runner
from equivcheck.layouts.rounding import Rounding
from equivcheck.reference.reference import Reference, ReferenceRun
from equivcheck.scenario import Layout, Mesh, Scenario, Training
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD
from equivcheck.trace.differences import Divergence, Phase
from equivcheck.trace.moments import Moment, moments, moments_of_steps
from equivcheck.trace.pieces import Whole, fill, parts_of
from equivcheck.trace.tensors import Vector
from equivcheck.trace.trace import Piece, Snapshot, Trace
from equivcheck.train.read import buffer_snapshot, snapshot
from equivcheck.train.setup import Setup
from equivcheck.worlds.ranks import Ranks

RATIO = 1e-4
"""Relative error up to which all elements of tensors have one ratio to what they should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialValues:
    """What one rank starts training from."""

    parameters: Snapshot
    """Its parameters."""
    buffers: Snapshot
    """Its buffers."""

    def parts(self) -> Iterator[tuple[Piece, Vector]]:
        """Each piece with its values."""
        for kept in (self.parameters, self.buffers):
            for piece, values in parts_of(kept):
                if values is not None and piece.name:
                    yield piece, values


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DivergedRun:
    """A diverged scenario with the traces of its ranks."""

    scenario: Scenario
    """What diverged."""
    reference: Reference
    """What one device computes."""
    before: tuple[Trace, ...]
    """Traces of the ranks of another layout that ran the first steps; mostly empty."""
    traces: tuple[Trace, ...]
    """Traces of the layout's own ranks."""
    found: tuple[tuple[Moment, ...], ...]
    """Per moment of the reference, that of each rank."""
    initial: tuple[InitialValues, ...]
    """What each rank started from; empty where that could not be seen."""
    divergences: tuple[Divergence, ...]
    """All that differ by value, at least one, in order."""

    @property
    def training(self) -> Training:
        """What is trained."""
        return self.scenario.training

    @property
    def layout(self) -> Layout:
        """How it is spread over ranks."""
        return self.scenario.layout

    @property
    def mesh(self) -> Mesh:
        """The ranks."""
        return self.layout.mesh

    @property
    def wide_axes(self) -> tuple[str, ...]:
        """The axes of more than one rank, outermost first."""
        return tuple(name for name in self.mesh.names if self.mesh.size(name) > 1)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Those along which ranks compute on different rows."""
        return tuple(name for name in self.wide_axes if name in (DP, REPLICATE, SHARD))

    @property
    def rounding(self) -> Rounding | None:
        """What the layout rounds."""
        return rounding_of(self.layout, self.training.precision)

    @property
    def resumes(self) -> bool:
        """Whether the first steps ran under another layout."""
        return self.scenario.resume is not None

    @property
    def can_be_emulated(self) -> bool:
        """Whether one device can emulate each rank: one layout runs all steps, and rounds nothing."""
        return self.rounding is None and not self.resumes

    @property
    def first(self) -> Divergence:
        """The first divergence."""
        return self.divergences[0]

    @property
    def num_moments(self) -> int:
        """Moments up to the end of the first step that differs."""
        last = len(self.reference.moments)
        return next((at for at, moment in enumerate(self.reference.moments) if self._is_later(moment.step, moment.phase)), last)

    def _is_later(self, step: int, phase: Phase) -> bool:
        return step > self.first.step or phase in (Phase.STATE, Phase.BUFFER)

    @property
    def updated(self) -> tuple[str, ...]:
        """The parameters that have a gradient at some step of the reference."""
        found = [moment for moment in self.reference.moments if moment.phase is Phase.GRADIENT]
        return tuple(name for at, name in enumerate(found[0].table.names) if any(moment.present[at] for moment in found))

    @property
    def suspects(self) -> tuple[tuple[str, ...], ...]:
        """Sets of parameters whose gradients may be what is wrong: those that differ first, and all."""
        differing = tuple(name for name in self.differing(Phase.GRADIENT) if name in self.updated)
        is_part = bool(differing) and set(differing) != set(self.updated)
        return (differing, self.updated) if is_part else (differing or self.updated,)

    def differing(self, phase: Phase) -> tuple[str, ...]:
        """The tensors that differ in a phase of the first step that does, in order."""
        return tuple(
            dict.fromkeys(found.tensor for found in self.divergences if (found.step, found.phase) == (self.first.step, phase))
        )

    def expected_values(self, step: int, phase: Phase) -> Whole:
        """The reference's tensors of a phase of a step."""
        values: Whole = {}
        for found in self.reference.moments:
            if (found.step, found.phase) == (step, phase):
                ends = [*found.table.offsets[1:], found.table.total]
                rows = zip(found.table.names, found.table.shapes, found.table.offsets, ends, strict=True)
                values |= {name: found.values[start:end].reshape(shape) for name, shape, start, end in rows}
        return values

    def found_values(self, step: int, phase: Phase) -> Whole:
        """The same of the ranks, put together; where ranks disagree, the lowest counts."""
        values: Whole = {}
        for expected, found in zip(self.reference.moments, self.found, strict=True):
            if (expected.step, expected.phase) == (step, phase):
                for moment in reversed(found):
                    for piece, held in parts_of(moment.snapshot):
                        if piece.name and held is not None:
                            fill(values.setdefault(piece.name, np.full(piece.shape, np.nan)), piece, held)
        return values

    def ratio(self, names: Sequence[str], phase: Phase) -> float | None:
        """The one ratio of all elements of some tensors to what they should be, if there is one other than 1.

        A whole number, or one over it, if it is near one.
        """
        found, expected = self.found_values(self.first.step, phase), self.expected_values(self.first.step, phase)
        ratios = [
            (found[name] / expected[name])[expected[name] != 0.0].reshape(-1)
            for name in names
            if name in found and name in expected and found[name].shape == expected[name].shape
        ]
        values = np.concatenate(ratios) if ratios else np.empty(0)
        if not len(values) or not np.isfinite(values).all() or not values.all():
            return None
        ratio = float(np.median(values))
        if not np.allclose(values, ratio, rtol=RATIO) or isclose(ratio, 1.0, rel_tol=RATIO):
            return None
        for whole in (round(ratio), 1 / round(1 / ratio) if abs(ratio) < 1 else 0.0):
            if whole and isclose(whole, ratio, rel_tol=RATIO):
                return float(whole)
        return ratio


def run_again(
    scenario: Scenario, alter: Callable[[Setup], None] | None, world: str | Ranks, deadline: float = 60.0
) -> DivergedRun | None:
    """Run a scenario's ranks again; None if nothing differs by value. Raises `RanksFailed`."""
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
    """`alter`, and a record of what each rank then starts from; for ranks that are threads."""

    def change(setup: Setup) -> None:
        if alter is not None:
            alter(setup)
        setup.before_training.append(lambda _optimizer, _schedule: initial.update({dist.get_rank(): initial_values(setup)}))

    return change


def initial_values(setup: Setup) -> InitialValues:
    """What a rank holds now."""
    slots = setup.find_slots(setup.model)
    pieces = tuple(piece for slot in slots for piece in slot.pieces)
    parameters = snapshot(slots, pieces, [slot.parameter for slot in slots])
    return InitialValues(parameters=parameters, buffers=buffer_snapshot(setup.model))
