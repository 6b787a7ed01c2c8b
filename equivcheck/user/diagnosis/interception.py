"""Intercept backward passes and gradient clipping, through private torch API; tried on torch 2.9 to 2.15."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.utils import clip_grad

from equivcheck.user.precision import autograd_private

Backward = Callable[[Callable[[], None]], None]
"""Called instead of a backward pass, with a function that runs it."""
Clip = Callable[[list[torch.Tensor], float, Callable[[list[torch.Tensor], torch.Tensor], None]], torch.Tensor]
"""Called instead of clipping, with tensors, norm type and a function that scales tensors by a norm. Returns the norm."""


@contextlib.contextmanager
def intercept_steps(backward: Backward, clip: Clip) -> Iterator[None]:
    """Intercept every `Tensor.backward()` and `clip_grad_norm_` in all threads."""
    own_backward, own_run = torch.autograd.backward, autograd_private.run_backward
    own_clip = (clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_)
    norms: dict[int, torch.Tensor] = {}

    # `clip_grad_norm_` calls two private functions. The first returns a placeholder because it does not know the parameters.
    # The second does, so the norm is computed there and written into the placeholder.
    def intercept_backward(own: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments, **keywords: backward(lambda: own(*arguments, **keywords))

    def placeholder_norm(_gradients: Any, norm_type: float = 2.0, *_arguments: Any, **_keywords: Any) -> torch.Tensor:
        norm = torch.tensor(float("nan"), dtype=torch.float64)
        norm.kind = float(norm_type)  # type: ignore[attr-defined]
        norms[id(norm)] = norm
        return norm

    def scaling(parameters: Any, max_norm: float, norm: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if norms.pop(id(norm), None) is None:
            own_clip[1](tensors, max_norm, norm, *arguments, **keywords)
            return
        found = clip(tensors, norm.kind, lambda some, by: own_clip[1](some, max_norm, by))  # type: ignore[attr-defined]
        norm.data = found.detach()

    torch.autograd.backward, autograd_private.run_backward = intercept_backward(own_backward), intercept_backward(own_run)
    clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_ = placeholder_norm, scaling  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.backward, autograd_private.run_backward = own_backward, own_run
        clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_ = own_clip


def norm_of(tensors: Iterable[torch.Tensor], kind: float) -> torch.Tensor:
    """Return the norm over all elements; 0 for no tensors."""
    flat = [tensor.reshape(-1) for tensor in tensors if tensor.numel()]
    return torch.linalg.vector_norm(torch.cat(flat), kind) if flat else torch.zeros((), dtype=torch.float64)
