"""Gradients that each rank clips by itself before they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from equivcheck.diagnosis.case import Case
from equivcheck.diagnosis.counterfactual import Counterfactual, side_by_side
from equivcheck.diagnosis.norms import norm_of, not_at_all, scale_to
from equivcheck.diagnosis.side_by_side import Gradients, SideBySide, WhenReduced, data_axes
from equivcheck.scenario import ClipNorm, ClipValue
from equivcheck.verdict.cause import Cause


def clipped_early(case: Case) -> Iterator[Counterfactual]:
    """Each rank clips its own gradients, then they are reduced."""
    clipping = case.scenario.training.clipping
    axes = data_axes(case.scenario.layout)
    if clipping is None or case.rounding is not None or case.scenario.start is not None:
        return
    if case.scenario.layout.mesh.size(*axes) == 1:
        return
    words = "each rank clips the gradients of its own rows before they are reduced"
    for again in (False, True):
        more = ", and clips once more after that" if again else ""
        yield side_by_side(case, Cause.CLIPPED_BEFORE_REDUCTION, words + more, _early(clipping, again=again, each=False))
        yield side_by_side(case, Cause.CLIPPED_BEFORE_REDUCTION, words + more, _early(clipping, again=again, each=True))


def _early(clipping: ClipNorm | ClipValue, *, again: bool, each: bool) -> Callable[[SideBySide], None]:
    def clip(gradients: Gradients) -> None:
        holders = [torch.empty_like(value) for value in gradients.values()]
        for holder, value in zip(holders, gradients.values(), strict=True):
            holder.grad = value
        if isinstance(clipping, ClipNorm):
            scale_to(holders, clipping, norm_of(gradients.values(), clipping.norm_type))
        else:
            nn.utils.clip_grad_value_(holders, clipping.clip_value)

    def clip_all(_index: int, gradients: list[Gradients]) -> None:
        for own in gradients:
            clip(own)

    def change(trainings: SideBySide) -> None:
        trainings.meeting = WhenReduced.EACH if each else WhenReduced.ONCE
        trainings.before_reducing.append(clip_all)
        if not again:
            for setup in trainings.setups:
                setup.clip_norm = not_at_all

    return change
