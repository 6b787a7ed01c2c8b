"""Which pairs of features can occur together, found by trying: a pair is legal if a scenario within all limits has both.

What the strategies draw is legal. For any other pair, examples of the one are given what makes the other, field by field and noun
by noun, then repaired as the strategies repair what they draw: if both are still there, the pair is legal. Where no example can
be brought to have both, a limit or a noun forbids it: options of two layouts that are not composed, a flag that another rules
out, what a layout cannot run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from equivcheck.campaign.coverage.features import Feature, Path, features, located_features
from equivcheck.campaign.coverage.pairs import Pairs, pairs_of
from equivcheck.errors import InvalidScenario
from equivcheck.layouts.composition.fitting import fitted, row_multiple, with_scaled_rows
from equivcheck.scenario import Axis, Mesh, Scenario
from equivcheck.scenario.file_format.converter import LAYER_TAGS

KEPT_EXAMPLES = 4
"""Scenarios kept of each feature."""


class Examples:
    """A few scenarios of each feature, of different layouts as far as there are any, and what came together in all of them."""

    def __init__(self) -> None:
        self._kept: dict[Feature, dict[str, Scenario]] = {}
        self._beside: dict[Feature, set[Feature]] = {}
        self._layouts: dict[Feature, set[str]] = {}

    def add(self, scenario: Scenario) -> None:
        """Count a scenario, and keep it where its features have too few."""
        found = features(scenario)
        for feature in found:
            self._beside.setdefault(feature, set()).update(found)
            self._layouts.setdefault(feature, set()).add(scenario.layout.name)
            kept = self._kept.setdefault(feature, {})
            if len(kept) < KEPT_EXAMPLES:
                kept.setdefault(scenario.layout.name, scenario)

    def of(self, feature: Feature) -> Iterable[Scenario]:
        """Those of a feature."""
        return self._kept.get(feature, {}).values()

    def came_together(self, one: Feature, other: Feature) -> bool:
        """Whether a scenario had both."""
        return other in self._beside[one]

    def undrawn(self) -> list[tuple[Feature, Feature]]:
        """The pairs of features that never came together, though there is a layout that had the one and the other."""
        pairs = combinations(sorted(self._beside), 2)
        return [
            pair
            for pair in pairs
            if not self.came_together(*pair) and not self._layouts[pair[0]].isdisjoint(self._layouts[pair[1]])
        ]

    @property
    def legal(self) -> Pairs:
        """The pairs that came together."""
        return pairs_of(self._beside, [(one, other) for one, beside in self._beside.items() for other in beside if one < other])


def witness(one: Feature, other: Feature, examples: Examples) -> Scenario | None:
    """A scenario within all limits that has both; None if no example could be brought to."""
    if _is_same_field(one, other):
        return None
    for first, second in product(examples.of(one), examples.of(other)):
        for scenario in (*_crossed(first, second, other), *_crossed(second, first, one)):
            if {one, other} <= features(scenario):
                return scenario
    return None


def _is_same_field(one: Feature, other: Feature) -> bool:
    """Whether both are values of a field that a scenario has once: nouns in tuples it may have several times."""
    several = ("LayerPlan", "Group", "Axis", *(kind.__name__ for kind in LAYER_TAGS.values()))
    same = (one.part, one.noun, one.field) == (other.part, other.noun, other.field)
    return same and one.noun not in several and not one.field.endswith("[]")


def _crossed(base: Scenario, source: Scenario, feature: Feature) -> Iterator[Scenario]:
    """The base with what gives the source a feature: the field alone, the noun that has it, and so on to all but the root."""
    for found, path in located_features(source):
        if found == feature:
            for length in range(len(path), 0, -1):
                for candidate in (base, _on_one_rank(base)):
                    crossed = _repaired(_with(candidate, path[:length], _at(source, path[:length])))
                    if crossed is not None:
                        yield crossed
            return


def _on_one_rank(scenario: Scenario) -> Scenario | None:
    """The same on axes of size 1, where any number of rows can be shared out."""
    axes = tuple(Axis(name=axis.name, size=1) for axis in scenario.layout.mesh.axes)
    try:
        return replace(scenario, layout=replace(scenario.layout, mesh=Mesh(axes=axes)))
    except InvalidScenario:
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
    # What is crossed may be no scenario at all: a tuple with a noun of another kind, or too short a plan.
    with suppress(InvalidScenario, AttributeError, IndexError, ZeroDivisionError):
        found: Scenario | None = fitted(
            replace(scenario, training=with_scaled_rows(scenario.training, row_multiple(scenario.layout)))
        )
        return found
    return None
