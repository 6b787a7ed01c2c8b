"""The cattrs converter between frozen dataclasses and plain JSON values.

It is strict: nothing is coerced except an integer to a float, and every error carries its path in the data. Objects from a family
of classes (optimizers, schedules, clippings, parallelisms, layers, data, losses, the model's source) carry a ``kind``. JSON has
no infinity, so it is written as a string.

Unknown and missing keys are found by cattrs. Its tagged unions are not used because they need all members in advance, but third
parties add parallelisms later. They also report neither path nor choices if a kind is missing or unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin

from cattrs import Converter, IterableValidationNote
from cattrs.errors import IterableValidationError
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from equivcheck.scenario.clipping import ClipNorm, ClipValue
from equivcheck.scenario.file_format.aliases import FORMER_FIELDS, FORMER_VALUES
from equivcheck.scenario.file_format.misfit import JSON_TYPES, MisfitError, quote, unknown_field, wrong_type
from equivcheck.scenario.layers.base import AnyLayer
from equivcheck.scenario.layers.experts import Experts
from equivcheck.scenario.layers.linear import Layer
from equivcheck.scenario.layers.lora import LoRALinear
from equivcheck.scenario.layers.token_layers import Attention, GatedMLP, Tokens
from equivcheck.scenario.loss import CrossEntropy, Loss
from equivcheck.scenario.model import Model
from equivcheck.scenario.optimizer import OPTIMIZERS, Optimizer
from equivcheck.scenario.parallelisms import PARALLELISMS
from equivcheck.scenario.parallelisms.base import Parallelism
from equivcheck.scenario.schedule import SCHEDULES, Schedule
from equivcheck.scenario.training import Training

T = TypeVar("T")

KIND = "kind"
"""Key that names the class of an object within its family."""

NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
"""Strings for the floats that JSON cannot write."""

PARALLELISM_TAGS: dict[str, type[Parallelism]] = {kind.tag: kind for kind in PARALLELISMS}
"""Known parallelisms by tag. Registering a layout adds the layout's parallelism."""

LAYER_TAGS: dict[str, type[AnyLayer]] = {kind.tag: kind for kind in (Layer, Attention, GatedMLP, Experts, LoRALinear)}
"""Known layer kinds by tag. Registering a layer kind adds its tag."""

FAMILIES: dict[type, Mapping[str, type]] = {
    Optimizer: {kind.__name__: kind for kind in OPTIMIZERS},
    Schedule: {kind.__name__: kind for kind in SCHEDULES},
    Parallelism: PARALLELISM_TAGS,
    AnyLayer: LAYER_TAGS,
}
"""Members by tag for each family's base class. Clippings have no base class; each union is its own family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """JSON form of `Model.features` in a model on real numbers. A model on tokens has its `Tokens` in the same place."""

    tag: ClassVar[str] = "features"
    features: int
    """Features in a row."""


def _as_written(kind: type, **first: Any) -> type:
    own = [(each.name, each.type, each.default) for each in fields(kind) if each.name not in (*first, "features")]
    members = [(name, hint, field()) for name, hint in first.items()]
    members += [(name, hint, field(default=default)) for name, hint, default in own]
    made = make_dataclass(kind.__name__, members, namespace={"tag": getattr(kind, "tag", None)}, frozen=True, kw_only=True)
    # Hints are looked up there. From Python 3.12 on, one in the namespace gives way to the module of the caller.
    made.__module__ = kind.__module__
    return made


_TOKENS = _as_written(Tokens, features=int)
_MODEL = _as_written(Model, source=Features | _TOKENS)
"""Model as JSON. The number of input features is part of its source."""


def tag_of(kind: type) -> str | None:
    """Tag that identifies the class in JSON; None if it needs no tag."""
    if issubclass(kind, (Optimizer, Schedule, ClipNorm, ClipValue)):
        return kind.__name__
    tag = getattr(kind, "tag", None)
    return tag if isinstance(tag, str) else None


def make_converter(ask_for_more_tags: Callable[[], None]) -> Converter:
    """Make the converter between dataclasses and JSON values.

    If the converter finds an unknown tag, it calls `ask_for_more_tags`, which may register third-party classes, and looks again.
    """
    converter = Converter(detailed_validation=True)
    for scalar in (bool, int, str):
        converter.register_structure_hook(scalar, _exactly)
    converter.register_structure_hook(float, _structure_float)
    converter.register_unstructure_hook(float, _unstructure_float)
    converter.register_structure_hook_func(_is_enum, _structure_enum)
    converter.register_structure_hook_factory(_is_tuple, lambda kind: _tuple_structurer(kind, converter))
    converter.register_unstructure_hook_factory(_is_tuple, lambda kind: _tuple_unstructurer(kind, converter))
    converter.register_structure_hook_factory(is_dataclass, lambda kind: _class_structurer(kind, converter))
    converter.register_unstructure_hook_factory(is_dataclass, lambda kind: _class_unstructurer(kind, converter))
    converter.register_structure_hook_factory(_is_union, lambda kind: _union_structurer(kind, converter, ask_for_more_tags))
    converter.register_unstructure_hook_func(_is_union, converter.unstructure)
    converter.register_structure_hook(Model, lambda value, _: _model(converter.structure(value, _MODEL)))
    converter.register_unstructure_hook(Model, lambda model: converter.unstructure(_written(model), unstructure_as=_MODEL))
    converter.register_structure_hook_factory(
        FAMILIES.__contains__, lambda base: _family_structurer(FAMILIES[base], converter, ask_for_more_tags)
    )
    converter.register_unstructure_hook_func(FAMILIES.__contains__, converter.unstructure)
    return converter


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _exactly(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise wrong_type(value, JSON_TYPES[kind])
    return value


def _structure_float(value: Any, _: type) -> float:
    if isinstance(value, str) and value in NON_FINITE:
        return NON_FINITE[value]
    if type(value) not in (int, float):
        raise wrong_type(value, JSON_TYPES[float])
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise MisfitError(f"{quote(value)} is too large for a float. Expected a number with absolute value below 1.8e308.")
    return number


def _unstructure_float(value: float) -> float | str:
    return value if math.isfinite(value) else str(float(value))


def _structure_enum(value: Any, kind: type[Enum]) -> Enum:
    try:
        return kind(value)
    except ValueError:
        former = FORMER_VALUES.get(kind, {})
        if isinstance(value, str) and value in former:
            return former[value]
        choices = ", ".join(str(member.value) for member in kind)
        raise MisfitError(f"{quote(value)} is not valid. Expected one of: {choices}.") from None


def _tuple_structurer(kind: Any, converter: Converter) -> Callable[[Any, Any], tuple[Any, ...]]:
    members = get_args(kind)
    repeated = members[-1] is Ellipsis

    def structure(value: Any, _: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise wrong_type(value, "a list")
        if not repeated and len(value) != len(members):
            raise MisfitError(f"a list of length {len(value)} is not valid. Expected {len(members)} entries.")
        entries = []
        for index, entry in enumerate(value):
            member = members[0 if repeated else index]
            try:
                entries.append(converter.structure(entry, member))
            except Exception as error:
                error.add_note(IterableValidationNote(f"at index {index}", index, member))
                raise IterableValidationError("a list does not fit", [error], kind) from None
        return tuple(entries)

    return structure


def _tuple_unstructurer(kind: Any, converter: Converter) -> Callable[[Any], list[Any]]:
    members = get_args(kind)
    if members[-1] is not Ellipsis:
        return lambda value: [converter.unstructure(entry, member) for entry, member in zip(value, members, strict=True)]
    unstructure = converter.get_unstructure_hook(members[0])
    return lambda value: [unstructure(entry) for entry in value]


def _class_structurer(kind: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    changed: Any = _overrides(kind, converter)
    build = make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True, **changed)
    tag, former = tag_of(kind), FORMER_FIELDS.get(kind, {})

    def structure(value: Any, _: Any) -> Any:
        if tag is not None:
            _find_kind(value, {tag: kind})
            value = {name: inner for name, inner in value.items() if name != KIND}
        elif not isinstance(value, dict):
            raise wrong_type(value, "an object")
        for old in former.keys() & value.keys():
            # With both names, the former one stays and is refused as unknown.
            if former[old] not in value:
                value = {former[old] if name == old else name: inner for name, inner in value.items()}
        return build(value, kind)

    return structure


def _class_unstructurer(kind: Any, converter: Converter) -> Callable[[Any], dict[str, Any]]:
    changed: Any = _overrides(kind, converter)
    unstructure: Callable[[Any], dict[str, Any]] = make_dict_unstructure_fn(kind, converter, **changed)
    tag = tag_of(kind)
    return unstructure if tag is None else lambda value: {KIND: tag, **unstructure(value)}


def _union_structurer(kind: Any, converter: Converter, ask: Callable[[], None]) -> Callable[[Any, Any], Any]:
    members = [member for member in get_args(kind) if member is not NoneType]
    optional = len(members) < len(get_args(kind))
    if len(members) == 1:
        inner = converter.get_structure_hook(members[0])
    else:
        inner = _family_structurer({str(tag_of(member)): member for member in members}, converter, ask)
    return lambda value, _: None if optional and value is None else inner(value, members[0])


def _family_structurer(members: Mapping[str, type], converter: Converter, ask: Callable[[], None]) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        return converter.structure(value, _find_kind(value, members, ask))

    return structure


def _find_kind(value: Any, members: Mapping[str, T], ask: Callable[[], None] = lambda: None) -> T:
    if not isinstance(value, dict):
        raise wrong_type(value, "an object")
    tag = value.get(KIND)
    if isinstance(tag, str) and tag not in members:
        ask()
    if isinstance(tag, str) and tag in members:
        return members[tag]
    problem = f"{quote(tag)} is not valid" if KIND in value else "missing field"
    raise MisfitError(f"{problem}. Expected one of: {', '.join(members)}.", f".{KIND}")


def _values(noun: Any) -> dict[str, Any]:
    return {each.name: getattr(noun, each.name) for each in fields(noun)}


def _written(model: Model) -> Any:
    values = _values(model)
    features = values.pop("features")
    tokens = values.pop("source")
    source = Features(features=features) if tokens is None else _TOKENS(features=features, **_values(tokens))
    return _MODEL(source=source, **values)


def _model(written: Any) -> Model:
    values, source = _values(written), _values(written.source)
    features = source.pop("features")
    return Model(**values | {"features": features, "source": Tokens(**source) if source else None})


def _loss_hook(converter: Converter) -> Callable[[Any, Any], Any]:
    kinds: dict[str, Any] = {each.value: each for each in Loss} | {CrossEntropy.tag: CrossEntropy}

    def structure(value: Any, _: Any) -> Any:
        loss = _find_kind(value, kinds)
        if loss is CrossEntropy:
            return converter.structure(value, CrossEntropy)
        if others := value.keys() - {KIND}:
            raise unknown_field(min(others), ())
        return loss

    return structure


def _overrides(kind: type, converter: Converter) -> dict[str, Any]:
    if kind is not Training:
        return {}

    def loss_to_json(loss: Any) -> Any:
        return {KIND: loss.value} if isinstance(loss, Loss) else converter.unstructure(loss)

    return {"loss": override(struct_hook=_loss_hook(converter), unstruct_hook=loss_to_json)}
