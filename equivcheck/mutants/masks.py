"""Dropout masks of other draws."""

from __future__ import annotations

from dataclasses import replace

import torch

from equivcheck.scenario import Layer, Model
from equivcheck.train.material import Batch


def other_mask(mask: torch.Tensor, layer: Layer) -> torch.Tensor:
    """The mask that keeps what this one drops, and drops what it keeps, scaled alike."""
    return (mask == 0.0).to(mask.dtype) / (1.0 - layer.dropout)


def other_masks(batch: Batch, model: Model) -> Batch:
    """The batch with such masks."""
    pairs = zip(batch.masks, model.layers, strict=True)
    return replace(batch, masks=tuple(None if mask is None else other_mask(mask, layer) for mask, layer in pairs))
