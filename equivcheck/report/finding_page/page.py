"""Writes HTML pages about verdicts. A page about a scenario shows values from one more run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path
from typing import Any

from equivcheck.campaign.findings.finding import Finding
from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.oracle.comparison.communication import differing_calls
from equivcheck.oracle.verdict.verdict import AGAIN, CaseVerdict, Verdict
from equivcheck.programs.verdict import ProgramVerdict
from equivcheck.report.finding_page import call_lanes
from equivcheck.report.finding_page.mesh import draw_mesh, options, placements
from equivcheck.report.finding_page.second_run import SecondRun, StepRow, phases_of, step_rows
from equivcheck.report.finding_page.tensors import DrawnTensor, drawn_tensors, holders
from equivcheck.report.frame import charts
from equivcheck.report.frame.templates import Headline, footer, render
from equivcheck.report.lanes import group_names, used_letters
from equivcheck.scenario.scenario import count, describe_case
from equivcheck.system.files import replace_text
from equivcheck.system.printable import shorten
from equivcheck.worlds.failure import Failure
from equivcheck.worlds.trace.differences import Divergence

_LONGEST_HEADLINE = 300
_LONGEST_TEXT = 12_000
"""Maximum characters in a stack, or in the scenario as code."""
_LONGEST_SCRIPT = 80_000
_MOST_STACKS = 60_000
"""Maximum characters in all stacks together."""


_SAID_ALREADY = "why:"
"""Beginning of the evidence line that repeats the headline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContext:
    """Information for a page about a verdict, in addition to the verdict."""

    script: str = ""
    """Script that reproduces the failure with torch only; empty if none can be written."""
    why_no_script: str = ""
    """Reason why there is no script; empty if there is a script."""
    commands: tuple[str, ...] = ()
    """Commands for the reader: check the case again, and write the script."""
    kept: Finding | None = None
    """The finding in a store; None for a scenario that was checked just now."""


RunAgain = Callable[[Any], SecondRun]
"""Function that runs a verdict's ranks once more."""


@singledispatch
def write_page(verdict: CaseVerdict, file: Path, context: PageContext, again: RunAgain) -> None:  # noqa: ARG001
    """Write the HTML page about a verdict to `file`.

    `again` runs the ranks once more. Raises `OSError` if the file cannot be written.
    """
    raise TypeError(f"verdict is not valid: its class is {type(verdict).__name__}. Expected Verdict or ProgramVerdict")


@write_page.register
def _(verdict: Verdict, file: Path, context: PageContext, again: RunAgain) -> None:
    write_scenario_page(file, verdict, again(verdict), context)


@write_page.register
def _(verdict: ProgramVerdict, file: Path, context: PageContext, _again: RunAgain) -> None:
    program = verdict.program
    values = {
        "title": f"Tensor program on {count(program.num_ranks, 'rank')}",
        "headline": headline(verdict),
        "tiles": [*tiles(verdict), ("statements", str(len(program.statements)))],
        "facts": [("program", describe_case(program)), *facts(verdict, context)],
        "footer": footer(),
        "sections": {"found": "What was found", "program": "The program", "again": "Run it again"},
        "verdict": verdict,
        "context": context,
        "evidence": [line for line in verdict.evidence() if line != AGAIN],
        "stacks": list(stacks(verdict.failure)),
        "code": verdict.code(),
    }
    replace_text(file, render("finding_page/program.html.jinja", **values))


def write_scenario_page(file: Path, verdict: Verdict, again: SecondRun, context: PageContext) -> None:
    """Write the HTML page about a scenario's verdict to `file`. `again` has values from one more run.

    Raises `OSError` if the file cannot be written.
    """
    replace_text(file, render("finding_page/finding.html.jinja", **_values(verdict, again, context)))


def _values(verdict: Verdict, again: SecondRun, context: PageContext) -> dict[str, Any]:
    scenario = verdict.scenario
    mesh, rows = scenario.layout.mesh, step_rows(again.moments)
    tensors = drawn_tensors(again, scenario)
    return {
        "title": f"{scenario.name} on {count(mesh.num_ranks, 'rank')}",
        "headline": headline(verdict),
        "tiles": list(tiles(verdict)),
        "facts": [("scenario", describe_case(scenario)), *facts(verdict, context)],
        "footer": footer(),
        "sections": _sections(again),
        "verdict": verdict,
        "again": again,
        "context": context,
        "evidence": [line for line in verdict.evidence() if line != AGAIN and not line.startswith(_SAID_ALREADY)],
        "mesh": draw_mesh(mesh, _wrong_ranks(verdict, tensors), verdict.failure or again.failure),
        "options": options(scenario.layout),
        "parallelisms": [parallelism.tag for parallelism in reversed(scenario.layout.parallelisms)],
        "placements": placements(scenario.layout, scenario.training.model, holders(again)),
        "tensors": tensors,
        "lanes": call_lanes.lane_blocks(again.calls, mesh),
        "letters": used_letters(again.calls),
        "groups": [name or "one rank" for name in group_names(again.calls, mesh)],
        "unexpected": list(_unexpected(verdict, again)),
        "stacks": list(stacks(again.failure)),
        "rows": rows,
        "phases": phases_of(rows),
        "chart": charts,
        **_plots(rows),
        "code": shorten(verdict.code(), _LONGEST_TEXT),
        "script": context.script if len(context.script) <= _LONGEST_SCRIPT else "",
        "drawing": call_lanes,
    }


def _sections(again: SecondRun) -> dict[str, str]:
    """Return section names by id. Sections that compare values are left out if there is nothing to compare."""
    compared = {"tensors": "Tensors on ranks"} if again.moments else {}
    by_step = {"steps": "Losses and errors by step"} if again.moments else {}
    calls, last = {"calls": "Calls of each rank"}, {"again": "Run it again"}
    return {"found": "What was found", "mesh": "Mesh and plan"} | compared | calls | by_step | last


def headline(verdict: CaseVerdict) -> Headline:
    """Return the page's headline, with the verdict's outcome and cause."""
    diagnosis = verdict.diagnosis.sentence if verdict.diagnosis else verdict.reason
    text = f"{verdict.outcome.value}: {diagnosis}" if diagnosis else verdict.outcome.value
    return Headline(text=shorten(text, _LONGEST_HEADLINE), is_good=not verdict.outcome.is_finding)


def _wrong_ranks(verdict: Verdict, tensors: Sequence[DrawnTensor]) -> frozenset[int]:
    """Return the ranks with the first difference or failure."""
    first = verdict.divergence
    if first is None:
        culprit = verdict.failure.culprit if verdict.failure else None
        return frozenset() if culprit is None else frozenset({culprit.rank})
    drawn = frozenset(block.rank for block in tensors[0].blocks if block.wrong) if tensors else frozenset()
    return drawn or frozenset(first.ranks or ((first.rank,) if first.rank >= 0 else ()))


def tiles(verdict: CaseVerdict) -> Iterator[tuple[str, str]]:
    """Yield the most important facts as pairs (name, value), for the boxes at the page's top."""
    first = verdict.divergence
    if first is not None:
        yield "first in", f"step {first.step}, {first.phase.value}"
        yield "times the tolerance", f"{first.error:.3g}"
        yield "tensors that differ", f"{1 + len(verdict.followers) + verdict.num_unnamed:,}"
    elif verdict.failure is not None:
        yield "failure", verdict.failure.kind.value
        states = Counter(report.state.value for report in verdict.failure.reports)
        yield "rank states", ", ".join(f"{number} {state}" for state, number in states.items())
    else:
        yield "largest error", f"{verdict.worst_error:.2g} x tolerance"
    yield "ranks", f"{verdict.case.num_ranks:,}"


def facts(verdict: CaseVerdict, context: PageContext) -> Iterator[tuple[str, str]]:
    """Yield further facts about the check, by name."""
    yield "world", verdict.world
    if verdict.outcome.is_finding:
        yield "fingerprint", fingerprint(verdict)
    if verdict.known:
        yield "known as", verdict.known
    if verdict.beyond:
        yield "beyond", verdict.beyond
    if context.kept is not None:
        yield "found", context.kept.environment.date
        yield "torch", context.kept.environment.torch
        if context.kept.shown_in is not None:
            yield "bisection", str(context.kept.shown_in)
    if verdict.confirmed:
        yield "confirmed", verdict.confirmed


def _plots(rows: list[StepRow]) -> dict[str, Any]:
    if not rows:
        return {"losses": None, "errors": None}
    losses = {"single-device run": [row.expected_loss for row in rows], "ranks": [row.loss for row in rows]}
    errors = {phase.value: [row.errors.get(phase) for row in rows] for phase in phases_of(rows)}
    return {"losses": charts.plot(losses), "errors": charts.plot(errors, log=True)}


def _unexpected(verdict: Verdict, again: SecondRun) -> Iterator[Divergence]:
    """Yield unexpected calls: one per kind, at the first rank that makes it."""
    if verdict.unmodelled or again.failure is not None or verdict.beyond or verdict.scenario.resume is not None:
        return
    found: dict[Any, Divergence] = {}
    for rank, calls in enumerate(again.calls):
        found = differing_calls(verdict.scenario, rank, calls) | found
    yield from found.values()


def stacks(failure: Failure | None) -> Iterator[Mapping[str, str]]:
    """Yield each rank's stack, with the error or the call in which it was waiting."""
    reports = failure.reports if failure else ()
    for report in reports:
        longest = min(_LONGEST_TEXT, _MOST_STACKS // len(reports))
        yield {
            "rank": str(report.rank),
            "state": report.state.value,
            "words": shorten(report.error or report.pending, 1000),
            "stack": shorten(report.stack, longest),
        }
