"""Print text from unknown sources: without terminal control characters, shortened, and wrapped."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable

WIDTH = 80
"""Columns on a screen."""


def screen_width() -> int:
    """Return the columns of the reader's terminal if it is wider than `WIDTH`, else `WIDTH`.

    The variable COLUMNS counts as a terminal.
    """
    return max(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def wrap_lines(lines: Iterable[str]) -> list[str]:
    """Wrap to `screen_width`. A labelled line such as ``  why:   ...`` goes on below its text, any other two columns indented."""
    return [part for line in lines for part in _wrapped(line, screen_width())]


def _wrapped(line: str, width: int) -> list[str]:
    label = re.match(r" +\w+(: +| {2,})", line)
    indent = " " * (len(label[0]) if label else len(line) - len(line.lstrip()) + 2)
    head, gap, remark = line.partition("   (")
    if gap and len(line) > width:  # a remark such as (ranks disagree: ...) keeps together
        return [*wrap(head, indent, width), *wrap(f"{indent}({remark}", f"{indent} ", width)]
    return wrap(line, indent, width)


def wrap(text: str, indent: str = "", width: int = WIDTH) -> list[str]:
    """Wrap into lines with at most `width` columns, all but the first indented. Long words, such as paths, stay whole."""
    return textwrap.wrap(
        escape_unprintable(text), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def escape_unprintable(text: str) -> str:
    """Escape all unprintable characters except line breaks and tabs."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode("ascii") for each in text
    )


def shorten(text: str, most: int) -> str:
    """Shorten the text in the middle to at most `most` characters.

    The end stays because error messages end with the expected values.
    """
    if len(text) <= most:
        return text
    cut, half = " ... ", most // 2
    return f"{text[:half]}{cut}{text[len(text) + half + len(cut) - most :]}"
