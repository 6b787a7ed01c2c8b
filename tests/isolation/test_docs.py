"""The docs name what is compared."""

from __future__ import annotations

from pathlib import Path

from equivcheck.worlds.state.keeper import ENTRIES

PAGE = Path(__file__).parents[2] / "docs/explanation/reliability.md"


def test_the_docs_name_each_entry() -> None:
    """The table on the page about reliability has each entry of the tables, and no other."""
    section = PAGE.read_text(encoding="utf-8").partition("## State after a run")[2].partition("\n## ")[0]
    rows = [line.strip("|\n").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    cells = [cell.strip() for row in rows for cell in row if cell.strip()]
    assert sorted(cells) == sorted(entry.name for entry in ENTRIES)
