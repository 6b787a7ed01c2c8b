"""The page of `bench`: milliseconds of a check, world by world."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from equivcheck.report.frame.headline import Headline, footer
from equivcheck.report.frame.templates import rendered
from equivcheck.scenario.scenario import count
from equivcheck.system.output_file import replace_text

_WORLDS = {
    "ranks_only_ms": "ranks alone, in sim",
    "sim_ms": "sim",
    "gloo_ms": "gloo",
    "spawn_ms": "new processes",
}
"""What is measured, from the fastest to the slowest."""


def write_page(file: Path, told: Mapping[str, Any]) -> None:
    """Write the page of what ``bench --json`` prints."""
    rows = told["rows"]
    ratios = [row["speedup_over_spawn"] for row in rows if row["speedup_over_spawn"] is not None]
    values = {
        "title": f"equivcheck bench: {told['training']} trainings",
        "headline": Headline(text=_headline(ratios), is_good=True),
        "tiles": [],
        "facts": [(name, value) for name, value in told["environment"].items() if value],
        "footer": footer(),
        "rows": rows,
        "worlds": _WORLDS,
        "length": partial(_length, *_ends([row[world] for row in rows for world in _WORLDS if row[world]])),
        "count": count,
    }
    replace_text(file, rendered("pages/bench.html.jinja", **values))


def _headline(ratios: list[float]) -> str:
    if not ratios:
        return "nothing ran on new processes"
    low, high = (f"{each:,.0f}" for each in (min(ratios), max(ratios)))
    return f"a check in sim is {low if low == high else f'{low} to {high}'} times faster than on new processes"


def _ends(values: list[float]) -> tuple[float, float]:
    """Powers of ten around all values."""
    return (math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))) if values else (0.0, 1.0)


def _length(low: float, high: float, value: float | None) -> float:
    """Of a bar, of 100, on a logarithmic scale; none for what was not measured."""
    return 100 * (math.log10(value) - low) / max(1.0, high - low) if value else 0.0
