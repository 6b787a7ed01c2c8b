"""Clipping by another norm than that of all gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from equivcheck.mutants.mutant import Minimum, fault
from equivcheck.mutants.needs import OVER_OTHERS, is_eager, is_wrapped
from equivcheck.mutants.rank import axis_names, mesh_of, size_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import DDP, AnyLayer, ClipNorm, NormType, Replicate, Scenario
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD, TP
from equivcheck.training.accumulate import whole
from equivcheck.training.read import local_values
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.stage import Stage

SPLIT = "two ranks hold different elements of one gradient"
BY_PARAMETERS = ("ddp", "replicate", "fsdp2", "ddp x tensor_parallel", "replicate x tensor_parallel", "fsdp2 x tensor_parallel")
"""Layouts in which the norm of some parameters can be asked for: `FullyShardedDataParallel` clips what it holds."""
BY_NORM = ("ddp", "replicate", "fsdp1", "fsdp2", "tensor_parallel", "fsdp2 x tensor_parallel")
"""Layouts that clip by norm."""
BEYOND_ALL = 1e30
"""A largest norm at which nothing is clipped, in any element type that has it."""


def clips_by_norm(scenario: Scenario) -> bool:
    """Whether hooks are called, and gradients are clipped by their norm."""
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
    replicas = mesh.size(REPLICATE) if REPLICATE in mesh.names or not _replicates(scenario) else mesh.size(DP)
    return clips_by_norm(scenario) and replicas > 1 and _norm_type(scenario) is not NormType.INF


def _replicates(scenario: Scenario) -> bool:
    return scenario.layout.has(DDP, Replicate)


def _has_vectors(layer: AnyLayer) -> bool:
    return not layer.frozen and (layer.bias or layer.norm is not None)


def _clips_vectors(scenario: Scenario) -> bool:
    return clips_by_norm(scenario) and any(map(_has_vectors, scenario.training.model.layers))


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


def _clip_by_norm(setup: Setup, norm_of: Callable[[Clipping], torch.Tensor]) -> None:
    """Clip by another norm, and return it."""

    def clip_and_return(clip: Clipping) -> torch.Tensor:
        norm = norm_of(clip)
        shrink(clip.parameters, coefficient(clip.noun, norm))
        return norm

    clip_by(setup, clip_and_return)


def coefficient(noun: ClipNorm, norm: torch.Tensor) -> torch.Tensor:
    """What gradients of that norm are multiplied by, as `clip_grad_norm_` has it."""
    return (noun.max_norm / (norm + 1e-6)).clamp(max=1.0)


def shrink(parameters: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients in place."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(float(factor))


@fault(
    layouts=("fsdp2", "fsdp1", "tensor_parallel", *OVER_OTHERS),
    applies=_clips_shards,
    causes=(Cause.LOCAL_NORM,),
    minimum=Minimum(because=f"{SPLIT}; one layer is enough"),
)
def local_norm(setup: Setup) -> None:
    """Each rank clips by the norm of the gradients that it holds."""
    _clip_by_norm(setup, _of_own_shard)


def _of_own_shard(clipping: Clipping) -> torch.Tensor:
    """The norm of what this rank holds."""
    held = [local_values(parameter.grad) for parameter in clipping.parameters if parameter.grad is not None]
    return nn.utils.get_total_norm([values for values in held if values.numel()], clipping.norm_type)


@fault(
    layouts=("fsdp2", "fsdp1"),
    applies=_adds_norms,
    causes=(Cause.ANOTHER_NORM,),
    minimum=Minimum(because=f"{SPLIT}; one layer is enough"),
)
def norms_added_up(setup: Setup) -> None:
    """The norms of shards are added up, whatever the type of the norm."""
    _clip_by_norm(setup, _added_up)


def _added_up(clipping: Clipping) -> torch.Tensor:
    """The sum of the norms of shards, rather than the norm of all of them."""
    norm = _of_own_shard(clipping).to(clipping.right.dtype, copy=True)
    for axis in set(axis_names(clipping.setup)) & {DP, SHARD}:
        dist.all_reduce(norm, group=mesh_of(clipping.setup).get_group(axis))
    return norm


@fault(
    layouts=("ddp", "replicate", "fsdp2", "ddp x tensor_parallel", "replicate x tensor_parallel"),
    applies=_has_replicas,
    causes=(Cause.REPLICAS_IN_NORM,),
    minimum=Minimum(because="two ranks hold one gradient alike"),
)
def replicas_in_norm(setup: Setup) -> None:
    """The norm counts gradients that ranks hold alike once for each of them."""
    _clip_by_norm(setup, _with_replicas)


def _with_replicas(clipping: Clipping) -> torch.Tensor:
    """The norm that counts what ranks hold alike as often as they are."""
    names = axis_names(clipping.setup)
    count = size_of(clipping.setup, REPLICATE if REPLICATE in names else DP)
    factor: float = count ** (1.0 / clipping.norm_type)
    return clipping.right * factor


@fault(
    layouts=BY_PARAMETERS,
    applies=_clips_vectors,
    causes=(Cause.PART_OF_NORM,),
    minimum=Minimum(ranks=1, because="one layer has a weight and a bias"),
)
def vectors_not_in_norm(setup: Setup) -> None:
    """Biases and the weights of norms are left out of the norm, but clipped by it."""
    _clip_by_norm(setup, lambda clip: clip.norm_of([parameter for parameter in clip.parameters if parameter.dim() > 1]))


@fault(
    layouts=BY_PARAMETERS,
    applies=clips_by_norm,
    causes=(Cause.PART_OF_NORM, Cause.NOT_CLIPPED),
    minimum=Minimum(ranks=1, because="what is left out may be all there is: then nothing is clipped"),
)
def first_parameter_not_in_norm(setup: Setup) -> None:
    """The first parameter is left out of the norm, but clipped by it."""
    _clip_by_norm(setup, lambda clip: clip.norm_of(clip.parameters[1:]))


@fault(
    layouts=BY_NORM,
    applies=clips_by_norm,
    causes=(Cause.ANOTHER_NORM,),
    minimum=Minimum(ranks=1, because="a gradient of two elements has norms that differ"),
)
def another_norm_type(setup: Setup) -> None:
    """Gradients are clipped by a norm of another type than the one asked for."""
    inner = setup.clip_norm

    def clip_norm(module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
        other = NormType.INF if clipping.norm_type is NormType.TWO else NormType.TWO
        return inner(module, parameters, replace(clipping, norm_type=other))

    setup.clip_norm = clip_norm
