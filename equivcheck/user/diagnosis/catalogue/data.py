"""Mistakes in the data and in the returned loss: wrong rows, a loss that is not a mean over rows, another loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.words import count_description
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.training.accumulate import scalar_value
from equivcheck.user.batches import convert_batch, microbatches, tensors_of
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.task import Loss
from equivcheck.worlds.trace.differences import Difference, Phase

MEAN_OF_MEANS = (
    "your loss or model is not a mean over rows: each rank divides by its own count, or normalizes with the statistics of its "
    "own rows, and the results are averaged over ranks"
)
BUFFERS = "buffers are left unreduced: each rank's buffers are computed from its own rows"
BROADCAST = (
    "each rank computes buffers from its own rows, and before each forward rank 0's buffers replace those of the other ranks, as "
    "with DDP's `broadcast_buffers`"
)
PARTS = "your `shard` returns wrong parts (one device that averages over them computes the same values): "


def wrong_rows(diverged: DivergedTraining, facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes with a batch's rows.

    Examples: ranks average their means although they have different numbers of labels, all ranks have the same rows, or inputs
    are paired with another rank's targets.
    """
    if not diverged.has_own_rows:
        return
    parts = _describe_parts(diverged) if facts.differs else ""
    if facts.differs:
        if not parts.startswith(PARTS):
            yield from _means_of_means(diverged, parts)
        where = diverged.ranks_text(diverged.data_axes)
        words = f"gradients are summed over {where}, as if each rank's loss were a partial sum"
        size = diverged.size(diverged.data_axes)
        yield Mistake(Cause.SUMMED, words, lambda ranks: ranks.multiply_gradients(lambda *_: size), own_rows=True)
    count = diverged.task.num_ranks
    for source in range(count):
        words = f"every rank computes on the rows of rank {source}"
        yield Mistake(Cause.SAME_ROWS, words, partial(_load, rows=partial(_rows_from, diverged, source)), own_rows=True)
    if parts.startswith(PARTS):  # last, because other words for the same rows say more
        yield Mistake(Cause.SAME_ROWS, parts, lambda _ranks: None, own_rows=True)
    if diverged.task.step is None and diverged.first.phase in (Phase.LOSS, Phase.GRADIENT):
        for distance in range(1, count):
            for first, second, words in ((distance, 0, "inputs"), (0, distance, "targets")):
                paired = partial(_paired_rows, diverged, first, second)
                sentence = f"inputs and targets of different ranks are paired: rank r has the {words} of rank r + {distance}"
                yield Mistake(Cause.SAME_ROWS, sentence, partial(_load, rows=paired), own_rows=True)


def _means_of_means(diverged: DivergedTraining, words: str) -> Iterator[Mistake]:
    yield Mistake(Cause.MEAN_OF_MEANS, words, lambda _ranks: None, own_rows=True)
    if diverged.single.buffers.pieces:
        # If losses and gradients are right until buffers differ, it is not the loss that each rank divides by its own count.
        is_wrong_at_once = diverged.first.step == 0 and diverged.first.phase is not Phase.BUFFER
        words = f"{words}; {BROADCAST}" if is_wrong_at_once else BROADCAST
        yield Mistake(Cause.MEAN_OF_MEANS, words, _broadcast_buffers, own_rows=True)


def _describe_parts(diverged: DivergedTraining) -> str:
    """Return words for the mistake. If the user shards batches, compare each part's rows with the batch."""
    if diverged.first.phase is Phase.BUFFER:
        return BUFFERS
    if diverged.task.shard is None:
        return MEAN_OF_MEANS
    full = [convert_batch(batch, diverged.task.dtype) for batch in diverged.task.batches]
    firsts = [rank for rank in diverged.coordinates if not any(rank.indices[each] for each in diverged.same_row_axes)]
    rows = [row for rank in firsts for batch in diverged.shares[rank.rank] for row in rows_of(batch)]
    right = [row for batch in full for row in rows_of(batch)]
    if sorted(rows) == sorted(right):
        return MEAN_OF_MEANS
    if set(rows) <= set(right):
        return PARTS + "some rows of the batch are in no part, or in several"
    by_tensor = [[sorted(column) for column in zip(*each, strict=True)] for each in (rows, right)]
    paired = by_tensor[0] == by_tensor[1]
    return PARTS + ("they pair rows of tensors that do not belong together" if paired else "they are not the rows of the batch")


def rows_of(batch: Any) -> list[tuple[bytes, ...]]:
    """Return a batch's rows as bytes: for each row, a tuple with an entry for each tensor."""
    return list(zip(*([row.numpy().tobytes() for row in tensor] for tensor in tensors_of(batch) if tensor.dim()), strict=False))


def _load(ranks: EmulatedUserRanks, *, rows: Callable[[int], Any]) -> None:
    ranks.batches = [rows(rank) for rank in range(len(ranks.batches))]


def _broadcast_buffers(ranks: EmulatedUserRanks) -> None:
    for rank, model in enumerate(ranks.models):
        model.register_forward_pre_hook(partial(_take_buffers, ranks, rank))


def _take_buffers(ranks: EmulatedUserRanks, rank: int, model: nn.Module, _inputs: Any) -> None:
    own = dict(model.named_buffers())
    given = ranks.exchange(rank, {name: buffer.clone() for name, buffer in own.items()}, lambda all_: [all_[0]] * len(all_))
    for name, buffer in own.items():
        buffer.data.copy_(given[name])


def _rows_from(diverged: DivergedTraining, source: int, _rank: int) -> tuple[Any, ...]:
    return diverged.shares[source]


def _paired_rows(diverged: DivergedTraining, first: int, second: int, rank: int) -> list[Any]:
    """Return a rank's batches: inputs from the rank `first` places further on, targets from `second` places further on."""
    batches = []
    for number in range(len(diverged.task.batches)):
        left, right = (microbatches(diverged.shares[(rank + by) % diverged.task.num_ranks][number]) for by in (first, second))
        batches.append([(one[0], other[1]) for one, other in zip(left, right, strict=True)])
    return batches


RIGHT = "your ranks train correctly, but the loss that they return is"


def wrong_losses(diverged: DivergedTraining, facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes in the loss that the step returns. If anything else differs too, yield nothing.

    Examples: the loss is multiplied, is wrong on one rank, or comes from only one microbatch or rank.
    """
    if any(found.phase is not Phase.LOSS for found in diverged.divergences):
        return
    factors = [factor for size in diverged.counts for factor in (float(size), 1 / size) if factor != 1.0]
    for factor in factors:
        words = f"{RIGHT} {factor:g} times the loss{count_description(diverged, factor)}"
        yield Mistake(Cause.SCALED, words, partial(_multiply, factor=factor))
    if diverged.first.difference is Difference.RANKS_DISAGREE:
        for rank, factor in product(range(diverged.task.num_ranks), (0.0, -1.0, *factors)):
            words = f"{RIGHT} {factor:g} times the loss on rank {rank}{count_description(diverged, factor)}"
            yield Mistake(Cause.SCALED, words, partial(_multiply, factor=factor, only=rank))
    for index in range(facts.num_backward if facts.num_backward > 1 else 0):
        words = f"{RIGHT} from microbatch {index} only"
        yield Mistake(Cause.MICROBATCH_LOST, words, partial(_of_microbatch, index=index, divisor=1))
        divided = partial(_of_microbatch, index=index, divisor=facts.num_backward)
        yield Mistake(Cause.MICROBATCH_LOST, f"{words}, divided by the number of microbatches", divided)
    for rank in range(diverged.task.num_ranks) if diverged.has_own_rows else ():
        words = f"{RIGHT} from rank {rank}'s rows only"
        yield Mistake(Cause.NOT_REDUCED, words, partial(_of_rank, source=rank), own_rows=True)


def _multiply(ranks: EmulatedUserRanks, *, factor: float, only: int | None = None) -> None:
    def scaled_return(rank: int, value: Any) -> float | None:
        number = scalar_value(value) if isinstance(value, torch.Tensor) else value
        return None if number is None else float(number) * (factor if only in (None, rank) else 1.0)

    ranks.returns = scaled_return


def _of_rank(ranks: EmulatedUserRanks, *, source: int) -> None:
    ranks.returns = lambda rank, value: ranks.exchange(rank, value, lambda all_: [all_[source]] * len(all_))


def _of_microbatch(ranks: EmulatedUserRanks, *, index: int, divisor: int) -> None:
    seen: dict[int, list[float]] = {}

    def watching(rank: int, loss: Loss) -> Loss:
        def recording_loss(outputs: Any, targets: Any) -> torch.Tensor:
            value = loss(outputs, targets)
            seen.setdefault(rank, []).append(scalar_value(value))
            return value

        return recording_loss

    ranks.wraps_loss = watching
    ranks.returns = lambda rank, _value: seen.pop(rank)[index] / divisor
