"""Checks shared by the nouns: each names the noun, the field, the value and what is allowed."""

from __future__ import annotations

import math
from typing import Any

from equivcheck.errors import InvalidScenario


def refuse(noun: object, field: str, allowed: str) -> InvalidScenario:
    """The error for a field of a noun whose value is not allowed."""
    return InvalidScenario(f"{type(noun).__name__}.{field} is {getattr(noun, field)!r}; allowed: {allowed}")


def require_between(noun: object, field: str, low: float, high: float) -> None:
    """Refuse a number outside ``[low, high]``, NaN included."""
    value: Any = getattr(noun, field)
    if not low <= value <= high:
        raise refuse(noun, field, f"{low} to {high}")


def require_positive(noun: object, *fields: str) -> None:
    """Refuse numbers that are not finite and above zero."""
    for field in fields:
        if not (math.isfinite(getattr(noun, field)) and getattr(noun, field) > 0):
            raise refuse(noun, field, "a finite number above 0")


def require_not_negative(noun: object, *fields: str) -> None:
    """Refuse numbers that are not finite and at least zero."""
    for field in fields:
        if not (math.isfinite(getattr(noun, field)) and getattr(noun, field) >= 0):
            raise refuse(noun, field, "a finite number of at least 0")
