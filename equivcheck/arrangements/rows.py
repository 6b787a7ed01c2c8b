"""Examples without padding, and the rows of a microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from equivcheck.arrangements.fields import Field
from equivcheck.system.choice import PrintableEnum


class Packing(PrintableEnum):
    """How the model gets the boundaries between packed documents."""

    POSITION_IDS = "position_ids"
    """Positions start again at 0, and there is no mask."""
    CU_SEQLENS = "cu_seqlens"
    """Cumulative lengths over the flat row, and the longest length."""
    DOCUMENT_IDS = "document_ids"
    """Each position has its document's number."""


class Side(PrintableEnum):
    """Side on which rows are padded."""

    RIGHT = "right"
    LEFT = "left"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Example:
    """One example without padding."""

    values: Mapping[Field, torch.Tensor]
    """Each field's value, with shape (positions, ...), or without positions for `Role.ROW`."""
    length: int
    """Number of positions; 1 if the batch has no tokens."""
    num_counted: int
    """Number of labels with a loss; 1 if the batch has no labels."""
    num_labels: int
    """Number of labels before the model's shift, which drops the first one."""
    weight: float
    """First number in the batch for this row, such as a weight; 1 if there is no such number."""
    value: Any = None
    """Example from the user's own function; None if the batch was taken apart here."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Rows of one microbatch."""

    rows: tuple[tuple[Example, ...], ...]
    """Examples in each row; several if they are packed."""
    side: Side = Side.RIGHT
    """Side on which rows are padded."""
    extra: int = 0
    """How many padding positions the longest row has."""
    pad_id: int | None = None
    """Token used for padding; None for the token that the user chose."""

    @property
    def examples(self) -> tuple[Example, ...]:
        """Return all rows' examples, in order."""
        return tuple(example for row in self.rows for example in row)

    @property
    def length(self) -> int:
        """Return the number of positions per row, padding included."""
        return max(sum(example.length for example in row) for row in self.rows) + self.extra

    @property
    def positions(self) -> tuple[tuple[int, int, Example], ...]:
        """Return a triple (row, position, example) for each example: its row, and its first position in this row."""
        found = []
        for number, row in enumerate(self.rows):
            start = self.length - sum(example.length for example in row) if self.side is Side.LEFT else 0
            for example in row:
                found.append((number, start, example))
                start += example.length
        return tuple(found)

    @property
    def is_packed(self) -> bool:
        """Whether a row has several examples."""
        return any(len(row) > 1 for row in self.rows)
