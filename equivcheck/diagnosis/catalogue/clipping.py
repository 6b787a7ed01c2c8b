"""Faults in gradient clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from equivcheck.diagnosis.catalogue.counterfactual import Counterfactual, on_emulated_ranks, on_one_device
from equivcheck.diagnosis.catalogue.norms import clip_nothing, norm_of, scale_to, with_clipping, wrong_norms
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.layouts.base.rounding import EACH, ONCE, WhenReduced
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import ClipNorm, ClipValue
from equivcheck.training.setup import Setup

Clip = Callable[[nn.Module, list[torch.Tensor], ClipNorm], torch.Tensor]
"""Clips gradients and returns their norm."""


def wrong_clippings(diverged: DivergedRun) -> Iterator[Counterfactual]:
    """Clipping left out, by a wrong norm, per tensor, or before the reduction."""
    clipping = diverged.training.clipping
    if clipping is None:
        return
    by_value = isinstance(clipping, ClipValue)
    change = with_clipping(ClipValue(clip_value=1e300)) if by_value else partial(_clipping_with, clip=clip_nothing)
    yield on_one_device(diverged, Cause.NOT_CLIPPED, "gradients are not clipped", change)
    if isinstance(clipping, ClipNorm):
        yield from wrong_norms(diverged, clipping)
        words = "each tensor is clipped by its own norm"
        yield on_one_device(diverged, Cause.PART_OF_NORM, words, partial(_clipping_with, clip=_clip_each))
    yield from _before_reduction(diverged, clipping)


def _clipping_with(setup: Setup, clip: Clip) -> None:
    setup.clip_norm = clip


def _clip_each(module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
    whole = clip_nothing(module, parameters, clipping)
    for parameter in parameters:
        if parameter.grad is not None:
            scale_to([parameter], clipping, norm_of([parameter.grad], clipping.norm_type))
    return whole


def _before_reduction(diverged: DivergedRun, clipping: ClipNorm | ClipValue) -> Iterator[Counterfactual]:
    if not diverged.data_axes or not diverged.can_be_emulated:
        return
    words = "each rank clips the gradients of its own rows before they are reduced"
    for again, more in ((False, ""), (True, ", and again afterwards")):
        for when in (ONCE, EACH):
            change = _early(clipping, again=again, when=when)
            yield on_emulated_ranks(diverged, Cause.CLIPPED_BEFORE_REDUCTION, words + more, change)


def _early(clipping: ClipNorm | ClipValue, *, again: bool, when: WhenReduced) -> Callable[[EmulatedRanks], None]:
    def clip(gradients: Gradients) -> None:
        holders = [torch.empty_like(value) for value in gradients.values()]
        for holder, value in zip(holders, gradients.values(), strict=True):
            holder.grad = value
        if isinstance(clipping, ClipNorm):
            scale_to(holders, clipping, norm_of(gradients.values(), clipping.norm_type))
        else:
            nn.utils.clip_grad_value_(holders, clipping.clip_value)

    def change(ranks: EmulatedRanks) -> None:
        ranks.when_reduced = when
        ranks.before_reducing.append(clip)
        if not again:
            for setup in ranks.setups:
                setup.clip_norm = clip_nothing

    return change
