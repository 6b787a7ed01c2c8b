"""Print text from unknown sources: without terminal control characters, and shortened."""

from __future__ import annotations


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
