"""Clipping by a wrong norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from equivcheck.mutants.mutant import ONE_RANK, fault
from equivcheck.mutants.needs import INNER_TENSOR_PARALLEL, is_eager, is_wrapped
from equivcheck.mutants.rank import axis_names, mesh_of, size_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import DDP, AnyLayer, ClipNorm, NormType, Replicate, Scenario
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD, TP
from equivcheck.training.accumulate import full_value
from equivcheck.training.read import local_values
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.stage import Stage

BY_PARAMETERS = ("ddp", "replicate", "fsdp2", "ddp x tensor_parallel", "replicate x tensor_parallel", "fsdp2 x tensor_parallel")
"""Layouts in which a rank can compute the norm over some of the parameters. `FullyShardedDataParallel` always clips all its
parameters.
"""
BY_NORM = ("ddp", "replicate", "fsdp1", "fsdp2", "tensor_parallel", "fsdp2 x tensor_parallel")
"""Layouts that clip by norm."""
NO_LIMIT = 1e30
"""A `max_norm` that is never exceeded, so that nothing is clipped."""


def clips_by_norm(scenario: Scenario) -> bool:
    """Whether nothing is compiled or traced, and gradients are clipped by norm."""
    return is_eager(scenario) and isinstance(scenario.training.clipping, ClipNorm)


def _norm_type(scenario: Scenario) -> NormType:
    assert isinstance(scenario.training.clipping, ClipNorm), scenario.training.clipping
    return scenario.training.clipping.norm_type


def _clips_shards(scenario: Scenario) -> bool:
    shards = 1 if is_wrapped(scenario.layout) else scenario.layout.mesh.size(DP, SHARD)
    return clips_by_norm(scenario) and shards * scenario.layout.mesh.size(TP) > 1


def _adds_norms(scenario: Scenario) -> bool:
    return clips_by_norm(scenario) and scenario.layout.mesh.size(DP, SHARD) > 1 and _norm_type(scenario) is not NormType.ONE


def _has_replicas(scenario: Scenario) -> bool:
    mesh = scenario.layout.mesh
    replicas = mesh.size(REPLICATE) if REPLICATE in mesh.names or not scenario.layout.has(DDP, Replicate) else mesh.size(DP)
    return clips_by_norm(scenario) and replicas > 1 and _norm_type(scenario) is not NormType.INF


def _has_vectors(layer: AnyLayer) -> bool:
    return not layer.frozen and (layer.bias or layer.norm is not None)


def _clips_vectors(scenario: Scenario) -> bool:
    return clips_by_norm(scenario) and any(map(_has_vectors, scenario.training.model.layers))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ClippingCall:
    """One call that clips gradients by norm, before any gradient is changed.

    Collectives that compute the norms are not recorded as communication calls.
    """

    setup: Setup
    """The rank's setup."""
    parameters: list[torch.Tensor]
    """Parameters to clip."""
    noun: ClipNorm
    """Clipping options of the training."""
    right: torch.Tensor
    """The correct total norm."""
    norm_of: Callable[[list[torch.Tensor]], torch.Tensor]
    """Returns the gradient norm of some parameters, over all ranks."""

    @property
    def norm_type(self) -> float:
        """Order p of the norm."""
        return float(self.noun.norm_type.value)


def clip_with(setup: Setup, clip: Callable[[ClippingCall], torch.Tensor]) -> None:
    """Clip gradients by `clip`, which also returns the norm to report."""
    inner = setup.clip_norm

    def clip_norm(module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
        unlimited = replace(clipping, max_norm=NO_LIMIT)

        def norm_of(some: list[torch.Tensor]) -> torch.Tensor:
            return full_value(inner(module, some, unlimited))

        right = inner(module, parameters, unlimited)
        setup.announce(Stage.READING, 0)
        return clip(ClippingCall(setup=setup, parameters=parameters, noun=clipping, right=full_value(right), norm_of=norm_of))

    setup.clip_norm = clip_norm


def _clip_by_norm(setup: Setup, norm_of: Callable[[ClippingCall], torch.Tensor]) -> None:
    """Clip by another norm and return it."""

    def clip_and_return(clip: ClippingCall) -> torch.Tensor:
        norm = norm_of(clip)
        scale_down(clip.parameters, coefficient(clip.noun, norm))
        return norm

    clip_with(setup, clip_and_return)


def coefficient(noun: ClipNorm, norm: torch.Tensor) -> torch.Tensor:
    """Return the factor by which `clip_grad_norm_` multiplies gradients if their total norm is `norm`."""
    return (noun.max_norm / (norm + 1e-6)).clamp(max=1.0)


def scale_down(parameters: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply the gradients of the parameters by `factor`, in place."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(float(factor))


@fault(layouts=("fsdp2", "fsdp1", "tensor_parallel", *INNER_TENSOR_PARALLEL), applies=_clips_shards, causes=(Cause.LOCAL_NORM,))
def local_norm(setup: Setup) -> None:
    """Bug: each rank clips by the norm over its local shards."""
    _clip_by_norm(setup, _of_own_shard)


def _of_own_shard(clipping: ClippingCall) -> torch.Tensor:
    """Return the norm over this rank's shards."""
    held = [local_values(parameter.grad) for parameter in clipping.parameters if parameter.grad is not None]
    return nn.utils.get_total_norm([values for values in held if values.numel()], clipping.norm_type)


@fault(layouts=("fsdp2", "fsdp1"), applies=_adds_norms, causes=(Cause.ANOTHER_NORM,))
def norms_added_up(setup: Setup) -> None:
    """Bug: the shards' norms are added up instead of combined into one norm."""
    _clip_by_norm(setup, _added_up)


def _added_up(clipping: ClippingCall) -> torch.Tensor:
    """Return the sum over the shards' norms."""
    norm = _of_own_shard(clipping).to(clipping.right.dtype, copy=True)
    for axis in set(axis_names(clipping.setup)) & {DP, SHARD}:
        dist.all_reduce(norm, group=mesh_of(clipping.setup).get_group(axis))
    return norm


@fault(
    layouts=("ddp", "replicate", "fsdp2", "ddp x tensor_parallel", "replicate x tensor_parallel"),
    applies=_has_replicas,
    causes=(Cause.REPLICAS_IN_NORM,),
)
def replicas_in_norm(setup: Setup) -> None:
    """Bug: the norm counts replicated gradients once per replica."""
    _clip_by_norm(setup, _with_replicas)


def _with_replicas(clipping: ClippingCall) -> torch.Tensor:
    """Return the total norm with each replica counted."""
    names = axis_names(clipping.setup)
    count = size_of(clipping.setup, REPLICATE if REPLICATE in names else DP)
    factor: float = count ** (1.0 / clipping.norm_type)
    return clipping.right * factor


@fault(layouts=BY_PARAMETERS, applies=_clips_vectors, causes=(Cause.PART_OF_NORM,), minimum=ONE_RANK)
def vectors_not_in_norm(setup: Setup) -> None:
    """Bug: biases and norm weights are clipped, but do not count in the norm."""
    _clip_by_norm(setup, lambda clip: clip.norm_of([parameter for parameter in clip.parameters if parameter.dim() > 1]))


@fault(layouts=BY_PARAMETERS, applies=clips_by_norm, causes=(Cause.PART_OF_NORM, Cause.NOT_CLIPPED), minimum=ONE_RANK)
def first_parameter_not_in_norm(setup: Setup) -> None:
    """Bug: the first parameter is clipped, but does not count in the norm."""
    _clip_by_norm(setup, lambda clip: clip.norm_of(clip.parameters[1:]))


@fault(layouts=BY_NORM, applies=clips_by_norm, causes=(Cause.ANOTHER_NORM,), minimum=ONE_RANK)
def another_norm_type(setup: Setup) -> None:
    """Bug: gradients are clipped by another norm type than configured."""
    inner = setup.clip_norm

    def clip_norm(module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
        other = NormType.INF if clipping.norm_type is NormType.TWO else NormType.TWO
        return inner(module, parameters, replace(clipping, norm_type=other))

    setup.clip_norm = clip_norm
