"""Conversion between floating-point types; complex tensors stay complex."""

from __future__ import annotations

import torch
from torch import nn


def as_type(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a copy with floating-point or complex values in the precision of `dtype`. Integers are copied unchanged."""
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.detach().clone()
    return tensor.detach().to(dtype.to_complex() if tensor.is_complex() else dtype, copy=True)


def convert_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert parameters and buffers in place. `Module.to` would drop the imaginary part of complex buffers."""
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if buffer.is_complex()
    ]
    for module, name, _ in buffers:
        setattr(module, name, None)
    model = model.to(dtype)
    shared = {id(buffer): as_type(buffer, dtype) for _, _, buffer in buffers}
    for module, name, buffer in buffers:
        setattr(module, name, shared[id(buffer)])
    return model


def complex_parameter(model: nn.Module) -> str:
    """Return the first complex parameter's name; empty if there is none."""
    return next((name for name, parameter in model.named_parameters() if parameter.is_complex()), "")


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as pairs of real numbers along a last dim; real tensors unchanged."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor
