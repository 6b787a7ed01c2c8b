"""Clipping by other norms than that of all gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket

from equivcheck.mutants.axes import axis_names, mesh_of, size_of
from equivcheck.mutants.reductions import averaged, reduce_by
from equivcheck.scenario import ClipNorm, ClipValue, NormType
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD
from equivcheck.trace.stage import Stage
from equivcheck.train.accumulate import whole
from equivcheck.train.read import local_values
from equivcheck.train.setup import Setup

BEYOND_ALL = 1e30
"""A largest norm at which nothing is clipped, in any element type that has it."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Clipping:
    """One call that is to clip by norm; nothing has been clipped yet, and what else is sent is no part of the training."""

    setup: Setup
    """How this rank trains."""
    parameters: list[torch.Tensor]
    """Whose gradients are to be clipped."""
    noun: ClipNorm
    """How."""
    right: torch.Tensor
    """The norm of all gradients."""
    norm_of: Callable[[list[torch.Tensor]], torch.Tensor]
    """The norm of the gradients of some parameters, over all ranks."""

    @property
    def norm_type(self) -> float:
        """The exponent of the norm."""
        return float(self.noun.norm_type.value)


def clip_by(setup: Setup, clip: Callable[[Clipping], torch.Tensor]) -> None:
    """Let gradients be clipped otherwise; `clip` returns the norm that is to be returned."""
    inner = setup.clip_norm

    def clip_norm(module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
        unlimited = replace(clipping, max_norm=BEYOND_ALL)

        def norm_of(some: list[torch.Tensor]) -> torch.Tensor:
            return whole(inner(module, some, unlimited))

        right = inner(module, parameters, unlimited)
        setup.announce(Stage.READING, 0)
        return clip(Clipping(setup=setup, parameters=parameters, noun=clipping, right=whole(right), norm_of=norm_of))

    setup.clip_norm = clip_norm


@dataclass(frozen=True, slots=True)
class ClipByNorm:
    """Clip by another norm, and return it; called with the setup of a rank."""

    norm: Callable[[Clipping], torch.Tensor]
    """Which."""

    def __call__(self, setup: Setup) -> None:
        """Plant it."""
        clip_by(setup, self._clip)

    def _clip(self, clipping: Clipping) -> torch.Tensor:
        norm = self.norm(clipping)
        shrink(clipping.parameters, coefficient(clipping.noun, norm))
        return norm


def coefficient(noun: ClipNorm, norm: torch.Tensor) -> torch.Tensor:
    """What gradients of that norm are multiplied by, as `clip_grad_norm_` has it."""
    return (noun.max_norm / (norm + 1e-6)).clamp(max=1.0)


def shrink(parameters: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients in place."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(float(factor))


def of_own_shard(clipping: Clipping) -> torch.Tensor:
    """The norm of what this rank holds."""
    held = [local_values(parameter.grad) for parameter in clipping.parameters if parameter.grad is not None]
    return nn.utils.get_total_norm([values for values in held if values.numel()], clipping.norm_type)


def added_up(clipping: Clipping) -> torch.Tensor:
    """The sum of the norms of shards, rather than the norm of all of them."""
    norm = of_own_shard(clipping).to(clipping.right.dtype, copy=True)
    for axis in set(axis_names(clipping.setup)) & {DP, SHARD}:
        dist.all_reduce(norm, group=mesh_of(clipping.setup).get_group(axis))
    return norm


def with_replicas(clipping: Clipping) -> torch.Tensor:
    """The norm that counts what ranks hold alike as often as they are."""
    names = axis_names(clipping.setup)
    count = size_of(clipping.setup, REPLICATE if REPLICATE in names else DP)
    factor: float = count ** (1.0 / clipping.norm_type)
    return clipping.right * factor


def of_matrices(clipping: Clipping) -> torch.Tensor:
    """The norm of the gradients of matrices: biases and norms are left out."""
    return clipping.norm_of([parameter for parameter in clipping.parameters if parameter.dim() > 1])


def of_all_but_first(clipping: Clipping) -> torch.Tensor:
    """The norm of the gradients of all parameters but the first."""
    return clipping.norm_of(clipping.parameters[1:])


def use_another_type(setup: Setup) -> None:
    """Clip by the 2-norm where another is asked for, by the largest element where it is that one."""
    inner = setup.clip_norm

    def clip_norm(module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
        other = NormType.INF if clipping.norm_type is NormType.TWO else NormType.TWO
        return inner(module, parameters, replace(clipping, norm_type=other))

    setup.clip_norm = clip_norm


def clip_each(setup: Setup) -> None:
    """Clip each parameter by its own norm; return that of all."""
    clip_by(setup, _clip_each)


def _clip_each(clipping: Clipping) -> torch.Tensor:
    for parameter in clipping.parameters:
        if parameter.grad is not None:
            shrink([parameter], coefficient(clipping.noun, clipping.norm_of([parameter])))
    return clipping.right


def clip_nothing(setup: Setup) -> None:
    """Return the norm, and clip nothing."""
    clip_by(setup, lambda clipping: clipping.right)


def scale_to_norm(setup: Setup) -> None:
    """Scale gradients to the largest norm, also those that are smaller."""
    clip_by(setup, _scale_to_norm)


def _scale_to_norm(clipping: Clipping) -> torch.Tensor:
    shrink(clipping.parameters, clipping.noun.max_norm / (clipping.right + 1e-6))
    return clipping.right


def report_norm_after(setup: Setup) -> None:
    """Clip rightly, and return the norm after."""
    inner = setup.clip_norm

    def clip_norm(module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
        norm = inner(module, parameters, clipping)
        setup.announce(Stage.READING, 0)
        return whole(norm).clamp(max=clipping.max_norm)

    setup.clip_norm = clip_norm


def clip_buckets(setup: Setup) -> None:
    """Let each rank clip its own gradients, a bucket at a time, before they are averaged."""
    clipping = setup.training.clipping
    if isinstance(clipping, ClipNorm):
        reduce_by(setup, partial(_clip_bucket, clipping))
    elif isinstance(clipping, ClipValue):
        reduce_by(setup, partial(_clamp_bucket, clipping.clip_value))


def _clip_bucket(clipping: ClipNorm, bucket: GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    values = bucket.buffer()
    values.mul_(coefficient(clipping, torch.linalg.vector_norm(values, float(clipping.norm_type.value))))
    return averaged(bucket, group)


def _clamp_bucket(limit: float, bucket: GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    bucket.buffer().clamp_(-limit, limit)
    return averaged(bucket, group)
