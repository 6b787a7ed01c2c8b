"""A matrix of layouts as one HTML page, which asks for nothing from elsewhere."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import jinja2

import equivcheck
from equivcheck.layout_matrix.result import MatrixResult, one_device, totals
from equivcheck.layout_matrix.text import HEADINGS, cells, said
from equivcheck.system.printable import printable

TEMPLATE = Path(__file__).with_name("matrix.html.jinja")


def write_html(path: Path, name: str, found: MatrixResult) -> None:
    """The page, with all that is known of each layout behind its row."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"printable": printable}
    template = environment.from_string(TEMPLATE.read_text("utf-8"))
    page = template.render(
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
