"""What a run leaves: pieces of full tensors by canonical name.

A rank hands over what it holds and where that lies in the full tensor; nothing is gathered. The oracle puts the pieces together,
so that reading costs no communication and does not rely on the code under test to undo its own sharding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Where a run of local elements lies in a full tensor."""

    name: str
    """Canonical name; empty for padding that belongs to no tensor."""
    shape: tuple[int, ...]
    """Shape of the full tensor; of the run itself for padding."""
    start: tuple[int, ...] = ()
    """First index of a box along each dim; empty for all of the tensor."""
    size: tuple[int, ...] = ()
    """Extent of the box along each dim; as long as `start`."""
    run: tuple[int, int] | None = None
    """Offset and length of the run within the flattened box; None for all of it."""
    place: tuple[int, int] | None = None
    """Where other tensors share the local tensor: offset of the run in it, and its length; None for a tensor of its own."""

    @property
    def numel(self) -> int:
        """Elements in the piece."""
        if self.run is not None:
            return self.run[1]
        return math.prod(self.size if self.start else self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One parameter as the optimizer of a rank sees it, and which pieces its local elements are, in order."""

    parameter: torch.Tensor
    """The parameter: plain, DTensor or flat."""
    pieces: tuple[Piece, ...]
    """What its local elements are; together as many as the local elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Local values at one moment."""

    pieces: tuple[Piece, ...]
    """What the values are, in order; the same object at every step of a run."""
    present: tuple[bool, ...]
    """Per piece, whether there was a tensor (a gradient may be None)."""
    fits: tuple[bool, ...]
    """Per piece, whether its tensor had the expected number of elements; the values of one that had not are left out."""
    dtypes: tuple[str, ...]
    """Per piece, the element type; empty where not present."""
    values: npt.NDArray[np.floating]
    """The elements of the pieces that are present and fit, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step leaves on one rank."""

    loss: float | None
    """This rank's loss, scaled as it was for backward; the mean over the ranks that have one is the loss of the step."""
    gradients: Snapshot
    """After the last backward, before clipping."""
    clip_norm: float | None
    """What clipping by norm returned; None without it."""
    clipped: Snapshot | None
    """Gradients after clipping; None without clipping."""
    parameters: Snapshot
    """After the update."""
    full_gradients: Snapshot | None = None
    """What `full_tensor()` gives of each gradient that is a DTensor, before clipping; None where nobody asked."""
    full_parameters: Snapshot | None = None
    """What it gives of each parameter, after the update; None where nobody asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a whole run leaves on one rank."""

    steps: tuple[Step, ...]
    """One a step that was run."""
    state: Snapshot
    """Optimizer state at the end; names are ``parameter/key``."""
    buffers: Snapshot
    """Buffers at the end."""
