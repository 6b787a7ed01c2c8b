"""The table of the docs that says what finds each item."""

from __future__ import annotations

from collections import Counter

from exam.item import Found, Item, Listed, Planted
from exam.items import ITEMS


def score() -> str:
    """How many items each finds, and the table, as Markdown."""
    counted = Counter(item.found for item in ITEMS)
    counts = [f"| {found.value} | {counted[found]} |" for found in Found]
    head = [
        "| found by | bugs |",
        "|---|---|",
        *counts,
        "",
        "| bug | what is wrong | found by | differs first |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *map(_row, ITEMS)]) + "\n"


def _row(item: Item) -> str:
    told = "; ".join(filter(None, [item.about, item.note]))
    return f"| [{item.name}]({item.link}) | {told} | {item.found.value}{_which(item)} | {item.first} |"


def _which(item: Item) -> str:
    if isinstance(item.by, Planted):
        return f": mutant `{item.by.name}`"
    if isinstance(item.by, Listed):
        return f": `{item.by.recipe}.py`"
    return ""
