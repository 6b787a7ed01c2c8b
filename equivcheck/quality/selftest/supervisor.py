"""Selftest over several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from equivcheck.mutants.mutant import Mutant
from equivcheck.mutants.registry import mutant
from equivcheck.quality.selftest.examine import Effort, examine
from equivcheck.quality.selftest.jobs import JobPlan, run_jobs, serve
from equivcheck.quality.selftest.result import MutantResult, SelftestResult

_GRACE_SECONDS = 120.0
"""Seconds for imports and the diagnosis, in addition to drawing and shrinking."""

Listener = Callable[[MutantResult, int], None]
"""Function that gets each mutant's complete result, and how many are complete so far."""


def selftest(
    mutants: Sequence[Mutant], effort: Effort, *, num_workers: int = 1, listener: Listener = lambda _row, _count: None
) -> SelftestResult:
    """Examine mutants on `num_workers` processes, each within the budget `effort`. `listener` gets each complete result.

    The first SIGINT or SIGTERM ends the selftest with the results so far, the second raises `KeyboardInterrupt`.
    """
    by_name = {mutant.name: mutant for mutant in mutants}
    work: JobPlan[str, MutantResult] = JobPlan(
        module=__name__,
        effort=effort,
        blank=lambda name: MutantResult.of(by_name[name]),
        limit=effort.seconds + effort.shrink_seconds + _GRACE_SECONDS,
    )
    found = run_jobs(tuple(by_name), work, num_workers=num_workers, listener=listener)
    return SelftestResult(
        rows=found.results, asked=len(mutants), seed=effort.seed, seconds=found.seconds, interrupted=found.interrupted
    )


def main(fd: int) -> None:
    """Examine mutants for the supervisor at the other end of `fd`, a file descriptor."""
    serve(fd, lambda name, effort, tell: examine(mutant(name), effort, tell), lambda name: MutantResult.of(mutant(name)))
