"""Mistakes in the data: wrong rows, or a loss that is not a mean over rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.batches import converted, mapped, microbatches
from equivcheck.user.diagnosis.counterfactual import Change, Counterfactual, Honest
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedRanks
from equivcheck.worlds.trace.differences import Phase

MEAN_OF_MEANS = (
    "your loss or model is no mean over rows: each rank divides by its own count, or normalizes with the statistics of its own "
    "rows, and the results are averaged over ranks"
)


def wrong_rows(diverged: DivergedTraining, honest: Honest) -> Iterator[Counterfactual]:
    """Yield means over means, equal rows on all ranks, and inputs paired with another rank's targets."""
    if not diverged.shares or not diverged.data_axes:
        return
    if honest.differs:
        yield _with(Cause.MEAN_OF_MEANS, _told(diverged), lambda _rank, own: own)
        yield from _sum_of_means(diverged)
    shares, count = diverged.shares, diverged.task.num_ranks
    for source in range(count):
        words = f"every rank computes on the rows of rank {source}"
        yield _with(Cause.SAME_ROWS, words, lambda _rank, _own, source=source: shares[source])  # type: ignore[misc]
    if diverged.task.step is None and diverged.first.phase in (Phase.LOSS, Phase.GRADIENT):
        for distance in range(1, count):
            for first, second, words in ((distance, 0, "inputs"), (0, distance, "targets")):
                change = _paired(diverged, first, second)
                sentence = f"inputs and targets of different ranks are paired: rank r has the {words} of rank r + {distance}"
                yield Counterfactual(cause=Cause.SAME_ROWS, sentence=sentence, change=change, own_rows=True)


BUFFERS = "buffers are left unreduced: each rank's buffers are computed from its own rows"
PARTS = "your `shard` returns wrong parts (one device that averages over them computes the same values): "


def _told(diverged: DivergedTraining) -> str:
    """Describe the mistake. If the user shards batches, compare the parts' rows with the batch."""
    if diverged.first.phase is Phase.BUFFER:
        return BUFFERS
    if diverged.task.shard is None:
        return MEAN_OF_MEANS
    whole = [converted(batch, diverged.task.dtype) for batch in diverged.task.batches]
    firsts = [rank for rank in diverged.coordinates if not any(rank.indices[each] for each in _others(diverged))]
    rows = [row for rank in firsts for batch in diverged.shares[rank.rank] for row in rows_of(batch)]
    right = [row for batch in whole for row in rows_of(batch)]
    if sorted(rows) == sorted(right):
        return MEAN_OF_MEANS
    if set(rows) <= set(right):
        return PARTS + "some rows of the batch are in no part, or in several"
    by_tensor = [[sorted(column) for column in zip(*each, strict=True)] for each in (rows, right)]
    paired = by_tensor[0] == by_tensor[1]
    return PARTS + ("they pair rows of tensors that do not belong together" if paired else "they are not the rows of the batch")


def _others(diverged: DivergedTraining) -> list[str]:
    return [name for name in diverged.wide_axes if name not in diverged.data_axes]


def rows_of(batch: Any) -> list[tuple[bytes, ...]]:
    """Return the batch as bytes, one tuple per row over all tensors."""
    found: list[torch.Tensor] = []
    mapped(batch, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return list(zip(*([row.numpy().tobytes() for row in tensor] for tensor in found if tensor.dim()), strict=False))


def _with(cause: Cause, sentence: str, rows: Callable[[int, Any], Any]) -> Counterfactual:
    def change(ranks: EmulatedRanks) -> None:
        ranks.batches = [rows(rank, own) for rank, own in enumerate(ranks.batches)]

    return Counterfactual(cause=cause, sentence=sentence, change=change, own_rows=True)


def _sum_of_means(diverged: DivergedTraining) -> Iterator[Counterfactual]:
    """Sum, instead of mean, over results from the ranks' own rows."""
    size = diverged.size(diverged.data_axes)

    def change(ranks: EmulatedRanks) -> None:
        ranks.reduce = lambda all_, microbatch, step: [
            {name: value * size for name, value in each.items()} for each in ranks.mean(all_, microbatch, step)
        ]

    where = diverged.over(diverged.data_axes)
    words = f"gradients are summed over {where}, as if each rank's loss were a partial sum"
    yield Counterfactual(cause=Cause.SUMMED, sentence=words, change=change, own_rows=True)


def _paired(diverged: DivergedTraining, first: int, second: int) -> Change:
    """Inputs `first` ranks further on, and targets `second` ranks further on."""
    count = diverged.task.num_ranks

    def step_of(rank: int, number: int) -> Any:
        left, right = (microbatches(diverged.shares[(rank + by) % count][number]) for by in (first, second))
        return [(one[0], other[1]) for one, other in zip(left, right, strict=True)]

    def change(ranks: EmulatedRanks) -> None:
        ranks.batches = [[step_of(rank, number) for number in range(len(diverged.task.batches))] for rank in range(count)]

    return change
