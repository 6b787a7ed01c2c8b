"""Headline and footer for pages."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

import equivcheck


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A page's main message."""

    text: str
    """One line."""
    is_good: bool
    """Whether nothing needs attention."""


def footer() -> str:
    """Versions and time for the page's last line."""
    return f"equivcheck {equivcheck.__version__}, torch {version('torch')}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."
