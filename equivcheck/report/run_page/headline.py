"""Headline and facts for a run's page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from equivcheck.campaign.history.past import PastRun
from equivcheck.campaign.history.run import Ended
from equivcheck.report.frame.headline import Headline
from equivcheck.scenario.scenario import count


def headline(past: PastRun, summary: Mapping[str, Any] | None, num_failing: int, num_shown: int) -> Headline:
    """Result in the order of exit codes: trouble with the run comes before its findings."""
    text = _trouble(past, summary)
    if num_failing:
        found = f"fails: {count(num_failing, 'finding')}"
        return Headline(text=f"{text}; {found}" if text else found, is_good=False)
    nothing = "nothing new" if num_shown else "nothing found"
    if past.ended is Ended.INTERRUPTED and not text:
        return Headline(text=f"{nothing}, stopped before its end", is_good=True)
    return Headline(text=text or nothing, is_good=not text)


def _trouble(past: PastRun, summary: Mapping[str, Any] | None) -> str:
    if past.ended is None:
        return "no result yet: the run was killed, or still goes on"
    if summary is None:
        return "the checker itself failed" if past.ended is Ended.BROKEN else ""
    if summary["broken"]:
        return f"the checker itself failed: {summary['broken'].splitlines()[0]}"
    if summary["unkept"]:
        return f"not all findings were kept: {summary['unkept']}"
    if summary["control"] is not None and not summary["control"]["caught"]:
        return "proves nothing: the control was not caught"
    return ""


def tiles(past: PastRun) -> Iterator[tuple[str, str]]:
    """Main figures, by name."""
    yield "checks", f"{past.checks:,}"
    yield "checks a second", f"{past.rate:.1f}"
    yield "pairs of features covered", f"{100 * past.share:.1f} %"
    yield "findings", f"{past.num_findings:,}"


def facts(past: PastRun, summary: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Known facts, by name."""
    run = past.run
    yield "began", moment(run.began)
    yield "took", f"{past.seconds:,.1f} s"
    yield "seed", str(run.seed)
    if run.shard:
        yield "shard", run.shard
    if summary is not None:
        yield "world", f"{summary['world']}, {count(summary['workers'], 'worker')}"
    yield "torch", f"{run.torch} ({run.torch_commit[:8]})" if run.torch_commit else run.torch
    yield "equivcheck", run.equivcheck
    if run.revision:
        yield "revision", run.revision[:12]
    yield "platform", run.platform
    yield "run", run.id


def moment(began: str) -> str:
    """``2026-01-31 12:00 UTC``."""
    return f"{began[:10]} {began[11:16]} UTC"
