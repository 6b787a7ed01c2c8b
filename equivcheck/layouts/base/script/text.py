"""Format Python source: break long lines like a formatter, so that a script looks written by a person."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

WIDTH = 100
"""Maximum line length in characters."""
INDENT = "    "

_OPENING, _CLOSING = "([{", ")]}"
_NUMBER = re.compile(r"-?[\d.]+(e[+-]?\d+)?")
_CLAUSE = re.compile(r" (?=for |if )")


def indent_lines(lines: Iterable[str], levels: int = 1) -> list[str]:
    """Indent lines by `levels` levels. Empty lines stay empty."""
    return [f"{INDENT * levels}{line}" if line else "" for line in lines]


def block(opening: str, lines: Sequence[str]) -> list[str]:
    """Return code for a statement such as ``if parallel:`` with an indented body. Empty if there are no lines for the body."""
    return [opening, *indent_lines(lines)] if lines else []


def call(name: str, *arguments: str, **keywords: object) -> str:
    """Return code for a function call.

    Strings in `keywords` are code, None leaves the argument out, and other values use ``repr``.
    """
    written = {key: value if isinstance(value, str) else repr(value) for key, value in keywords.items() if value is not None}
    named = [f"{key}={value}" for key, value in written.items()]
    return f"{name}({', '.join([*arguments, *named])})"


def tuple_code(items: Sequence[str]) -> str:
    """Return code for a tuple."""
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def paragraph(text: str) -> str:
    """Wrap a paragraph of prose to the line length."""
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def format_code(lines: Iterable[str]) -> str:
    """Join lines into a text, and break long lines like a formatter."""
    return "".join(f"{part}\n" for line in lines for part in break_line(line))


def break_line(line: str) -> list[str]:
    """Break a long line at its last bracket, then at commas or comprehension clauses, until all parts fit."""
    body = line.lstrip()
    pairs = [(start, end) for start, end in _outermost(line) if end > start + 1]
    if len(line) <= WIDTH or not pairs or body.startswith("#"):
        return [line]
    start, end = pairs[-1]
    indent = line[: len(line) - len(body)]
    inner = line[start + 1 : end].strip()
    middle = [f"{indent}{INDENT}{inner}"]
    if len(middle[0]) > WIDTH:
        middle = [part for item in _items(inner, len(indent) + len(INDENT)) for part in break_line(f"{indent}{INDENT}{item}")]
    return [line[: start + 1], *middle, f"{indent}{line[end:]}"]


def _items(inner: str, indent: int) -> list[str]:
    """Split the content between two brackets by item or clause. Numbers share lines."""
    parts, clauses = _split(inner), _clauses(inner)
    if len(clauses) > 1:
        return clauses
    if all(_NUMBER.fullmatch(part) for part in parts):
        return textwrap.wrap(", ".join(parts) + ",", WIDTH - indent)
    return [f"{part}," for part in parts] if len(parts) > 1 else [inner]


def _split(inner: str) -> list[str]:
    """Split at commas outside brackets."""
    commas = [position for position, depth in _depths(inner) if depth == 0 and inner[position] == ","]
    ends = zip([-1, *commas], [*commas, len(inner)], strict=True)
    return [part for start, end in ends if (part := inner[start + 1 : end].strip())]


def _clauses(inner: str) -> list[str]:
    """Split a comprehension into clauses."""
    depths = dict(_depths(inner))
    places = [match.start() for match in _CLAUSE.finditer(inner) if depths.get(match.start()) == 0]
    if not any(inner[place:].startswith(" for ") for place in places):
        return [inner]
    ends = zip([0, *places], [*places, len(inner)], strict=True)
    return [inner[start:end].strip() for start, end in ends]


def _outermost(line: str) -> list[tuple[int, int]]:
    """Positions of outermost bracket pairs."""
    opened, pairs = 0, []
    for position, depth in _depths(line):
        if line[position] in _OPENING and depth == 0:
            opened = position
        elif line[position] in _CLOSING and depth == 0:
            pairs.append((opened, position))
    return pairs


def _depths(line: str) -> Iterator[tuple[int, int]]:
    """Yield each position outside strings with its bracket depth. A bracket itself counts as outside its pair."""
    depth, quote = 0, ""
    for position, character in enumerate(line):
        if quote:
            quote = "" if character == quote and line[position - 1] != "\\" else quote
            continue
        if character in "\"'":
            quote = character
            continue
        if character == "#":
            return
        depth -= character in _CLOSING
        yield position, depth
        depth += character in _OPENING


def source_of(found: object) -> list[str]:
    """Return the source lines of a class or function of equivcheck, for use in the script.

    Dataclasses lose ``kw_only``, because scripts pass arguments by position.
    """
    return inspect.getsource(found).rstrip().replace(", kw_only=True", "").splitlines()  # type: ignore[arg-type]
