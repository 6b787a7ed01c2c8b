"""Finds the feature pairs that one scenario can have.

Pairs in drawn scenarios are legal. For any other pair, this module takes examples with one feature and copies the other feature
into them: first the field, then the noun around it, and so on. It repairs the result as the strategies do. The pair is legal if
both features are still there. If no example keeps both, a limit or a noun forbids the pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from equivcheck.campaign.coverage.features import Feature, Path, features, located_features
from equivcheck.campaign.coverage.pairs import Pairs, pairs_of
from equivcheck.errors import InvalidScenario
from equivcheck.layouts.composition.fitting import fit_scenario, multiply_rows, row_multiple
from equivcheck.scenario import Axis, Mesh, Scenario
from equivcheck.scenario.file_format.converter import LAYER_TAGS

KEPT_EXAMPLES = 4
"""Scenarios kept per feature."""


class Examples:
    """A few example scenarios for each feature, and all pairs of features known to be legal."""

    def __init__(self) -> None:
        self._kept: dict[Feature, dict[str, Scenario]] = {}
        self._beside: dict[Feature, set[Feature]] = {}
        self._layouts: dict[Feature, set[str]] = {}

    def add(self, scenario: Scenario) -> None:
        """Count a scenario's features, and keep the scenario if one of its features has too few examples."""
        found = features(scenario)
        for feature in found:
            self._beside.setdefault(feature, set()).update(found)
            self._layouts.setdefault(feature, set()).add(scenario.layout.name)
            kept = self._kept.setdefault(feature, {})
            if len(kept) < KEPT_EXAMPLES:
                kept.setdefault(scenario.layout.name, scenario)

    def add_pairs(self, pairs: Pairs) -> None:
        """Count pairs that are known to be legal, without a scenario."""
        for number, feature in enumerate(pairs.features):
            self._beside.setdefault(feature, set()).update(pairs.features[other] for other in pairs.of(number))
            self._layouts.setdefault(feature, set())

    def of(self, feature: Feature) -> Iterable[Scenario]:
        """Return the example scenarios with this feature."""
        return self._kept.get(feature, {}).values()

    def came_together(self, one: Feature, other: Feature) -> bool:
        """Whether any added scenario had both features, or the pair was added."""
        return other in self._beside[one]

    def pairs_never_drawn(self) -> list[tuple[Feature, Feature]]:
        """Return the pairs not added so far, although both features occurred in scenarios with the same layout name."""
        pairs = combinations(sorted(self._beside), 2)
        return [
            pair
            for pair in pairs
            if not self.came_together(*pair) and not self._layouts[pair[0]].isdisjoint(self._layouts[pair[1]])
        ]

    @property
    def legal(self) -> Pairs:
        """Pairs of features found together in an added scenario, and added pairs."""
        return pairs_of(self._beside, [(one, other) for one, beside in self._beside.items() for other in beside if one < other])


def construct_pairs(pairs: Iterable[tuple[Feature, Feature]], examples: Examples, *, has_time: Callable[[], bool]) -> int:
    """Construct a scenario for each pair, and add it to the examples. Return how many pairs were tried while there was time."""
    tried = 0
    for one, other in pairs:
        if not has_time():
            break
        scenario = None if examples.came_together(one, other) else witness(one, other, examples)
        if scenario is not None:
            examples.add(scenario)
        tried += 1
    return tried


def witness(one: Feature, other: Feature, examples: Examples) -> Scenario | None:
    """Return a supported scenario with both features. Returns None if none can be made from the examples."""
    if _is_same_field(one, other):
        return None
    for first, second in product(examples.of(one), examples.of(other)):
        for scenario in (*_crossed(first, second, other), *_crossed(second, first, one)):
            if {one, other} <= features(scenario):
                return scenario
    return None


def _is_same_field(one: Feature, other: Feature) -> bool:
    """Whether both features are values of one field, in a class that a scenario contains only once."""
    several = ("LayerPlan", "ParameterGroup", "Axis", *(kind.__name__ for kind in LAYER_TAGS.values()))
    same = (one.part, one.noun, one.field) == (other.part, other.noun, other.field)
    return same and one.noun not in several and not one.field.endswith("[]")


def _crossed(base: Scenario, source: Scenario, feature: Feature) -> Iterator[Scenario]:
    """Copy a feature from `source` to `base`: first the field, then the noun around it, up to the root."""
    for found, path in located_features(source):
        if found == feature:
            for length in range(len(path), 0, -1):
                for candidate in (base, _on_one_rank(base)):
                    crossed = _repaired(_with(candidate, path[:length], _at(source, path[:length])))
                    if crossed is not None:
                        yield crossed
            return


def _on_one_rank(scenario: Scenario) -> Scenario | None:
    """Return the scenario with all axes reduced to size 1, because any number of rows can then be split."""
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
    """Replace the value at a path; None if the path does not exist or does not accept the value."""
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
    """The nearest supported scenario, with rows distributed as the strategies do; None if no such scenario exists."""
    if scenario is None:
        return None
    # A crossed scenario may be malformed: an object of another class in a tuple, or a plan that is too short.
    with suppress(InvalidScenario, AttributeError, IndexError, ZeroDivisionError):
        found: Scenario | None = fit_scenario(
            replace(scenario, training=multiply_rows(scenario.training, row_multiple(scenario.layout)))
        )
        return found
    return None
