"""Single-device runs that compute a softmax as sharded ranks do.

Context-parallel ranks in a ring keep the logarithm of each softmax's sum and recompute the weights from scores minus this
logarithm, as FlashAttention does (https://arxiv.org/abs/2205.14135). One device uses such a logarithm in the backward of
`logsumexp`, for a z-loss; vocabulary-parallel ranks do not. Scores and logarithms are rounded at their own size, so weights are
off by as many units in the last place as scores are large. Perturbed inputs do not show this error: if one score dominates,
the weight stays exact. The error depends on the processor, so runs with perturbed logarithms show its size. Fused attention has
the same error if heads are sharded, because its rounding depends on its inputs' strides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from equivcheck.scenario import CrossEntropy, Training
from equivcheck.training.labels import IGNORED, labels_of, weights_of
from equivcheck.training.layers.sequence import AttentionHooks, Sequence
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.loss import loss_of
from equivcheck.worlds.trace.trace import Trace

NUM_PERTURBED_LOGARITHMS = 4
"""Runs with perturbed logarithms. They are made only before a divergence is reported."""


def summed_z_loss_trace(training: Training) -> Trace:
    """Train on one device, and compute the z-loss from summed exponentials, like vocabulary-parallel ranks."""
    setup = single_device_setup(training)
    setup.loss = loss_by_sums
    return train(setup)


def loss_by_sums(training: Training, outputs: torch.Tensor, targets: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
    """Compute the cross-entropy with its z-loss from summed exponentials.

    Outputs have shape (..., classes); `targets` contain the labels. The result is divided by `divisor`.
    """
    loss = training.loss
    assert isinstance(loss, CrossEntropy), "no other has a z-loss"
    plain = loss_of(replace(training, loss=replace(loss, z_loss=0.0)), outputs, targets, divisor)
    largest = outputs.detach().amax(-1)
    logarithm = (outputs - largest.unsqueeze(-1)).exp().sum(-1).log() + largest
    weights, counts = weights_of(targets), labels_of(targets) != IGNORED
    squares = logarithm.square() if weights is None else logarithm.square() * weights
    return plain + loss.z_loss * (squares * counts).sum() / divisor


def logarithm_traces(training: Training) -> Iterator[Trace]:
    """Train on one device several times. Attention's backward computes softmax weights from the logarithms of softmax sums.

    The first run uses exact logarithms, and each later run perturbs them.
    """
    for seed in (None, *range(NUM_PERTURBED_LOGARITHMS)):
        setup = single_device_setup(training)
        for module in setup.module.modules():
            if hasattr(module, "sequence"):
                module.sequence = LogarithmAttention(seed)  # type: ignore[assignment]
        yield train(setup)


class LogarithmAttention(Sequence):
    """Attention over full sequences on one device. Like ring attention, it uses logarithms of softmax sums.

    With a seed, each logarithm is changed by one unit in its last place, up or down. Backward changes each row's sum of output
    times gradient in the same way. The rounding error of this sum matters if one softmax weight is close to 1.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def attend_from_local(
        self, attention: AttentionHooks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Compute softmax attention over the full sequence, with the masks and heads of the module `attention`.

        All tensors have the shape (rows, heads, positions, head_dim). Backward recomputes the softmax weights from the logarithm
        of each softmax sum, as FlashAttention does, instead of saving the weights in forward.
        """
        positions = torch.arange(query.shape[-2])
        unseen = attention.unseen(positions, positions)
        heads = query, attention.repeat_kv_heads(key), attention.repeat_kv_heads(value)
        found: torch.Tensor = _Attention.apply(*heads, unseen, self._round)  # type: ignore[no-untyped-call]
        return found

    def _round(self, logarithm: torch.Tensor) -> torch.Tensor:
        if self._generator is None:
            return logarithm
        up = torch.rand(logarithm.shape, generator=self._generator) < 0.5
        return logarithm.nextafter(torch.where(up, torch.inf, -torch.inf).to(logarithm))


def _scores(query: torch.Tensor, key: torch.Tensor, unseen: torch.Tensor | None) -> torch.Tensor:
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    return scores if unseen is None else scores.masked_fill(unseen, -torch.inf)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        """Compute attention with softmax weights relative to the largest score, and save the logarithm of each softmax sum.

        Takes query, key and value, each (rows, heads, positions, width), a mask or None, and a function that rounds logarithms.
        """
        query, key, value, unseen, rounded = inputs
        scores = _scores(query, key, unseen)
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        total = weights.sum(-1, keepdim=True)
        found: torch.Tensor = weights @ value / total
        ctx.unseen, ctx.rounded = unseen, rounded
        ctx.save_for_backward(query, key, value, found, rounded(largest + total.log()))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute the softmax weights again from the saved logarithm of each softmax sum, then the gradients."""
        (gradient,), (query, key, value, found, logarithm) = gradients, ctx.saved_tensors
        weights = (_scores(query, key, ctx.unseen) - logarithm).exp()
        inner = ctx.rounded((gradient * found).sum(-1, keepdim=True))
        of_scores = weights * (gradient @ value.transpose(-1, -2) - inner) / math.sqrt(query.shape[-1])
        return of_scores @ key, of_scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ gradient, None, None
