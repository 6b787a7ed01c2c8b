"""Sketches module outputs. The signs for a row depend on the hash of its sample, so the rows' order and rank do not matter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from equivcheck.recording.signs import NUM_SUMS
from equivcheck.recording.sketch import Sketch, sketch_rows, sketches_in
from equivcheck.recording.tensors import local_of
from equivcheck.recording.watch.samples import tensors_in


class Outputs:
    """Sketches of module outputs during one call to a model.

    Each output is sketched right after the module's call, because a script may change it in place later.
    """

    def __init__(self) -> None:
        self._inside: list[set[str]] = [set()]
        self._tables: list[tuple[str, torch.Tensor, tuple[int, ...], str]] = []

    def enter(self) -> None:
        """Record that a module's call begins."""
        self._inside.append(set())

    def leave(self, name: str | None, output: Any) -> None:
        """Record the output of the module whose call began last.

        `name` is the module's name, or None if the output is not wanted. If a wrapper has the same name as the module inside it,
        only the inner module's output is recorded.
        """
        inside = self._inside.pop()
        if name is None:
            return
        self._inside[-1].add(name)
        tensors = [] if name in inside else list(tensors_in(output))
        for number, tensor in enumerate(tensors):
            local = local_of(tensor)
            if local.is_floating_point() and local.dim() and local.numel() and _is_complete(tensor):
                own = name if len(tensors) == 1 else f"{name}[{number}]"
                self._tables.append((own, sketch_rows(local), tuple(local.shape[1:]), str(local.dtype).removeprefix("torch.")))

    def sign_rows(self, hashes: torch.Tensor) -> Iterator[tuple[str, tuple[int, ...], str, Sketch]]:
        """Yield each output's name, shape for one sample, element type and sketch. `hashes` are the samples' hashes.

        Outputs without one row for each sample are left out. With tensor or sequence parallelism, a rank may return only a part
        of each row. The output's shape is then smaller than on one device.
        """
        for name, table, shape, dtype in self._tables:
            if len(table) == len(hashes):
                bits = hashes.to(table.device)[:, None] >> torch.arange(64 - NUM_SUMS, 64, device=table.device)
                sums = (table[:, 3:] * (1 - 2 * (bits & 1))).sum(0)
                rest = torch.stack([table[:, 0].sum(), table[:, 1].min(), table[:, 2].max()])
                (own,) = sketches_in(torch.cat([rest, sums])[None].cpu().numpy())  # one transfer
                yield name, shape, dtype, own


def _is_complete(tensor: torch.Tensor) -> bool:
    """Whether this rank has all the tensor's elements."""
    return not isinstance(tensor, DTensor) or all(isinstance(placement, Replicate) for placement in tensor.placements)
