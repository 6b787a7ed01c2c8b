"""Mistakes in a cross-entropy: a wrong divisor, wrong labels, or missing terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from equivcheck.diagnosis.catalogue.counterfactual import (
    Change,
    changing_batches,
    changing_loss,
    on_emulated_ranks,
    on_one_device,
)
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.scenario_ranks import ScenarioRanks
from equivcheck.diagnosis.evidence import RankCoordinate
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import CrossEntropy
from equivcheck.scenario.mesh import TP
from equivcheck.training.documents import precedes_boundary
from equivcheck.training.labels import IGNORED, change_labels, count_labels, labels_of, labels_two_ahead
from equivcheck.training.material import Batch, material
from equivcheck.training.second_predictions import LabelsOf, relabel_second, weigh_second_as_first

Divisor = Callable[[Sequence[Batch], Batch], float]
"""Function to compute a microbatch's divisor, given the step's microbatches and the microbatch."""


def wrong_labels(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes with labels: wrong divisors for the loss, wrong labels, and lost or scaled loss terms."""
    loss = diverged.training.loss
    if not isinstance(loss, CrossEntropy):
        return
    if not loss.summed:
        yield from _miscounted(diverged, loss)
    yield from _other_losses(diverged, loss)
    yield from _relabelled(diverged)


def _miscounted(diverged: DivergedRun, loss: CrossEntropy) -> Iterator[Mistake]:
    outputs, has_several_microbatches = diverged.training.model.out_features, len(diverged.training.data.microbatches) > 1
    plain = replace(loss, class_weights=False)

    def fault(words: str, change: Change) -> Mistake:
        return on_one_device(Cause.LABEL_COUNT, f"the loss is divided by {words}", change)

    if has_several_microbatches:
        words = "the counted labels of each microbatch, not of the step"
        yield fault(words, _divided(lambda batches, batch: len(batches) * _at_least_one(loss, outputs, [batch])))
    words = "all labels of the step, including ignored ones"
    yield fault(words, _divided(lambda batches, _batch: float(sum(labels_of(each.targets).numel() for each in batches))))
    if loss.class_weights:
        words = "the number of labels, not by the sum of their class weights"
        yield fault(words, _divided(lambda batches, _batch: _at_least_one(plain, outputs, batches)))
    yield fault("1: it is the sum over labels", _divided(lambda _batches, _batch: 1.0))
    if diverged.data_axes:
        where = diverged.ranks_text(diverged.data_axes)
        words = f"each of {where} divides the loss by its own counted labels, not by those of the step"
        yield on_emulated_ranks(Cause.LABEL_COUNT, words, partial(_counting_own, loss=loss, of_step=True))
        if has_several_microbatches:
            words = f"each of {where} divides each microbatch's loss by its own counted labels, not by those of the step"
            yield on_emulated_ranks(Cause.LABEL_COUNT, words, partial(_counting_own, loss=loss, of_step=False))


def _at_least_one(loss: CrossEntropy, outputs: int, batches: Sequence[Batch]) -> float:
    return sum(count_labels(loss, outputs, batch.targets) for batch in batches) or 1.0


def _divided(divisor: Divisor) -> Change:
    return changing_batches(lambda batches: [replace(batch, divisor=divisor(batches, batch)) for batch in batches])


def _counting_own(ranks: ScenarioRanks, loss: CrossEntropy, *, of_step: bool) -> None:
    """Bug: the loss is divided by the labels that the rank counts in the step or the microbatch."""
    outputs, size = ranks.training.model.out_features, ranks.mesh.size(*ranks.axes)
    steps = material(ranks.training).steps

    def take(rank: RankCoordinate, batch: Batch) -> Batch:
        step = next(batches for batches in steps if any(each is batch for each in batches))
        counted = step if of_step else (batch,)
        parts = 1 if of_step else len(step)
        own = _at_least_one(loss, outputs, [ranks.take_rows(rank, each) for each in counted])
        return replace(ranks.take_rows(rank, batch), divisor=size * parts * own)

    ranks.take = take


def _other_losses(diverged: DivergedRun, loss: CrossEntropy) -> Iterator[Mistake]:
    def fault(words: str, change: Change) -> Mistake:
        return on_one_device(Cause.ANOTHER_LOSS, words, change)

    if loss.z_loss:
        yield fault("the z-loss is left out", changing_loss(z_loss=0.0))
        for axes in (*((name,) for name in diverged.data_axes if len(diverged.data_axes) > 1), diverged.data_axes):
            if axes:
                size, where = diverged.mesh.size(*axes), diverged.ranks_text(axes)
                yield fault(f"the z-loss is summed over {where}, not averaged", changing_loss(z_loss=loss.z_loss * size))
                yield fault(f"the z-loss is averaged over {where} twice", changing_loss(z_loss=loss.z_loss / size))
    if loss.label_smoothing:
        yield fault("labels are not smoothed", changing_loss(label_smoothing=0.0))
    if loss.class_weights:
        yield fault("class weights are not applied", changing_loss(class_weights=False))


def _relabelled(diverged: DivergedRun) -> Iterator[Mistake]:
    def fault(words: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Mistake:
        relabelled = changing_batches(
            lambda batches: [replace(batch, targets=change_labels(batch.targets, change)) for batch in batches]
        )
        return on_one_device(Cause.ANOTHER_LABEL, words, relabelled)

    yield fault("ignored labels count as class 0", lambda labels: labels.masked_fill(labels == IGNORED, 0))
    ranks, dim = diverged.mesh.size(TP), 1 - diverged.training.data.batch_dim
    if diverged.training.model.length is None or ranks == 1:
        return
    where = f"each sequence shard on {diverged.ranks_text((TP,))}"
    for shift in (-1, 1):
        yield fault(f"labels are shifted by one position within {where}", partial(_shifted, dim=dim, ranks=ranks, shift=shift))
    for place in (-1, 0):
        words = f"the {'last' if place else 'first'} label in {where} is ignored"
        yield fault(words, partial(_without, dim=dim, ranks=ranks, place=place))


def _shifted(labels: torch.Tensor, *, dim: int, ranks: int, shift: int) -> torch.Tensor:
    return torch.cat([part.roll(shift, dim) for part in labels.chunk(ranks, dim)], dim)


def _without(labels: torch.Tensor, *, dim: int, ranks: int, place: int) -> torch.Tensor:
    labels = labels.clone()
    for part in labels.chunk(ranks, dim):
        part.select(dim, place).fill_(IGNORED)
    return labels


def wrong_second_predictions(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes in a head's second prediction, for the token after the next.

    The loss for this prediction is divided by the first prediction's label count, or uses another token's labels.
    """
    training, loss = diverged.training, diverged.training.loss
    if not training.model.predicts_two or not isinstance(loss, CrossEntropy):
        return
    if not loss.summed:
        words = "the loss of the second prediction is divided by the labels of the first"
        change = changing_batches(partial(weigh_second_as_first, training))
        yield on_one_device(Cause.LABEL_WEIGHTS, words, change)
    ways: list[tuple[str, LabelsOf]] = [("the labels of the first, for the next token", lambda labels: labels)]
    if training.model.packs_documents:
        none = precedes_boundary(training.model.length or 1, None)
        ways.append(("labels in the next document before each boundary", partial(labels_two_ahead, boundaries=none)))
    for what, second in ways:
        change = changing_batches(partial(relabel_second, training, second))
        yield on_one_device(Cause.ANOTHER_LABEL, f"the second prediction has {what}", change)
