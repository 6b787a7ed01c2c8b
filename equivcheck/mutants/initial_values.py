"""What ranks start from, written over where it lies."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from equivcheck.trace.trace import Piece
from equivcheck.train.read import local_values
from equivcheck.train.setup import Setup


@torch.no_grad()
def overwrite(setup: Setup, values: Mapping[str, torch.Tensor]) -> None:
    """Let this rank have its part of other full tensors, by canonical name, whatever its layout has cut them into."""
    for slot in setup.find_slots(setup.model):
        local, start = local_values(slot.parameter), 0
        flat = local.reshape(-1).clone()
        for piece in slot.pieces:
            if piece.name in values and piece.numel:
                flat[start : start + piece.numel] = _part(values[piece.name], piece)
            start += piece.numel
        local.copy_(flat.view(local.shape))


def _part(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The elements of a piece, in order."""
    for dim, (first, extent) in enumerate(zip(piece.start, piece.size, strict=True)):
        whole = whole.narrow(dim, first, extent)
    flat = whole.reshape(-1)
    return flat if piece.run is None else flat.narrow(0, *piece.run)
