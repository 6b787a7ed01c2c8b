"""Test for an effect of a mutant on a scenario's ranks."""

from __future__ import annotations

from collections.abc import Sequence

from equivcheck.layouts.composition.running import RanksResult, Runner
from equivcheck.mutants.mutant import Mutant
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Scenario
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.trace.moments import Moment, moments
from equivcheck.worlds.trace.trace import Trace


def is_reached(scenario: Scenario, mutant: Mutant, deadline: float) -> bool:
    """Whether the mutant changes any bit in any rank's trace, or only its ranks fail.

    If the mutant changes only communication, changed calls count too.
    """
    try:
        honest = Runner(world="sim", deadline=deadline).run(scenario)
    except RanksFailed:
        return False
    try:
        wrong = Runner(world="sim", deadline=deadline, alter=mutant.plant).run(scenario)
    except RanksFailed:
        return True
    if Cause.COMMUNICATION in mutant.causes and honest.run.calls != wrong.run.calls:
        return True
    return not _alike(_traces(honest), _traces(wrong))


def _traces(result: RanksResult) -> tuple[Trace, ...]:
    return (*result.before, *result.run.values)


def _alike(first: Sequence[Trace], second: Sequence[Trace]) -> bool:
    left, right = _moments(first), _moments(second)
    return len(left) == len(right) and all(map(_same_bits, left, right))


def _moments(traces: Sequence[Trace]) -> list[Moment]:
    return [moment for trace in traces for moment in moments(trace)]


def _same_bits(one: Moment, other: Moment) -> bool:
    first, second = one.snapshot, other.snapshot
    shapes = (first.pieces, first.present, first.fits, first.dtypes) == (
        second.pieces,
        second.present,
        second.fits,
        second.dtypes,
    )
    return shapes and first.values.tobytes() == second.values.tobytes()
