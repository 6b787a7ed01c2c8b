"""Writes the page about a campaign, from the history and the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2

from equivcheck.campaign.history.history import History, HistoryFailed
from equivcheck.campaign.history.past import Noted, PastRun, find_run, past_runs, run_details
from equivcheck.campaign.history.run import Ended
from equivcheck.campaign.history.standing import fails, records, records_decided_by
from equivcheck.oracle.known_issues.known import all_known_issues
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.report.frame import charts
from equivcheck.report.frame.templates import Headline, render
from equivcheck.report.run_page.findings import shown_findings
from equivcheck.report.run_page.tables import all_layouts, layout_rows, pair_rows
from equivcheck.report.standing_text import where_seen
from equivcheck.scenario.scenario import count
from equivcheck.system.files import replace_text


def headline(past: PastRun, summary: Mapping[str, Any] | None, num_failing: int, num_shown: int) -> Headline:
    """Return a campaign's result as a headline.

    A problem with the campaign itself comes first, then the number of findings that make the campaign fail.
    """
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
    """Yield a campaign's most important numbers as pairs (name, value)."""
    yield "checks", f"{past.checks:,}"
    yield "checks a second", f"{past.rate:.1f}"
    yield "pairs of features covered", f"{100 * past.share:.1f} %"
    yield "findings", f"{past.num_findings:,}"


def facts(past: PastRun, summary: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Yield name and text for each fact about a campaign, such as its seed or its torch version."""
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
    """Format a time, such as ``2026-01-31 12:00 UTC``."""
    return f"{began[:10]} {began[11:16]} UTC"


_NUM_EARLIER = 20
"""Number of runs in the last table, including this run."""


def write_page(file: Path, store: Path, run: str = "") -> PastRun:
    """Write the HTML page about a campaign, and return the campaign. It is the last one, or the one whose id begins with `run`.

    Raises `UsageError` if there is no such campaign, and `HistoryFailed` if the history cannot be read.
    """
    history = History(store)
    past = find_run(history, run)
    replace_text(file, _page(store, history, past))
    return past


def _page(store: Path, history: History, past: PastRun) -> str:
    try:
        return render("run_page/run.html.jinja", **_values(store, history, past))
    except (LookupError, TypeError, ValueError, AttributeError, jinja2.UndefinedError) as error:
        wrong = f"{type(error).__name__}: {error}"
        raise HistoryFailed(
            f"the history {history.path} has a summary of run {past.run.id} that cannot be read: {wrong}"
        ) from error


def _values(store: Path, history: History, past: PastRun) -> dict[str, Any]:
    left = run_details(history, past.run)
    decided = records_decided_by(past.run, records(history, past.run.began))
    found = shown_findings(store, past.run, decided, _unkept(left.summary))
    num_failing = sum(fails(past.run, record) for record in decided)
    layouts = layout_rows(left)
    return {
        "past": past,
        "title": f"equivcheck fuzz: {past.run.mode.value} run of {moment(past.run.began)}",
        "headline": headline(past, left.summary, num_failing, sum(record.standing.shows for record in decided)),
        "tiles": list(tiles(past)),
        "facts": list(facts(past, left.summary)),
        "footer": f"equivcheck {past.run.equivcheck}. The store is {store}.",
        "moment": moment,
        "count": count,
        "where": where_seen,
        "summary": left.summary,
        "nodes": left.summary.get("nodes", []) if left.summary else [],
        "found": found,
        "outcomes": [outcome for outcome in Outcome if any(row.outcomes[outcome] for row in layouts)],
        "layouts": layouts,
        "all_layouts": all_layouts(layouts),
        "chart": charts,
        "earlier": [each for each, _ in zip(past_runs(history, past.run.began), range(_NUM_EARLIER), strict=False)],
        **_charts(past, left),
    }


def _unkept(summary: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return scenarios by fingerprint, for findings that no store has."""
    findings = summary["findings"] if summary else []
    return {found["fingerprint"]: found["verdict"]["scenario"] for found in findings if found["verdict"]}


def _charts(past: PastRun, left: Noted) -> dict[str, Any]:
    checks = [(seconds, float(checks)) for seconds, checks, _ in left.progress]
    shares = [(seconds, 100 * pairs / max(1, past.of_pairs)) for seconds, _, pairs in left.progress]
    summary = left.summary
    return {
        "checks": charts.line(checks) if checks else None,
        "coverage": charts.line(shares, most=100.0, unit=" %") if shares else None,
        "errors": charts.error_bars(summary["errors"]["sizes"]) if summary and summary["errors"]["sizes"] else None,
        "pairs": pair_rows(summary["pairs"]["parts"]) if summary else [],
        "links": {issue.id: issue.link or f"not reported: {issue.title}" for issue in all_known_issues()},
    }
