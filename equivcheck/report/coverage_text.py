"""Formats the coverage of features and operations, as text and as JSON values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from equivcheck.campaign.coverage.pairs import by_families
from equivcheck.campaign.coverage.programs import ProgramReach
from equivcheck.campaign.coverage.reach import Reach, by_parts
from equivcheck.campaign.plan import Plan
from equivcheck.programs.nouns.operations.registry import OPERATIONS
from equivcheck.programs.run.overloads import Overloads
from equivcheck.scenario.scenario import count
from equivcheck.worlds.signature import AFTER

_MAX_FEATURES, _MAX_PAIRS, _MAX_NAMES = 12, 20, 40


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MeasuredCoverage:
    """Result from `equivcheck coverage`: the feature pairs in drawn scenarios, and the plan with which they were drawn."""

    reach: Reach
    """Feature pairs in the drawn scenarios."""
    plan: Plan
    """Plan with the strategies from which scenarios were drawn."""
    seconds: float
    """How long the measurement took."""


def print_coverage(console: Console, measured: MeasuredCoverage) -> None:
    """Print how many feature pairs were drawn. Each row of the table is for two parts of a scenario, such as model and optimizer.

    A feature is one value of a field. Below the table are the features with the most missing pairs, and some missing pairs.
    """
    reach = measured.reach
    console.print(_table(reach))
    for line in _lines(measured):
        console.print(Text(line), soft_wrap=True)


def pairs_line(reach: Reach) -> str:
    """Return the line ``pairs of features covered: 41,000 of 43,000 (95.3 %)``."""
    return f"pairs of features covered: {reach.drawn_pairs.count:,} of {reach.legal.count:,} ({100 * reach.share:.1f} %)"


def signatures_line(signatures: Collection[str]) -> str:
    """Return the line ``signatures: 420 pairs of consecutive calls, 1,300 DTensor operations with placements``."""
    calls = sum(AFTER in each for each in signatures)
    return f"signatures: {calls:,} pairs of consecutive calls, {len(signatures) - calls:,} DTensor operations with placements"


def families_line(reach: Reach) -> str:
    """Return the line ``tokens 20,000 of 22,000 (90.9 %), sequences ..., rows ...``.

    It says how many feature pairs were drawn for each kind of model input.
    """
    return ", ".join(
        f"{each['family']} {each['drawn']:,} of {each['legal']:,} ({100 * each['drawn'] / max(1, each['legal']):.1f} %)"
        for each in _families(reach)
    )


def coverage_object(measured: MeasuredCoverage) -> dict[str, Any]:
    """Convert a coverage measurement to a JSON object.

    `missing` lists allowed feature pairs never drawn, starting with the features that have the most undrawn pairs.
    """
    reach = measured.reach
    return {
        "scenarios": reach.num_scenarios,
        "seconds": round(measured.seconds, 3),
        "scenarios_per_second": round(reach.num_scenarios / measured.seconds, 3) if measured.seconds else 0.0,
        "features": len(reach.legal.features),
        "legal_pairs": reach.legal.count,
        "drawn_pairs": reach.drawn_pairs.count,
        "share": round(reach.share, 6),
        "families": _families(reach),
        "parts": _parts(reach),
        "lacking": [{"feature": name, "missing": missing, "legal": total} for name, missing, total in _lacking(reach)],
        "missing": [list(pair) for pair in _missing(reach)],
        "unknown_features": sorted(map(str, reach.unknown)),
        "seed": measured.plan.seed,
        "layouts": list(measured.plan.layouts),
    }


def reach_object(reach: Reach) -> dict[str, Any]:
    """Convert the covered feature pairs to JSON values, for a campaign's summary."""
    figures = {"legal_pairs": reach.legal.count, "drawn_pairs": reach.drawn_pairs.count, "share": round(reach.share, 6)}
    return figures | {"families": _families(reach), "parts": _parts(reach)}


def programs_line(reach: ProgramReach) -> str:
    """Return the line ``operations in tensor programs: 250 of 254, with 3,120 placements of arguments``."""
    reached, places = len(reach.operations), f"{len(reach.places):,}"
    return f"operations in tensor programs: {reached} of {len(OPERATIONS)}, with {places} placements of arguments"


def programs_object(reach: ProgramReach) -> dict[str, Any]:
    """Convert the covered operations to a JSON object: numbers, missing operations, and statements that all ranks refused."""
    return {
        "programs": reach.num_programs,
        "operations": len(OPERATIONS),
        "reached": len(reach.operations),
        "places": len(reach.places),
        "missing": list(reach.missing),
        "refused": dict(reach.refused.most_common()),
    }


def _families(reach: Reach) -> list[dict[str, Any]]:
    legal, drawn = by_families(reach.legal), by_families(reach.drawn_pairs)
    return [{"family": family.value, "legal": legal[family], "drawn": drawn[family]} for family in legal]


def _parts(reach: Reach) -> list[dict[str, Any]]:
    legal, drawn = by_parts(reach.legal), by_parts(reach.drawn_pairs)
    return [{"one": one, "other": other, "legal": legal[one, other], "drawn": drawn[one, other]} for one, other in legal]


def _table(reach: Reach) -> Table:
    legal, drawn = by_parts(reach.legal), by_parts(reach.drawn_pairs)
    table = Table("features of", "with features of", box=None, pad_edge=False, header_style="bold")
    for heading in ("drawn", "legal", "share"):
        table.add_column(heading, justify="right")
    for (one, other), total in sorted(legal.items(), key=lambda item: drawn[item[0]] - item[1]):
        if total:
            table.add_row(one, other, f"{drawn[one, other]:,}", f"{total:,}", f"{100 * drawn[one, other] / total:.1f} %")
    return table


def _lines(measured: MeasuredCoverage) -> list[str]:
    reach, rate = measured.reach, measured.reach.num_scenarios / measured.seconds if measured.seconds else 0.0
    lines = [
        f"\n{count(reach.num_scenarios, 'scenario')} in {measured.seconds:.1f} s, {rate:.0f} a second, seed {measured.plan.seed}",
        pairs_line(reach),
        f"  {families_line(reach)}",
    ]
    lacking = _lacking(reach)
    if lacking:
        lines.append("\nfeatures with the most pairs not covered:")
        lines += [f"  {name}: {missing:,} of {total:,} pairs" for name, missing, total in lacking[:_MAX_FEATURES]]
        missing = _missing(reach)
        lines.append(f"\npairs not covered, {min(_MAX_PAIRS, len(missing))} of {len(missing):,} (--json has all):")
        lines += [f"  {one} with {other}" for one, other in missing[:_MAX_PAIRS]]
    if reach.unknown:
        lines.append(f"\nfeatures not in the table of legal pairs, so not counted: {'; '.join(sorted(map(str, reach.unknown)))}")
    return lines


def _lacking(reach: Reach) -> list[tuple[str, int, int]]:
    """Return each feature with its numbers of undrawn and of allowed pairs, starting with the most undrawn pairs."""
    legal, missing = reach.legal, reach.missing
    rows = [
        (str(feature), gone.bit_count(), there.bit_count())
        for feature, gone, there in zip(legal.features, missing.rows, legal.rows, strict=True)
        if gone
    ]
    return sorted(rows, key=lambda row: (-row[1], row[0]))


def _missing(reach: Reach) -> list[tuple[str, str]]:
    pairs = reach.missing
    lacks = [row.bit_count() for row in pairs.rows]
    found = [(number, other) for number in range(len(pairs.features)) for other in pairs.of(number) if number < other]
    found.sort(key=lambda pair: (-max(lacks[pair[0]], lacks[pair[1]]), pair))
    return [(str(pairs.features[one]), str(pairs.features[other])) for one, other in found]


def print_program_coverage(console: Console, reach: ProgramReach, found: Overloads, seed: int) -> None:
    """Print how many operations occurred with each placement, then the operations not drawn.

    Then print the overloads with a DTensor rule that no operation calls, and called overloads without a rule. `seed` is the seed
    for the programs.
    """
    table = Table("placement of an argument", box=None, pad_edge=False, header_style="bold")
    table.add_column("operations", justify="right")
    for lies, number in _placements(reach).most_common():
        table.add_row("computed" if lies == "value" else lies or "without dims", str(number))
    console.print(table)
    for line in _program_lines(reach, found, seed):
        console.print(Text(line), soft_wrap=True)


def program_coverage_object(reach: ProgramReach, found: Overloads) -> dict[str, Any]:
    """Convert the covered operations and torch's overloads to a JSON object, with all missing overloads."""
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


def _program_lines(reach: ProgramReach, found: Overloads, seed: int) -> list[str]:
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
