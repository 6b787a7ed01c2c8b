"""The model itself: parts by hand, orders of cuts, and gradients by their definition."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from redistribution import model
from redistribution.cases import Placement, Redistribution, strided
from redistribution.differences import addend, shard, stride
from redistribution.drawn import redistributions
from redistribution.limits import is_ambiguous


def parts(extent: int, mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> list[list[int]]:
    """The rows that each rank has."""
    case = Redistribution(mesh=mesh, shape=(extent,), source=placements, target=placements)
    return [model.held(np.arange(extent), mesh, placements, coordinate).tolist() for coordinate in case.coordinates()]


def test_parts_by_hand() -> None:
    """Even, uneven, empty, cut twice, and strided parts."""
    assert parts(4, (2,), (shard(),)) == [[0, 1], [2, 3]]
    assert parts(5, (4,), (shard(),)) == [[0, 1], [2, 3], [4], []]
    assert parts(5, (2, 2), (shard(), shard())) == [[0, 1], [2], [3], [4]]
    assert parts(8, (2, 2), (stride(2), shard())) == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert parts(7, (2,), (stride(3),)) == [[0, 1, 3, 4, 6], [2, 5]]


def test_addends_by_hand() -> None:
    """Ranks along an axis of addends have different ones, which are put together as it says."""
    for op, fold in (("sum", np.sum), ("avg", np.mean), ("max", np.max), ("min", np.min)):
        case = Redistribution(mesh=(3,), shape=(2,), source=(addend(op),), target=(shard(),))
        given_parts = [model.source_part(case, (part,)) for part in range(3)]
        assert len({part.tobytes() for part in given_parts}) == 3
        whole = np.concatenate([model.target_part(case, (part,)) for part in range(3)])
        assert np.array_equal(whole, fold(given_parts, axis=0))


@given(st.sampled_from(((2, 2), (2, 3), (4, 2), (2, 2, 2))), st.integers(0, 3), st.data())
def test_even_strides_are_orders_of_cuts(mesh: tuple[int, ...], count: int, data: st.DataObject) -> None:
    """What torch writes as strides is a dim that is cut by one axis after the other, in any order, if parts are even."""
    order = data.draw(st.permutations(range(len(mesh))))
    placements = strided(mesh, (shard(),) * len(mesh), tuple(order))
    extent = count * math.prod(mesh)
    assert not is_ambiguous(Redistribution(mesh=mesh, shape=(extent,), source=placements, target=placements), placements)


def test_strides_of_which_two_readings_differ() -> None:
    """Nine rows in halves of five and four, and each half in four: the last row is the second half's, not the first one's."""
    placements = (stride(2), shard())
    assert parts(9, (4, 2), placements)[-2:] == [[8], []]
    assert [model.cut_in_order(np.arange(9), (4, 2), placements, (1, 0), (3, part)).tolist() for part in (0, 1)] == [[], [8]]


@given(st.sampled_from((2, 3, 4, 6)).flatmap(redistributions))
def test_gradients_by_definition(case: Redistribution) -> None:
    """Each element of the result once, weighted, is each addend once, times its gradient."""
    pending, axes = model.pending_axes(case), range(len(case.mesh))
    total, expected = 0.0, 0.0
    for at in case.coordinates():
        weight = np.sum([model.weight(case, other) for other in model.along(case, pending, at)], 0)
        if not any(at[axis] for axis in axes if not case.target[axis].op):
            expected += float(np.sum(weight * model.reduced(case, at)))
        if not any(at[axis] for axis in axes if not case.source[axis].op):
            total += float(np.sum(weight * model.share(case, at) * model.addend(case, at)))
    assert abs(total - expected) <= 1e-9 * abs(expected)
