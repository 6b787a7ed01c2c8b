"""Layout matrix as one HTML page, without external resources."""

from __future__ import annotations

from pathlib import Path

from equivcheck.report.frame.templates import Headline, footer, rendered
from equivcheck.system.output_file import replace_text
from equivcheck.user.matrix.result import MatrixResult, one_device, totals
from equivcheck.user.matrix.text import HEADINGS, cells, said


def write_html(path: Path, name: str, found: MatrixResult) -> None:
    """Write the page, with all details behind each layout's row."""
    page = rendered(
        "matrix/matrix.html.jinja",
        title=name,
        headline=Headline(text=totals(found), is_good=found.is_passed),
        tiles=(),
        facts=(),
        found=found,
        headings=HEADINGS,
        cells=cells,
        said=said,
        one_device=one_device(found),
        footer=footer(),
    )
    replace_text(path, page)
