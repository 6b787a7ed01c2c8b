"""What a page is about, in a line and in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

import equivcheck


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """What came of what a page is about."""

    text: str
    """In a line."""
    is_good: bool
    """Whether nothing is to be looked at."""


def footer() -> str:
    """By what, and when, a page was made."""
    return f"equivcheck {equivcheck.__version__}, torch {version('torch')}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."
