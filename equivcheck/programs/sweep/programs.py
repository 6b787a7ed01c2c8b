"""Programs in a sweep over single operations: each runs one operation, with arguments under all placements."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from equivcheck.programs.nouns import Constant, Leaf, Operation, TensorProgram
from equivcheck.programs.nouns.arguments import dims_of, make, shapes_of
from equivcheck.programs.nouns.operations.operation import Argument, ArgumentKind, OperationFacts, Shape
from equivcheck.programs.nouns.operations.registry import OPERATIONS
from equivcheck.programs.nouns.placement import REDUCTIONS, REPLICATE, partial, shard

FIRST_REDUCTIONS = REDUCTIONS[:3]
"""Reductions if the first argument is partial. The minimum is left out, because it mirrors the maximum."""
OTHER_REDUCTIONS = REDUCTIONS[:1]
"""Reductions if other arguments are partial, or the mesh has several axes."""
LIMITED_PARTIALS = tuple(partial(each) for each in REDUCTIONS if each not in OTHER_REDUCTIONS)
"""Partial placements only combined with replicated arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Selection of programs for a sweep over single operations."""

    mesh: tuple[int, ...] = (2,)
    """Mesh axis sizes."""
    operations: tuple[str, ...] = ()
    """Operations to run, by name; empty for all operations."""

    def programs(self) -> Iterator[TensorProgram]:
        """Yield all programs in the sweep, operation by operation."""
        for name in self.operations or tuple(OPERATIONS):
            yield from self._of(OPERATIONS[name])

    def _of(self, facts: OperationFacts) -> Iterator[TensorProgram]:
        for shape in facts.shapes:
            for dim in dims_of(facts, shape):
                yield from self._of_shape(facts, shape, dim)

    def _of_shape(self, facts: OperationFacts, shape: Shape, dim: int) -> Iterator[TensorProgram]:
        first: list[Leaf | Constant] = [Leaf(shape=shape, placements=each) for each in self._placements(shape, FIRST_REDUCTIONS)]
        made = [list(self._made(argument, shape, dim, seed)) for seed, argument in enumerate(facts.arguments, start=1)]
        distances = tuple(range(facts.num_arguments, 0, -1))
        operation = Operation(name=facts.name, arguments=distances, dim=dim)
        for arguments in self._together([first, *made]):
            yield TensorProgram(mesh=self.mesh, statements=(*arguments, operation))

    def _together(self, lists: list[list[Leaf | Constant]]) -> Iterator[tuple[Leaf | Constant, ...]]:
        """Yield all placement pairs. With more than two arguments, all but two are replicated."""
        for arguments in itertools.product(*lists):
            special = [each for each in arguments if set(each.placements) != {REPLICATE}]
            odd = [each for each in special if not {*each.placements}.isdisjoint(LIMITED_PARTIALS)]
            if len(special) <= (1 if odd else 2):
                yield arguments

    def _made(self, argument: Argument, shape: Shape, dim: int, seed: int) -> Iterator[Leaf | Constant]:
        for made in shapes_of(argument, shape, dim):
            for placements in self._placements(made, OTHER_REDUCTIONS if argument.kind is ArgumentKind.LEAF else ()):
                yield make(argument, made, placements, seed=seed, high=argument.high(shape, dim))

    def _placements(self, shape: Shape, reductions: Iterable[str]) -> list[tuple[str, ...]]:
        """Return all placements. On several axes, at most one axis is partial, and only as a sum."""
        along_one = [REPLICATE, *map(shard, range(len(shape)))]
        several = len(self.mesh) > 1
        addends = [partial(each) for each in reductions if each in OTHER_REDUCTIONS or not several]
        found = itertools.product([*along_one, *addends], repeat=len(self.mesh))
        return [each for each in found if sum(placement in addends for placement in each) <= 1]
