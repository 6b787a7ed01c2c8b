"""Helpers for scenario dataclasses: frozen, printed as code without default fields, with checked ranges."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

from equivcheck.errors import InvalidScenario
from equivcheck.system.printable import shorten

T = TypeVar("T")

SHOWN_CHARACTERS = 60
"""Maximum characters of a value that an error message quotes."""


def option(*, default: T, limits: bool = True, calls: bool = True) -> T:
    """Declare a field of a parallelism.

    Args:
        default: Value with which the parallelism behaves as if it had no such option.
        limits: False if no documented restriction depends on the option.
        calls: False if the collectives that a run should call do not depend on the option.

    `tests/unit/test_options.py` fails if a flag does not agree with the modules that read the field.
    """
    found: T = field(default=default, metadata={"limits": limits, "calls": calls})
    return found


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field, option))
def frozen_dataclass(cls: type[T]) -> type[T]:
    """Make a class a frozen, slotted, keyword-only dataclass whose repr evaluates to an equal value.

    Rich formats it over several lines with ``__rich_repr__``, Hypothesis and IPython with ``_repr_pretty_``.
    """
    cls.__repr__ = _repr  # type: ignore[method-assign]
    cls.__rich_repr__ = changed_fields  # type: ignore[attr-defined]
    cls._repr_pretty_ = _print_pretty  # type: ignore[attr-defined]
    return dataclass(frozen=True, slots=True, kw_only=True, repr=False)(cls)


def changed_fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value for each field that differs from its default."""
    for each in fields(value):
        found = getattr(value, each.name)
        if _default(each) is MISSING or found != _default(each):
            yield each.name, found


def _default(each: Field[Any]) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def _repr(value: Any) -> str:
    return f"{type(value).__name__}({', '.join(f'{name}={found!r}' for name, found in changed_fields(value))})"


def _print_pretty(value: Any, printer: Any, _cycle: bool) -> None:
    with printer.group(4, f"{type(value).__name__}(", ")"):
        for number, (name, found) in enumerate(changed_fields(value)):
            if number:
                printer.text(",")
                printer.breakable()
            else:
                printer.breakable("")
            printer.text(f"{name}=")
            printer.pretty(found)


def invalid_field(noun: object, field: str, expected: str, why: str = "") -> InvalidScenario:
    """Return the error for an invalid field. The message says why the value is not valid and which values are expected."""
    reason = f": {why}" if why else ""
    return InvalidScenario(
        f"{type(noun).__name__}.{field} {short_repr(getattr(noun, field))} is not valid{reason}. Expected {expected}."
    )


def short_repr(value: object) -> str:
    """Return a value's shortened repr for an error message."""
    return shorten(repr(value), SHOWN_CHARACTERS)


def require_between(noun: object, field: str, low: float, high: float) -> None:
    """Raise `InvalidScenario` if the number in `field` is outside ``[low, high]`` or NaN."""
    value: Any = getattr(noun, field)
    if not low <= value <= high:
        raise invalid_field(noun, field, f"{low} to {high}")


def require_positive(noun: object, *names: str) -> None:
    """Raise `InvalidScenario` if a field in `names` is not finite or not above zero."""
    for name in names:
        if not (math.isfinite(getattr(noun, name)) and getattr(noun, name) > 0):
            raise invalid_field(noun, name, "a finite number above 0")


def require_not_negative(noun: object, *names: str) -> None:
    """Raise `InvalidScenario` if a field in `names` is not finite or is negative."""
    for name in names:
        if not (math.isfinite(getattr(noun, name)) and getattr(noun, name) >= 0):
            raise invalid_field(noun, name, "a finite number of at least 0")
