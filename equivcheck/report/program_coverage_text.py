"""Coverage by tensor programs, as text and as JSON values."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from equivcheck.campaign.coverage.programs import ProgramReach
from equivcheck.programs.run.overloads import Overloads
from equivcheck.report.coverage_text import programs_line, programs_object
from equivcheck.scenario.scenario import count

_MAX_NAMES = 40


def print_program_coverage(console: Console, reach: ProgramReach, found: Overloads, seed: int) -> None:
    """Print placements with their operation counts, operations not drawn, and overloads."""
    console.print(_table(reach))
    for line in _lines(reach, found, seed):
        console.print(Text(line), soft_wrap=True)


def program_coverage_object(reach: ProgramReach, found: Overloads) -> dict[str, Any]:
    """One object, with all overloads that are not reached."""
    return {
        **programs_object(reach),
        "placements": dict(_placements(reach).most_common()),
        "overloads": {
            "registered": len(found.registered),
            "reached": sorted(found.reached),
            "missing": list(found.missing),
            "unregistered": sorted(found.unregistered),
        },
    }


def _placements(reach: ProgramReach) -> Counter[str]:
    """Operation count per argument placement."""
    return Counter(lies for _, lies in {(operation, lies) for operation, _, lies in reach.places})


def _table(reach: ProgramReach) -> Table:
    table = Table("placement of an argument", box=None, pad_edge=False, header_style="bold")
    table.add_column("operations", justify="right")
    for lies, number in _placements(reach).most_common():
        table.add_row("computed" if lies == "value" else lies or "without dims", str(number))
    return table


def _lines(reach: ProgramReach, found: Overloads, seed: int) -> list[str]:
    share = 100 * len(found.reached) / max(1, len(found.registered))
    lines = [
        f"\n{count(reach.num_programs, 'program')}, seed {seed}",
        programs_line(reach),
        f"overloads with a DTensor rule: {len(found.registered):,}, reached {len(found.reached):,} ({share:.1f} %)",
    ]
    for what, names in (
        ("operations not drawn", reach.missing),
        ("overloads with a rule, reached by no operation", found.missing),
        ("overloads without a DTensor rule, called by operations", tuple(sorted(found.unregistered))),
    ):
        if names:
            more = f" and {len(names) - _MAX_NAMES:,} more (--json has all)" if len(names) > _MAX_NAMES else ""
            lines.append(f"\n{what}: {', '.join(names[:_MAX_NAMES])}{more}")
    return lines
