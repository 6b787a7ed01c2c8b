"""A campaign's summary on one screen: findings, parallelisms, known problems, the control, and next commands."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from equivcheck.campaign.events import Summary
from equivcheck.campaign.tally import Histogram, Tally
from equivcheck.campaign.workers.messages import Control
from equivcheck.layouts.composition.registry import TIMES
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.nouns import TensorProgram
from equivcheck.report.campaign.finding_paragraphs import finding_lines, store_option
from equivcheck.report.terminal import own_command
from equivcheck.scenario.scenario import count
from equivcheck.system.printable import WIDTH, escape_unprintable, shorten, wrap

_MOST_LINES = 36
"""Maximum number of lines in the summary, so that it shares a screen with the command and its progress. Findings that could not
be saved may add lines.
"""
_LEAST_FOR_FINDINGS = 8
_UNDECIDED = (Outcome.INCONCLUSIVE, Outcome.UNSUPPORTED)
_EXAMPLE = Path("examples/llama.py")
_OWN = "a case of your own", ["check", "--help"]


def print_summary(console: Console, summary: Summary) -> None:
    """Print a campaign's summary on one screen with 80 columns."""
    rest = [
        *_table(summary.tally),
        "",
        _known_line(summary.tally),
        *_control_lines(summary),
        *_broken_lines(summary),
        *_next(summary),
    ]
    room = max(_LEAST_FOR_FINDINGS, _MOST_LINES - len(rest))
    for line in [*finding_lines(summary, room), "", _headline(summary), *rest]:
        console.print(Text(line, style=_style(line)), soft_wrap=True)


def _style(line: str) -> str:
    """Color by the first word."""
    styles = {"DIVERGED": "bold red", "CRASHED": "bold red", "HUNG": "bold red", "parallelism": "bold", "the checker": "bold red"}
    return next((style for start, style in styles.items() if line.startswith(start)), "")


def _headline(summary: Summary) -> str:
    """``133 checks in 40 s, 3.3 a second, seed 15``."""
    tally = summary.tally
    rate = f", {tally.num_checks / summary.seconds:.1f} a second" if summary.seconds else ""
    early = " (stopped before the end)" if summary.interrupted else ""
    return f"{count(tally.num_checks, 'check')} in {summary.seconds:.0f} s{rate}, seed {summary.plan.seed}{early}"


def _table(tally: Tally) -> Iterator[str]:
    """A line per parallelism with its compositions, then one for tensor programs."""
    yield _row("parallelism", *("checks", "equivalent", "known", "undecided", "failed", "median ms"))
    names = {part for layout in tally.durations for part in layout.split(TIMES)}
    for name in sorted(names, key=lambda name: (name == TensorProgram.tag, name)):
        yield _parallelism(tally, name)
    if names:
        yield "a composition counts in each of its lines; local_...: explicit collectives"
    reasons = ((reason, number) for (outcome, reason), number in tally.reasons.most_common() if outcome in _UNDECIDED)
    for reason, number in itertools.islice(reasons, 1):
        yield shorten(f"undecided: {reason} ({count(number, 'check')})", WIDTH)


def _parallelism(tally: Tally, name: str) -> str:
    layouts = [layout for layout in tally.durations if name in layout.split(TIMES)]
    by_outcome = {outcome: sum(tally.outcomes[layout, outcome] for layout in layouts) for outcome in Outcome}
    times = Histogram()
    for layout in layouts:
        times.merge(tally.durations[layout])
    undecided = sum(by_outcome[outcome] for outcome in _UNDECIDED)
    failed = sum(number for outcome, number in by_outcome.items() if outcome.is_finding)
    passed, known = by_outcome[Outcome.EQUIVALENT], by_outcome[Outcome.KNOWN]
    return _row(name, sum(by_outcome.values()), passed, known, undecided, failed, f"{times.quantile(0.5) * 1000:.0f}")


def _row(name: str, *numbers: object) -> str:
    return name.ljust(22) + "".join(
        str(number).rjust(width) for number, width in zip(numbers, (7, 11, 6, 10, 7, 10), strict=True)
    )


def _known_line(tally: Tally) -> str:
    """``49 checks met 29 known problems of torch; fuzz -v lists them``."""
    if not tally.known:
        return "no check met a known problem of torch"
    checks, problems = count(tally.known.total(), "check"), count(len(tally.known), "known problem")
    return f"{checks} met {problems} of torch; fuzz -v lists {'it' if len(tally.known) == 1 else 'them'}"


def _control_lines(summary: Summary) -> list[str]:
    if summary.control is not None:
        return wrap(control_text(summary.control))
    return ["control: not decided before the run ended"] if summary.plan.controls is not None else []


def control_text(control: Control) -> str:
    """Return a line such as ``control: a bug planted on purpose (gradients_summed) was caught after 3 examples``."""
    done = "was caught after" if control.caught else "was not caught in"
    return f"control: a bug planted on purpose ({control.name}) {done} {count(control.examples, 'example')}"


def _broken_lines(summary: Summary) -> list[str]:
    return [f"the checker itself failed: {escape_unprintable(summary.broken)}"] if summary.broken else []


def _next(summary: Summary) -> Iterator[str]:
    """Three commands to try next."""
    yield from ("", "next:")
    longer = "one layout, longer", ["fuzz", "--layout", "fsdp2", "--seconds", "300"]
    page = "findings as a page", ["report", *store_option(summary)]
    example = "one model, all", ["matrix", str(_EXAMPLE)]
    here = "this machine", ["doctor"]
    for purpose, arguments in (page if summary.findings else longer, example if _EXAMPLE.exists() else here, _OWN):
        yield f"  {purpose:<20}{own_command(*arguments)}"
