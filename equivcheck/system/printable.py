"""Prepare text from unknown sources for printing: remove terminal control characters, shorten it, and wrap it."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable

WIDTH = 80
"""Columns on a screen."""


def screen_width() -> int:
    """Return how many columns the user's terminal has, but at least `WIDTH`.

    If the variable COLUMNS is set, its value replaces the terminal's width.
    """
    return max(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def wrap_lines(lines: Iterable[str]) -> list[str]:
    """Wrap lines to `screen_width`.

    Continuation lines begin below the text after a label such as `` why: ``. Without a label, they begin two columns to the right
    of the line's first character.
    """
    return [part for line in lines for part in _wrapped(line, screen_width())]


def _wrapped(line: str, width: int) -> list[str]:
    label = re.match(r" +\w+(: +| {2,})", line)
    indent = " " * (len(label[0]) if label else len(line) - len(line.lstrip()) + 2)
    head, gap, remark = line.partition("   (")
    if gap and len(line) > width:  # a remark such as (ranks disagree: ...) keeps together
        return [*wrap(head, indent, width), *wrap(f"{indent}({remark}", f"{indent} ", width)]
    return wrap(line, indent, width)


def wrap(text: str, indent: str = "", width: int = WIDTH) -> list[str]:
    """Wrap a text into lines with at most `width` columns. All lines but the first begin with `indent`. Long words stay whole."""
    return textwrap.wrap(
        escape_unprintable(text), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def escape_unprintable(text: str) -> str:
    """Replace each unprintable character by its Python escape sequence, except line breaks and tabs."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode("ascii") for each in text
    )


def shorten(text: str, most: int) -> str:
    """Cut characters out of the middle of a text, so that at most `most` characters remain.

    The end stays because error messages end with the expected values.
    """
    if len(text) <= most:
        return text
    cut, half = " ... ", most // 2
    return f"{text[:half]}{cut}{text[len(text) + half + len(cut) - most :]}"
