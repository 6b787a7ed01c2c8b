"""Mistakes with the chunks into which pipelines split a microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from equivcheck.diagnosis.catalogue.counterfactual import on_one_device
from equivcheck.diagnosis.catalogue.rows import scaling_loss, taking_rows
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.scenario_ranks import ScenarioRanks
from equivcheck.diagnosis.evidence import RankCoordinate
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Pipeline
from equivcheck.training.accumulate import backward, microbatch_loss, scalar_value
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup

Split = Callable[[Batch], Iterator[tuple[Batch, float]]]
"""Function that yields parts of a microbatch, each with a factor for its loss. This loss is weighted by the part's rows."""


def wrong_chunks(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes: chunks are left out, summed, or averaged with wrong weights, or their padding counts."""
    layout = diverged.layout
    count = next((each.num_chunks for each in layout.of(Pipeline)), 1)
    if count == 1:
        return
    for index in range(count):
        words = f"the pipeline leaves out chunk {index} of each microbatch"
        for divides_by_own in (True, False):
            take = partial(_without_chunk, index=index, count=count)
            yield taking_rows(Cause.MICROBATCH_LOST, words, take, divides_by_own=divides_by_own)
    words = f"the pipeline sums the {count} chunks of each microbatch, rather than averaging them"
    yield on_one_device(Cause.MICROBATCHES_SUMMED, words, partial(scaling_loss, factor=count))
    if not layout.has_equal_chunks(diverged.training.data.microbatches):
        yield from _uneven(layout.num_data_ranks, count, is_mean=diverged.training.loss.is_mean)
    if diverged.training.model.balances or diverged.training.model.has_router_bias:
        yield from _in_losses_only(diverged, count)


def _without_chunk(ranks: ScenarioRanks, rank: RankCoordinate, batch: Batch, index: int, count: int) -> Batch:
    own = ranks.take_rows(rank, batch)
    return _select(own, [row for at, rows in enumerate(_chunks(own.rows, 1, count)) if at != index for row in rows])


def _uneven(data_ranks: int, count: int, *, is_mean: bool) -> Iterator[Mistake]:
    """Yield mistakes with chunks of different numbers of rows."""
    if is_mean:
        words = f"the pipeline averages the {count} chunks of each microbatch, although they have different numbers of rows"
        split = partial(_weighted_equally, data_ranks=data_ranks, count=count, total=1.0)
        yield on_one_device(Cause.MEAN_OF_MEANS, words, partial(_computing_parts, split=split))
        words = f"the pipeline sums the {count} chunks of each microbatch, rather than averaging them"
        split = partial(_weighted_equally, data_ranks=data_ranks, count=count, total=float(count))
        yield on_one_device(Cause.MICROBATCHES_SUMMED, words, partial(_computing_parts, split=split))
    words = "rows count twice if they pad a chunk that has fewer rows than the pipeline's first chunk"
    split = partial(_padded, data_ranks=data_ranks, count=count, is_mean=is_mean)
    yield on_one_device(Cause.ROWS_REPEATED, words, partial(_computing_parts, split=split))


def _in_losses_only(diverged: DivergedRun, count: int) -> Iterator[Mistake]:
    """Yield mistakes with wrong weights of losses, while load-balancing losses and router biases count every position.

    Stages add load-balancing losses to their activations, so they do not depend on weights in the last stage.
    """
    training, data_ranks = diverged.training, diverged.layout.num_data_ranks
    right = "load-balancing losses" if training.model.balances else "router biases"

    def mistake(cause: Cause, words: str, split: Split) -> Mistake:
        change = partial(_computing_parts, split=split, weighs_balance=False)
        return on_one_device(cause, f"{words}, but {right} are right", change)

    for index in range(count):
        split = partial(_weighted, data_ranks=data_ranks, factors=[float(at != index) for at in range(count)])
        yield mistake(Cause.MICROBATCH_LOST, f"the pipeline leaves out the loss of chunk {index} of each microbatch", split)
    uneven = ", although they have different numbers of rows"
    ways = (
        (Cause.MICROBATCHES_SUMMED, "sums", ", rather than averaging them", count),
        (Cause.MEAN_OF_MEANS, "averages", uneven, 1),
    )
    for cause, verb, more, total in ways if training.loss.is_mean else ():
        words = f"the pipeline {verb} the losses of the {count} chunks of each microbatch{more}"
        split = partial(_weighted_equally, data_ranks=data_ranks, count=count, total=float(total))
        yield mistake(cause, words, split)


def _chunks(rows: int, data_ranks: int, count: int) -> list[list[int]]:
    """Return the rows in each chunk, over all data-parallel ranks."""
    own = torch.arange(rows).reshape(data_ranks, -1).tensor_split(count, 1)
    return [chunk.flatten().tolist() for chunk in own]


def _weighted_equally(batch: Batch, *, data_ranks: int, count: int, total: float) -> Iterator[tuple[Batch, float]]:
    for chunk in _chunks(batch.rows, data_ranks, count):
        yield _select(batch, chunk), total * batch.rows / len(chunk) / count


def _weighted(batch: Batch, *, data_ranks: int, factors: Sequence[float]) -> Iterator[tuple[Batch, float]]:
    for chunk, factor in zip(_chunks(batch.rows, data_ranks, len(factors)), factors, strict=True):
        yield _select(batch, chunk), factor


def _padded(batch: Batch, *, data_ranks: int, count: int, is_mean: bool) -> Iterator[tuple[Batch, float]]:
    chunks = _chunks(batch.rows, data_ranks, count)
    missing = [(len(chunks[0]) - len(chunk)) // data_ranks for chunk in chunks]
    last = [chunk[len(chunk) // data_ranks - 1 :: len(chunk) // data_ranks] for chunk in chunks]
    kept = [row for chunk, rows, number in zip(chunks, last, missing, strict=True) for row in chunk + rows * number]
    yield _select(batch, kept), batch.rows / len(kept) if is_mean else 1.0


def _select(batch: Batch, rows: list[int]) -> Batch:
    kept = torch.tensor(rows, dtype=torch.int64)
    inputs, targets = (values.index_select(batch.batch_dim, kept) for values in (batch.inputs, batch.targets))
    masks = tuple(None if mask is None else mask[kept] for mask in batch.masks)
    return replace(batch, inputs=inputs, targets=targets, masks=masks)


def _computing_parts(setup: Setup, split: Split, *, weighs_balance: bool = True) -> None:
    """Run forward and backward on parts of each microbatch, with weighted losses.

    Without `weighs_balance`, load-balancing losses keep their right weights.
    """
    loss_of, own = setup.loss, [1.0]
    setup.loss = lambda *given: loss_of(*given) * own[0]

    def compute(setup: Setup, microbatches: Sequence[Batch], index: int) -> float:
        total = 0.0
        for batch in microbatches:
            for part, weight in split(batch):
                own[0], added = (1.0, weight) if weighs_balance else (weight, 1.0)
                loss = microbatch_loss(setup, part, index, part.rows) * added
                backward(setup, loss)
                total += scalar_value(loss)
        return total

    setup.compute = compute
