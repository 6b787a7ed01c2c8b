"""Wrapping for the terminal."""

from __future__ import annotations

import textwrap

from equivcheck.system.printable import printable

WIDTH = 80
"""Columns on a screen."""


def wrapped(text: str, indent: str = "") -> list[str]:
    """Wrap into lines of at most `WIDTH` columns, all but the first indented. Long words, such as paths, stay whole."""
    return textwrap.wrap(printable(text), WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
