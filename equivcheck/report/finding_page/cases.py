"""Pages about verdicts, by kind of case."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from pathlib import Path
from typing import Any

from equivcheck.oracle.verdict.verdict import AGAIN, CaseVerdict, Verdict
from equivcheck.programs.verdict import ProgramVerdict
from equivcheck.report.finding_page import page
from equivcheck.report.finding_page.page import Told
from equivcheck.report.finding_page.second_run import SecondRun
from equivcheck.report.frame.templates import footer, rendered
from equivcheck.scenario.scenario import count, in_words
from equivcheck.system.output_file import replace_text

RunAgain = Callable[[Any], SecondRun]
"""Runs a verdict's ranks once more."""


@singledispatch
def write_page(verdict: CaseVerdict, file: Path, context: Told, again: RunAgain) -> None:  # noqa: ARG001
    """Write the page. Raises `OSError` if the file cannot be written."""
    raise TypeError(f"verdict {type(verdict).__name__} is not valid: unknown class. Expected Verdict or ProgramVerdict")


@write_page.register
def _(verdict: Verdict, file: Path, context: Told, again: RunAgain) -> None:
    page.write_page(file, verdict, again(verdict), context)


@write_page.register
def _(verdict: ProgramVerdict, file: Path, context: Told, _again: RunAgain) -> None:
    program = verdict.program
    values = {
        "title": f"Tensor program on {count(program.num_ranks, 'rank')}",
        "headline": page.headline(verdict),
        "tiles": [*page.tiles(verdict), ("statements", str(len(program.statements)))],
        "facts": [("program", in_words(program)), *page.facts(verdict, context)],
        "footer": footer(),
        "sections": {"found": "What was found", "program": "The program", "again": "Run it again"},
        "verdict": verdict,
        "context": context,
        "evidence": [line for line in verdict.evidence() if line != AGAIN],
        "stacks": list(page.stacks(verdict.failure)),
        "code": verdict.code(),
    }
    replace_text(file, rendered("finding_page/program.html.jinja", **values))
