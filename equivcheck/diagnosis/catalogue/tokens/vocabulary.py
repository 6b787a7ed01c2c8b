"""Mistakes in vocabulary-parallel logits and softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from equivcheck.diagnosis.catalogue.counterfactual import Change, on_emulated_ranks, on_one_device
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.scenario_ranks import ScenarioRanks
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.layouts.base.partition import chunk_size, is_last_shard_empty
from equivcheck.layouts.base.plan.layers import plan_over_ranks
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import CrossEntropy, Split, Training
from equivcheck.scenario.mesh import TP
from equivcheck.training.labels import IGNORED, class_weights, labels_of, weights_of
from equivcheck.training.loss import loss_of
from equivcheck.training.setup import Setup

Loss = Callable[[Training, torch.Tensor, torch.Tensor, float], torch.Tensor]


def wrong_vocabularies(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes in heads whose vocabulary is sharded over ranks."""
    plan, model = plan_over_ranks(diverged.layout), diverged.training.model
    if plan is None or diverged.rounding is not None:
        return
    if model.head is not None and plan.head is Split.COLWISE:
        yield from _of_logits(diverged, model.out_features)


def _of_logits(diverged: DivergedRun, vocabulary: int) -> Iterator[Mistake]:
    ranks, where, loss = diverged.mesh.size(TP), diverged.ranks_text((TP,)), diverged.training.loss
    size = chunk_size(vocabulary, ranks)
    words = f"the logits of {where} are gathered in the wrong order"
    for shift in dict.fromkeys((-size, size)):
        yield on_one_device(Cause.PERMUTED, words, _rolling(shift))
    if not isinstance(loss, CrossEntropy) or is_last_shard_empty(vocabulary, ranks):
        return
    words = f"each of {where} subtracts the maximum of its own logits, not of all, before exponentials are summed"
    yield on_one_device(Cause.SOFTMAX_OF_PART, words, partial(_subtracting_own_maximum, ranks=ranks))
    words = f"each of {where} divides by the sum over the exponentials of its own logits, not of all"
    yield on_emulated_ranks(Cause.SOFTMAX_OF_PART, words, partial(_dividing_by_own, num_ranks=ranks))


def _rolling(shift: int) -> Change:
    def change(setup: Setup) -> None:
        setup.model.get_submodule("head").register_forward_hook(lambda _module, _inputs, logits: logits.roll(shift, -1))

    return change


def _subtracting_own_maximum(setup: Setup, ranks: int) -> None:
    def loss(training: Training, logits: torch.Tensor, labels: torch.Tensor, divisor: float) -> torch.Tensor:
        maxima = [shard.amax(-1, keepdim=True).expand_as(shard) for shard in logits.detach().chunk(ranks, -1)]
        return loss_of(training, logits - torch.cat(maxima, -1), labels, divisor)

    setup.loss = loss


def _dividing_by_own(emulated: ScenarioRanks, num_ranks: int) -> None:
    for rank, setup in zip(emulated.coordinates, emulated.setups, strict=True):
        setup.loss = _by_own_denominator(rank.indices[TP], num_ranks)


def _by_own_denominator(rank: int, ranks: int) -> Loss:
    """Return one rank's loss. Each logits shard gets a gradient as if the softmax used this shard's denominator."""

    def loss(training: Training, logits: torch.Tensor, labels: torch.Tensor, divisor: float) -> torch.Tensor:
        shards, losses = logits.chunk(ranks, -1), []
        for place, shard in enumerate(shards):
            seen = torch.cat([each if at == place else each.detach() for at, each in enumerate(shards)], -1)
            losses.append(_divided_by(shard.logsumexp(-1), training, seen, labels, divisor))
        gradients = torch.stack(losses).sum()
        return gradients + (losses[rank] - gradients).detach()

    return loss


def _divided_by(
    own: torch.Tensor, training: Training, logits: torch.Tensor, targets: torch.Tensor, divisor: float
) -> torch.Tensor:
    """Compute the loss with `own` as the logarithm of the softmax denominator."""
    loss, total, classes = training.loss, logits.logsumexp(-1), logits.shape[-1]
    assert isinstance(loss, CrossEntropy), "the loss is a cross-entropy"
    labels, label_weights = labels_of(targets), weights_of(targets)
    weights = class_weights(classes, logits.dtype) if loss.class_weights else torch.ones(classes, dtype=logits.dtype)
    shares = (1.0 - loss.label_smoothing) * weights[labels.clamp(min=0)] + loss.label_smoothing * weights.mean()
    more = shares * (own - total) + loss.z_loss * (own.square() - total.square())
    more = more if label_weights is None else more * label_weights
    return loss_of(training, logits, targets, divisor) + more[labels != IGNORED].sum() / divisor
