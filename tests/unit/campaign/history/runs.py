"""Runs of a history, one after the other."""

from __future__ import annotations

from equivcheck.campaign.findings.fate import Recheck
from equivcheck.campaign.history.history import History
from equivcheck.campaign.history.run import Ended, Mode, Run
from unit.campaign import fakes

MARK = "0123456789ab"


def run(number: int, *, mode: Mode = Mode.NIGHTLY, shard: str = "") -> Run:
    """The run of one night."""
    return Run(
        id=f"run {number}",
        began=f"{2030 + number}-01-01T00:00:00.000000+00:00",
        seed=number,
        mode=mode,
        shard=shard,
        torch=f"2.{number}.0",
        torch_commit="c0ffee",
        equivcheck="1.0",
        revision="beef",
        platform="Linux",
    )


def nights(history: History, *seen: Recheck | None, mark: str = MARK) -> None:
    """Runs that saw a finding so, or did not tell of it."""
    for number, again in enumerate(seen):
        history.begin(run(number))
        if again is not None:
            history.see(run(number), mark, fakes.diverged(fakes.scenario()), again)
        history.end(run(number), Ended.FINISHED)
