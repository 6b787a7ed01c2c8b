"""Explains hangs: some ranks refuse an operation and skip its collective, while others wait in it."""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.programs.run.rank import REFUSED
from equivcheck.worlds.failure import Failure, RanksFailed, RankState


def refused_by_some(run: Callable[[frozenset[str]], object], hung: Failure) -> Failure:
    """Let refusals raise, and return the failure of a rank that refuses what others do not; else return `hung`.

    `run` takes the statements whose refusal does not end a rank, and raises `RanksFailed`. It is called again as long as all
    ranks refuse the same statement.
    """
    allowed: frozenset[str] = frozenset()
    while hung.hung and all(report.state is not RankState.RUNNING for report in hung.reports):
        try:
            run(allowed)
        except RanksFailed as error:
            refused = {_place(report.error) for report in error.failure.reports if report.state is RankState.RAISED}
            if not refused or "" in refused:
                break
            if len(refused) > 1 or any(report.state is not RankState.RAISED for report in error.failure.reports):
                return error.failure
            allowed |= refused
        else:
            break
    return hung


def _place(error: str) -> str:
    """The refused statement; empty if the error is no refusal."""
    return error.partition(REFUSED)[2].partition(":")[0]
