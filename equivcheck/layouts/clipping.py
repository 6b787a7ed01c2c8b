"""Clipping gradients of which some are plain tensors and some DTensors, or DTensors of different meshes.

`clip_grad_norm_` puts all norms into one tensor and refuses such a mixture; those who have one take the norm of each group, then
the norm of those norms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from equivcheck.scenario import ClipNorm


def clip_by_groups(
    _module: nn.Module,
    parameters: list[torch.Tensor],
    clipping: ClipNorm,
    gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = lambda parameter: parameter.grad,
) -> torch.Tensor:
    """Clip by the norm over all gradients and ranks; returns the norm before. `gradient_of` gives what the norm is taken of."""
    norm_type = float(clipping.norm_type.value)
    groups: dict[Any, list[torch.Tensor]] = {}
    for gradient in filter(lambda found: found is not None, map(gradient_of, parameters)):
        assert gradient is not None
        groups.setdefault(_group(gradient), []).append(gradient)
    norms = [_whole(nn.utils.get_total_norm(group, norm_type)) for group in groups.values()]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)
    for group in _grouped(parameters).values():
        nn.utils.clip_grads_with_norm_(group, clipping.max_norm, norm)
    return norm


def _grouped(parameters: list[torch.Tensor]) -> dict[Any, list[torch.Tensor]]:
    groups: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(_group(parameter), []).append(parameter)
    return groups


def _group(tensor: torch.Tensor) -> Any:
    """What tensors must have in common to be computed with together."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
