"""Reads a model's buffers at every step, without searching all modules each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from equivcheck.layouts.base.local_tensors import local_tensor_piece
from equivcheck.training.read import snapshot
from equivcheck.user.batches import as_real
from equivcheck.worlds.trace.trace import Slot, Snapshot


class StepBuffers:
    """Reads a model's buffers in each step.

    Buffers are read by attribute, because a module may replace its tensors.
    """

    def __init__(self, owners: Sequence[tuple[str, nn.Module, str]]) -> None:
        """`owners` are the buffers' names, modules and attributes."""
        self.names = [name for name, _, _ in owners]
        self._owners = owners
        self._layouts: list[Any] = []
        self._last: Snapshot | None = None

    def read(self) -> Snapshot | None:
        """Return the current values of the buffers; None if there are no buffers."""
        if not self._owners:
            return None
        found = [owner._buffers.get(key) for _, owner, key in self._owners]
        layouts = [None if buffer is None else (type(buffer), buffer.dtype, buffer.shape) for buffer in found]
        if self._last is None or layouts != self._layouts or DTensor in [layout and layout[0] for layout in layouts]:
            self._layouts, self._last = layouts, self._read_slots([None if each is None else as_real(each) for each in found])
            return self._last
        held = [as_real(each) if each.dtype.is_complex else each for each in found if each is not None]
        if not held:
            return self._last
        values = torch.cat([each.detach().reshape(-1) for each in held])
        numbers = (values.float() if values.dtype is torch.bfloat16 else values).numpy()  # NumPy has no bfloat16
        return replace(self._last, values=numbers)  # with the same positions, which the comparison looks up once

    def _read_slots(self, tensors: Sequence[torch.Tensor | None]) -> Snapshot:
        held = [torch.empty(0) if tensor is None else tensor for tensor in tensors]
        pieces = map(local_tensor_piece, self.names, held)
        slots = [Slot(parameter=tensor, pieces=(piece,)) for tensor, piece in zip(held, pieces, strict=True)]
        return snapshot(slots, tuple(slot.pieces[0] for slot in slots), tensors)


def has_buffers(module: nn.Module) -> bool:
    """Whether a module or a submodule has a buffer. Uses a loop, because `Module.buffers` is ten times slower."""
    waiting: list[nn.Module | None] = [module]
    for each in waiting:
        if each is not None:
            if each._buffers:
                return True
            waiting += each._modules.values()
    return False
