"""What a redistribution means: plain functions in NumPy over the whole tensor. No torch.

A rank holds the elements at some indices of each dim. Each mesh axis, from the first to the last, that cuts a dim takes a part of
the indices that are left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from redistribution.cases import Coordinate, Held, Placement, Placements, Redistribution, in_order

Array = npt.NDArray[Any]

UNIT = 840.0
"""Numbers are multiples of it, so that means over up to eight ranks are whole numbers, and exact in any order."""

FOLDS: dict[str, Callable[[Array], Array]] = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: stack.mean(0),
    "max": lambda stack: stack.max(0),
    "min": lambda stack: stack.min(0),
}


def chunks(indices: Array, count: int) -> list[Array]:
    """Parts of which all but the last that has any are of the same size: as few as possible of them are empty or smaller."""
    size = math.ceil(len(indices) / count)
    return [indices[part * size : (part + 1) * size] for part in range(count)]


def cut(indices: Array, placement: Placement, count: int, part: int) -> Array:
    """What is left of a dim's indices for one of the ranks along an axis."""
    pieces = chunks(indices, placement.split) if placement.held is Held.STRIDED else [indices]
    return np.concatenate([chunks(piece, count)[part] for piece in pieces])


def held(whole: Array, mesh: Sequence[int], placements: Placements, coordinate: Coordinate) -> Array:
    """A rank's part of the whole."""
    indices = [np.arange(extent) for extent in whole.shape]
    for placement, count, part in zip(placements, mesh, coordinate, strict=True):
        if placement.cuts:
            indices[placement.dim] = cut(indices[placement.dim], placement, count, part)
    return whole[np.ix_(*indices)]


def cut_in_order(
    whole: Array, mesh: Sequence[int], placements: Placements, order: Sequence[int], coordinate: Coordinate
) -> Array:
    """A rank's part if dims are cut by one axis after the other in an order, which strides stand for."""
    plain = in_order(placements)
    indices = [np.arange(extent) for extent in whole.shape]
    for axis in order:
        if plain[axis].cuts:
            dim = plain[axis].dim
            indices[dim] = cut(indices[dim], plain[axis], mesh[axis], coordinate[axis])
    return np.asarray(whole[np.ix_(*indices)])


def numbers(case: Redistribution, *key: int) -> Array:
    """Whole numbers of the tensor's shape."""
    return UNIT * np.random.default_rng([case.seed, *key]).integers(-9, 9, case.shape, endpoint=True).astype(np.float64)


def addend(case: Redistribution, coordinate: Coordinate) -> Array:
    """The whole tensor as ranks at a coordinate have it: another one at each place along the axes of addends, else the same."""
    key = [part if placement.held is Held.PARTIAL else 0 for part, placement in zip(coordinate, case.source, strict=True)]
    return numbers(case, 0, *key)


def weight(case: Redistribution, coordinate: Coordinate) -> Array:
    """What a rank's result is multiplied with: another one at each place along the axes whose gradients are pending."""
    pending = pending_axes(case)
    return numbers(case, 1, *(part if axis in pending else 0 for axis, part in enumerate(coordinate)))


def pending_axes(case: Redistribution) -> list[int]:
    """The axes along which gradients are addends."""
    return [axis for axis, here in enumerate(case.pending) if here]


def along(case: Redistribution, axes: Sequence[int], coordinate: Coordinate) -> list[Coordinate]:
    """The coordinates that differ in some axes only."""
    places = [range(case.mesh[axis]) if axis in axes else (part,) for axis, part in enumerate(coordinate)]
    return list(itertools.product(*places))


def source_part(case: Redistribution, coordinate: Coordinate) -> Array:
    """What a rank holds before."""
    return held(addend(case, coordinate), case.mesh, case.source, coordinate)


def target_part(case: Redistribution, coordinate: Coordinate) -> Array:
    """What a rank holds afterwards."""
    return held(reduced(case, coordinate), case.mesh, case.target, coordinate)


def reduced(case: Redistribution, coordinate: Coordinate) -> Array:
    """The whole tensor for ranks at a coordinate, addends put together."""
    if not case.reduced:
        return addend(case, coordinate)
    stack = np.stack([addend(case, other) for other in along(case, case.reduced, coordinate)])
    return FOLDS[case.op](stack)


def weight_part(case: Redistribution, coordinate: Coordinate) -> Array:
    """What a rank multiplies its result with."""
    return held(weight(case, coordinate), case.mesh, case.target, coordinate)


def gradient_part(case: Redistribution, coordinate: Coordinate) -> Array:
    """The gradient of what a rank held, of the sum of the weighted elements of the result.

    Each element counts once, however many ranks hold it.
    The gradient of what is replicated, before, is that of the tensor, on all ranks.
    """
    total = np.sum([weight(case, other) for other in along(case, pending_axes(case), coordinate)], 0)
    return held(total * share(case, coordinate), case.mesh, case.source, coordinate)


def share(case: Redistribution, coordinate: Coordinate) -> Array:
    """How a result grows with each element of a rank's addend; ranks that hold an extremum have equal parts of it."""
    if case.op in ("max", "min"):
        most = reduced(case, coordinate)
        holders = np.sum([addend(case, other) == most for other in along(case, case.reduced, coordinate)], 0)
        return (addend(case, coordinate) == most) / holders
    count = math.prod(case.mesh[axis] for axis in case.reduced)
    return np.full(case.shape, 1 / count if case.op == "avg" else 1.0)
