"""A run's summary: which communication call follows which, and which shardings DTensor computes.

Scenarios with different options may have the same summary, and scenarios that differ only in size may have different summaries.
Like branch coverage, the summary counts transitions between calls, without sizes, so that their number stays small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from equivcheck.worlds.call import Call
from equivcheck.worlds.ranks import Run

START, END = "start", "end"
AFTER = " > "
"""Separator between two calls."""


def signature(run: Run) -> tuple[str, ...]:
    """Summarize a run: list all pairs of consecutive collectives on any rank, and all shardings that DTensor computed.

    Examples: ``backward all_gather@2 > backward reduce_scatter.sum@2``, ``aten.mm.default (R,) (S(1),)``.
    """
    return tuple(sorted(run.shardings.union(*map(_transitions, run.calls))))


def _transitions(calls: Iterable[Call]) -> Iterator[str]:
    before = START
    for call in calls:
        now = f"{call.stage.value} {call.op}@{len(call.ranks)}"
        yield f"{before}{AFTER}{now}"
        before = now
    yield f"{before}{AFTER}{END}"
