"""Builds a `Failure` from answers and reports of ranks on several hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from equivcheck.worlds.failure import Failure, RankReport, RankState
from equivcheck.worlds.gloo.answer import Content
from equivcheck.worlds.gloo.failures import failure_of, raised_report

Answers = dict[int, bytes | None]
"""Answer of each rank; None if the rank was lost, and missing if it is still busy."""

LOST_TEXT = "was lost: its process has ended (see torchrun's output) or its host is gone"
"""Error text of a rank whose connection has ended."""


def failure_of_hosts(
    answers: Answers, contents: Mapping[int, Content], busy: Mapping[int, RankReport], why: str, hosts: Mapping[int, str]
) -> Failure:
    """Failure for the whole run.

    `busy` holds reports of ranks without an answer; `why` is the reason for which they were given up.
    """
    reports = [_report(rank, answers, contents.get(rank), busy.get(rank)) for rank in sorted(hosts)]
    times = {rank: place for place, rank in enumerate(answers)}  # clocks of hosts differ: in the order in which answers came
    failure = failure_of(reports, times, why)
    return replace(failure, summary=f"{failure.summary} ({_where(failure, hosts)})")


def _report(rank: int, answers: Answers, said: Content | None, busy: RankReport | None) -> RankReport:
    if said is not None and said.raised is not None:
        return raised_report(rank, said.raised)
    if said is not None:
        return RankReport(rank=rank, state=RankState.FINISHED)
    if rank in answers:
        return RankReport(rank=rank, state=RankState.DIED, error=LOST_TEXT)
    return busy or RankReport(rank=rank, state=RankState.RUNNING)


def _where(failure: Failure, hosts: Mapping[int, str]) -> str:
    """Host with the first failed rank, or all hosts."""
    if failure.first is not None:
        return f"on host {hosts[failure.first]}"
    names = dict.fromkeys(hosts.values())
    return "; ".join(f"on host {name}: {', '.join(str(rank) for rank in hosts if hosts[rank] == name)}" for name in names)
