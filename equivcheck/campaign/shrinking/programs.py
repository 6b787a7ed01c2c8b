"""Changes that make a tensor program simpler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from equivcheck.errors import EquivCheckError
from equivcheck.programs.nouns import Constant, Leaf, Operation, Redistribution, RoundTrip, Statement, TensorProgram
from equivcheck.programs.nouns.placement import REPLICATE, partial, shard, sharded_dim
from equivcheck.programs.nouns.program import arguments_of

T = TypeVar("T")

Places = list[int]
"""Positions of a statement's arguments."""


def _without_others(program: TensorProgram) -> Iterator[TensorProgram]:
    """Keep one statement and its ancestors."""
    for number in range(len(program.statements)):
        yield from _of(program, _ancestors(program, number))


def _without_readers(program: TensorProgram) -> Iterator[TensorProgram]:
    """Remove a statement and its descendants."""
    numbers = range(len(program.statements))
    for number in reversed(numbers):
        yield from _of(program, [each for each in numbers if number not in _ancestors(program, each)])


def _bypassed(program: TensorProgram) -> Iterator[TensorProgram]:
    """Remove a statement, and let its readers read one of its arguments instead."""
    for number, statement in enumerate(program.statements):
        for argument in dict.fromkeys(_places(number, statement)):
            yield from _replaced(program, number, None, argument)


def _as_leaf(program: TensorProgram) -> Iterator[TensorProgram]:
    """Replace a statement by a leaf with the same shape, and remove unread statements."""
    from equivcheck.programs.run.one_device import plan_of, value_of

    plan = plan_of(program)
    for number, statement in enumerate(program.statements):
        if isinstance(statement, (Leaf, Constant)):
            continue
        value = value_of(statement, plan.outputs[number], plan.applies[number])
        for placements in _placements_of(statement, len(program.mesh), value.ndim):
            with suppress(EquivCheckError):
                leaf = Leaf(shape=tuple(value.shape), placements=placements, seed=number % 8)
                yield from map(_without_unread, _replaced(program, number, leaf, number))


def _placements_of(statement: Statement, num_axes: int, num_dims: int) -> Iterator[tuple[str, ...]]:
    if isinstance(statement, Redistribution):
        yield statement.placements
    for placement in (REPLICATE, *map(shard, range(num_dims)), partial()):
        yield (placement,) * num_axes


def _without_axis(program: TensorProgram) -> Iterator[TensorProgram]:
    for axis in range(len(program.mesh)):
        with suppress(EquivCheckError):
            placed = (Leaf, Constant, Redistribution)
            statements = tuple(
                replace(each, placements=_left_out(each.placements, axis)) if isinstance(each, placed) else each
                for each in program.statements
            )
            yield replace(program, mesh=_left_out(program.mesh, axis), statements=statements)


def _on_fewer_ranks(program: TensorProgram) -> Iterator[TensorProgram]:
    for axis, size in enumerate(program.mesh):
        for fewer in range(1, size):
            with suppress(EquivCheckError):
                yield replace(program, mesh=(*program.mesh[:axis], fewer, *program.mesh[axis + 1 :]))


def _of_smaller_sizes(program: TensorProgram) -> Iterator[TensorProgram]:
    """Shrink one size everywhere, then in one tensor; then remove a dim from one tensor."""
    tensors = [number for number, each in enumerate(program.statements) if isinstance(each, (Leaf, Constant))]
    sizes = sorted({size for number in tensors for size in program.statements[number].shape}, reverse=True)  # type: ignore[union-attr]
    for size in sizes:
        for smaller in range(1, size):
            yield from _changed(program, dict.fromkeys(tensors, lambda each, a=size, b=smaller: _resized(each, a, b)))
    for number in tensors:
        for dim, size in enumerate(program.statements[number].shape):  # type: ignore[union-attr]
            for smaller in range(1, size):
                yield from _changed(program, {number: lambda each, at=dim, to=smaller: _with_size(each, at, to)})
            yield from _changed(program, {number: lambda each, at=dim: _without_dim(each, at)})


def _resized(tensor: Leaf | Constant, old: int, new: int) -> Statement:
    resized = replace(tensor, shape=tuple(new if size == old else size for size in tensor.shape))
    return replace(resized, high=new) if isinstance(resized, Constant) and resized.high == old else resized


def _with_size(tensor: Leaf | Constant, dim: int, size: int) -> Statement:
    return replace(tensor, shape=(*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]))


def _without_dim(tensor: Leaf | Constant, dim: int) -> Statement:
    placements = tuple(_moved(each, dim) for each in tensor.placements)
    return replace(tensor, shape=_left_out(tensor.shape, dim), placements=placements)


def _moved(placement: str, dim: int) -> str:
    cut = sharded_dim(placement)
    if cut is None or cut < dim:
        return placement
    return REPLICATE if cut == dim else shard(cut - 1)


def _replicated(program: TensorProgram) -> Iterator[TensorProgram]:
    """Replicate one of a statement's placements."""
    for number, statement in enumerate(program.statements):
        for axis, placement in enumerate(getattr(statement, "placements", ())):
            for simpler in (REPLICATE, partial()):
                if placement not in (REPLICATE, simpler):
                    yield from _changed(program, {number: lambda each, at=axis, to=simpler: _placed(each, at, to)})


def _placed(statement: Statement, axis: int, placement: str) -> Statement:
    assert isinstance(statement, (Leaf, Constant, Redistribution))
    return replace(statement, placements=(*statement.placements[:axis], placement, *statement.placements[axis + 1 :]))


def _with_fewer_settings(program: TensorProgram) -> Iterator[TensorProgram]:
    """Set a dim, an output or a seed to 0."""
    for number, statement in enumerate(program.statements):
        for name in ("dim", "output", "seed"):
            if getattr(statement, name, 0):
                yield from _changed(program, {number: lambda each, field=name: replace(each, **{field: 0})})
    yield replace(program, schedule_seed=0)


PROGRAM_CHANGES: tuple[Callable[[TensorProgram], Iterator[TensorProgram]], ...] = (
    _without_others,
    _without_readers,
    _bypassed,
    _as_leaf,
    _without_axis,
    _on_fewer_ranks,
    _of_smaller_sizes,
    _replicated,
    _with_fewer_settings,
)
"""Changes, most effective first."""


def _left_out(values: tuple[T, ...], place: int) -> tuple[T, ...]:
    return values[:place] + values[place + 1 :]


def _places(number: int, statement: Statement) -> Places:
    return [number - back for back in arguments_of(statement)]


def _ancestors(program: TensorProgram, number: int) -> list[int]:
    """Return a statement and its ancestors, in order."""
    found = {number}
    for each in range(number, -1, -1):
        if each in found:
            found.update(_places(each, program.statements[each]))
    return sorted(found)


def _of(program: TensorProgram, numbers: Iterable[int]) -> Iterator[TensorProgram]:
    """Keep some statements, which must include their arguments."""
    kept = list(numbers)
    with suppress(EquivCheckError):
        yield replace(program, statements=tuple(_again(program, kept, {})))


def _replaced(program: TensorProgram, number: int, statement: Statement | None, reads: int) -> Iterator[TensorProgram]:
    """Replace or remove a statement, and let its readers read statement `reads`."""
    kept = [each for each in range(len(program.statements)) if statement is not None or each != number]
    statements = list(_again(program, kept, {number: reads}))
    if statement is not None:
        statements[number] = statement
    with suppress(EquivCheckError):
        yield replace(program, statements=tuple(statements))


def _again(program: TensorProgram, kept: list[int], instead: dict[int, int]) -> Iterator[Statement]:
    """Yield the kept statements, with distances to the new positions of their arguments."""
    for now, number in enumerate(kept):
        statement = program.statements[number]
        distances = tuple(now - kept.index(instead.get(place, place)) for place in _places(number, statement))
        if isinstance(statement, Operation):
            yield replace(statement, arguments=distances)
        elif isinstance(statement, (Redistribution, RoundTrip)):
            yield replace(statement, argument=distances[0])
        else:
            yield statement


def _without_unread(program: TensorProgram) -> TensorProgram:
    """Remove unread leaves and constants, except for the last statement."""
    last = len(program.statements) - 1
    read = {place for number, each in enumerate(program.statements) for place in _places(number, each)}
    kept = [number for number, each in enumerate(program.statements) if number in read or number == last or arguments_of(each)]
    return next(_of(program, kept), program)


def _changed(program: TensorProgram, changes: dict[int, Callable[..., Statement]]) -> Iterator[TensorProgram]:
    with suppress(EquivCheckError):
        statements = [changes[number](each) if number in changes else each for number, each in enumerate(program.statements)]
        yield replace(program, statements=tuple(statements))
