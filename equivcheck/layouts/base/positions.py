"""Sequence positions of each context-parallel rank: arithmetic without torch."""

from __future__ import annotations

from itertools import accumulate

from equivcheck.layouts.base.expected_calls.rank_view import RankView
from equivcheck.layouts.base.limits.limit import parallelism_of
from equivcheck.layouts.base.partition import chunk_sizes
from equivcheck.scenario import ContextParallel, LoadBalancer
from equivcheck.scenario.mesh import CP


def positions_of_ranks(parallelism: ContextParallel, length: int, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the positions that each rank holds, in local order. Each position belongs to one rank."""
    if parallelism.balance is LoadBalancer.CONTIGUOUS:
        return _chunks(length, size)
    chunks = _chunks(length, 2 * size)
    return tuple(head + tail for head, tail in zip(chunks[:size], reversed(chunks[size:]), strict=True))


def _chunks(length: int, count: int) -> tuple[tuple[int, ...], ...]:
    ends = accumulate(chunk_sizes(length, count))
    return tuple(tuple(range(end - own, end)) for end, own in zip(ends, chunk_sizes(length, count), strict=True))


def longest_part(parallelism: ContextParallel, length: int, size: int) -> int:
    """Largest number of positions on any rank. Collectives pad the other ranks' shards to this number."""
    return max(map(len, positions_of_ranks(parallelism, length, size)))


def own_length(view: RankView) -> int | None:
    """Number of positions in each sequence that this rank has. None if rows are not sequences."""
    length, size = view.training.model.length, view.layout.mesh.size(CP)
    if length is None or size == 1:
        return length
    return len(positions_of_ranks(parallelism_of(view.layout, ContextParallel), length, size)[view.index(CP)])
