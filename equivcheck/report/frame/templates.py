"""Templates of HTML pages: what they quote is of unknown origin, and shown as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from equivcheck.system.printable import printable

_FOLDER = Path(__file__).parents[1]
"""All templates lie below; names of templates are relative to it."""


def rendered(template: str, **values: Any) -> str:
    """A page; its text is printable and escaped, whatever the values."""
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
    """What is not HTML made by a template, made printable."""
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
