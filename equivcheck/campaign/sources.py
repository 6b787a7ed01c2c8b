"""What the batches of trainings are drawn from: all layouts, what is beyond limits of torch, and at times one layout alone."""

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
"""Batches after which the kinds of batches come again."""
_BEYOND = frozenset((2,))
"""Of these batches the numbers, from 0, that are drawn beyond limits of torch: early, as a short run has few, but not before what
torch supports has been drawn for half a minute."""
_FOCUSED = frozenset((3, 5, 8))
"""Those that have one layout alone. Where all are drawn together, what takes four features of one at once is met seldom."""
_STAY = 10
"""For so many of them it is the same layout, some hundreds of checks: as many as a short campaign of that layout has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a batch is drawn from."""

    strategy: SearchStrategy[Any]
    """Its cases."""
    beyond: bool = False
    """Whether limits of torch do not count."""
    focus: str = ""
    """Name of the layout that all of them have; empty for any."""


def sources(plan: Plan, worker: int) -> Iterator[Source]:
    """The sources of a worker's batches, by its number, without an end: workers go through the layouts from different ones on."""
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
    """One layout after the other, each for a while, in an order that the seed decides; None where there is but one."""
    names = list(plan.layouts or layout_names())
    if len(names) == 1:
        return None
    Random(plan.seed).shuffle(names)
    first = worker * len(names) // plan.num_workers % len(names)
    return cycle([source for name in (*names[first:], *names[:first]) for source in [_source(plan, name)] * _STAY])


def _source(plan: Plan, name: str) -> Source:
    assert plan.strategy is not None
    return Source(strategy=plan.strategy(replace(plan, layouts=(name,))), focus=name)
