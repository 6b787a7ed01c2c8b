"""Formats a sweep's result, as text and as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from equivcheck.programs.sweep.order import Coverage
from equivcheck.programs.sweep.sweep import Group, SweepResult
from equivcheck.scenario.file_format.codec import encode


def print_sweep(console: Console, found: SweepResult, coverage: Sequence[Coverage] = ()) -> None:
    """Print a sweep's coverage and counts, then a paragraph for each group of programs with the same result."""
    for part in coverage:
        console.print(f"{part.name}: {part.num_covered:,} covered, {part.num_left:,} left")
    counts = ", ".join(f"{number:,} {outcome.value}" for outcome, number in found.outcomes.most_common())
    console.print(f"{sum(found.outcomes.values()):,} programs: {counts or 'none'}; {found.num_clones:,} more do not apply")
    console.print(f"{len(found.agreed)} operations agree, torch refuses {len(found.refused)} under some placements")
    if found.stopped:
        console.print("stopped before the end")
    for group in found.groups.values():
        console.print(f"\n{group.operation}: {group.outcome.value}, {group.what} ({group.num:,} programs)")
        console.print(f"  all have: {', '.join(sorted(group.facts)) or 'nothing in common'}")
        console.print(f"  {group.first.program!r}")
        console.print(f"  {group.first.reason}")


def sweep_object(found: SweepResult, coverage: Sequence[Coverage] = ()) -> dict[str, Any]:
    """Convert a sweep's result to a JSON object, with all counts and groups."""
    return {
        "coverage": {each.name: {"covered": each.num_covered, "left": each.num_left} for each in coverage},
        "outcomes": {outcome.value: number for outcome, number in found.outcomes.items()},
        "not_applicable": found.num_clones,
        "stopped": found.stopped,
        "agreed": dict(found.agreed),
        "refused": dict(found.refused),
        "differ": [_group_object(group) for group in found.groups.values()],
    }


def _group_object(group: Group) -> dict[str, Any]:
    return {
        "operation": group.operation,
        "outcome": group.outcome.value,
        "what": group.what,
        "programs": group.num,
        "facts": sorted(group.facts),
        "reason": group.first.reason,
        "program": encode(group.first.program),
    }
