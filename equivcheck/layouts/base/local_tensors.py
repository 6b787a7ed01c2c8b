"""Read plain local tensors as pieces of full parameters, and clip by the norm over all ranks.

Explicit parallelisms shard parameters as plain tensors. `DistributedDataParallel` over tensor parallelism replaces DTensors by
their local tensors, which private torch API (`_st_info`) marks. Tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equivcheck.layouts.base.partition import chunk_size, shard_dim
from equivcheck.scenario import ClipNorm, NormType, Parallelism
from equivcheck.training.layers.parameters import parameters_of
from equivcheck.training.read import box_of, canonical_name, piece_of
from equivcheck.training.setup import Setup
from equivcheck.training.update.clipping import clip_by_norm_of_norms, norm_of_norms
from equivcheck.worlds.trace.trace import Piece, Slot


def has_localized_tensors(model: nn.Module) -> bool:
    """Whether some parameters in a model are local tensors that replaced DTensors."""
    return any(_spec(parameter) is not None for parameter in model.parameters())


def local_tensor_slots(model: nn.Module) -> tuple[Slot, ...]:
    """Return one `Slot` for each distinct parameter. It says which elements of the full parameter this rank has.

    A rank has all elements, or its shard if the parameter was a DTensor.
    """
    return tuple(
        Slot(parameter=parameter, pieces=(local_tensor_piece(canonical_name(name), parameter),))
        for name, parameter in model.named_parameters()
    )


def local_tensor_piece(name: str, parameter: torch.Tensor) -> Piece:
    """Return which elements of a parameter this rank has: all, or its shard if the parameter was a DTensor."""
    spec = _spec(parameter)
    return piece_of(name, parameter) if spec is None else box_of(name, tuple(spec.shape), spec.mesh, spec.placements)


def clip_across(_module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
    """Clip the gradients by their norm over all shards, and return the norm before clipping.

    `clip_grad_norm_` cannot do this, because it only sees this rank's shards.
    """
    return clip_by_norm_of_norms(parameters, clipping, _gradient)


def norm_across(parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
    """Return the gradients' norm over all shards."""
    return norm_of_norms(parameters, clipping, _gradient)


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient, as a DTensor if the parameter was a DTensor."""
    spec, gradient = _spec(parameter), parameter.grad
    if spec is None or gradient is None:
        return gradient
    return DTensor.from_local(gradient, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)


def _spec(parameter: torch.Tensor) -> Any:
    return getattr(parameter, "_st_info", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One rank's shard of a parameter."""

    shape: tuple[int, ...]
    """The full parameter's shape."""
    dim: int
    """Sharded dim."""
    start: int
    """The shard's first index along that dim."""

    def place(self, piece: Piece) -> Piece:
        """Convert a piece of this shard to a piece of the full parameter: the position is counted in the full parameter."""
        start = list(piece.start or (0,) * len(self.shape))
        start[self.dim] += self.start
        return replace(piece, shape=self.shape, start=tuple(start), size=piece.size or piece.shape)


def read_plain_shards(setup: Setup, parallelism: Parallelism, mesh: DeviceMesh) -> None:
    """Make the setup read each plain tensor as a shard of its full parameter, and clip by the norm over all shards."""
    parts: dict[str, _Part] = {}
    for parameter in parameters_of(setup.training.model):
        dim = shard_dim(parallelism, parameter)
        if dim is not None and mesh.size() > 1:
            size = parameter.shape[dim]
            start = min(chunk_size(size, mesh.size()) * mesh.get_local_rank(), size)
            parts[parameter.full_name] = _Part(shape=parameter.shape, dim=dim, start=start)
    if not parts:
        return
    inner, cut = setup.find_slots, set[torch.Tensor]()
    clip = setup.clip_norm if isinstance(setup.clip_norm, ClipOverShards) else ClipOverShards()
    clip.cuts.append((cut, mesh.get_group()))

    def find_slots(model: nn.Module) -> tuple[Slot, ...]:
        slots = inner(model)
        cut.update(slot.parameter for slot in slots if any(piece.name in parts for piece in slot.pieces))
        placed = (tuple(parts[each.name].place(each) if each.name in parts else each for each in slot.pieces) for slot in slots)
        return tuple(Slot(parameter=slot.parameter, pieces=pieces) for slot, pieces in zip(slots, placed, strict=True))

    setup.find_slots, setup.clip_norm, setup.total_norm = find_slots, clip, clip.total_norm


@dataclass(slots=True, eq=False)
class ClipOverShards:
    """Clips gradients by their norm over all ranks' shards. `clip_grad_norm_` would only see this rank's shards."""

    cuts: list[tuple[Collection[torch.Tensor], dist.ProcessGroup]] = field(default_factory=list)
    """Sharded parameters with their shards' process group, for each parallelism with shards."""

    def __call__(self, _module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
        """Clip the gradients and return the norm before clipping."""
        return clip_over_groups(parameters, clipping, self.cuts)

    def total_norm(self, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
        """Return the gradients' norm over all ranks' shards."""
        return norm_over_groups(parameters, clipping, self.cuts)


def clip_over_groups(
    parameters: list[torch.Tensor], clipping: ClipNorm, cuts: Sequence[tuple[Collection[torch.Tensor], dist.ProcessGroup]]
) -> torch.Tensor:
    """Clip gradients by their norm over all ranks' shards, and return the norm before clipping.

    `cuts` has, for each parallelism with shards, the sharded parameters and their shards' process group.
    """
    total = norm_over_groups(parameters, clipping, cuts)
    nn.utils.clip_grads_with_norm_(parameters, clipping.max_norm, total)
    return total


def norm_over_groups(
    parameters: list[torch.Tensor], clipping: ClipNorm, cuts: Sequence[tuple[Collection[torch.Tensor], dist.ProcessGroup]]
) -> torch.Tensor:
    """Return the gradients' norm over all ranks' shards.

    `cuts` has, for each parallelism with shards, the sharded parameters and their shards' process group. One norm is computed for
    all parameters sharded by the same parallelisms, and one for replicated parameters. The result combines these norms.
    """
    norm_type = float(clipping.norm_type.value)
    kinds: dict[tuple[bool, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            kinds.setdefault(tuple(parameter in cut for cut, _ in cuts), []).append(parameter.grad)
    norms = []
    for is_cut, kind in sorted(kinds.items(), key=itemgetter(0), reverse=True):
        norm = _norm(kind, norm_type)
        for _, group in compress(cuts, is_cut):
            norm = combined_norm(norm, clipping.norm_type, group)
        norms.append(norm)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    return total


def combined_norm(norm: torch.Tensor, kind: NormType, group: dist.ProcessGroup) -> torch.Tensor:
    """Combine the ranks' local norms into the norm over a group: the p-norm over all local norms, or their maximum."""
    if kind is NormType.INF:
        dist.all_reduce(norm, dist.ReduceOp.MAX, group)
        return norm
    power = float(kind.value)
    total = norm**power
    dist.all_reduce(total, group=group)
    return total ** (1 / power)


def _norm(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return this rank's norm, or 0 if no gradient has elements."""
    held = [gradient for gradient in gradients if gradient.numel()]
    if not held:
        return gradients[0].new_zeros(())
    norm = nn.utils.get_total_norm(held, norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
