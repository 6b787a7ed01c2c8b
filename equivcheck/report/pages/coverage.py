"""The page of `coverage`: which legal pairs of features were drawn, by parts of a scenario."""

from __future__ import annotations

from pathlib import Path

from equivcheck.report.coverage_text import Measured, coverage_object
from equivcheck.report.frame.headline import Headline, footer
from equivcheck.report.frame.pairs import pair_rows
from equivcheck.report.frame.templates import rendered
from equivcheck.scenario.scenario import count
from equivcheck.system.output_file import replace_text

_MAX_FEATURES, _MAX_PAIRS = 40, 300
"""That lack most; how many there are besides is told."""


def write_page(file: Path, measured: Measured) -> None:
    """Write the page."""
    told = coverage_object(measured)
    missing, lacking = told["missing"], told["lacking"]
    values = {
        "title": "equivcheck coverage: pairs of features",
        "headline": Headline(text=f"{100 * told['share']:.1f} % of legal pairs were drawn", is_good=True),
        "tiles": [
            ("pairs drawn", f"{told['drawn_pairs']:,}"),
            ("legal pairs", f"{told['legal_pairs']:,}"),
            ("features", f"{told['features']:,}"),
            ("scenarios", f"{told['scenarios']:,}"),
        ],
        "facts": [
            ("took", f"{told['seconds']:,.1f} s"),
            ("seed", str(told["seed"])),
            ("layouts", ", ".join(told["layouts"]) or "all"),
        ],
        "footer": footer(),
        "pairs": pair_rows(told["parts"]),
        "lacking": lacking[:_MAX_FEATURES],
        "more_lacking": len(lacking) - _MAX_FEATURES,
        "missing": missing[:_MAX_PAIRS],
        "missing_words": f"{count(len(missing), 'pair')}, {min(_MAX_PAIRS, len(missing)):,} of them here",
        "unknown": told["unknown_features"],
    }
    replace_text(file, rendered("pages/coverage.html.jinja", **values))
