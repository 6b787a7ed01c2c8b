"""Rendering of templates. Values may come from untrusted files, so they are escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from equivcheck.system.printable import printable

_FOLDER = Path(__file__).parents[1]
"""Folder with all templates, which are named relative to it."""


def rendered(template: str, **values: Any) -> str:
    """Render a page. Values become printable, escaped text."""
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
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
