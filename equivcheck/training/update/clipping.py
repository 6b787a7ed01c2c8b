"""Clip gradients that mix plain tensors and DTensors, or DTensors on different meshes.

`clip_grad_norm_` stacks all norms into one tensor and refuses a mixture. Training loops with such a mixture therefore take the
norm for each kind of tensor, and then the norm over these norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from equivcheck.scenario import ClipNorm, ClipValue

GradientOf = Callable[[torch.Tensor], torch.Tensor | None]


def clip_by_norm(_module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
    """Clip gradients by norm, and return the norm before clipping.

    Some parameters may be plain tensors, or DTensors on different meshes.
    """
    if len(_kinds(parameters)) > 1:
        return clip_by_norm_of_norms(parameters, clipping)
    return nn.utils.clip_grad_norm_(parameters, clipping.max_norm, norm_type=float(clipping.norm_type.value))


def clip_by_norm_of_norms(
    parameters: list[torch.Tensor], clipping: ClipNorm, gradient_of: GradientOf = lambda parameter: parameter.grad
) -> torch.Tensor:
    """Clip gradients by one norm over all gradients, even if they lie on different meshes. Return the norm before clipping.

    `gradient_of` returns the elements of a parameter's gradient that this rank adds to the norm; None if it adds none.
    """
    norm = norm_of_norms(parameters, clipping, gradient_of)
    clip_to_norm(parameters, clipping, norm)
    return norm


def norm_of_norms(
    parameters: list[torch.Tensor], clipping: ClipNorm, gradient_of: GradientOf = lambda parameter: parameter.grad
) -> torch.Tensor:
    """Return the norm over the gradients on all ranks, as a plain tensor. Gradients may lie on different meshes.

    `gradient_of` returns the elements of a parameter's gradient that this rank adds to the norm; None if it adds none.
    """
    norm_type = float(clipping.norm_type.value)
    gradients = [gradient for gradient in map(gradient_of, parameters) if gradient is not None]
    norms = [_whole(nn.utils.get_total_norm(kind, norm_type)) for kind in _kinds(gradients)]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    return norm


def clip_to_norm(parameters: list[torch.Tensor], clipping: ClipNorm, norm: torch.Tensor) -> None:
    """Scale all gradients by one factor, so that their total norm is at most the limit in `clipping`.

    `norm` is the total norm before clipping.
    """
    for kind in _kinds(parameters):
        nn.utils.clip_grads_with_norm_(kind, clipping.max_norm, norm)


def clip_by_value(parameters: list[torch.Tensor], clipping: ClipValue) -> None:
    """Clamp each gradient element to the limit in `clipping`.

    Some parameters may be plain tensors, or DTensors on different meshes.
    """
    kinds = _kinds(parameters)
    for kind in kinds:
        # It raises if no parameter has a gradient. That is an error only if no other kind has one either.
        if len(kinds) == 1 or any(parameter.grad is not None for parameter in kind):
            nn.utils.clip_grad_value_(kind, clipping.clip_value)


def _kinds(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors that can be computed together. DTensors are grouped by mesh, and plain tensors form a group."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(kinds.values())


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
