"""What torch does not redistribute right, in which versions, and the nearest case that it does; all others must be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from redistribution import model
from redistribution.cases import Held, Placement, Placements, Redistribution, Start, in_order, strided


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


def _has(case: Redistribution, held: Held) -> bool:
    return any(each.held is held for each in (*case.source, *case.target))


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


def _is_alone(case: Redistribution, placements: Placements) -> bool:
    return any(each.held is Held.STRIDED and len(case.cut_by(placements, each.dim)) == 1 for each in placements)


def _cuts_again(case: Redistribution) -> bool:
    both = (case.source, case.target)
    return any(len(case.cut_by(placements, dim)) > 1 for placements in both for dim in range(len(case.shape)))


def _gathered_at_once(case: Redistribution) -> bool:
    return case.flattened and any(
        case.is_uneven(placements, dim) and len(case.cut_by(placements, dim)) > 1
        for placements in (case.source, case.target)
        for dim in range(len(case.shape))
    )


def _pending_addends(case: Redistribution) -> bool:
    return any(here and each.op for here, each in zip(case.pending, case.source, strict=True))


def _without_pending_addends(case: Redistribution) -> Redistribution:
    return replace(case, pending=tuple(here and not each.op for here, each in zip(case.pending, case.source, strict=True)))


def _reduce_kept(case: Redistribution) -> Redistribution:
    return replace(case, target=tuple(Placement() if each.op else each for each in case.target))


def _room(case: Redistribution) -> int:
    """Elements of a dim that leave some to each rank, however it is cut."""
    return (math.prod(case.mesh) - 1) ** 2


REPAIRS = (
    Repair(
        name="parts without elements",
        torch="<2.10",
        applies=lambda case: any(extent <= _room(case) for extent in case.shape),
        repaired=lambda case: replace(case, shape=tuple(extent + _room(case) + 1 for extent in case.shape)),
    ),
    Repair(
        name="gathers of uneven nested parts along a flattened axis",
        torch=">=2.11",
        applies=_gathered_at_once,
        repaired=lambda case: replace(case, flattened=False),
    ),
    Repair(
        name="strides of which two readings differ",
        applies=lambda case: any(is_ambiguous(case, placements) for placements in (case.source, case.target)),
        repaired=_ordered,
    ),
    Repair(
        name="scatters of uneven strided parts",
        applies=lambda case: (
            case.start is Start.DISTRIBUTED
            and any(each.held is Held.STRIDED and case.is_uneven(case.source, each.dim) for each in case.source)
        ),
        repaired=lambda case: replace(case, start=Start.FROM_LOCAL),
    ),
    Repair(
        name="gradients of uneven parts of a leaf",
        torch="<2.12",
        applies=lambda case: (
            case.start is Start.DISTRIBUTED and any(case.is_uneven(case.source, dim) for dim in range(len(case.shape)))
        ),
        repaired=lambda case: replace(case, start=Start.FROM_LOCAL),
    ),
    Repair(
        name="pending gradients of addends other than of a sum",
        torch=">=2.11",
        applies=lambda case: _pending_addends(case) and case.op != "sum",
        repaired=_without_pending_addends,
    ),
    Repair(
        name="pending gradients of addends",
        torch="<2.11",
        applies=_pending_addends,
        repaired=_without_pending_addends,
    ),
    Repair(
        name="orders of cuts beside addends",
        torch="<2.11",
        applies=lambda case: _has(case, Held.STRIDED) and _has(case, Held.PARTIAL),
        repaired=_ordered,
    ),
    Repair(
        name="strides that no order of cuts makes, to or from dims that are cut several times",
        torch=">=2.12",
        applies=lambda case: any(_is_alone(case, placements) for placements in (case.source, case.target)) and _cuts_again(case),
        repaired=_ordered,
    ),
    Repair(
        name="strides that no order of cuts makes",
        torch="<2.12",
        applies=lambda case: any(_is_alone(case, placements) for placements in (case.source, case.target)),
        repaired=_ordered,
    ),
    Repair(
        name="orders of cuts",
        torch="<2.10",
        applies=lambda case: _has(case, Held.STRIDED),
        repaired=_ordered,
    ),
    Repair(
        name="addends that are kept",
        torch="<2.10",
        applies=lambda case: any(each.op for each in case.target),
        repaired=_reduce_kept,
    ),
)
"""In the order in which they are made; a repair undoes no other."""
