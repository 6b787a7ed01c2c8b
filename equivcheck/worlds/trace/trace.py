"""Training trace: pieces of full tensors by canonical name.

A rank records its local values and their position in the full tensor, and does not gather tensors. The oracle assembles the
pieces, so recording needs no communication and does not trust the code under test to undo its own sharding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Position of a rank's local elements in a full tensor.

    The elements form a box in the full tensor, or a consecutive part of such a box after flattening.
    """

    name: str
    """Canonical name; empty for padding."""
    shape: tuple[int, ...]
    """Shape of the full tensor; for padding, shape of the padding itself."""
    start: tuple[int, ...] = ()
    """First index of a box along each dim; empty for the full tensor."""
    size: tuple[int, ...] = ()
    """Extent of the box along each dim, with as many entries as `start`."""
    run: tuple[int, int] | None = None
    """Offset and length if the piece is only a part of the flattened box; None if it is the full box."""
    place: tuple[int, int] | None = None
    """Offset and length of the piece in a local tensor shared by several tensors; None if the local tensor is not shared."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        if self.run is not None:
            return self.run[1]
        return math.prod(self.size if self.start else self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One parameter on a rank, or another tensor such as a buffer, with the positions of its local elements in full tensors.

    The positions are pieces, in the order of the local elements.
    """

    parameter: torch.Tensor
    """Plain parameter, DTensor or flat parameter."""
    pieces: tuple[Piece, ...]
    """Pieces that cover the local elements completely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One rank's recorded local values of all tensors at one point of a training."""

    pieces: tuple[Piece, ...]
    """Pieces in order; the same object at every step of a run."""
    present: tuple[bool, ...]
    """For each piece, whether its tensor exists. For example, a gradient may be None."""
    fits: tuple[bool, ...]
    """For each piece, whether its tensor has the expected number of elements; other pieces are left out of `values`."""
    dtypes: tuple[str, ...]
    """Element type of each piece's tensor, such as ``float32``; empty if the tensor does not exist."""
    values: npt.NDArray[np.floating]
    """Concatenated elements of the pieces that are present and fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One rank's recorded values from one step."""

    loss: float | None
    """This rank's loss, scaled as for backward; None if the rank computes no loss. The mean over ranks with a loss is the loss of
    the step.
    """
    gradients: Snapshot
    """Gradients after the last backward, before clipping."""
    clip_norm: float | None
    """Norm that gradient clipping returned; None without clipping."""
    clipped: Snapshot | None
    """Gradients after clipping; None without clipping."""
    parameters: Snapshot
    """Parameters after the update."""
    full_gradients: Snapshot | None = None
    """`full_tensor()` for each DTensor gradient before clipping; None if it was not recorded."""
    full_parameters: Snapshot | None = None
    """`full_tensor()` for each parameter after the update; None if it was not recorded."""
    reported: Snapshot | None = None
    """Values that a user's step returned, and state outside the module; names are ``value`` and ``tensor/object``."""
    buffers: Snapshot | None = None
    """Buffers after the step; None if they were not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All recorded values of a training on one rank."""

    steps: tuple[Step, ...]
    """One entry for each step that ran."""
    state: Snapshot
    """Final optimizer state; names are ``parameter/key``."""
    buffers: Snapshot
    """Final buffers."""
