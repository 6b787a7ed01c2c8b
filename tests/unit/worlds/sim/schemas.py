"""Operations on tensors as DTensor describes them to shape propagation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor._dtensor_spec import TensorMeta


def meta(tensor: torch.Tensor) -> TensorMeta:
    """Metadata of a tensor in DTensor."""
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def described(value: Any) -> Any:
    """Argument as DTensor passes it on: tensors by shape, stride and element type."""
    if isinstance(value, torch.Tensor):
        return SimpleNamespace(tensor_meta=meta(value))
    return [described(each) for each in value] if isinstance(value, list) else value


def answer(value: Any) -> Any:
    """DTensor's metadata for a result."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(answer, value)) or None
    return meta(value)


def schema(op: Any, *arguments: Any) -> Any:
    """An operation on described arguments."""
    return SimpleNamespace(op=op, args_schema=tuple(map(described, arguments)), kwargs_schema={})
