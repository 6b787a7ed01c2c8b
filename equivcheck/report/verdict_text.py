"""One verdict, for people."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from equivcheck.oracle.verdict import Verdict
from equivcheck.report.tables import STYLES
from equivcheck.report.words import in_words


def print_verdict(console: Console, verdict: Verdict) -> None:
    """Outcome, scenario in words, evidence; of something new and wrong also the scenario as code."""
    title = Text.assemble((verdict.outcome.value.upper(), f"bold {STYLES[verdict.outcome]}"), f" {in_words(verdict.scenario)}, ")
    title.append(f"in {verdict.world}, {verdict.seconds * 1000:.0f} ms")
    console.print(title, soft_wrap=True)
    for line in _evidence(verdict):
        console.print(Text(line), soft_wrap=True)


def _evidence(verdict: Verdict) -> list[str]:
    lines = [verdict.reason] if verdict.reason else []
    if verdict.known:
        lines.append(f"on file as {verdict.known}")
    if not verdict.reason:
        lines.append(f"the largest error is {verdict.worst_error:.2g} of its tolerance")
    if verdict.followers:
        lines.append("also differing: " + "; ".join(verdict.followers))
    if verdict.confirmed:
        lines.append(verdict.confirmed)
    if verdict.failure is not None:
        lines += [
            f"  rank {report.rank} {report.state.value} {report.error or report.pending}" for report in verdict.failure.reports
        ]
    return [*lines, repr(verdict.scenario)] if verdict.outcome.is_finding else lines
