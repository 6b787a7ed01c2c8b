"""Unequal initial parameters and buffers, for wrappers that promise to broadcast the values on rank 0."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def make_unequal(model: nn.Module, mesh: DeviceMesh) -> None:
    """Change this rank's parameters and buffers in place, to make ranks start with different values.

    The first rank stays unchanged. Use it to check that a parallelism broadcasts initial values, because the broadcast must undo
    the change.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank of the world is in the mesh"
    if not any(coordinate):
        return
    generator = np.random.default_rng(coordinate)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local += torch.from_numpy(np.asarray(generator.integers(1, 100, tuple(local.shape)))).to(local.dtype)
