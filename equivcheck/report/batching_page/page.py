"""Writes the HTML page about a verdict from `check_batching`."""

from __future__ import annotations

from pathlib import Path

from equivcheck.batching.verdict import BatchingVerdict
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.report.frame.templates import Headline, footer, render
from equivcheck.report.recording_page.grid import error_text
from equivcheck.system.files import replace_text


def write_batching_page(file: Path, name: str, verdict: BatchingVerdict) -> None:
    """Write the HTML page about a verdict from `check_batching` to `file`. `name` is the recipe's name."""
    wrong = [result for result in verdict.results if result.divergence is not None or result.failure]
    page = render(
        "batching_page/batching.html.jinja",
        title=f"equivcheck batching: {verdict.name or name}",
        headline=Headline(text=_headline(verdict), is_good=verdict.outcome is Outcome.EQUIVALENT),
        tiles=(
            ("examples", str(len(verdict.counts))),
            ("arrangements", str(len(verdict.results))),
            ("arrangements that differ", str(len(wrong))),
        ),
        facts=(("recipe", name), ("element type", verdict.precision)),
        sections={"verdict": "Verdict", "arrangements": "Arrangements", "read": "How the batch was read"},
        lines=verdict.describe().splitlines(),
        results=[(result, error_text(result.error)) for result in verdict.results],
        counts=verdict.counts,
        read=verdict.read,
        footer=footer(),
    )
    replace_text(file, page)


def _headline(verdict: BatchingVerdict) -> str:
    said = verdict.cause or verdict.reason or "all arrangements of the batch agree"
    return f"{verdict.outcome.value.upper()}: {said}"
