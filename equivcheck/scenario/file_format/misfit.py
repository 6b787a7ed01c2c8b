"""One-line errors for JSON that does not match its class: path, value, and valid values."""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import NoneType

JSON_TYPES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    NoneType: "null",
    list: "a list",
    dict: "an object",
}
"""JSON names of Python types."""

SHOWN_CHARACTERS = 40
"""Longest value that an error message quotes, in characters. Messages are one line."""


class MisfitError(ValueError):
    """Invalid data at one place. `below` is the path from the object that noticed it."""

    def __init__(self, problem: str, below: str = "") -> None:
        super().__init__(problem)
        self.below = below


def quote(value: object) -> str:
    """A JSON value on one line, shortened."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def wrong_type(value: object, allowed: str) -> MisfitError:
    """Error for a value with the wrong type."""
    name = JSON_TYPES.get(type(value), f"a {type(value).__name__}")
    return MisfitError(f"null; allowed: {allowed}" if value is None else f"{quote(value)} is {name}; allowed: {allowed}")


def unknown_field(name: str, allowed: Iterable[str]) -> MisfitError:
    """Error for a key that the class does not have."""
    place = name if name.isidentifier() and len(name) <= SHOWN_CHARACTERS else quote(name)
    return MisfitError(f"unknown field; allowed: {', '.join(allowed) or 'none'}", f".{place}")
