"""Measures a case's size, and lists its settings that differ from their defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import singledispatch
from math import prod
from typing import Any

from equivcheck.programs.nouns import Constant, Leaf, Redistribution, TensorProgram
from equivcheck.programs.nouns.placement import REPLICATE
from equivcheck.scenario import CrossEntropy, Data, Layer, LayerPlan, Model, ParameterGroup, Scenario
from equivcheck.scenario.case import Checkable

Size = tuple[int, ...]
"""Tuple that orders cases by size.
A scenario's size has: ranks, parts beyond linear layers, layers, steps, rows, widths, settings not at default."""
_WITHIN = ("vocabulary", "num_heads", "num_kv_heads", "head_dim", "hidden", "rank")
"""Size fields inside a layer or embedding, without its input and output."""
_SIZES = ("features", "width", "length", *_WITHIN, "microbatches", "steps", "seed")
"""Fields with sizes or random seeds, which `settings_of` leaves out."""
_USUAL = (Model, Data, ParameterGroup, Layer, LayerPlan)
"""Classes that `settings_of` leaves out, because each is the default or the only kind in its place."""


@singledispatch
def size_of(case: Checkable) -> Size:
    """Return a case's size as a tuple, compared from left to right: ranks or statements first.

    The smallest failing case is kept.
    """
    raise TypeError(f"case is not valid: its class is {type(case).__name__}. Expected Scenario or TensorProgram")


@size_of.register
def _(scenario: Scenario) -> Size:
    training = scenario.training
    model = training.model
    unusual = [model.source, model.head, *(layer for layer in model.layers if not isinstance(layer, Layer))]
    return (
        sum(layout.mesh.num_ranks for layout in scenario.layouts),
        sum(part is not None for part in unusual) + isinstance(training.loss, CrossEntropy),
        len(model.layers),
        training.steps,
        training.data.batch * (model.length or 1),
        sum(model.widths) + sum(getattr(part, name, 0) for part in (model.source, *model.layers) for name in _WITHIN),
        sum(1 for _ in _settings(scenario)),
    )


@size_of.register
def _(program: TensorProgram) -> Size:
    """Return statements, ranks, axes, elements, axes that are not replicated, and settings not at default."""
    tensors = [each for each in program.statements if isinstance(each, (Leaf, Constant))]
    placed = [each for each in program.statements if isinstance(each, (Leaf, Constant, Redistribution))]
    return (
        len(program.statements),
        program.num_ranks,
        len(program.mesh),
        sum(prod(each.shape) + sum(each.shape) + len(each.shape) for each in tensors),
        sum(placement != REPLICATE for each in placed for placement in each.placements),
        sum(1 for _ in _settings(program)),
    )


def _settings(value: Any) -> Iterator[Any]:
    """Yield each field below `value` that differs from its default."""
    if isinstance(value, tuple):
        for item in value:
            yield from _settings(item)
    elif is_dataclass(value):
        for field in fields(value):
            inner = getattr(value, field.name)
            if is_default(field, inner):
                continue
            yield inner
            yield from _settings(inner)


def is_default(field: Field[Any], value: object) -> bool:
    """Whether `value` is the default of a dataclass field."""
    return field.default is not MISSING and field.default == value


def settings_of(scenario: Scenario) -> tuple[str, ...]:
    """Return the scenario's settings that differ from their defaults, such as ``optimizer AdamW``.

    Sizes and seeds are left out.
    """
    return (*_of(scenario.training, ""), *_of_layout(scenario))


def _of_layout(scenario: Scenario) -> Iterator[str]:
    for parallelism in scenario.layout.parallelisms:
        yield from _of(parallelism, parallelism.tag)
    yield from _of(scenario.layout.execution, "execution")
    if scenario.resume is not None:
        yield f"resumes from a checkpoint of {scenario.resume.layout.name}"


def _of(value: Any, path: str) -> Iterator[str]:
    for field in fields(value):
        inner = getattr(value, field.name)
        if is_default(field, inner) or field.name in _SIZES:
            continue
        yield from _setting(inner, f"{path}.{field.name}" if path else field.name)


def _setting(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        for index, item in enumerate(value):
            yield from _item(item, f"{path}[{index}]")
    elif is_dataclass(value):
        yield from _item(value, path)
    else:
        yield f"{path} {value.value if isinstance(value, Enum) else value}"


def _item(value: Any, path: str) -> Iterator[str]:
    """Yield the kind of an object in a scenario, unless it is the usual kind, and its settings."""
    if not isinstance(value, _USUAL):
        yield f"{path} {type(value).__name__}"
    yield from _of(value, path)
