"""Sources of training batches: all layouts, scenarios beyond torch's limits, and single layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, cycle
from random import Random
from typing import Any

from hypothesis.strategies import SearchStrategy

from equivcheck.campaign.plan import Plan
from equivcheck.layouts.composition.registry import layout_names

_CYCLE = 10
"""Batches after which the cycle repeats."""
_BEYOND = frozenset((2,))
"""Positions in a cycle, from 0, at which batches ignore torch's limits. One comes early because a short run has few batches, but
after half a minute with supported scenarios."""
_FOCUSED = frozenset((3, 5, 8))
"""Positions in a cycle at which batches draw from one layout. If all layouts are drawn together, four features of one layout
rarely meet."""
_STAY = 10
"""Consecutive focused batches with one layout: some hundreds of checks, as many as a short campaign with only that layout has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Source for a batch."""

    strategy: SearchStrategy[Any]
    """Strategy for its cases."""
    beyond: bool = False
    """Whether the check ignores torch's limits."""
    focus: str = ""
    """The only layout; empty for all."""


def sources(plan: Plan, worker: int) -> Iterator[Source]:
    """Yield the sources of a worker's batches, without end. Each worker starts with another layout."""
    assert plan.strategy is not None
    usual = plan.strategy(plan)
    beyond = usual if plan.frontier is None else plan.frontier(plan)
    focused = _focused(plan, worker)
    for number in count():
        place = number % _CYCLE
        if place in _BEYOND and plan.frontier is not None:
            yield Source(strategy=beyond, beyond=True)
        elif place in _FOCUSED and focused is not None:
            yield next(focused)
        else:
            yield Source(strategy=usual)


def _focused(plan: Plan, worker: int) -> Iterator[Source] | None:
    """Cycle through the layouts in an order that the seed decides; None if there is only one."""
    names = list(plan.layouts or layout_names())
    if len(names) == 1:
        return None
    Random(plan.seed).shuffle(names)
    first = worker * len(names) // plan.num_workers % len(names)
    return cycle([source for name in (*names[first:], *names[:first]) for source in [_source(plan, name)] * _STAY])


def _source(plan: Plan, name: str) -> Source:
    assert plan.strategy is not None
    return Source(strategy=plan.strategy(replace(plan, layouts=(name,))), focus=name)
