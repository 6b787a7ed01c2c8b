"""Selects drawn scenarios that are worth a check, by cost, time budget and new features."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from equivcheck.campaign.coverage.reach import Reach, Triples, shipped_features
from equivcheck.layouts.base.execution.compile_time import START_SECONDS, expected_compile_seconds, expected_trace_seconds
from equivcheck.scenario import FSDP1, FSDP2, SPMD, LocalTensorParallel, Replicate, Scenario, TensorParallel

COMPILED_SHARE = 0.15
"""Largest share of a worker's expected time for compiled scenarios."""
TRACED_SHARE = 0.1
"""Largest share for traced steps. Without this share, 5 % of the drawn scenarios took a third of the time."""


class TimeBudget:
    """A time budget for one kind of scenario, such as compiled ones."""

    def __init__(self, seconds: float, expected: Callable[[Scenario], float], *, start: float = 0.0) -> None:
        """The first scenario also costs `start` seconds."""
        self._left, self._expected = seconds - start, expected

    def allows(self, scenario: Scenario) -> bool:
        """Whether enough time is left for the scenario's expected duration. Always True if this duration is 0."""
        expected = self._expected(scenario)
        return expected == 0.0 or expected <= self._left

    def spend(self, scenario: Scenario) -> None:
        """Subtract the scenario's expected duration. A measured duration would depend on the machine's load."""
        self._left -= self._expected(scenario)


_COST = {FSDP1: 1.4, Replicate: 1.5, FSDP2: 2.3, LocalTensorParallel: 1.25, TensorParallel: 2.5, SPMD: 5.0}
"""Cost factors, relative to DDP."""
_COST_OF_SEQUENCES = 2.0
"""Cost factor for models over sequences."""
_GROWTH = 0.6
"""Exponent of the cost's growth with work. It is below 1 because setup costs do not grow."""


def expected_cost(scenario: Scenario) -> float:
    """Return the CPU time expected for a check. The time for compiling and tracing is not included.

    The unit, about 6 ms, is one layer's cost on one rank, for one step with one microbatch under DDP. The formula was fitted to
    4,000 drawn scenarios, and explains 78 % of the variance in log CPU time. A campaign does not fit it again, because the same
    seed would then give other checks.
    """
    training = scenario.training
    work = training.steps * len(training.data.microbatches) * len(training.model.layers)
    cost = work**_GROWTH * (1.0 if training.model.length is None else _COST_OF_SEQUENCES)
    layouts = (
        layout.mesh.num_ranks**_GROWTH * math.prod(factor for kind, factor in _COST.items() if layout.has(kind))
        for layout in scenario.layouts
    )
    return float(sum(layouts) * cost)


FIRST_WINDOW, WINDOW, CHECKS_FOR_ONE_MORE = 4, 10, 60
"""Scenarios drawn per check: four at first, when nearly everything is new, then one more after each 60 checks, up to ten. Then
drawing takes as long as a cheap check."""
WINDOW_OF_COMPILED = 4
"""Compiled scenarios drawn per check. One costs as much as hundreds of other scenarios, and each would bring something new."""
WORTH_OF_A_PAIR = 200
"""How many new triples count as much as one new pair."""
REGARDLESS_OF_COST_ONE_IN = 60
"""One check in this many ignores the cost: it takes the scenario with the most new features."""
_REMEMBERED = 100_000
"""Scenarios after which the set of checked scenarios is cleared, because it takes some megabytes."""


class Selection:
    """Chooses scenarios with new features. They must fit into the time budget, and must not have been checked before."""

    def __init__(self, seconds: float) -> None:
        self._budgets = (
            TimeBudget(COMPILED_SHARE * seconds, expected_compile_seconds, start=START_SECONDS),
            TimeBudget(TRACED_SHARE * seconds, expected_trace_seconds),
        )
        self._novelty = Novelty()
        self._checked: set[int] = set()

    def wants(self, scenario: Scenario, *, may_be_known: bool = False) -> bool:
        """Return whether to check a scenario, and remember it if so.

        `may_be_known` says whether the scenario could show a known issue. Scenarios are remembered because Hypothesis draws some
        of them again, such as the simple ones at the start of each batch.
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
    """Chooses a scenario if no recent scenario of the same kind had more new features for its cost.

    Compiled scenarios, traced ones, and those with possible known issues are separate kinds, because only few such scenarios
    should be checked. New feature pairs and triples count relative to all pairs and triples in the scenario. Without this, models
    over sequences would be preferred, because these have the most features and cost twice as much. If no scenario brings anything
    new, every scenario is chosen.
    """

    def __init__(self) -> None:
        self._reach, self._triples = Reach(), Triples()
        self._recent: dict[tuple[bool, bool, bool], deque[tuple[float, float]]] = {}
        self._num_wanted = 0

    def wants(self, scenario: Scenario, *, may_be_known: bool = False) -> bool:
        """Return whether to check a scenario, and count its features if so.

        `may_be_known` says whether the scenario could show a known issue.
        """
        executions, gains = [layout.execution for layout in scenario.layouts], self._gains(scenario)
        compiles, traces = any(each.is_compiled for each in executions), any(each.whole_step for each in executions)
        window = WINDOW_OF_COMPILED if compiles else min(WINDOW, FIRST_WINDOW + self._num_wanted // CHECKS_FOR_ONE_MORE)
        kind = compiles, traces, may_be_known
        before = tuple(self._recent.setdefault(kind, deque(maxlen=WINDOW - 1)))[1 - window :]
        measure = self._num_wanted % REGARDLESS_OF_COST_ONE_IN != 0
        wanted = gains[measure] >= max((each[measure] for each in before), default=0.0)
        self._recent[kind].append(gains)
        if wanted:
            self._num_wanted += 1
            self._reach.add(scenario)
            self._triples.add(scenario)
        return wanted

    def _gains(self, scenario: Scenario) -> tuple[float, float]:
        """Return a scenario's gain in new pairs and triples, and its share of new pairs and triples divided by its cost."""
        gain = _worth(self._reach.gain(scenario) / 2, self._triples.gain(scenario))
        count = len(shipped_features(scenario)[0])
        return gain, gain / _worth(math.comb(count, 2), math.comb(count, 3)) / expected_cost(scenario)


def _worth(num_pairs: float, num_triples: int) -> float:
    return WORTH_OF_A_PAIR * num_pairs + num_triples
