"""Copies parameters, gradients and optimizer state for a record, if they are full tensors or DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from equivcheck.user.trainers.protocol import LocalPart

if TYPE_CHECKING:
    from torch import nn


def local_parts(named: Iterable[tuple[str, torch.Tensor | None]]) -> list[LocalPart]:
    """Copy named tensors for a record. If a tensor is None, such as a frozen parameter's gradient, it is left out."""
    return [
        LocalPart(name=name, shape=tuple(tensor.shape), tensor=tensor.detach().clone())
        for name, tensor in named
        if tensor is not None
    ]


def gradient_parts(named: Sequence[tuple[str, nn.Parameter]]) -> list[LocalPart]:
    """Copy the gradients of named parameters for a record. Parameters without a gradient are left out."""
    return local_parts((name, parameter.grad) for name, parameter in named)


def chunk_parts(parts: Iterable[LocalPart], shapes: Mapping[str, tuple[int, ...]], rank: int) -> list[LocalPart]:
    """Set the positions of parts that are plain chunks of full tensors, with chunks of equal size on all ranks.

    `shapes` has the full shapes by parameter name, and `rank` is the number of the chunk. The chunked dim is the one whose size
    differs. DTensors, full tensors and tensors with another number of dims stay as they are.
    """
    return [_chunk(part, shapes[part.name.partition("/")[0]], rank) for part in parts]


def _chunk(part: LocalPart, full: tuple[int, ...], rank: int) -> LocalPart:
    if part.shape == full or len(part.shape) != len(full):
        return part
    start = tuple(0 if size == whole else rank * size for size, whole in zip(part.shape, full, strict=True))
    return replace(part, shape=full, start=start)


def state_parts(optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]]) -> list[LocalPart]:
    """Copy an optimizer's state for these named parameters, for a record."""
    state: Any = optimizer.state
    return local_parts(
        (f"{name}/{key}", torch.as_tensor(value)) for name, parameter in named for key, value in state.get(parameter, {}).items()
    )
