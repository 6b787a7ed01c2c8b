"""Holding what the ranks told each other against what was foreseen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from equivcheck.composition.expected_calls import predicted
from equivcheck.layouts.expected_calls.communication import Key, described, order_of, totals
from equivcheck.scenario import Scenario
from equivcheck.trace.differences import Difference, Divergence, Phase
from equivcheck.trace.stage import Stage
from equivcheck.worlds.call import Call
from equivcheck.worlds.ranks import Run

NO_CALLS = (0, 0)
"""Calls and bytes where there are none."""
_NOT_FORESEEN = (Stage.SETUP, Stage.READING)
"""Stages that are no part of the training's steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallComparison:
    """How a run's calls compare with what was foreseen."""

    divergences: tuple[Divergence, ...] = ()
    """Each kind of calls that differs, at the first rank where it does, in the order of steps and stages."""
    unforeseen: str = ""
    """Why nothing was compared; empty where it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDifference:
    """Calls of one kind, over one group in one stage of a step, that a rank did not issue as was foreseen."""

    key: Key
    """Step, stage, op and axes."""
    rank: int
    """Which rank."""
    expected: tuple[int, int]
    """Calls and bytes foreseen."""
    actual: tuple[int, int]
    """Those that it issued."""

    @property
    def calls(self) -> str:
        """Which calls: ``all_gather over dp``."""
        _, _, op, axes = self.key
        return f"{op} over {axes or 'one rank'}"

    def as_divergence(self) -> Divergence:
        """As part of a verdict."""
        step, stage, _, _ = self.key
        return Divergence(
            step=step,
            phase=Phase.COMMUNICATION,
            tensor=f"{self.calls} in {stage.value}",
            difference=Difference.BYTES if self.expected[0] == self.actual[0] else Difference.CALLS,
            rank=self.rank,
            expected=described(*self.expected),
            actual=described(*self.actual),
            error=float("inf"),
        )


def compare_calls(scenario: Scenario, world: str, run: Run) -> CallComparison:
    """Compare the calls of each rank with what was foreseen for it."""
    if not run.calls:
        return CallComparison(unforeseen=f"world {world} does not see calls")
    reason = predicted(scenario.training, scenario.layout).reason
    if reason:
        return CallComparison(unforeseen=reason)
    found: dict[Key, CallDifference] = {}
    for rank, calls in enumerate(run.calls):
        for difference in differing_calls(scenario, rank, calls):
            found.setdefault(difference.key, difference)
    return CallComparison(divergences=tuple(found[key].as_divergence() for key in sorted(found, key=order_of)))


def differing_calls(scenario: Scenario, rank: int, calls: Iterable[Call]) -> list[CallDifference]:
    """Where the calls of a rank in the steps are not those that were foreseen for it, in the order of steps and stages."""
    training, layout = scenario.training, scenario.layout
    expected, actual = predicted(training, layout, rank).totals, totals(calls, layout.mesh, without=_NOT_FORESEEN)
    if expected == actual:
        return []
    return [
        CallDifference(key=key, rank=rank, expected=expected.get(key, NO_CALLS), actual=actual.get(key, NO_CALLS))
        for key in sorted(expected.keys() | actual.keys(), key=order_of)
        if expected.get(key) != actual.get(key)
    ]
