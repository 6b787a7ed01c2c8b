"""Writes a matrix's result as one HTML page without external resources, as JUnit XML for CI services, and as JSON values."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from equivcheck.report.frame.templates import Headline, footer, render
from equivcheck.system.files import replace_text
from equivcheck.system.printable import escape_unprintable
from equivcheck.user.matrix.result import MatrixResult, single_device_line, totals
from equivcheck.user.matrix.row import LayoutRow
from equivcheck.user.matrix.text import HEADINGS, numbers, outcome_text


def write_html(path: Path, name: str, found: MatrixResult) -> None:
    """Write an HTML page about a training checked under many layouts. Each layout's row can be opened for all details."""
    page = render(
        "matrix/matrix.html.jinja",
        title=name,
        headline=Headline(text=totals(found), is_good=found.is_passed),
        tiles=(),
        facts=(),
        found=found,
        headings=HEADINGS,
        numbers=numbers,
        said=outcome_text,
        one_device=single_device_line(found),
        footer=footer(),
    )
    replace_text(path, page)


def write_junit(path: Path, name: str, found: MatrixResult) -> None:
    """Write a JUnit XML file about a training checked under many layouts, with a test case for each layout.

    An unexpected outcome is a failure, and a layout that could not be checked is an error.
    """
    rows, seconds = found.unexpected, sum(row.milliseconds for row in found.rows) / 1000
    suite = ET.Element("testsuite", name=escape_unprintable(name), tests=str(len(found.rows)), time=f"{seconds:.3f}")
    suite.set("errors", str(sum(row.verdict is None for row in rows)))
    suite.set("failures", str(sum(row.verdict is not None for row in rows)))
    for row in found.rows:
        _case(suite, row, escape_unprintable(name))
    ET.indent(suite)
    ET.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def _case(suite: ET.Element, row: LayoutRow, name: str) -> None:
    case = ET.SubElement(suite, "testcase", name=row.name, classname=name, time=f"{row.milliseconds / 1000:.3f}")
    details = escape_unprintable(row.details)
    if row.is_as_expected:
        ET.SubElement(case, "system-out").text = details
        return
    kind = "error" if row.verdict is None else "failure"
    message = escape_unprintable(f"{outcome_text(row)}: {row.first_difference}")
    ET.SubElement(case, kind, message=message, type=row.outcome).text = details


def matrix_object(found: MatrixResult) -> dict[str, Any]:
    """Convert the result for a training checked under many layouts to a JSON object, with an entry for each layout."""
    return {
        "layouts": [_row(row) for row in found.rows],
        "asked": found.asked,
        "passed": found.is_passed,
        "interrupted": found.interrupted,
    }


def _row(row: LayoutRow) -> dict[str, Any]:
    divergence = None if row.verdict is None else row.verdict.divergence
    return {
        "name": row.name,
        "mesh": dict(row.mesh),
        "world": None if row.verdict is None else row.verdict.world,
        "outcome": None if row.verdict is None else row.verdict.outcome.value,
        "expected": row.expected.value,
        "as_expected": row.is_as_expected,
        "first_difference": row.first_difference or None,
        "step": None if divergence is None else divergence.step,
        "phase": None if divergence is None else divergence.phase.value,
        "tensor": None if divergence is None else divergence.tensor,
        "cause": row.cause or None,
        "details": row.details,
        "error": row.error or None,
        **_measures(row),
        "milliseconds": round(row.milliseconds, 2),
    }


def _measures(row: LayoutRow) -> dict[str, Any]:
    names = ("loss", "expected_loss", "gradient_norm", "expected_gradient_norm", "num_calls", "num_bytes")
    found = dict.fromkeys(names) if row.measures is None else asdict(row.measures)
    ratio = None if row.measures is None else row.measures.norm_ratio
    return {name: _number(value) for name, value in (found | {"norm_ratio": ratio}).items()}


def _number(value: float | None) -> float | str | None:
    """Return infinity and NaN as text, because JSON has no such numbers."""
    return value if value is None or math.isfinite(value) else str(value)
