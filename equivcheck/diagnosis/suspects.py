"""Finds elements whose values may be wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from equivcheck.diagnosis.evidence import Evidence
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.pieces import select_piece, values_by_piece

Masks = Mapping[str, torch.Tensor]
"""Selected elements of each tensor, by name."""
MOSTLY = 0.75
"""Fraction of wrong elements above which the whole tensor counts as wrong. The others may differ too little to be noticed."""


def wrong_elements(diverged: Evidence, phase: Phase) -> dict[str, torch.Tensor]:
    """Return a mask for each tensor: the elements with a difference on any rank in this phase of the first wrong step.

    Tensors without a reported difference are left out. In such tensors, single elements may exceed the limit per element, because
    only the full tensor has a tolerance.
    """
    masks: dict[str, np.ndarray] = {}
    differing = diverged.differing(phase)
    for expected, found in zip(diverged.reference.moments, diverged.found, strict=True):
        if (expected.step, expected.phase) != (diverged.first.step, phase):
            continue
        expected_full = diverged.expected_values(expected.step, phase)
        for moment in found:
            for piece, values in values_by_piece(moment.snapshot):
                right = expected_full.get(piece.name)
                if piece.name in differing and right is not None and values is not None and right.shape == piece.shape:
                    # A batch may use few rows of an embedding, so the tolerance comes from the elements that are not zero.
                    count = int(np.count_nonzero(right)) or 1
                    limit = float(expected.tolerances[expected.table.rows[piece.name]]) / math.sqrt(count) / 2
                    places = select_piece(np.arange(right.size).reshape(right.shape), piece)
                    mask = masks.setdefault(piece.name, np.zeros(right.shape, dtype=np.bool_)).reshape(-1)
                    mask[places] |= np.abs(values - right.reshape(-1)[places]) > limit
    return {name: torch.from_numpy(mask) for name, mask in masks.items() if mask.any()}


def suspects(diverged: Evidence) -> tuple[Masks | None, ...]:
    """Return the sets of elements whose gradients may be wrong: those in the first divergence, and all elements (None)."""
    if diverged.first.phase is not Phase.GRADIENT:
        return (None,)
    masks = {name: mask for name, mask in wrong_elements(diverged, Phase.GRADIENT).items() if name in diverged.updated}
    full = {name: torch.ones_like(mask) if mask.sum() >= MOSTLY * mask.numel() else mask for name, mask in masks.items()}
    if not masks or (set(full) >= set(diverged.updated) and all(mask.all() for mask in full.values())):
        return (None,)
    names = {name: torch.ones_like(mask) for name, mask in masks.items()}
    same = all(mask.all() for mask in full.values())
    return (full, None) if same else (names, full, None)
