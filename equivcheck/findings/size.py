"""Which of two scenarios is the simpler one to look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from equivcheck.scenario import Scenario

Size = tuple[int, ...]
"""Ordered: ranks, layers, steps, rows, widths, settings that are not their default."""


def size_of(scenario: Scenario) -> Size:
    """How much there is to look at: the lexicographically smaller size is the better example of the same fault."""
    training = scenario.training
    model = training.model
    return (
        sum(layout.mesh.num_ranks for layout in scenario.layouts),
        len(model.layers),
        training.steps,
        training.data.batch,
        model.features + sum(layer.width for layer in model.layers),
        sum(1 for _ in _settings(scenario)),
    )


def _settings(value: Any) -> Iterator[Any]:
    """Every field below `value` that was set to something else than its default."""
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
    """Whether a setting has its default, if it has one."""
    return field.default is not MISSING and field.default == value
