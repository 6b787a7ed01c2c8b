"""What is said of JSON that does not fit: what is there, and what is allowed, in one line."""

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
"""What people call the Python types that JSON is read as."""

SHOWN_CHARACTERS = 40
"""Of a value that does not fit, at most this much is quoted: texts are one line."""


class MisfitError(ValueError):
    """Data that does not fit, at one place: `below` is the path from where it was noticed."""

    def __init__(self, problem: str, below: str = "") -> None:
        super().__init__(problem)
        self.below = below


def quote(value: object) -> str:
    """A JSON value on one line, shortened."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def wrong_type(value: object, allowed: str) -> MisfitError:
    """The refusal of a value of the wrong type."""
    name = JSON_TYPES.get(type(value), f"a {type(value).__name__}")
    return MisfitError(f"null; allowed: {allowed}" if value is None else f"{quote(value)} is {name}; allowed: {allowed}")


def unknown_field(name: str, allowed: Iterable[str]) -> MisfitError:
    """The refusal of a key that an object has and its class has not."""
    place = name if name.isidentifier() and len(name) <= SHOWN_CHARACTERS else quote(name)
    return MisfitError(f"unknown field; allowed: {', '.join(allowed) or 'none'}", f".{place}")
