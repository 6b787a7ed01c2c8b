"""Norms over chosen elements of gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from equivcheck.scenario import ClipNorm, NormType


def norm_of(values: Iterable[torch.Tensor], kind: NormType) -> torch.Tensor:
    """The norm over all elements of some tensors; 0 of none."""
    flat = [value.reshape(-1) for value in values if value.numel()]
    return torch.linalg.vector_norm(torch.cat(flat), float(kind.value)) if flat else torch.zeros((), dtype=torch.float64)


def scale_to(parameters: Iterable[torch.Tensor], clipping: ClipNorm, norm: torch.Tensor) -> None:
    """Scale gradients as `clip_grad_norm_` does for a norm."""
    torch.nn.utils.clip_grads_with_norm_(list(parameters), clipping.max_norm, norm)


def gradients_of(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that there are."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def not_at_all(_module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
    """Return the norm, and leave gradients alone."""
    return norm_of(gradients_of(parameters), clipping.norm_type)
