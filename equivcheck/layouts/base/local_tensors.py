"""Parameters whose DTensors `DistributedDataParallel` replaced by local tensors.

Uses private torch API (`_st_info`, DDP's note on such parameters). Tested with torch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from equivcheck.scenario import ClipNorm
from equivcheck.training.clipping import clip_by_norm_of_norms
from equivcheck.training.read import box_of, canonical_name, piece_of
from equivcheck.worlds.trace.trace import Piece, Slot


def is_localized(model: nn.Module) -> bool:
    """Whether a model has parameters that were DTensors before."""
    return any(_spec(parameter) is not None for parameter in model.parameters())


def localized_slots(model: nn.Module) -> tuple[Slot, ...]:
    """One slot for each distinct parameter: the full parameter, or the local tensor's shard."""
    return tuple(
        Slot(parameter=parameter, pieces=(localized_piece(canonical_name(name), parameter),))
        for name, parameter in model.named_parameters()
    )


def localized_piece(name: str, parameter: torch.Tensor) -> Piece:
    """This rank's piece of a parameter: all of it, or a DTensor's local shard."""
    spec = _spec(parameter)
    return piece_of(name, parameter) if spec is None else box_of(name, tuple(spec.shape), spec.mesh, spec.placements)


def clip_across(_module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
    """Clip by the norm over all shards, and return the norm before.

    DDP leaves this to its users, because `clip_grad_norm_` only sees this rank's shards.
    """
    return clip_by_norm_of_norms(parameters, clipping, _gradient)


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient, as a DTensor if the parameter was one."""
    spec, gradient = _spec(parameter), parameter.grad
    if spec is None or gradient is None:
        return gradient
    return DTensor.from_local(gradient, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)


def _spec(parameter: torch.Tensor) -> Any:
    return getattr(parameter, "_st_info", None)
