"""The race: several campaigns, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.quality.selftest.jobs import Work, run_jobs
from equivcheck.quality.selftest.race.result import CampaignRun, Distance, Race

_SILENT_SECONDS = 600.0
"""A process is given up that is idle, or works, for so long without a word: no scenario takes as long with all mutants."""


def race(
    distance: Distance,
    *,
    seed: int = 0,
    num_campaigns: int = 2,
    num_workers: int = 1,
    listener: Callable[[CampaignRun, int], None] = lambda _run, _count: None,
) -> Race:
    """Run campaigns by consecutive seeds; the first SIGINT or SIGTERM ends it with what is known by then."""
    work: Work[int, CampaignRun] = Work(
        module="equivcheck.quality.selftest.race.campaign",
        effort=distance,
        blank=lambda one: CampaignRun(seed=one),
        limit=_SILENT_SECONDS,
    )
    found = run_jobs(range(seed, seed + num_campaigns), work, num_workers=num_workers, listener=listener)
    return Race(campaigns=found.results, distance=distance, interrupted=found.interrupted)
