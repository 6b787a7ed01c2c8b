"""What torch does not redistribute right, in which versions, and the nearest case that it does; all others must be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from redistribution import model
from redistribution.cases import Held, Order, Placement, Placements, Redistribution, Start, in_order, strided


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """Cases that a version of torch does not get right; `differences` has an example of each."""

    name: str
    """What they are."""
    torch: str = ""
    """The versions of torch; empty for all."""
    applies: Callable[[Redistribution], bool]
    """Whether a case is one."""
    repaired: Callable[[Redistribution], Redistribution]
    """The nearest that is none."""


def _ordered(case: Redistribution) -> Redistribution:
    return replace(case, source=in_order(case.source), target=in_order(case.target))


def is_ambiguous(case: Redistribution, placements: Placements) -> bool:
    """Whether strides that stand for an order of cuts leave other parts than the cuts in that order."""
    if all(each.held is not Held.STRIDED for each in placements):
        return False
    whole = np.arange(math.prod(case.shape)).reshape(case.shape)
    orders = [
        order
        for order in itertools.permutations(range(len(case.mesh)))
        if strided(case.mesh, in_order(placements), order) == placements
    ]
    return any(
        not np.array_equal(
            model.held(whole, case.mesh, placements, at), model.cut_in_order(whole, case.mesh, placements, order, at)
        )
        for order in orders
        for at in case.coordinates()
    )


def is_view(case: Redistribution, placements: Placements, axis: int) -> bool:
    """Whether an axis has a stride that stands for no order of cuts: no other axis cuts the dim."""
    here = placements[axis]
    return here.held is Held.STRIDED and len(case.cut_by(placements, here.dim)) == 1


def _has_view(case: Redistribution) -> bool:
    return any(is_view(case, placements, axis) for placements in case.both for axis in range(len(case.mesh)))


def _has_view_and_stride_beside_cuts(case: Redistribution) -> bool:
    """Where there is a view, the plan is made axis by axis, and overlooks strides of dims that other axes cut, too."""
    return _has_view(case) and any(
        stride.held is Held.STRIDED and len(_axes_that_cut(case, stride.dim)) > 1
        for placements in case.both
        for stride in placements
    )


def _axes_that_cut(case: Redistribution, dim: int) -> set[int]:
    """Before or afterwards."""
    return {axis for placements in case.both for axis, each in enumerate(placements) if each.cuts and each.dim == dim}


def is_gathered_otherwise(case: Redistribution) -> bool:
    """Whether a dim is cut by axes whose flattened one would cut it otherwise, or has its ranks in another order."""
    return case.flattened and any(
        len(sizes) > 1 and (case.order is Order.COLUMNS or not are_as_one(extent, sizes))
        for placements in case.both
        for dim, extent in enumerate(case.shape)
        for sizes in [[size for size in case.cut_by(placements, dim) if size > 1]]
    )


def are_as_one(extent: int, sizes: Sequence[int]) -> bool:
    """Whether axes that cut one after the other leave the parts that any run of them would leave as one axis."""
    if len(sizes) < 2:
        return True
    outer = [len(part) for part in model.chunks(np.arange(extent), sizes[0])]
    for count in range(2, len(sizes) + 1):
        at_once = [len(part) for part in model.chunks(np.arange(extent), math.prod(sizes[:count]))]
        if _nested(extent, sizes[:count]) != at_once:
            return False
    return all(are_as_one(part, sizes[1:]) for part in outer)


def _nested(extent: int, sizes: Sequence[int]) -> list[int]:
    """The sizes of parts of parts."""
    parts = [extent]
    for size in sizes:
        parts = [len(part) for whole in parts for part in model.chunks(np.arange(whole), size)]
    return parts


def _has_pending_addends(case: Redistribution) -> bool:
    return any(here and each.op for here, each in zip(case.pending, case.source, strict=True))


def _has_pending_addends_of_no_sum(case: Redistribution) -> bool:
    return _has_pending_addends(case) and case.op != "sum"


def _has_parts_without_elements(case: Redistribution) -> bool:
    return any(extent <= _room(case) for extent in case.shape)


def _has_strides(case: Redistribution) -> bool:
    return any(each.held is Held.STRIDED for placements in case.both for each in placements)


def _has_strides_and_addends_of_no_sum(case: Redistribution) -> bool:
    return _has_strides(case) and any(each.op not in ("", "sum") for each in case.source)


def _has_ambiguous_strides(case: Redistribution) -> bool:
    return any(is_ambiguous(case, placements) for placements in case.both)


def _scatters_uneven_strides(case: Redistribution) -> bool:
    uneven = any(each.held is Held.STRIDED and case.is_uneven(case.source, each.dim) for each in case.source)
    return uneven and case.start is Start.DISTRIBUTED


def _has_uneven_leaf(case: Redistribution) -> bool:
    return case.start is Start.DISTRIBUTED and any(case.is_uneven(case.source, dim) for dim in range(len(case.shape)))


def _keeps_addends(case: Redistribution) -> bool:
    return any(each.op for each in case.target)


def _room(case: Redistribution) -> int:
    """Elements of a dim that leave some to each rank, however it is cut."""
    return (math.prod(case.mesh) - 1) ** 2


def _larger(case: Redistribution) -> Redistribution:
    return replace(case, shape=tuple(extent + _room(case) + 1 for extent in case.shape))


def _unflattened(case: Redistribution) -> Redistribution:
    return replace(case, flattened=False)


def _from_local(case: Redistribution) -> Redistribution:
    return replace(case, start=Start.FROM_LOCAL)


def _without_pending_addends(case: Redistribution) -> Redistribution:
    return replace(case, pending=tuple(here and not each.op for here, each in zip(case.pending, case.source, strict=True)))


def _all_reduced(case: Redistribution) -> Redistribution:
    return replace(case, target=tuple(Placement() if each.op else each for each in case.target))


REPAIRS = (
    Repair(name="parts without elements", torch="<2.10", applies=_has_parts_without_elements, repaired=_larger),
    Repair(
        name="gathers along a flattened axis that cuts otherwise",
        torch=">=2.11",
        applies=is_gathered_otherwise,
        repaired=_unflattened,
    ),
    Repair(name="strides of which two readings differ", applies=_has_ambiguous_strides, repaired=_ordered),
    Repair(name="scatters of uneven strided parts", applies=_scatters_uneven_strides, repaired=_from_local),
    Repair(name="gradients of uneven parts of a leaf", torch="<2.12", applies=_has_uneven_leaf, repaired=_from_local),
    Repair(
        name="pending gradients of addends other than of a sum",
        torch=">=2.11",
        applies=_has_pending_addends_of_no_sum,
        repaired=_without_pending_addends,
    ),
    Repair(
        name="pending gradients of addends",
        torch="<2.11",
        applies=_has_pending_addends,
        repaired=_without_pending_addends,
    ),
    Repair(name="orders of cuts", torch="<2.10", applies=_has_strides, repaired=_ordered),
    Repair(
        name="orders of cuts beside addends other than of a sum",
        torch=">=2.10,<2.11",
        applies=_has_strides_and_addends_of_no_sum,
        repaired=_ordered,
    ),
    Repair(name="strides of views", torch=">=2.10,<2.12", applies=_has_view, repaired=_ordered),
    Repair(
        name="strides of dims that other axes cut, too, beside those of views",
        torch=">=2.12",
        applies=_has_view_and_stride_beside_cuts,
        repaired=_ordered,
    ),
    Repair(name="addends that are kept", torch="<2.10", applies=_keeps_addends, repaired=_all_reduced),
)
"""In the order in which they are made; a repair undoes no other."""
