"""Features of a scenario: the values of its dataclass fields. A new field counts as a new feature without registration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from inspect import get_annotations
from typing import Any, get_type_hints

from equivcheck.scenario import Parallelism, Resume, Scenario
from equivcheck.system.choice import PrintableEnum

MANY = 3
"""Integers and lengths from this value share one bucket."""

Path = tuple[str | int, ...]
"""Path to a field: field names and tuple indices."""


@dataclass(frozen=True, slots=True, order=True)
class Feature:
    """One value in one field of a scenario, such as ``bias False`` in a linear layer.

    All numbers in one range, such as 3 and above, are the same feature.
    """

    part: str
    """Part of the scenario that contains the field: ``training.optimizer``, ``layout.parallelisms``, ``resume`` ..."""
    noun: str
    """Class with the field's declaration, so subclasses share the feature. A parallelism counts as its own class."""
    field: str
    """Field name, followed by ``[]`` for a tuple's elements."""
    value: str
    """The value as code, or its range: 0, 1, 2 and 3+ for integers and lengths, else `default`, 0 or `other`."""

    def __str__(self) -> str:
        return f"{self.part} {self.noun}.{self.field} {self.value}"


def features(scenario: Scenario) -> frozenset[Feature]:
    """Return all features in a scenario: the values in its fields."""
    return frozenset(feature for feature, _ in located_features(scenario))


def located_features(scenario: Scenario) -> Iterator[tuple[Feature, Path]]:
    """Yield each feature of a scenario, with the path to its field. Seeds and constant fields are left out.

    In a resumed scenario, the layout before the checkpoint counts only by name, because other scenarios already cover its
    options.
    """
    for top in ("training", "layout"):
        yield from _of_noun(getattr(scenario, top), top, (top,))
    resume = scenario.resume
    yield _feature("resume", "Scenario", "resume", str(resume and resume.layout.name)), ("resume",)
    if resume is not None:
        for field in _fields(Resume):
            if field.name != "layout":
                yield _feature("resume", "Resume", field.name, field.bucket(getattr(resume, field.name))), ("resume", field.name)


def _of_noun(noun: Any, part: str, path: Path) -> Iterator[tuple[Feature, Path]]:
    for field in _fields(type(noun)):  # type: ignore[arg-type]
        value, here = getattr(noun, field.name), (*path, field.name)
        if not field.is_plain_noun:
            yield _feature(part, field.owner, field.name, field.bucket(value)), here
        within = f"{part}.{field.name}" if len(path) == 1 else part
        for place, inner in _inside(value, here):
            if is_dataclass(inner):
                yield from _of_noun(inner, within, place)
            elif isinstance(inner, int) and isinstance(value, tuple):
                yield _feature(part, field.owner, f"{field.name}[]", _size(inner)), place


def _inside(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield a field's value, or each element if it is a tuple."""
    if isinstance(value, tuple):
        yield from (((*path, place), inner) for place, inner in enumerate(value))
    else:
        yield path, value


@dataclass(frozen=True, slots=True)
class _NounField:
    name: str
    owner: str
    default: object
    is_plain_noun: bool

    def bucket(self, value: Any) -> str:
        """Return the text for a value in a feature: the value itself, or the range that contains it."""
        if value is None or isinstance(value, (bool, str)):
            return str(value)
        if isinstance(value, PrintableEnum):
            return value.name
        if is_dataclass(value):
            return type(value).__name__
        if isinstance(value, int):
            return _size(value)
        if isinstance(value, tuple) and not (value and isinstance(value[-1], float)):
            return f"of {_size(len(value))}"
        return "default" if value == self.default else "0" if value == 0.0 else "other"


@cache
def _fields(noun: type[Any]) -> tuple[_NounField, ...]:
    hints = get_type_hints(noun)
    return tuple(
        _NounField(field.name, _owner(noun, field.name), field.default, _has_one_class(hints[field.name]))
        for field in fields(noun)
        if not field.name.endswith("seed")
    )


def _has_one_class(hint: Any) -> bool:
    """Whether all values of a field have the same class."""
    return isinstance(hint, type) and is_dataclass(hint) and not hint.__subclasses__()


def _owner(noun: type[Any], name: str) -> str:
    if issubclass(noun, Parallelism):  # a field may work in one parallelism and fail in another, even if both inherit it
        return noun.__name__
    return next(base.__name__ for base in reversed(noun.__mro__) if name in get_annotations(base))


@cache
def _feature(part: str, noun: str, field: str, value: str) -> Feature:
    return Feature(part, noun, field, value)


def _size(number: int) -> str:
    return f"{MANY}+" if number >= MANY else str(number)
