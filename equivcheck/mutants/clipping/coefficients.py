"""Clipping by the right norm, but too early, with a wrong coefficient, or not at all."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed.GradBucket, which type checkers do not see

from equivcheck.mutants.clipping.norms import (
    BY_NORM,
    BY_PARAMETERS,
    ClippingCall,
    clip_with,
    clips_by_norm,
    coefficient,
    scale_down,
)
from equivcheck.mutants.comm_hooks import average_bucket, reduce_with
from equivcheck.mutants.mutant import ONE_RANK, fault
from equivcheck.mutants.needs import WITH_DDP, reduces_by_hooks
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import DDP, ClipNorm, ClipValue, Scenario
from equivcheck.training.accumulate import full_value
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.stage import Stage


def _sends_as_computed(scenario: Scenario) -> bool:
    # DDP divides bucket views in another order than other gradients, which changes the last digit.
    views = any(ddp.gradient_as_bucket_view for layout in scenario.layouts for ddp in layout.of(DDP))
    return reduces_by_hooks(scenario) and not views


def _sends_by_norm(scenario: Scenario) -> bool:
    return _sends_as_computed(scenario) and isinstance(scenario.training.clipping, ClipNorm)


def _sends_by_value(scenario: Scenario) -> bool:
    return _sends_as_computed(scenario) and isinstance(scenario.training.clipping, ClipValue)


@fault(layouts=WITH_DDP, applies=_sends_by_norm, causes=(Cause.CLIPPED_BEFORE_REDUCTION,))
def clipped_before_reduction(setup: Setup) -> None:
    """Bug: each rank clips its own gradients before they are averaged."""
    clipping = setup.training.clipping
    if isinstance(clipping, ClipNorm):
        reduce_with(setup, partial(_clip_bucket, clipping))


def _clip_bucket(clipping: ClipNorm, bucket: GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    values = bucket.buffer()
    values.mul_(coefficient(clipping, torch.linalg.vector_norm(values, float(clipping.norm_type.value))))
    return average_bucket(bucket, group)


@fault(layouts=WITH_DDP, applies=_sends_by_value, causes=(Cause.CLIPPED_BEFORE_REDUCTION,))
def clamped_before_reduction(setup: Setup) -> None:
    """Bug: each rank clamps its own gradients before they are averaged."""
    clipping = setup.training.clipping
    if isinstance(clipping, ClipValue):
        reduce_with(setup, partial(_clamp_bucket, clipping.clip_value))


def _clamp_bucket(limit: float, bucket: GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    bucket.buffer().clamp_(-limit, limit)
    return average_bucket(bucket, group)


@fault(layouts=BY_PARAMETERS, applies=clips_by_norm, causes=(Cause.PART_OF_NORM,), minimum=ONE_RANK)
def clipped_by_own_norms(setup: Setup) -> None:
    """Bug: each parameter is clipped by its own norm instead of the total norm."""
    clip_with(setup, _clip_each)


def _clip_each(clipping: ClippingCall) -> torch.Tensor:
    for parameter in clipping.parameters:
        if parameter.grad is not None:
            scale_down([parameter], coefficient(clipping.noun, clipping.norm_of([parameter])))
    return clipping.right


@fault(layouts=BY_NORM, applies=clips_by_norm, causes=(Cause.NORM_MISREPORTED,), minimum=ONE_RANK)
def norm_after_clipping_returned(setup: Setup) -> None:
    """Bug: clipping returns the norm after clipping instead of the norm before."""
    inner = setup.clip_norm

    def clip_norm(module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
        norm = inner(module, parameters, clipping)
        setup.announce(Stage.READING, 0)
        return full_value(norm).clamp(max=clipping.max_norm)

    setup.clip_norm = clip_norm


@fault(layouts=BY_NORM, applies=clips_by_norm, causes=(Cause.NOT_CLIPPED,), minimum=ONE_RANK)
def not_clipped(setup: Setup) -> None:
    """Bug: the norm is returned, but gradients are not clipped."""
    clip_with(setup, lambda clip: clip.right)


@fault(layouts=BY_NORM, applies=clips_by_norm, causes=(Cause.SCALED,), minimum=ONE_RANK)
def scaled_up_to_norm(setup: Setup) -> None:
    """Bug: gradients are scaled up to `max_norm` if their norm is smaller."""
    clip_with(setup, _scale_to_norm)


def _scale_to_norm(clipping: ClippingCall) -> torch.Tensor:
    scale_down(clipping.parameters, clipping.noun.max_norm / (clipping.right + 1e-6))
    return clipping.right
