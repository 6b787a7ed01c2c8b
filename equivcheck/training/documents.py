"""Documents of equal length, packed into one sequence."""

from __future__ import annotations

import torch


def places_in_documents(positions: torch.Tensor, document_length: int | None) -> torch.Tensor:
    """Return positions relative to the start of their document.

    `document_length` is None if sequences are not packed.
    """
    return positions if document_length is None else positions % document_length


def in_other_documents(queries: torch.Tensor, keys: torch.Tensor, document_length: int) -> torch.Tensor:
    """Return a mask with True if query and key belong to different documents. Its shape is (queries, keys).

    Arguments are positions.
    """
    return queries[:, None] // document_length != keys // document_length


def precedes_boundary(length: int, document_length: int | None) -> torch.Tensor:
    """Return a mask over positions with True at the last position of each document except the last document.

    The token after such a position belongs to another document, so its label does not count.
    """
    positions = torch.arange(length)
    if document_length is None:
        return torch.zeros(length, dtype=torch.bool)
    return ((positions + 1) % document_length == 0) & (positions + 1 < length)
