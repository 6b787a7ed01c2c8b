"""What ranks did, told by the world rather than by options: which communication call follows which, and what DTensor works out.

Two scenarios without an option in common may do the same, and two that differ in a size alone may not. As of the branches of a
program, what is counted are steps from one call to the next, without sizes: there are few enough of them to be met again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from equivcheck.worlds.call import Call
from equivcheck.worlds.ranks import Run

START, END = "start", "end"
AFTER = " > "
"""Between two calls."""


def signature(run: Run) -> tuple[str, ...]:
    """All that some ranks did: ``backward all_gather@2 > backward reduce_scatter.sum@2``, ``aten.mm.default (R,) (S(1),)``."""
    return tuple(sorted(run.shardings.union(*map(_transitions, run.calls))))


def _transitions(calls: Iterable[Call]) -> Iterator[str]:
    before = START
    for call in calls:
        now = f"{call.stage.value} {call.op}@{len(call.ranks)}"
        yield f"{before}{AFTER}{now}"
        before = now
    yield f"{before}{AFTER}{END}"
