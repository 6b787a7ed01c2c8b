"""Reshapes, repeats and factory functions after a linear layer, which DTensor's sharding propagation must handle."""

from __future__ import annotations

from collections.abc import Callable

import torch

from equivcheck.scenario import ShapeOp
from equivcheck.scenario.layers.linear import ARANGE_STEP
from equivcheck.training.layers.module import replicated_like


def _flatten(values: torch.Tensor) -> torch.Tensor:
    return values.flatten().view(values.shape)


def _squeeze(values: torch.Tensor) -> torch.Tensor:
    return values.view(values.shape[0], 1, values.shape[1]).squeeze(1)


def _unsqueeze(values: torch.Tensor) -> torch.Tensor:
    return values.unsqueeze(0).mean(0)


def _view(values: torch.Tensor) -> torch.Tensor:
    rows, width = values.shape
    parts = 2 if width % 2 == 0 else width
    return values.view(rows, parts, width // parts).flatten(1)


def _repeat(values: torch.Tensor) -> torch.Tensor:
    return values.unsqueeze(1).repeat(1, 2, 1).mean(1)


def _arange(values: torch.Tensor) -> torch.Tensor:
    made = ARANGE_STEP * torch.arange(values.shape[1], dtype=values.dtype, device=values.device)
    return values + replicated_like(values, made).repeat(values.shape[0], 1)


def _ones(values: torch.Tensor) -> torch.Tensor:
    return values + torch.ones_like(values)


def _zeros(values: torch.Tensor) -> torch.Tensor:
    return values + values.new_zeros((values.shape[0], 1))


SHAPE_OPS: dict[ShapeOp, Callable[[torch.Tensor], torch.Tensor]] = {
    ShapeOp.FLATTEN: _flatten,
    ShapeOp.SQUEEZE: _squeeze,
    ShapeOp.UNSQUEEZE: _unsqueeze,
    ShapeOp.VIEW: _view,
    ShapeOp.REPEAT: _repeat,
    ShapeOp.ARANGE: _arange,
    ShapeOp.ONES: _ones,
    ShapeOp.ZEROS: _zeros,
}
"""Functions from (rows, width) to (rows, width). For a DTensor `rows` is the global number."""


def added_constant(shape_op: ShapeOp | None, width: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the constant that a layer's last operation, `shape_op`, adds to each row of its output.

    Its shape is (width,). None if the operation adds nothing.
    """
    if shape_op is ShapeOp.ARANGE:
        return ARANGE_STEP * torch.arange(width, dtype=dtype)
    return torch.ones(width, dtype=dtype) if shape_op is ShapeOp.ONES else None
