"""One-line errors for JSON that does not match its class: path, value, and valid values."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
    """Error about invalid data in a JSON object. `below` is the path from this object to the invalid data."""

    def __init__(self, problem: str, below: str = "") -> None:
        super().__init__(problem)
        self.below = below


def quote(value: object) -> str:
    """Return a JSON value as one shortened line for an error message."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def wrong_type(value: object, expected: str) -> MisfitError:
    """Return the error for a value with the wrong type."""
    name = JSON_TYPES.get(type(value), f"a {type(value).__name__}")
    reason = "" if value is None else f": it is {name}"
    return MisfitError(f"{quote(value)} is not valid{reason}. Expected {expected}.")


def unknown_field(name: str, known: Sequence[str]) -> MisfitError:
    """Return the error for a field `name` that a JSON object may not have. `known` are the fields that it may have."""
    place = name if name.isidentifier() and len(name) <= SHOWN_CHARACTERS else quote(name)
    return MisfitError(
        f"unknown field. Expected one of: {', '.join(known)}." if known else "unknown field. Expected no other field.",
        f".{place}",
    )
