"""The matrix of versions as a table in the docs."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tools.trainers.rows import Result

PATH = Path(__file__).parents[2] / "docs" / "results" / "42_trainers.toml"
ABOUT = """
Two updates on two CPU ranks or more, in float32 unless the table says otherwise. The command checks all rows and fails if one
does not end as expected. If the outcome is *refused*, the cause is the error in one line. Seconds, on two
shared cores, include the search for a cause, unless the row expects a first difference.
"""
COLUMNS = ("framework", "version", "configuration", "outcome", "cause, or first difference", "report", "seconds")


def write_table(results: Sequence[Result], path: Path = PATH) -> None:
    """Write a TOML file for the page *Measured results*. Rows of frameworks that were not checked stay as they are."""
    cells = [*_other_rows(results, path), *map(_cells, results)]
    rows = ",\n".join(f"    {json.dumps(each, ensure_ascii=False)}" for each in cells)
    lines = ['title = "Trainers of frameworks"', f'about = """{ABOUT}"""', 'command = "python -m tools.trainers"']
    lines += [f"columns = {json.dumps(COLUMNS)}", f"rows = [\n{rows},\n]", 'notes = """\n\n"""']
    path.write_text("\n".join(lines) + "\n", "utf-8")


def _other_rows(results: Sequence[Result], path: Path) -> list[list[str]]:
    checked = {result.framework for result in results}
    rows = tomllib.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
    return [row for row in rows if row[0] not in checked]


def _cells(result: Result) -> list[str]:
    outcome = result.outcome if result.outcome == "refused" else result.outcome.upper()
    cells = [result.framework, result.version, result.configuration, outcome, result.cause, result.report]
    return [*cells, f"{result.seconds:.1f}"]
