"""Strategy for random tensor programs.

They are short, legal by construction, and shrink to one operation on a one-element leaf on two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.programs.nouns import Leaf, Operation, Redistribution, RoundTrip, TensorProgram
from equivcheck.programs.nouns.arguments import make, shapes_of
from equivcheck.programs.nouns.operations.operation import Argument, ArgumentKind, OperationFacts
from equivcheck.programs.nouns.operations.registry import DRAWN, OPERATIONS
from equivcheck.programs.nouns.placement import REDUCTIONS, REPLICATE, partial, shard
from equivcheck.strategies.chance import MOSTLY, RARELY, indices_below

if TYPE_CHECKING:
    from equivcheck.programs.run.builder import ProgramBuilder

MESHES: tuple[tuple[int, ...], ...] = ((2,), (3,), (2, 2), (4,), (1,), (1, 2), (2, 1))
"""Mesh shapes for programs. Two ranks come first."""
SIZES = (*(1, 2, 4, 3, 5) * 4, 0)
"""Sizes of dims: few values, so that shapes often fit each other and DTensor's caches. Size 0 is rare, because nothing is left to
compare.
"""
FEWEST, MOST = 3, 10
"""Minimum and maximum number of statements, not counting the arguments that operations need."""
NEAREST = 4
"""Maximum distance in statements between an operation and its first argument."""

_SEEDS = indices_below(8)
_DIMS = indices_below(12)
_SIZES = st.sampled_from(SIZES)
_NUM_DIMS: SearchStrategy[int] = st.sampled_from((2, 1, 3, 2, 0))
_CHOICES = indices_below(12)
_DISTANCES: SearchStrategy[int] = st.sampled_from((1, 1, 1, 2, 3, NEAREST))


@st.composite
def programs(draw: DrawFn, *, operations: Sequence[str] = (), max_ranks: int = 4) -> TensorProgram:
    """Draw tensor programs with 3 to 10 statements, and further statements for their arguments.

    `operations` are the names of allowed operations. By default, all are allowed except those that only sweeps use. Programs have
    1 to `max_ranks` ranks, usually 2 or more.
    """
    from equivcheck.programs.run.builder import ProgramBuilder

    mesh = draw(st.sampled_from([each for each in MESHES if prod(each) <= max_ranks]))
    names = tuple(operations) or DRAWN
    builder = ProgramBuilder()
    builder.add(draw(_leaves(len(mesh))))
    for _ in range(draw(st.integers(FEWEST, MOST)) - 1):
        _grow(draw, builder, len(mesh), names)
    return TensorProgram(mesh=mesh, statements=tuple(builder.statements))


@st.composite
def _leaves(draw: DrawFn, num_axes: int) -> Leaf:
    shape = tuple(draw(_SIZES) for _ in range(draw(_NUM_DIMS)))
    return Leaf(shape=shape, placements=_placements(draw, num_axes, len(shape)), seed=draw(_SEEDS))


def _placements(draw: DrawFn, num_axes: int, num_dims: int, *, with_addends: bool = True) -> tuple[str, ...]:
    """Draw one placement for each axis: replicated, sharded along any dim, or partial with one reduction."""
    addends = (partial(draw(_REDUCTIONS)),) if with_addends and draw(RARELY) else ()
    allowed = (REPLICATE, *map(shard, range(num_dims)), *addends)
    return tuple(allowed[draw(_CHOICES) % len(allowed)] for _ in range(num_axes))


def _grow(draw: DrawFn, builder: ProgramBuilder, num_axes: int, names: Sequence[str]) -> None:
    """Append a statement, after the arguments it needs."""
    kind = draw(_KINDS)
    distance = min(draw(_DISTANCES), len(builder))
    if kind is Operation:
        _operate(draw, builder, num_axes, (OPERATIONS[names[draw(indices_below(len(names)))]], distance))
    elif kind is Redistribution:
        placements = _placements(draw, num_axes, len(builder.shape(distance)), with_addends=False)
        builder.add(Redistribution(placements=placements, argument=distance))
    else:
        builder.add(RoundTrip(argument=distance) if kind is RoundTrip else draw(_leaves(num_axes)))


def _operate(draw: DrawFn, builder: ProgramBuilder, num_axes: int, taken: tuple[OperationFacts, int]) -> None:
    """Append an operation on an earlier value. The operation's other arguments are created for it, or are earlier values."""
    facts, distance = taken
    place, shape = len(builder) - distance, builder.shape(distance)
    dims = (*range(len(shape)), *range(-len(shape), 0)) or (0,)
    dim = dims[draw(_DIMS) % len(dims)] if facts.takes_dim else 0
    places = [place, *(_argument(draw, builder, num_axes, (argument, shape, dim)) for argument in facts.arguments)]
    distances = tuple(len(builder) - each for each in places)
    builder.add(Operation(name=facts.name, arguments=distances, dim=dim, output=draw(_OUTPUTS)))


def _argument(draw: DrawFn, builder: ProgramBuilder, num_axes: int, needed: tuple[Argument, tuple[int, ...], int]) -> int:
    """Return the number of the argument's statement: a new statement that fits, or a recent value."""
    argument, shape, dim = needed
    shapes = shapes_of(argument, shape, dim)
    if not shapes or (argument.kind is ArgumentKind.LEAF and not draw(MOSTLY)):
        return len(builder) - min(draw(_DISTANCES), len(builder))
    made = shapes[draw(_CHOICES) % len(shapes)]
    placements = _placements(draw, num_axes, len(made), with_addends=argument.kind is ArgumentKind.LEAF)
    builder.add(make(argument, made, placements, seed=draw(_SEEDS), high=argument.high(shape, dim)))
    return len(builder) - 1


_REDUCTIONS: SearchStrategy[str] = st.sampled_from(("sum", *REDUCTIONS))
_OUTPUTS: SearchStrategy[int] = st.sampled_from((0,) * 7 + (1,))
_KINDS: SearchStrategy[type] = st.sampled_from((*[Operation] * 8, Redistribution, Redistribution, RoundTrip, Leaf))
