"""Encode scenarios as versioned JSON and decode them. Each error is one line with the path in the data."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache, singledispatch
from importlib.metadata import entry_points
from typing import Any, TypeVar

from cattrs import AttributeValidationNote, IterableValidationNote
from cattrs.errors import BaseValidationError, ForbiddenExtraKeysError

from equivcheck.errors import InvalidScenario, UsageError
from equivcheck.scenario.case import Checkable
from equivcheck.scenario.file_format.converter import KIND, LAYER_TAGS, PARALLELISM_TAGS, make_converter
from equivcheck.scenario.file_format.misfit import MisfitError, quote, unknown_field, wrong_type
from equivcheck.scenario.file_format.old_format import upgrade
from equivcheck.scenario.layers.base import AnyLayer
from equivcheck.scenario.parallelisms.base import Parallelism
from equivcheck.scenario.scenario import Scenario

FORMAT = 2
"""JSON format that `to_json` writes. The number increases if older versions could not read a new format."""
_FORMATS = f"1 to {FORMAT}"
"""Format numbers that `from_json` can read."""

CASE = "scenario"
"""Value under ``kind`` in a scenario file."""

LAYOUT_ENTRY_POINTS = "equivcheck.layouts"
"""Entry-point group for third-party layouts, and so for their parallelisms."""

LAYER_ENTRY_POINTS = "equivcheck.layers"
"""Entry-point group for third-party kinds of layers."""

T = TypeVar("T")


@singledispatch
def to_json(case: Checkable) -> str:
    """Encode a case as one line of JSON with every field."""
    raise TypeError(f"case is not valid: its class is {type(case).__name__}. Expected Scenario or TensorProgram")


@to_json.register
def _(scenario: Scenario) -> str:
    return dump({KIND: CASE, "format": FORMAT, **encode(scenario)})


def from_json(text: str, *, where: str = "scenario") -> Scenario:
    """Decode a scenario from JSON in the current format or an older one. Fields with a default may be missing.

    `where` names the source in error messages, such as a file name. Raises `InvalidScenario` with one line: the source, the path
    in the JSON, and the problem.
    """
    data = load(text, where=where)
    if not isinstance(data, dict):
        raise InvalidScenario(f"{where}: {wrong_type(data, 'an object')}")
    if "format" not in data:
        raise InvalidScenario(f"{where}: format: missing field. Expected {_FORMATS}.")
    found = data["format"]
    if type(found) is not int:
        raise InvalidScenario(f"{where}: format: {wrong_type(found, 'an integer')}")
    if not 1 <= found <= FORMAT:
        newer = ": it is newer than this version of equivcheck reads" if found > FORMAT else ""
        raise InvalidScenario(f"{where}: format: {quote(found)} is not valid{newer}. Expected {_FORMATS}.")
    data = {name: value for name, value in data.items() if name != "format"}
    if found == FORMAT:
        kind = data.pop(KIND, None)
        if kind != CASE:
            problem = "missing field" if kind is None else f"{quote(kind)} is not valid"
            raise InvalidScenario(f"{where}: {KIND}: {problem}. Expected {CASE}.")
    else:
        data = upgrade(data)
    return decode(Scenario, data, where=where)


def encode(noun: Any) -> Any:
    """Encode a frozen dataclass, such as a scenario or a verdict, as dicts, lists, strings, numbers, booleans and None."""
    return _converter.unstructure(noun)


def decode(kind: type[T], data: Any, *, where: str = "data") -> T:
    """Build an object of class `kind` from data that `encode` returned.

    Raises `InvalidScenario` with one line that begins with `where` and the path in the data.
    """
    try:
        return _converter.structure(data, kind)
    except (BaseValidationError, MisfitError, InvalidScenario) as error:
        path, problem = _first_problem(error)
        raise InvalidScenario(": ".join(part for part in (where, path.removeprefix("."), problem) if part)) from None


def dump(data: Any) -> str:
    """Write encoded data as one line of strict JSON."""
    return json.dumps(data, allow_nan=False)


def load(text: str, *, where: str = "data") -> Any:
    """Parse strict JSON: NaN, infinity and repeated keys raise `InvalidScenario`. `where` names the source in the message."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise InvalidScenario(f"{where}: invalid JSON: {error}") from None


def register_parallelism(kind: type[Parallelism]) -> None:
    """Let `from_json` read a third-party parallelism, which JSON names by its tag.

    Raises `UsageError` if class or tag is not valid.
    """
    _register(kind, Parallelism, PARALLELISM_TAGS, "parallelism")


def register_layer(kind: type[AnyLayer]) -> None:
    """Let `from_json` read a third-party kind of layer, which JSON names by its tag.

    Raises `UsageError` if class or tag is not valid.
    """
    _register(kind, AnyLayer, LAYER_TAGS, "layer")


def _register(kind: type[T], base: type, tags: dict[str, type[T]], what: str) -> None:
    tag = getattr(kind, "tag", None)
    if not (is_dataclass(kind) and issubclass(kind, base) and isinstance(tag, str)):
        raise UsageError(
            f"{what} {kind!r} is not valid. Expected a dataclass derived from {base.__name__}, with a string in "
            "the attribute tag."
        )
    if any(field.name == KIND for field in fields(kind)):
        raise UsageError(
            f"{kind.__name__}.{KIND} is not a valid field name: {KIND} holds the tag in JSON. Expected another name."
        )
    if tags.setdefault(tag, kind) is not kind:
        raise UsageError(f"{kind.__name__}.tag {tag!r} is not valid: it is taken. Expected a tag other than {', '.join(tags)}.")


@cache
def _ask_entry_points() -> None:
    # A broken entry point adds no tag. The registries of layouts and layers raise its error.
    for entry_point in entry_points(group=LAYOUT_ENTRY_POINTS):
        with suppress(Exception):
            register_parallelism(entry_point.load().parallelism)
    for entry_point in entry_points(group=LAYER_ENTRY_POINTS):
        with suppress(Exception):
            register_layer(entry_point.load().layer_class)


_converter = make_converter(_ask_entry_points)


def _first_problem(error: BaseException) -> tuple[str, str]:
    path, owner = "", None
    while isinstance(error, BaseValidationError):
        owner = error.cl
        error = next((each for each in error.exceptions if isinstance(each, ForbiddenExtraKeysError)), error.exceptions[0])
        for note in getattr(error, "__notes__", ()):
            if isinstance(note, AttributeValidationNote):
                path += f".{note.name}"
            elif isinstance(note, IterableValidationNote):
                path += f"[{note.index}]"
    if isinstance(error, KeyError) and owner is not None:
        return path, f"missing field. {owner.__name__} has no default for it."
    if isinstance(error, ForbiddenExtraKeysError):
        error = unknown_field(min(error.extra_fields), [field.name for field in fields(error.cl)])
    if isinstance(error, MisfitError):
        path += error.below
    return path, str(error)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid. Expected a finite number")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        raise ValueError(f"field {quote(twice)} occurs twice")
    return found
