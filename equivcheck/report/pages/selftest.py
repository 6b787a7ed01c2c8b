"""The page of a selftest: mutants by layouts, and what each catch took."""

from __future__ import annotations

import statistics
from pathlib import Path

from equivcheck.mutants.mutant import Family, Mutant
from equivcheck.quality.selftest.row import OfLayout, Row, Selftest
from equivcheck.report.frame.headline import Headline, footer
from equivcheck.report.frame.templates import rendered
from equivcheck.scenario.scenario import count
from equivcheck.system.output_file import replace_text

_WIDEST = 12
"""Layouts beside each other that fit on paper; more of them are in another table."""


def write_page(file: Path, found: Selftest, mutants: tuple[Mutant, ...]) -> None:
    """Write the page; `mutants` say in which layouts each can be planted."""
    planted = {mutant.name: frozenset(mutant.layouts) for mutant in mutants}
    values = {
        "title": f"equivcheck selftest: {count(len(found.rows), 'mutant')}",
        "headline": _headline(found),
        "tiles": _tiles(found),
        "facts": [("seed", str(found.seed)), ("took", f"{found.seconds:,.0f} s")],
        "footer": footer(),
        "rows": found.rows,
        "layouts": {family.value: _layouts(family, mutants) for family in {row.family for row in found.rows}},
        "widest": _WIDEST,
        "cells": {
            row.name: {name: _cell(row, name, planted.get(row.name, frozenset())) for name in _layouts(row.family, mutants)}
            for row in found.rows
        },
        "wrong": {mutant.name: mutant.wrong for mutant in mutants},
        "most_examples": max((row.examples for row in found.rows), default=1) or 1,
        "most_seconds": max((row.seconds for row in found.rows if row.is_killed), default=1.0) or 1.0,
    }
    replace_text(file, rendered("pages/selftest.html.jinja", **values))


def _layouts(family: Family, mutants: tuple[Mutant, ...]) -> list[str]:
    """Where any of a family can be planted."""
    return sorted({layout for mutant in mutants if mutant.family is family for layout in mutant.layouts})


def _headline(found: Selftest) -> Headline:
    missed = len(found.rows) - found.num_killed
    early = ", stopped before its end" if found.interrupted else ""
    text = f"{count(missed, 'mutant')} not caught" if missed else "every mutant was caught"
    return Headline(text=text + early, is_good=found.is_passed)


def _tiles(found: Selftest) -> list[tuple[str, str]]:
    seconds = [row.seconds for row in found.rows if row.is_killed]
    return [
        ("caught", f"{found.num_killed} of {len(found.rows)}"),
        ("scenarios caught, of those affected", f"{found.caught_rate:.1%}"),
        ("examples to the first catch, median", f"{found.median_examples:g}"),
        ("CPU seconds to it, median", f"{statistics.median(seconds):.1f}" if seconds else "-"),
        ("right diagnoses", f"{found.diagnosis_rate:.0%}"),
    ]


def _cell(row: Row, layout: str, planted: frozenset[str]) -> tuple[str, str, str]:
    """Class, text and title of a cell."""
    if layout not in planted:
        return "", "", ""
    found = next((each for each in row.layouts if each.name == layout), OfLayout(name=layout))
    if not found.reachable:
        return "quiet", "·", "in no scenario that was drawn did it change anything"
    survived = found.reachable - found.caught - found.undecided
    words = f"caught in {found.caught} of {found.reachable}" + (f", {found.undecided} undecided" if found.undecided else "")
    kind = "missed" if survived else "caught" if found.caught else "undecided"
    return kind, f"{found.caught}/{found.reachable}", words
