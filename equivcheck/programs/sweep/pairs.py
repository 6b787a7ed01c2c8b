"""Pairs of operations in a sweep. The first operation's result is an argument of the second.

Results with new placements or shapes come first.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.check import check_program
from equivcheck.programs.deadline import USUAL_DEADLINE, seconds_of_program
from equivcheck.programs.nouns import TensorProgram
from equivcheck.programs.run.cache import cached_plan, with_replicated_leaves
from equivcheck.programs.sweep.order import Coverage
from equivcheck.programs.sweep.results import Result
from equivcheck.programs.sweep.second_programs import ArgumentPosition, programs_taking
from equivcheck.system.choice import PrintableEnum

MAX_SHAPES = 4
"""Results with different shapes to try for each new kind."""


class Novelty(PrintableEnum):
    """Property of an operation's result. Results with different properties become arguments of second operations in a sweep.

    A sweep first tries each `KIND` with each second operation, then each `SPEC`, then each `FIRST`.
    """

    KIND = "placements and dtypes"
    """Placements and dtype of the result."""
    SPEC = "strides, sizes of shards or numbers of dims"
    """A full `ResultSpec`: kind, number of dims, shard sizes, and strides."""
    FIRST = "first operations"
    """A full `ResultSpec` together with the first operation."""

    def feature(self, result: Result) -> Hashable:
        """Return a result's property.

        None if leaves can have this property, because a sweep over single operations tries them.
        """
        kind, spec = result.spec.kind, result.spec
        if self is Novelty.KIND:
            return None if spec.can_be_leaf else kind
        if self is Novelty.SPEC:
            return None if spec.can_be_leaf and not spec.memory else spec
        return spec, result.name


@dataclass(slots=True, kw_only=True)
class Pairs:
    """Pairs of operations in the order in which a sweep runs them, and how many have run."""

    results: tuple[Result, ...]
    """First operations' results."""
    places: tuple[ArgumentPosition, ...]
    """Second operations' arguments, each to be replaced by a result."""
    seed: int = 0
    """Seed for the pairs' order, and for the second operation's other arguments."""
    world: str = "sim"
    """World in which first operations are checked."""
    num_tried: Counter[Novelty] = field(default_factory=Counter)
    """How many combinations (a result as an argument) were tried, by novelty."""
    num_covered: Counter[Novelty] = field(default_factory=Counter)
    """How many combinations one device could compute, by novelty."""
    _met: set[tuple[ArgumentPosition, Hashable]] = field(default_factory=set)
    _refused: set[Hashable] = field(default_factory=set)
    _right: dict[TensorProgram, bool] = field(default_factory=dict)

    def total(self, novelty: Novelty) -> int:
        """Return how many pairs a sweep tries for this property. A pair is a result and an argument of a second operation."""
        return len(self._by_key(novelty)) * len(self.places)

    def coverage(self) -> tuple[Coverage, ...]:
        """Return the number of pairs already run and the number left, for each `Novelty`."""
        return tuple(
            Coverage(
                name=f"{each.value} that are new for an operation",
                num_covered=self.num_covered[each],
                num_left=self.total(each) - self.num_tried[each],
            )
            for each in Novelty
        )

    def __len__(self) -> int:
        """Return the number of combinations to try."""
        return sum(map(self.total, Novelty))

    def __iter__(self) -> Iterator[TensorProgram | None]:
        """Yield a program for each pair; None if one device refuses the pair."""
        places = random.Random(self.seed).sample(self.places, len(self.places))
        for novelty in Novelty:
            groups = self._groups(novelty)
            for turn in range(len(groups)):
                for number, place in enumerate(places):
                    for results in groups[(turn + number) % len(groups)]:
                        yield self._tried(novelty, place, results)

    def _tried(self, novelty: Novelty, place: ArgumentPosition, results: list[Result]) -> TensorProgram | None:
        """Return the first program that one device can compute. The results differ in shape, but share the new feature."""
        key = novelty.feature(results[0])
        self.num_tried[novelty] += 1
        if (place, key) in self._met:
            self.num_covered[novelty] += 1
            return None
        for result in results:
            refused = (place, result.shape, result.spec.dtype)
            if refused in self._refused or not self._is_right(result.program):
                continue
            chance = random.Random(repr((self.seed, place, with_replicated_leaves(result.program))))
            program = next((each for each in programs_taking(result, place, chance) if all(cached_plan(each).applies)), None)
            if program is not None:
                self.num_covered[novelty] += 1
                self._met.update((place, each.feature(result)) for each in Novelty)
                return program
            self._refused.add(refused)
        return None

    def _is_right(self, program: TensorProgram) -> bool:
        """Whether the first operation is correct alone, because otherwise the pair is not to blame."""
        if program not in self._right:
            verdict = check_program(program, world=self.world, deadline=seconds_of_program(program, self.world, USUAL_DEADLINE))
            self._right[program] = verdict.outcome is Outcome.EQUIVALENT and not (verdict.refusals or verdict.clones)
        return self._right[program]

    def _groups(self, novelty: Novelty) -> list[list[list[Result]]]:
        """Return results with new features, grouped by single-device run, because such results share the reference."""
        keys, groups = self._by_key(novelty), list[list[list[Result]]]()
        for found in sorted(self._by_computation(), key=lambda each: -len({*map(novelty.feature, each)})):
            group = {novelty.feature(result): result for result in reversed(found)}
            groups.append([_of_several_shapes(result, keys.pop(key)) for key, result in group.items() if key in keys])
        return [group for group in groups if group]

    def _by_key(self, novelty: Novelty) -> dict[Hashable, list[Result]]:
        found: dict[Hashable, list[Result]] = defaultdict(list)
        for result in self.results:
            found[novelty.feature(result)].append(result)
        found.pop(None, None)
        return found

    def _by_computation(self) -> list[list[Result]]:
        found: dict[TensorProgram, list[Result]] = defaultdict(list)
        for result in self.results:
            found[with_replicated_leaves(result.program)].append(result)
        return list(found.values())


def _of_several_shapes(result: Result, others: list[Result]) -> list[Result]:
    """Add results with other shapes, in case the second operation does not accept the first shape."""
    return list({each.shape: each for each in (*reversed(others), result)}.values())[::-1][:MAX_SHAPES]
