"""A campaign's long summary: layouts, known problems, measurements and findings."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from equivcheck.campaign.events import KeptFinding, Summary
from equivcheck.campaign.findings.store import Kept
from equivcheck.campaign.tally import Tally
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.report.campaign.finding_paragraphs import KEPT
from equivcheck.report.campaign.node_text import node_summary
from equivcheck.report.coverage_text import families_line, pairs_line, programs_line, signatures_line
from equivcheck.report.verdict_text import STYLES
from equivcheck.scenario.file_format.codec import to_json
from equivcheck.scenario.scenario import count, describe_case
from equivcheck.system.printable import escape_unprintable

_MAX_REASONS = 8


def print_details(console: Console, summary: Summary) -> None:
    """Print the long summary: outcomes and times by layout, coverage, the slowest scenario, known problems, and findings."""
    for part in _parts(summary):
        console.print(part, soft_wrap=isinstance(part, Text))


def _parts(summary: Summary) -> Iterator[RenderableType]:
    tally = summary.tally
    yield _table(tally)
    rate = tally.num_checks / summary.seconds if summary.seconds else 0.0
    early = " (stopped before the end)" if summary.interrupted else ""
    yield Text(
        f"{count(tally.num_checks, 'check')} in {summary.seconds:.1f} s{early}, {rate:.1f} checks/s, seed {summary.plan.seed}"
    )
    for node in summary.nodes:
        yield Text(node_summary(node), style="yellow" if node.lost else "")
    if tally.slowest is not None:
        yield Text(f"slowest: {tally.slowest_seconds * 1000:.0f} ms, {describe_case(tally.slowest)}")
    if tally.reach.num_scenarios:
        yield Text(pairs_line(tally.reach))
        yield Text(f"  {families_line(tally.reach)}")
    if tally.signatures:
        yield Text(signatures_line(tally.signatures))
    if tally.programs.num_programs:
        yield Text(programs_line(tally.programs))
    if tally.beyond:
        yield Text(_beyond_text(tally))
    yield from _notes(tally)
    if tally.not_repeated:
        yield Text(
            f"{count(tally.not_repeated, 'lost worker or failure', 'lost workers or failures')} did not repeat: the same case "
            "passes in a new process",
            style="yellow",
        )
    if summary.num_cut_off:
        cut_off = count(summary.num_cut_off, "check was", "checks were")
        yield Text(f"{cut_off} stopped because the campaign ended", style="yellow")
    if summary.control is not None and summary.control.passed_over:
        yield Text(f"control: no generated case showed {', '.join(summary.control.passed_over)} in time", style="yellow")
    for finding in summary.findings:
        yield from _paragraph(finding, tally)


def _beyond_text(tally: Tally) -> str:
    """``beyond limits of torch: 12 checks: 4 equivalent, 8 unsupported (every rank raises)``."""
    raises = {Outcome.UNSUPPORTED: " (every rank raises)"}
    shown = [f"{tally.beyond[each]} {each.value}{raises.get(each, '')}" for each in Outcome if tally.beyond[each]]
    return f"beyond limits of torch: {count(tally.beyond.total(), 'check')}: {', '.join(shown)}"


def _table(tally: Tally) -> Table:
    shown = [outcome for outcome in Outcome if any(other is outcome for _, other in tally.outcomes)]
    table = Table("layout", box=None, pad_edge=False, header_style="bold")
    for outcome in shown:
        table.add_column(outcome.value, justify="right", style=STYLES[outcome])
    for heading in ("checks", "median ms", "p95 ms"):
        table.add_column(heading, justify="right")
    for layout in sorted(tally.durations):
        numbers = [tally.outcomes[layout, outcome] for outcome in shown]
        times = [f"{tally.durations[layout].quantile(share) * 1000:.1f}" for share in (0.5, 0.95)]
        table.add_row(layout, *(str(number) for number in (*numbers, sum(numbers))), *times)
    return table


def _notes(tally: Tally) -> Iterator[Text]:
    """Yield errors relative to tolerance, known issues, and reasons for undecided checks by frequency."""
    if (errors := tally.errors_of()).count:
        median, p99, most = (f"{errors.quantile(share):.2g}" for share in (0.5, 0.99, 1.0))
        yield Text(f"error of equivalent checks, relative to tolerance: median {median}, 99 % up to {p99}, largest {most}")
    for name, number in tally.known.most_common():
        avoided = f", avoided in {tally.avoided[name]} more" if tally.avoided[name] else ""
        yield Text(
            f"known issue {name}: in {number} of {count(tally.decided[name], 'check')} that could show it{avoided}",
            style="yellow",
        )
    unseen = [f"{name} ({count(number, 'check')})" for name, number in tally.decided.most_common() if name not in tally.known]
    if unseen:
        yield Text(f"not seen although possible: {', '.join(unseen)}", style="yellow")
    for (outcome, reason), number in tally.reasons.most_common(_MAX_REASONS):
        yield Text(f"{outcome.value}: {reason}, {count(number, 'check')}", style=STYLES[outcome])


def _paragraph(finding: KeptFinding, tally: Tally) -> Iterator[Text]:
    """Yield unwrapped text, because a wrapped path cannot be copied."""
    verdict = finding.verdict
    times = count(tally.fingerprints[finding.fingerprint], "check")
    yield Text.assemble("\n  ", (verdict.outcome.value.upper(), STYLES[verdict.outcome]), f" {describe_case(verdict.case)}")
    yield Text(f"  {escape_unprintable(verdict.reason)}")
    if finding.kept is Kept.UNKEPT:
        yield Text(f"  not kept, seen in {times}; run equivcheck check FILE with this FILE:\n{to_json(verdict.case)}")
    else:
        yield Text(f"  {KEPT[finding.kept]}, seen in {times}; run equivcheck replay {finding.path}")
