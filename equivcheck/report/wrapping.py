"""Text in the columns of a screen."""

from __future__ import annotations

import textwrap

from equivcheck.system.printable import printable

WIDTH = 80
"""Columns."""


def wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of at most `WIDTH` columns, all but the first indented. A longer word, such as a path, stays in one piece."""
    return textwrap.wrap(printable(text), WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
