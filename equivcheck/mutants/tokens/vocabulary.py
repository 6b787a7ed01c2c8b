"""Vocabulary-parallel embeddings, logits and softmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from equivcheck.layouts.base.partition import chunk_size, is_last_shard_empty
from equivcheck.mutants.mutant import fault
from equivcheck.mutants.parameter_use import use_through
from equivcheck.mutants.rank import rank_along, size_of
from equivcheck.mutants.tensor_parallel.plan import TENSOR_PARALLEL
from equivcheck.mutants.tokens.needs import head_split, held_modules, plan_of, shards_vocabulary
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import CrossEntropy, Scenario, Split, Training
from equivcheck.scenario.mesh import TP
from equivcheck.training.labels import IGNORED, class_weights, labels_of, weights_of
from equivcheck.training.loss import loss_of
from equivcheck.training.setup import Setup


def _has_later_tokens(scenario: Scenario) -> bool:
    """Whether a rank after the first holds two tokens."""
    ranks, source = scenario.layout.mesh.size(TP), scenario.training.model.source
    return shards_vocabulary(scenario) and source is not None and source.vocabulary - chunk_size(source.vocabulary, ranks) > 1


def _gathers_logits(scenario: Scenario) -> bool:
    """Whether sharded logits are gathered and their order matters to the loss."""
    plan = plan_of(scenario)
    gathers = plan is not None and not plan.loss_parallel and head_split(scenario) is Split.COLWISE
    return gathers and not scenario.training.loss.is_linear


def _shares_softmax(scenario: Scenario) -> bool:
    """Whether each rank holds logits for a softmax."""
    shards = not is_last_shard_empty(scenario.training.model.out_features, scenario.layout.mesh.size(TP))
    return _gathers_logits(scenario) and shards and isinstance(scenario.training.loss, CrossEntropy)


@fault(layouts=TENSOR_PARALLEL, applies=shards_vocabulary, causes=(Cause.ANOTHER_ROW,))
def vocabulary_mask_off_by_one(setup: Setup) -> None:
    """Bug: each rank masks the last token in its vocabulary shard, so this token's embedding is zero."""
    for embedding in held_modules(setup, "embedding") if size_of(setup, TP) > 1 else ():
        use_through(embedding, _without_last_row)


def _without_last_row(weight: torch.Tensor) -> torch.Tensor:
    """Return a row-sharded DTensor with zeros in each rank's last row."""
    assert isinstance(weight, DTensor), "the plan shards the embedding"
    local = weight.to_local()
    kept = torch.ones(len(local), 1, dtype=local.dtype)
    kept[-1] = 0.0
    return DTensor.from_local(
        local * kept, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


@fault(layouts=TENSOR_PARALLEL, applies=_has_later_tokens, causes=(Cause.ANOTHER_ROW,))
def vocabulary_offset_off_by_one(setup: Setup) -> None:
    """Bug: each rank after the first subtracts one too many from its tokens, so it looks up the previous row."""
    ranks, source = size_of(setup, TP), setup.training.model.source
    assert source is not None, "the mutant applies to token models only"
    size = chunk_size(source.vocabulary, ranks)

    def shift_tokens(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens = inputs[0]
        is_first = (tokens < size) | (tokens % size == 0)
        return (torch.where(is_first, tokens, tokens - 1), *inputs[1:])

    for embedding in held_modules(setup, "embedding") if ranks > 1 else ():
        embedding.register_forward_pre_hook(shift_tokens, prepend=True)


@fault(layouts=TENSOR_PARALLEL, applies=_gathers_logits, causes=(Cause.PERMUTED,))
def logits_gathered_in_another_order(setup: Setup) -> None:
    """Bug: sharded logits are gathered in the wrong order."""
    shift = chunk_size(setup.training.model.out_features, size_of(setup, TP))
    for head in held_modules(setup, "head") if size_of(setup, TP) > 1 else ():
        head.register_forward_hook(lambda _module, _inputs, logits: logits.roll(-shift, -1))


@fault(layouts=TENSOR_PARALLEL, applies=_shares_softmax, causes=(Cause.SOFTMAX_OF_PART,))
def softmax_maximum_not_reduced(setup: Setup) -> None:
    """Bug: each rank subtracts its own maximum logit before the exponentials are summed over ranks."""
    if size_of(setup, TP) > 1:
        setup.loss = partial(_by_own_maximum, size_of(setup, TP))


def _by_own_maximum(ranks: int, training: Training, logits: torch.Tensor, labels: torch.Tensor, divisor: float) -> torch.Tensor:
    shards = logits.chunk(ranks, -1)
    shifted = torch.cat([shard - shard.detach().amax(-1, keepdim=True) for shard in shards], -1)
    return loss_of(training, shifted, labels, divisor)


@fault(layouts=TENSOR_PARALLEL, applies=_shares_softmax, causes=(Cause.SOFTMAX_OF_PART, Cause.RANKS_DISAGREE))
def softmax_denominator_not_reduced(setup: Setup) -> None:
    """Bug: each rank divides by the sum over its own exponentials, not over all."""
    if size_of(setup, TP) > 1:
        setup.loss = _by_own_denominator(rank_along(setup, TP), size_of(setup, TP))


def _by_own_denominator(rank: int, ranks: int) -> Callable[[Training, torch.Tensor, torch.Tensor, float], torch.Tensor]:
    def loss_of_rank(training: Training, logits: torch.Tensor, targets: torch.Tensor, divisor: float) -> torch.Tensor:
        loss, labels, weights = training.loss, labels_of(targets).flatten(), weights_of(targets)
        counts = labels != IGNORED
        weight_of = torch.ones(1, dtype=logits.dtype) if weights is None else weights.flatten()[counts]
        assert isinstance(loss, CrossEntropy), "the mutant applies to cross-entropy only"
        total = logits.chunk(ranks, -1)[rank].logsumexp(-1, keepdim=True)
        likely, classes = (logits - total).flatten(0, -2)[counts], logits.shape[-1]
        weight = class_weights(classes, logits.dtype) if loss.class_weights else torch.ones(classes, dtype=logits.dtype)
        of_labels = (functional.nll_loss(likely, labels[counts], weight, reduction="none") * weight_of).sum()
        of_classes = -((likely * weight).mean(-1) * weight_of).sum()
        smoothed = (1.0 - loss.label_smoothing) * of_labels + loss.label_smoothing * of_classes
        return (smoothed + loss.z_loss * (total.flatten()[counts].square() * weight_of).sum()) / divisor

    return loss_of_rank
