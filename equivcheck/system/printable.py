"""Text of unknown origin on a terminal: nothing that the terminal would obey, and no more than a line or so."""

from __future__ import annotations

_KEPT = "\n\t"


def printable(text: str) -> str:
    """The text with what is not printable, line breaks and tabs excepted, as escapes."""
    return "".join(each if each.isprintable() or each in _KEPT else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def in_short(text: str, most: int) -> str:
    """The text, cut in its middle if it is longer than `most` characters: it may end with what is allowed."""
    if len(text) <= most:
        return text
    cut, half = " ... ", most // 2
    return f"{text[:half]}{cut}{text[len(text) + half + len(cut) - most :]}"
