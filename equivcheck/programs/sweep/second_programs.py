"""Programs with one operation's result as another operation's argument."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

from equivcheck.programs.nouns import Constant, Leaf, Operation, TensorProgram
from equivcheck.programs.nouns.arguments import dims_of, make, shapes_of
from equivcheck.programs.nouns.operations.operation import ArgumentKind, OperationFacts, Shape
from equivcheck.programs.nouns.operations.registry import OPERATIONS
from equivcheck.programs.nouns.placement import REPLICATE, partial, shard
from equivcheck.programs.sweep.results import Result

ArgumentPosition = tuple[str, int]
"""An operation name and an argument number, from 0."""
MAX_ATTEMPTS = 6
"""Maximum number of programs to try for a result and an argument, because one device refuses many."""
_TWICE = 0.25
"""Probability that another argument with the same shape is the same result."""


def argument_positions(operations: Iterable[str]) -> tuple[ArgumentPosition, ...]:
    """Return these operations' arguments, each as operation name and argument number."""
    return tuple((name, position) for name in operations for position in range(OPERATIONS[name].num_arguments))


def programs_taking(result: Result, place: ArgumentPosition, chance: random.Random) -> Iterator[TensorProgram]:
    """Yield programs that pass `result` to a last operation as an argument. One device may refuse some of them.

    `place` is the last operation's name and the argument's number. `chance` draws the other arguments.
    """
    facts, position = OPERATIONS[place[0]], place[1]
    calls = list(_calls(facts, position, result.shape))
    for _ in range(MAX_ATTEMPTS if calls else 0):
        shape, dim = chance.choice(calls)
        others = {number: _made(facts, number, shape, dim, result, chance) for number in range(facts.num_arguments)}
        yield _program(result, Operation(name=facts.name, arguments=(1,) * len(others), dim=dim), others | {position: None})


def _calls(facts: OperationFacts, position: int, shape: Shape) -> Iterator[tuple[Shape, int]]:
    """Yield first-argument shapes, and dims, for which the argument at `position` can have `shape`."""
    for first in dict.fromkeys((shape, *facts.shapes)) if position else (shape,):
        for dim in dims_of(facts, first):
            others = [shapes_of(each, first, dim) for each in facts.arguments]
            if all(others) and (not position or shape in others[position - 1]):
                yield first, dim


def _made(  # noqa: PLR0913, PLR0917 - an argument depends on all of these
    facts: OperationFacts, number: int, shape: Shape, dim: int, result: Result, chance: random.Random
) -> Leaf | Constant | None:
    """Create an argument; None for the result itself."""
    argument = facts.arguments[number - 1] if number else None
    own = chance.choice(shapes_of(argument, shape, dim)) if argument else shape
    is_leaf = argument is None or argument.kind is ArgumentKind.LEAF
    if is_leaf and own == result.shape and chance.random() < _TWICE:
        return None
    placements = tuple(_placement(own, is_leaf, chance) for _ in result.program.mesh)
    if argument is None:
        return Leaf(shape=own, placements=placements, seed=number)
    return make(argument, own, placements, seed=number, high=argument.high(shape, dim))


def _placement(shape: Shape, is_leaf: bool, chance: random.Random) -> str:
    """Return a replicated placement half the time."""
    others = [*map(shard, range(len(shape))), *([partial()] if is_leaf else [])]
    return chance.choice(others) if others and chance.random() < 0.5 else REPLICATE


def _program(result: Result, operation: Operation, others: dict[int, Leaf | Constant | None]) -> TensorProgram:
    statements = list(result.program.statements)
    taken = len(statements) - 1
    indices = []
    for number in sorted(others):
        made = others[number]
        indices.append(taken if made is None else len(statements))
        statements += [] if made is None else [made]
    distances = tuple(len(statements) - index for index in indices)
    return replace(result.program, statements=(*statements, replace(operation, arguments=distances)))
