"""Writes the HTML page about two recorded runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.recording.compare.compare import Comparison
from equivcheck.recording.compare.verdict import TraceVerdict
from equivcheck.report.frame.templates import Headline, footer, render
from equivcheck.report.recording_page.samples import sample_lines, sample_tables
from equivcheck.report.recording_page.sides import environment_rows, settings_rows
from equivcheck.report.recording_page.tables import replica_tables, steps_table, tensors_table
from equivcheck.system.files import replace_text


def write_page(file: Path, compared: Comparison) -> None:
    """Write the HTML page about two compared recordings to `file`."""
    verdict = compared.verdict
    headline = f"{verdict.outcome.value.upper()}: {verdict.reason}"
    replicas = tuple(replica_tables(compared))
    sections = {"verdict": "Verdict", "steps": "Moments by steps", "tensors": "Tensors"}
    sections |= {"replicas": "Replicas that disagree"} if replicas else {}
    sections |= {"samples": "Samples", "settings": "Settings and environment", "coverage": "Coverage"}
    page = render(
        "recording_page/recording.html.jinja",
        title=f"equivcheck compare: {compared.facts.first.folder} and {compared.facts.second.folder}",
        headline=Headline(text=headline, is_good=verdict.outcome is Outcome.EQUIVALENT),
        tiles=tuple(_tiles(compared)),
        facts=tuple(zip("AB", verdict.runs, strict=True)),
        sections=sections,
        lines=tuple(_lines(verdict)),
        steps=steps_table(compared),
        tensors=tensors_table(compared),
        replicas=replicas,
        samples=tuple(sample_tables(compared)),
        sample_lines=tuple(sample_lines(compared)),
        settings=tuple(settings_rows(compared)),
        environment=tuple(environment_rows(compared)),
        coverage=verdict.coverage,
        footer=footer(),
    )
    replace_text(file, page)


def _lines(verdict: TraceVerdict) -> Iterator[tuple[str, str]]:
    """Yield parts of the verdict with their labels, except for the parts that tables show."""
    if verdict.first is not None:
        yield "first", f"{verdict.first.tensor}: {verdict.first.evidence}"
    if verdict.diagnosis is not None:
        yield "why", verdict.diagnosis.sentence
    if verdict.where:
        yield "where", verdict.where
    for label, texts in (("note", verdict.notes), ("gap", verdict.gaps)):
        yield from ((label, text) for text in texts if text != verdict.reason)
    if verdict.hint:
        yield "hint", verdict.hint


def _tiles(compared: Comparison) -> Iterator[tuple[str, str]]:
    verdict = compared.verdict
    yield "ranks", " and ".join(str(len(run.ranks)) for run in compared.facts.runs)
    yield "steps compared", str(len(compared.facts.steps))
    yield "values compared", f"{len(compared.tensors):,}"
    yield "values that differ", f"{len(verdict.differences):,}"
