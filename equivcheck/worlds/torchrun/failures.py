"""Makes a `Failure` of what ranks on several hosts said, and of where those were that said nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from equivcheck.worlds.failure import Failure, RankReport, RankState
from equivcheck.worlds.gloo.answer import Content
from equivcheck.worlds.gloo.failures import failure_of, raised

Answers = dict[int, bytes | None]
"""What each rank answered, None when it was lost instead; a rank that is still busy is missing."""

LOST_TEXT = "was lost: its process has ended, which torchrun tells more of, or its host is gone"
"""What is known of a rank whose connection has ended."""


def failure_of_hosts(
    answers: Answers, contents: Mapping[int, Content], busy: Mapping[int, RankReport], why: str, hosts: Mapping[int, str]
) -> Failure:
    """The verdict over all ranks; `busy` has reports of those that did not answer, `why` is what they were given up for."""
    reports = [_report(rank, answers, contents.get(rank), busy.get(rank)) for rank in sorted(hosts)]
    times = {rank: place for place, rank in enumerate(answers)}  # clocks of hosts differ: in the order in which answers came
    failure = failure_of(reports, times, why)
    return replace(failure, summary=f"{failure.summary} ({_where(failure, hosts)})")


def _report(rank: int, answers: Answers, said: Content | None, busy: RankReport | None) -> RankReport:
    if said is not None and said.raised is not None:
        return raised(rank, said.raised)
    if said is not None:
        return RankReport(rank=rank, state=RankState.FINISHED)
    if rank in answers:
        return RankReport(rank=rank, state=RankState.DIED, error=LOST_TEXT)
    return busy or RankReport(rank=rank, state=RankState.RUNNING)


def _where(failure: Failure, hosts: Mapping[int, str]) -> str:
    """The host of the rank that failed first, or of all."""
    if failure.first is not None:
        return f"on host {hosts[failure.first]}"
    names = dict.fromkeys(hosts.values())
    return "; ".join(f"on host {name}: {', '.join(str(rank) for rank in hosts if hosts[rank] == name)}" for name in names)
