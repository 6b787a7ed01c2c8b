"""Which redistributions are drawn: all that torch makes, and within what the installed one gets right (see `limits`)."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from equivcheck.system.torch_version import is_torch_in
from redistribution.cases import Held, Order, Placement, Placements, Redistribution, Start, strided
from redistribution.limits import REPAIRS

OPS = ("sum", "avg", "max", "min")
EXTENTS = st.sampled_from((3, 4, 5, 2, 7, 6, 1, 9, 8, 0))
"""Of a dim: seldom none, which hides all."""
SELDOM = st.sampled_from((False, False, True))


def meshes_of(size: int) -> list[tuple[int, ...]]:
    """The meshes of one to three axes that have as many ranks."""
    return [
        mesh for count in (1, 2, 3) for mesh in itertools.product(range(1, size + 1), repeat=count) if math.prod(mesh) == size
    ]


@st.composite
def layouts(draw: DrawFn, mesh: tuple[int, ...], num_dims: int) -> Placements:
    """What ranks may hold without addends: dims are cut in the order of the axes, or in another one, which makes strided parts.

    A dim that is cut once may be strided by any number, as views of tensors make it.
    """
    dims = st.sampled_from((None, *range(num_dims), *range(num_dims)))
    drawn = (draw(dims),) * len(mesh) if draw(st.booleans()) else tuple(draw(dims) for _ in mesh)
    placements = tuple(Placement() if dim is None else Placement(held=Held.SHARD, dim=dim) for dim in drawn)
    if not draw(st.booleans()):
        return placements
    alone = [axis for axis, each in enumerate(placements) if each.cuts and placements.count(each) == 1]
    if alone and draw(st.booleans()):
        axis = draw(st.sampled_from(alone))
        view = replace(placements[axis], held=Held.STRIDED, split=draw(st.sampled_from((2, 3))))
        return (*placements[:axis], view, *placements[axis + 1 :])
    return strided(mesh, placements, tuple(draw(st.permutations(range(len(mesh))))))


@st.composite
def redistributions(draw: DrawFn, size: int) -> Redistribution:
    """One on all ranks of a world."""
    mesh = draw(st.sampled_from(meshes_of(size)))
    shape = tuple(draw(st.lists(EXTENTS, min_size=draw(st.sampled_from((1, 1, 1, 0))), max_size=3)))
    source, target = draw(layouts(mesh, len(shape))), draw(layouts(mesh, len(shape)))
    if draw(st.booleans()):
        source, target = draw(with_addends(source, target))
    whole = draw(SELDOM)
    target = tuple(Placement() for _ in mesh) if whole else target
    start = Start.FROM_LOCAL if any(each.op for each in source) else draw(st.sampled_from(Start))
    case = Redistribution(
        mesh=mesh,
        order=draw(st.sampled_from((Order.ROWS, Order.COLUMNS))),
        flattened=len(mesh) > 1 and draw(st.booleans()),
        shape=shape,
        source=source,
        target=target,
        start=start,
        transposed=start is Start.FROM_LOCAL and draw(st.booleans()),
        asynchronous=not whole and draw(st.booleans()),
        whole=whole,
        pending=tuple(each.held is Held.REPLICATE and draw(st.booleans()) for each in target),
        seed=draw(st.integers(0, 1000)),
    )
    return within_limits(case)


@st.composite
def with_addends(draw: DrawFn, source: Placements, target: Placements) -> tuple[Placements, Placements]:
    """Placements of which some are of addends, which the target mostly puts together; others then cut in the order of axes."""
    addend = Placement(held=Held.PARTIAL, op=draw(st.sampled_from(OPS)))
    here = [draw(st.booleans()) for _ in source]
    kept = [is_addend and draw(SELDOM) for is_addend in here]
    return instead(source, here, addend), instead(target, kept, addend)


def instead(placements: Placements, where: list[bool], addend: Placement) -> Placements:
    """An addend along some axes; if there is one, other axes cut in their order, as strides were reckoned with all."""
    plain = [replace(each, held=Held.SHARD, split=1) if each.cuts else each for each in placements]
    return (
        tuple(addend if is_addend else each for is_addend, each in zip(where, plain, strict=True)) if any(where) else placements
    )


def within_limits(case: Redistribution) -> Redistribution:
    """The nearest case that the installed torch gets right."""
    for limit in REPAIRS:
        if is_torch_in(limit.torch) and limit.applies(case):
            case = limit.repaired(case)
    return case


@st.composite
def batches(draw: DrawFn, size: int) -> tuple[Redistribution, ...]:
    """Some redistributions that ranks do one after another, so that one run tries several; fewer of more ranks."""
    most = max(4, 24 // size)
    return tuple(draw(st.lists(redistributions(size), min_size=most // 2, max_size=most)))
