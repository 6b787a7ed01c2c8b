"""Torch version matrix as a terminal table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table

from equivcheck.oracle.known_issues.known import KnownIssue
from equivcheck.oracle.known_issues.showing import Shows
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.quality.versions.matrix import Matrix, VersionResult
from equivcheck.worlds.pool import LOCAL_WORLDS

_REASON = 200
"""Longest printed reason, in characters."""


def print_matrix(console: Console, matrix: Matrix, issues: Iterable[KnownIssue]) -> None:
    """Print the results as a table with a line for each version, then all problems."""
    issues = tuple(issues)
    worlds = [f"doctor {world}" for world in LOCAL_WORLDS]
    table = Table("torch", *worlds, *(outcome.value for outcome in Outcome), "scripts", box=None, header_style="bold")
    for version, found in matrix.versions.items():
        table.add_row(version, *_cells(found, issues))
    console.print(table)
    for version, found in matrix.versions.items():
        for line in wrong_in(found, issues):
            console.print(f"torch {version}: {line}", soft_wrap=True)


def _cells(found: VersionResult, issues: tuple[KnownIssue, ...]) -> Iterator[str]:
    for world in LOCAL_WORLDS:
        probes = [probe for probe in found.probes if probe.world == world]
        yield f"{sum(probe.works for probe in probes)}/{len(probes)}"
    counts = found.counts()
    yield from (str(counts[outcome]) for outcome in Outcome)
    shown = sum(showing.shows is Shows.SHOWS for showing in found.scripts.values())
    expected = sum(issue.is_in(found.torch) for issue in issues if issue.id in found.scripts)
    yield f"{shown}/{expected}"


def wrong_in(found: VersionResult, issues: tuple[KnownIssue, ...]) -> Iterator[str]:
    """Yield a line for each problem on a version: failed probes, findings, and scripts with unexpected results."""
    for probe in found.probes:
        if not probe.works:
            yield f"doctor {probe.world} {probe.subject}: {probe.reason[:_REASON]}"
    reasons = Counter((one.outcome.value, one.reason[:_REASON]) for one in found.corpus if one.outcome.is_finding)
    for (outcome, reason), count in reasons.most_common():
        yield f"{count} {outcome}: {reason}"
    ranges = {issue.id: issue.torch for issue in issues}
    for issue, showing in found.disagreements(issues).items():
        yield f"script {issue}: {showing}, but the known issue is listed for torch {ranges[issue]}"
