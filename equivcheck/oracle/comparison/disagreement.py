"""Find replicas that are not equal bit for bit, and the rank whose replica is farther from the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equivcheck.oracle.reference.noise import Expected
from equivcheck.worlds.trace.differences import Difference, Phase
from equivcheck.worlds.trace.tensors import Positions, Table, Vector
from equivcheck.worlds.trace.trace import Piece, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A tensor whose pieces do not fit together, or on which ranks disagree."""

    name: str
    """Canonical tensor name."""
    difference: Difference
    """Kind of difference."""
    rank: int
    """First rank with the difference. If ranks disagree, the rank that is farther from the reference."""
    expected: str
    """Value, shape or element type in the reference."""
    actual: str
    """Value, shape or element type on the rank."""
    ranks: tuple[int, ...] = ()
    """All ranks with the same missing tensor, shape or element type. Empty if a number differs."""
    index: tuple[int, ...] = ()
    """Index of the differing element. Empty if the difference is not in an element."""
    elsewhere: str = ""
    """Value on another rank, such as ``rank 1 has 0.5``, if ranks disagree. Else empty."""
    distance: float = 0.0
    """Distance between the element and the reference, if ranks disagree. Else 0."""


@dataclass(frozen=True, slots=True, eq=False)
class DifferingElements:
    """Elements whose bits on one rank differ from those on the first rank that holds them."""

    where: Positions
    """Positions of the elements in the flat vector of all tensors."""
    held: Vector
    """Values on the first rank that holds the elements."""
    local: Vector
    """Values on the rank that differs."""


def disagreements(
    expected: Expected, snapshots: Sequence[Snapshot], placed: Sequence[Positions], differing: DifferingElements
) -> list[Misfit]:
    """Return the tensors on which the last rank in `snapshots` disagrees with earlier ranks.

    `differing` holds the elements whose bits differ, and `placed` the positions of each rank's elements. If all ranks hold the
    same parts of a tensor, a different bit is enough. Otherwise the difference must exceed the tolerance, because kernels may
    round elements differently in different shards.
    """
    table, found = expected.table, []
    # Ranks may compute a reported value in different orders, such as a norm.
    is_bitwise = expected.phase is not Phase.REPORTED and _have_same_positions(table, snapshots)
    rows = np.searchsorted(table.offsets, differing.where, side="right") - 1
    distances = _distances(differing.held, differing.local)
    for row in np.unique(rows):
        chosen = rows == row
        distance = distances[chosen]
        if not is_bitwise and np.linalg.norm(distance) <= expected.tolerances[row]:
            continue
        worst = int(np.flatnonzero(chosen)[np.argmax(distance)])
        found.append(_misfit(expected, placed, differing, worst, table.names[row]))
    return found


def loss_disagreements(expected: Expected, snapshots: Sequence[Snapshot], groups: Sequence[Sequence[int]]) -> list[Misfit]:
    """Return a misfit for each group of ranks whose losses differ although the ranks have the same rows.

    The tolerance in `expected` is for the mean over groups. A single group's loss may be larger, so it gets a larger tolerance.
    """
    losses = {rank: float(snapshot.values[0]) for rank, snapshot in enumerate(snapshots) if snapshot.present[0]}
    reporting = [group for group in ([rank for rank in group if rank in losses] for group in groups) if group]
    means = [float(np.mean([losses[rank] for rank in group])) for group in reporting]
    mean, largest = float(expected.values[0]), max((abs(loss) for loss in losses.values() if np.isfinite(loss)), default=0.0)
    limit = float(expected.tolerances[0]) * len(groups) * (max(1.0, largest / abs(mean)) if mean else 1.0)
    found = []
    for number, group in enumerate(reporting):
        values = np.array([losses[rank] for rank in group])
        if not np.isnan(values).all() and _distances(values, values[:1]).max() > limit:
            # One device knows only the mean over groups. The other groups count as right, unless they are not finite.
            own = mean * len(means) - sum(means[:number] + means[number + 1 :])
            right = own if np.isfinite(own) else next((value for value in values.tolist() if np.isfinite(value)), mean)
            words = repr(mean) if len(means) == 1 else f"the same loss on ranks {', '.join(map(str, group))}"
            found.append(_loss_misfit(group, values, _distances(values, np.array(right)), words))
    return found


def _loss_misfit(group: Sequence[int], values: Vector, distances: Vector, expected: str) -> Misfit:
    # The last rank if several are equally far.
    far, near = len(group) - 1 - int(np.argmax(distances[::-1])), int(np.argmin(distances))
    return Misfit(
        name="loss",
        difference=Difference.RANKS_DISAGREE,
        rank=group[far],
        expected=expected,
        actual=repr(float(values[far])),
        elsewhere=f"rank {group[near]} has {float(values[near])!r}",
    )


def _misfit(expected: Expected, placed: Sequence[Positions], differing: DifferingElements, worst: int, name: str) -> Misfit:
    position = int(differing.where[worst])
    values = np.array([differing.local[worst], differing.held[worst]])
    ranks = len(placed) - 1, next(rank for rank, where in enumerate(placed) if position in where)
    distances = _distances(values, expected.values[position])
    # The last rank if both are equally far.
    blamed = int(np.argmax(distances))
    return Misfit(
        name=name,
        difference=Difference.RANKS_DISAGREE,
        rank=ranks[blamed],
        expected=repr(float(expected.values[position])),
        actual=repr(float(values[blamed])),
        index=element(expected.table, position)[1],
        elsewhere=f"rank {ranks[1 - blamed]} has {float(values[1 - blamed])!r}",
        distance=float(distances[blamed]),
    )


def _distances(values: Vector, others: Vector) -> Vector:
    # Infinities with the same sign are equal, although their difference is NaN.
    with np.errstate(invalid="ignore"):
        return np.where(values == others, 0.0, np.abs(np.nan_to_num(values - others, nan=np.inf)))


def _have_same_positions(table: Table, snapshots: Sequence[Snapshot]) -> bool:
    *before, last = (frozenset(snapshot.pieces) for snapshot in snapshots)
    held = np.zeros(table.total, dtype=np.bool_)
    for piece in last:
        held[_positions(table, piece)] = True
    return not any(held[_positions(table, piece)].any() for pieces in before for piece in pieces - last)


def _positions(table: Table, piece: Piece) -> Positions:
    found = table.positions(piece)
    return np.empty(0, dtype=np.intp) if found is None else found


def element(table: Table, position: int) -> tuple[int, tuple[int, ...]]:
    """Return a tensor's row number in `table`, and an element's index in this tensor.

    `position` is the element's position in the flat vector with all tensors.
    """
    row = int(np.searchsorted(table.offsets, position, side="right")) - 1
    index = np.unravel_index(position - table.offsets[row], table.shapes[row])
    return row, tuple(int(part) for part in index)
