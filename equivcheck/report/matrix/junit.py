"""Layout matrix as JUnit XML for CI services: one test case per layout."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

from equivcheck.system.printable import printable
from equivcheck.user.matrix.result import MatrixResult
from equivcheck.user.matrix.row import Row
from equivcheck.user.matrix.text import said


def write_junit(path: Path, name: str, found: MatrixResult) -> None:
    """Write the file. An unexpected outcome is a failure, and a layout that could not be checked is an error."""
    rows, seconds = found.unexpected, sum(row.milliseconds for row in found.rows) / 1000
    suite = ET.Element("testsuite", name=printable(name), tests=str(len(found.rows)), time=f"{seconds:.3f}")
    suite.set("errors", str(sum(row.verdict is None for row in rows)))
    suite.set("failures", str(sum(row.verdict is not None for row in rows)))
    for row in found.rows:
        _case(suite, row, printable(name))
    ET.indent(suite)
    ET.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def _case(suite: ET.Element, row: Row, name: str) -> None:
    case = ET.SubElement(suite, "testcase", name=row.name, classname=name, time=f"{row.milliseconds / 1000:.3f}")
    details = printable(row.details)
    if row.is_as_expected:
        ET.SubElement(case, "system-out").text = details
        return
    kind = "error" if row.verdict is None else "failure"
    ET.SubElement(case, kind, message=printable(f"{said(row)}: {row.first_difference}"), type=row.outcome).text = details
