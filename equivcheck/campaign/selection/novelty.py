"""Selection of the drawn scenarios that are worth a check."""

from __future__ import annotations

import math
from collections import deque

from equivcheck.campaign.coverage.reach import Reach, shipped
from equivcheck.campaign.coverage.triples import Triples
from equivcheck.campaign.selection.expected_cost import expected_cost
from equivcheck.campaign.selection.time_budget import COMPILED_SHARE, TRACED_SHARE, TimeBudget
from equivcheck.layouts.base.execution.compile_time import START_SECONDS, expected_compile_seconds, expected_trace_seconds
from equivcheck.scenario import Scenario

FIRST_WINDOW, WINDOW, CHECKS_FOR_ONE_MORE = 4, 10, 60
"""Scenarios drawn per check: four at first, when nearly everything is new, then one more after each 60 checks, up to ten. Then
drawing takes as long as a cheap check."""
WINDOW_OF_COMPILED = 4
"""Compiled scenarios drawn per check. They cost hundreds of others, and each would bring something new."""
WORTH_OF_A_PAIR = 200
"""New triples that count as much as one new pair."""
REGARDLESS_OF_COST_ONE_IN = 60
"""One in so many checks ignores the cost: it has the largest gain."""
_REMEMBERED = 100_000
"""Scenarios after which the set of checked ones is cleared: some megabytes."""


class Selection:
    """Wants scenarios that are new, fit into the time budget, and were not checked before."""

    def __init__(self, seconds: float) -> None:
        self._budgets = (
            TimeBudget(COMPILED_SHARE * seconds, expected_compile_seconds, start=START_SECONDS),
            TimeBudget(TRACED_SHARE * seconds, expected_trace_seconds),
        )
        self._novelty = Novelty()
        self._checked: set[int] = set()

    def wants(self, scenario: Scenario, *, may_be_known: bool = False) -> bool:
        """Decide whether to check a scenario. If so, it counts as checked.

        Hypothesis draws one scenario in several ways, and begins each batch with simple ones.
        """
        mark = hash(scenario)
        if mark in self._checked or not all(budget.allows(scenario) for budget in self._budgets):
            return False
        if not self._novelty.wants(scenario, may_be_known=may_be_known):
            return False
        if len(self._checked) >= _REMEMBERED:
            self._checked.clear()
        self._checked.add(mark)
        for budget in self._budgets:
            budget.spend(scenario)
        return True


class Novelty:
    """Wants the scenario with the largest new part for its cost, compared with recent ones in its group.

    New feature pairs and triples count relative to all that the scenario has. Their number alone would prefer models over
    sequences, because these have the most features and cost twice as much. If no scenario brings anything new, all are wanted.
    Compiled scenarios, traced ones, and those with possible known issues are separate groups, because few of them should be
    checked.
    """

    def __init__(self) -> None:
        self._reach, self._triples = Reach(), Triples()
        self._recent: dict[tuple[bool, bool, bool], deque[tuple[float, float]]] = {}
        self._num_wanted = 0

    def wants(self, scenario: Scenario, *, may_be_known: bool = False) -> bool:
        """Decide whether to check a scenario. If so, it counts as checked."""
        (compiles, traces), gains = _compiles_or_traces(scenario), self._gains(scenario)
        kind, window = (compiles, traces, may_be_known), WINDOW_OF_COMPILED if compiles else self._window
        before = tuple(self._recent.setdefault(kind, deque(maxlen=WINDOW - 1)))[1 - window :]
        measure = self._num_wanted % REGARDLESS_OF_COST_ONE_IN != 0
        wanted = gains[measure] >= max((each[measure] for each in before), default=0.0)
        self._recent[kind].append(gains)
        if wanted:
            self._num_wanted += 1
            self._reach.add(scenario)
            self._triples.add(scenario)
        return wanted

    @property
    def _window(self) -> int:
        return min(WINDOW, FIRST_WINDOW + self._num_wanted // CHECKS_FOR_ONE_MORE)

    def _gains(self, scenario: Scenario) -> tuple[float, float]:
        """A scenario's gain, and its share of new features divided by its cost."""
        gain = _worth(self._reach.gain(scenario) / 2, self._triples.gain(scenario))
        count = len(shipped(scenario)[0])
        return gain, gain / _worth(math.comb(count, 2), math.comb(count, 3)) / expected_cost(scenario)


def _worth(num_pairs: float, num_triples: int) -> float:
    return WORTH_OF_A_PAIR * num_pairs + num_triples


def _compiles_or_traces(scenario: Scenario) -> tuple[bool, bool]:
    executions = [layout.execution for layout in scenario.layouts]
    return any(execution.is_compiled for execution in executions), any(execution.whole_step for execution in executions)
