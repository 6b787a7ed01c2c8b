"""Renders HTML templates for pages. Values may come from untrusted files, so they are escaped."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2

import equivcheck
from equivcheck.system.printable import escape_unprintable


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The first line on a page: its main message."""

    text: str
    """The message in one line."""
    is_good: bool
    """Whether there is nothing that needs attention."""


def footer() -> str:
    """Return the text for a page's last line: versions and time."""
    return f"equivcheck {equivcheck.__version__}, torch {version('torch')}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."


_FOLDER = Path(__file__).parents[1]
"""Folder with all templates, which are named relative to it."""


def render(template: str, **values: Any) -> str:
    """Render the template with these values. They become printable, escaped text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_as_text,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def _as_text(value: object) -> object:
    """Make values printable, except for HTML from a template."""
    return escape_unprintable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
