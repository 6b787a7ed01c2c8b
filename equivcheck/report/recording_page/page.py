"""Page about two recorded runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.recording.compare.compare import Comparison
from equivcheck.report.frame.templates import Headline, footer, render
from equivcheck.report.recording_page.samples import sample_lines, sample_tables
from equivcheck.report.recording_page.sides import environment_rows, settings_rows
from equivcheck.report.recording_page.tables import replica_tables, steps_table, tensors_table
from equivcheck.system.files import replace_text


def write_page(file: Path, names: tuple[str, str], compared: Comparison) -> None:
    """Write the page. `names` are those of the two runs."""
    verdict = compared.verdict
    replicas = tuple(replica_tables(compared))
    sections = {"verdict": "Verdict", "steps": "Moments by steps", "tensors": "Tensors"}
    sections |= {"replicas": "Replicas that disagree"} if replicas else {}
    sections |= {"samples": "Samples", "settings": "Settings and environment", "coverage": "Coverage"}
    page = render(
        "recording_page/recording.html.jinja",
        title=f"equivcheck compare: {names[0]} and {names[1]}",
        headline=Headline(text=_headline(compared), is_good=verdict.outcome is Outcome.EQUIVALENT),
        tiles=tuple(_tiles(compared)),
        facts=(("A", names[0]), ("B", names[1])),
        sections=sections,
        lines=verdict.describe().splitlines(),
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


def _headline(compared: Comparison) -> str:
    return f"{compared.verdict.outcome.value.upper()}: {compared.verdict.reason}"


def _tiles(compared: Comparison) -> Iterator[tuple[str, str]]:
    first, second = compared.first, compared.second
    yield "ranks", f"{len(first.ranks)} and {len(second.ranks)}"
    yield "steps compared", str(len({*first.steps} & {*second.steps}))
    yield "tensors compared", f"{len(compared.tensors):,}"
    yield "tensors that differ", f"{len(compared.verdict.differences):,}"
