"""Which of the scenarios that a worker draws are worth its time."""

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
"""Scenarios drawn for each that is checked, about, as long as there are triples of features that have not come together: few at
first, when nearly everything is new; later more, one for every so many checks, and then drawing takes as long as a check of
what is cheap."""
WINDOW_OF_COMPILED = 4
"""The same for those that are compiled, which cost hundreds of others, and would always bring something new."""
WORTH_OF_A_PAIR = 200
"""How many new triples of features one new pair is worth: pairs first."""
REGARDLESS_OF_COST_ONE_IN = 60
"""Of so many that are checked one brings the most of all drawn before it, whatever it costs."""
_REMEMBERED = 100_000
"""Scenarios after which what was checked is forgotten: some megabytes."""


class Selection:
    """Wants what was not checked before, what there is time for, and what brings something new."""

    def __init__(self, seconds: float) -> None:
        self._budgets = (
            TimeBudget(COMPILED_SHARE * seconds, expected_compile_seconds, start=START_SECONDS),
            TimeBudget(TRACED_SHARE * seconds, expected_trace_seconds),
        )
        self._novelty = Novelty()
        self._checked: set[int] = set()

    def wants(self, scenario: Scenario, *, may_be_known: bool = False) -> bool:
        """Whether to check a scenario, which may end as a known issue or not; if so it counts as checked.

        Hypothesis draws one scenario in several ways, and starts every batch simple.
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
    """Wants a scenario of which, for what it costs, as large a part is new as of any of its kind drawn just before it.

    New are pairs and triples of features. It is their part that counts and not their number, which would choose what has the
    most features: models over sequences, of which one costs twice as much. When nothing brings any it wants every scenario: none
    is left out for good. Compiled scenarios, and those whose steps are traced, are kinds of their own, so that they are not
    checked much more often than they are drawn; and so are those that may end as a known issue, as there are to be few of them.
    """

    def __init__(self) -> None:
        self._reach, self._triples = Reach(), Triples()
        self._recent: dict[tuple[bool, bool, bool], deque[tuple[float, float]]] = {}
        self._num_wanted = 0

    def wants(self, scenario: Scenario, *, may_be_known: bool = False) -> bool:
        """Whether to check a scenario, which may end as a known issue or not; if so it counts as checked."""
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
        """What it brings, and what part of it that is, for what it costs."""
        gain = _worth(self._reach.gain(scenario) / 2, self._triples.gain(scenario))
        count = len(shipped(scenario)[0])
        return gain, gain / _worth(math.comb(count, 2), math.comb(count, 3)) / expected_cost(scenario)


def _worth(num_pairs: float, num_triples: int) -> float:
    return WORTH_OF_A_PAIR * num_pairs + num_triples


def _compiles_or_traces(scenario: Scenario) -> tuple[bool, bool]:
    """Whether any of its layouts compiles, and whether any traces steps."""
    executions = [layout.execution for layout in scenario.layouts]
    return any(execution.is_compiled for execution in executions), any(execution.whole_step for execution in executions)
