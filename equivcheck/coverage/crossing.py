"""Scenarios with a part of another, repaired as the strategies repair what they draw."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from equivcheck.composition.fitting import fitted, row_multiple, with_scaled_rows
from equivcheck.coverage.features import Path
from equivcheck.errors import InvalidScenario
from equivcheck.scenario import Scenario


def crossed(base: Scenario, source: Scenario, path: Path) -> Scenario | None:
    """The base with what the source has at a place; None where that is the same, no scenario, or none within all limits."""
    # What is crossed may be no scenario at all: a tuple with a noun of another kind, or too short a plan.
    with suppress(InvalidScenario, AttributeError, IndexError, ZeroDivisionError):
        part = _at(source, path)
        return None if part == _at(base, path) else _repaired(_with(base, path, part))
    return None


def _at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step] if isinstance(step, int) else getattr(value, step)
    return value


def _with(value: Any, path: Path, new: Any) -> Any:
    """The value with something new in a place; None if there is no such place, or nothing new may be there."""
    if value is None or not path:
        return new if not path else None
    step, rest = path[0], path[1:]
    try:
        if isinstance(step, int):
            place = min(step, len(value) - 1)
            inner = _with(value[place], rest, new)
            return None if inner is None and rest else (*value[:place], inner, *value[place + 1 :])
        inner = _with(getattr(value, step), rest, new)
        return None if inner is None and rest else replace(value, **{step: inner})
    except (AttributeError, IndexError, TypeError, ValueError):
        return None


def _repaired(scenario: Scenario | None) -> Scenario | None:
    """The nearest scenario within all limits, rows shared out as the strategies do; None if there is none."""
    if scenario is None:
        return None
    training = with_scaled_rows(scenario.training, row_multiple(scenario.layout))
    found: Scenario | None = fitted(replace(scenario, training=training))
    return found
