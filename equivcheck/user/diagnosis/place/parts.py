"""Compares the ranks' parts of one tensor with the full tensor, if it is not known how ranks split it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from equivcheck.diagnosis.evidence import RankCoordinate
from equivcheck.oracle.reference.noise import FACTOR
from equivcheck.user.diagnosis.place.modules import ModuleTensor
from equivcheck.user.task import OTHER_AXES, POSITION_AXES, Task
from equivcheck.worlds.trace.pieces import select_piece


class Status(Enum):
    """How the tensors on ranks relate to the full tensor."""

    RIGHT = "right"
    PARTIAL = "partial"
    """The sum or the mean over some ranks is right, but no rank's tensor is."""
    WRONG = "wrong"
    UNKNOWN = "unknown"
    """Not right in any known way, but the ranks may split the tensor in a way that was not tried."""


class Order(Enum):
    """How a dim's indices are spread over ranks."""

    CHUNKS = "chunks"
    STRIDED = "strided"
    HEAD_AND_TAIL = "head and tail"
    """Chunk i and chunk 2n - 1 - i of 2n chunks, as causal context parallelism balances its work."""


class Split(NamedTuple):
    """A tensor that is sharded over a mesh axis, along one dim."""

    dim: int
    """Dim in the full tensor."""
    order: Order
    """Way in which indices are spread over ranks."""


class Sum(NamedTuple):
    """A tensor that must be added up over a mesh axis, because ranks have partial sums."""

    is_mean: bool
    """Whether the sum is divided by the number of ranks."""


Layout = dict[str, Split | Sum | None]
"""For each axis with more than one rank: how a tensor is distributed over the ranks along that axis.
None if all ranks have the same values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Result of comparing the ranks' tensors with the full tensor."""

    status: Status
    """Whether the ranks' tensors are right."""
    ranks: tuple[int, ...] = ()
    """Ranks whose tensors are wrong."""
    axes: tuple[str, ...] = ()
    """Mesh axes over which the ranks' tensors must be added up to be right."""


class PartComparer:
    """Compares the tensors on ranks with full tensors, one tensor after the other.

    If ranks' values equal parts of the full tensor, they are right, and the comparer remembers this split. If a later tensor's
    shapes fit a remembered split but its values differ, it is wrong. Without a remembered split the status is unknown, because
    ranks may split the tensor in a new way.
    """

    def __init__(self, task: Task, coordinates: Sequence[RankCoordinate], eps: float) -> None:
        self._coordinates, self._eps = coordinates, eps
        self._sizes = {name: size for name, size in task.mesh if size > 1}
        self._row_axes = tuple(name for name in self._sizes if name in task.data_axes and task.shard is None)
        """Axes along which each rank gets a chunk of the rows."""
        known = [name for name in OTHER_AXES if name not in POSITION_AXES] if task.shard else self._sizes
        self._same_row_axes = tuple(name for name in self._sizes if name in known and name not in task.data_axes)
        """Axes along which all ranks get the same rows and positions."""
        self._seen_splits: set[tuple[int, str, Split]] = set()

    def compare(
        self, full: torch.Tensor, parts: Sequence[ModuleTensor | None], tolerance: float, scale: float = 1.0
    ) -> Agreement:
        """Compare each rank's tensor with the full tensor times `scale`. `parts` has None for a rank without a tensor."""
        shapes = {part.values.shape if part.piece is None else part.piece.shape for part in parts if part is not None}
        uncertain = Agreement(status=Status.UNKNOWN)
        if len(shapes) != 1:
            return uncertain
        fewest = len(parts) + 1
        for layout in self._layouts(tuple(full.shape), tuple(shapes.pop()), [*self._sizes]):
            expected = {rank: self._part(full * scale, layout, rank, part) for rank, part in enumerate(parts) if part is not None}
            found = {rank: parts[rank].values.reshape(-1) for rank in expected}  # type: ignore[union-attr]
            wrong = self._wrong_ranks(layout, found, expected, tolerance * scale)
            if not wrong:
                return self._agreement(layout, full)
            is_rearranged = all(_sorted_distance(found[rank], expected[rank]) <= tolerance * scale for rank in wrong)
            is_known = self._is_certain(layout, full.dim()) or any(expected[rank].any() for rank in expected if rank not in wrong)
            if is_known and not is_rearranged and not _summed_axes(layout) and len(wrong) < fewest:
                fewest, uncertain = len(wrong), Agreement(status=Status.WRONG, ranks=tuple(wrong))
        return uncertain

    def _layouts(self, full: tuple[int, ...], part: tuple[int, ...], axes: Sequence[str]) -> Iterator[Layout]:
        """All layouts in which a rank's part has the shape `part`."""
        if not axes:
            if full == part:
                yield {}
            return
        axis, *others = axes
        size = self._sizes[axis]
        cut = (
            [dim for dim in range(len(full)) if full[dim] % size == 0 and full[dim] // size >= part[dim]]
            if len(full) == len(part)
            else []
        )
        for option in (None, *(Split(dim, order) for dim in cut for order in Order), Sum(is_mean=False), Sum(is_mean=True)):
            rest = full
            if isinstance(option, Split):
                rest = (*full[: option.dim], full[option.dim] // size, *full[option.dim + 1 :])
            yield from ({axis: option, **layout} for layout in self._layouts(rest, part, others))

    def _part(self, full: torch.Tensor, layout: Layout, rank: int, seen: ModuleTensor) -> torch.Tensor:
        for axis, option in layout.items():
            if isinstance(option, Split):
                full = _take(full, option, self._sizes[axis], self._coordinates[rank].indices[axis])
        return full.reshape(-1) if seen.piece is None else torch.from_numpy(select_piece(full.contiguous().numpy(), seen.piece))

    def _wrong_ranks(
        self, layout: Layout, found: Mapping[int, torch.Tensor], expected: Mapping[int, torch.Tensor], tolerance: float
    ) -> list[int]:
        summed = _summed_axes(layout)
        count = math.prod(self._sizes[axis] for axis in summed)
        divisor = math.prod(self._sizes[axis] for axis in summed if layout[axis] == Sum(is_mean=True))
        wrong = []
        for rank, own in expected.items():
            place = self._coordinates[rank]
            peers = [
                found[other.rank]
                for other in self._coordinates
                if other.rank in found and place.differs_only_along(other, summed)
            ]
            rounding = FACTOR * self._eps * sum(map(norm_of, peers)) if summed else 0.0
            if len(peers) != count or not distance(sum(peers[1:], peers[0]) / divisor, own) <= tolerance + rounding:
                wrong.append(rank)
        return wrong

    def _agreement(self, layout: Layout, full: torch.Tensor) -> Agreement:
        summed = _summed_axes(layout)
        if full.any():
            splits = ((axis, option) for axis, option in layout.items() if isinstance(option, Split))
            self._seen_splits |= {(full.dim(), axis, split) for axis, split in splits if split.dim < full.dim() - 1}
        return Agreement(status=Status.PARTIAL if summed else Status.RIGHT, axes=tuple(summed))

    def _is_certain(self, layout: Layout, num_dims: int) -> bool:
        """Whether the ranks must have split the tensor in this way."""
        for axis, option in layout.items():
            if isinstance(option, Split):
                is_usual = axis in self._row_axes and option == Split(0, Order.CHUNKS)
                if not is_usual and (num_dims, axis, option) not in self._seen_splits:
                    return False
            elif axis not in self._same_row_axes:
                return False  # a number that each rank computes from its own rows, such as its loss
        return True


def _summed_axes(layout: Layout) -> list[str]:
    return [axis for axis, option in layout.items() if isinstance(option, Sum)]


def _take(full: torch.Tensor, split: Split, count: int, index: int) -> torch.Tensor:
    """Return one of `count` equal parts of the full tensor, by its index."""
    if split.order is Order.CHUNKS:
        return full.chunk(count, split.dim)[index]
    if split.order is Order.STRIDED:
        return full.movedim(split.dim, 0)[index::count].movedim(0, split.dim)
    if full.shape[split.dim] % (2 * count):
        return full.chunk(count, split.dim)[index]
    pieces = full.chunk(2 * count, split.dim)
    return torch.cat([pieces[index], pieces[2 * count - 1 - index]], split.dim)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of the difference between two tensors. Two NaN, or two equal infinities, do not differ."""
    same = (one == other) | (one.isnan() & other.isnan())
    return float(torch.where(same, 0.0, one - other).norm())


def norm_of(values: torch.Tensor) -> float:
    """Return the norm over the finite elements of a tensor."""
    return float(values.nan_to_num(0.0, 0.0, 0.0).norm())


def _sorted_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return distance(one.sort().values, other.sort().values)
