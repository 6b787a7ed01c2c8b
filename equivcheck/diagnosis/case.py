"""What a diagnosis starts from: what the ranks left, beside what they should have left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from equivcheck.comparison.compare import compare
from equivcheck.composition.registry import rounding_of
from equivcheck.composition.running import Runner
from equivcheck.diagnosis.starts import Begun, watched
from equivcheck.layouts.rounding import Rounding
from equivcheck.reference.reference import Reference, ReferenceRun
from equivcheck.scenario import Scenario
from equivcheck.trace.differences import Divergence, Phase
from equivcheck.trace.moments import Moment, moments, moments_of_steps
from equivcheck.trace.pieces import Whole, fill, parts_of
from equivcheck.trace.trace import Trace
from equivcheck.train.setup import Setup
from equivcheck.worlds.ranks import Ranks


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Case:
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
    starts: tuple[Begun, ...]
    """What each rank started from; empty where that could not be seen."""
    divergences: tuple[Divergence, ...]
    """All that differ by value, at least one, in order."""

    @property
    def first(self) -> Divergence:
        """The first divergence."""
        return self.divergences[0]

    @property
    def rounding(self) -> Rounding | None:
        """What the layout rounds."""
        return rounding_of(self.scenario.layout)

    @property
    def num_moments(self) -> int:
        """Moments up to the end of the first step that differs."""
        last = len(self.reference.moments)
        return next((at for at, moment in enumerate(self.reference.moments) if self._is_later(moment.step, moment.phase)), last)

    def _is_later(self, step: int, phase: Phase) -> bool:
        return step > self.first.step or phase in (Phase.STATE, Phase.BUFFER)

    @property
    def updated(self) -> tuple[str, ...]:
        """The parameters that the reference updates at some step."""
        found = [moment for moment in self.reference.moments if moment.phase is Phase.GRADIENT]
        return tuple(name for at, name in enumerate(found[0].table.names) if any(moment.present[at] for moment in found))

    def expected_values(self, step: int, phase: Phase) -> Whole:
        """The reference's tensors of a phase of a step."""
        values: Whole = {}
        for found in self.reference.moments:
            if (found.step, found.phase) == (step, phase):
                ends = [*found.table.offsets[1:], found.table.total]
                rows = zip(found.table.names, found.table.shapes, found.table.offsets, ends, strict=True)
                values |= {name: found.values[start:end].reshape(shape) for name, shape, start, end in rows}
        return values

    def whole(self, step: int, phase: Phase) -> Whole:
        """The same of the ranks, put together; where ranks disagree, the lowest counts."""
        values: Whole = {}
        for expected, found in zip(self.reference.moments, self.found, strict=True):
            if (expected.step, expected.phase) == (step, phase):
                for moment in reversed(found):
                    for piece, held in parts_of(moment.snapshot):
                        if piece.name and held is not None:
                            fill(values.setdefault(piece.name, np.full(piece.shape, np.nan)), piece, held)
        return values

    def differing(self, phase: Phase) -> tuple[str, ...]:
        """The tensors that differ in a phase of the first step that does, in order."""
        return tuple(
            dict.fromkeys(found.tensor for found in self.divergences if (found.step, found.phase) == (self.first.step, phase))
        )


def case_of(scenario: Scenario, alter: Callable[[Setup], None] | None, world: str | Ranks, deadline: float = 60.0) -> Case | None:
    """Run a scenario's ranks again; None if nothing differs by value. Raises `RanksFailed`."""
    kept: dict[int, Begun] = {}
    sees = world == "sim" and scenario.start is None and not scenario.layout.execution.is_compiled
    left = Runner(world=world, deadline=deadline, alter=watched(alter, kept) if sees else alter).run(scenario)
    reference = ReferenceRun.of(scenario).confirming_reference()
    divergences = compare(reference, left.run.values, left.before).divergences
    if not divergences:
        return None
    found = [*moments_of_steps(left.before), *zip(*map(moments, left.run.values), strict=True)]
    return Case(
        scenario=scenario,
        reference=reference,
        before=tuple(left.before),
        traces=tuple(left.run.values),
        found=tuple(found),
        starts=tuple(start for _, start in sorted(kept.items())),
        divergences=divergences,
    )
