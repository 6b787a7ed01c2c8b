"""A matrix of layouts as one HTML page, which asks for nothing from elsewhere."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import equivcheck
from equivcheck.layout_matrix.result import MatrixResult, one_device, totals
from equivcheck.layout_matrix.text import HEADINGS, cells, said
from equivcheck.report.templates import rendered


def write_html(path: Path, name: str, found: MatrixResult) -> None:
    """The page, with all that is known of each layout behind its row."""
    page = rendered(
        "matrix/matrix.html.jinja",
        name=name,
        found=found,
        headings=HEADINGS,
        cells=cells,
        said=said,
        totals=totals(found),
        one_device=one_device(found),
        when=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        versions=f"equivcheck {equivcheck.__version__}, torch {version('torch')}",
    )
    path.write_text(page, "utf-8")
