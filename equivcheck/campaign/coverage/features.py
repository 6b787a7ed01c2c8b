"""What a scenario has, taken off the fields of its nouns: a new field is a new feature without being listed anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from inspect import get_annotations
from typing import Any, get_type_hints

from equivcheck.scenario import Parallelism, Resume, Scenario
from equivcheck.system.choice import Choice

MANY = 3
"""From here on, whole numbers and lengths are alike."""

Path = tuple[str | int, ...]
"""Where a field lies in a scenario: names of fields, and places in tuples."""


@dataclass(frozen=True, slots=True, order=True)
class Feature:
    """One field of a noun with one value, or with one of a bucket of values."""

    part: str
    """Which part of a scenario it belongs to: ``training.optimizer``, ``layout.parallelisms``, ``resume`` ..."""
    noun: str
    """The class that declares the field, so that those that inherit it have it in common; of a parallelism its own."""
    field: str
    """Its name; with ``[]`` for what is in it."""
    value: str
    """The value as code, or its bucket: whole numbers and lengths 0, 1, 2 and 3+, others `default`, 0 or `other`."""

    def __str__(self) -> str:
        return f"{self.part} {self.noun}.{self.field} {self.value}"


def features(scenario: Scenario) -> frozenset[Feature]:
    """Everything that a scenario has."""
    return frozenset(feature for feature, _ in located_features(scenario))


def located_features(scenario: Scenario) -> Iterator[tuple[Feature, Path]]:
    """Every feature of a scenario with where it lies.

    Seeds are left out, as any value does, and so is what a field always has. The layout of the first steps counts by its name:
    its options are those that other scenarios have in the layout that ends them.
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
    """What is in a field: itself, or each of a tuple's."""
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
        """The value in words, alike for values that are alike."""
        if value is None or isinstance(value, (bool, str)):
            return str(value)
        if isinstance(value, Choice):
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
    """The fields of a class but seeds."""
    hints = get_type_hints(noun)
    return tuple(
        _NounField(field.name, _owner(noun, field.name), field.default, _is_plain_noun(hints[field.name]))
        for field in fields(noun)
        if not field.name.endswith("seed")
    )


def _is_plain_noun(hint: Any) -> bool:
    """Whether a field always has a noun of the same class."""
    return isinstance(hint, type) and is_dataclass(hint) and not hint.__subclasses__()


def _owner(noun: type[Any], name: str) -> str:
    if issubclass(noun, Parallelism):  # what a field of one does says little of another, though they share a plan
        return noun.__name__
    return next(base.__name__ for base in reversed(noun.__mro__) if name in get_annotations(base))


@cache
def _feature(part: str, noun: str, field: str, value: str) -> Feature:
    return Feature(part, noun, field, value)


def _size(number: int) -> str:
    return f"{MANY}+" if number >= MANY else str(number)
