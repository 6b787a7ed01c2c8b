"""Ranks that wait in vain, because others went on without what they had refused: these are what is wrong."""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.programs.run.rank import REFUSED
from equivcheck.worlds.failure import Failure, RanksFailed, RankState


def refused_by_some(run: Callable[[frozenset[str]], object], hung: Failure) -> Failure:
    """How ranks fail if a refusal ends them, unless all ranks have it: that of a rank that refuses alone; else what it was.

    `run` takes the beginnings of the refusals that do not end a rank, and raises `RanksFailed`.
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
    """Which statement it was that a rank refused; empty where it raised something else."""
    return error.partition(REFUSED)[2].partition(":")[0]
