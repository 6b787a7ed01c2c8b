"""Where a rank is on its mesh, and what the optimizer steps there."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivcheck.mutants.needs import DATA_AXES
from equivcheck.train.setup import Setup


def mesh_of(setup: Setup) -> DeviceMesh:
    """The ranks of a setup that a layout has been applied to."""
    assert setup.mesh is not None, "a mutant is planted after the layout has been applied"
    return setup.mesh


def axis_names(setup: Setup) -> tuple[str, ...]:
    """The names of the axes, outermost first."""
    return tuple(mesh_of(setup).mesh_dim_names or ())


def size_of(setup: Setup, *names: str) -> int:
    """Ranks along the axes of those names together; an axis that the mesh lacks counts as 1."""
    mesh = mesh_of(setup)
    return math.prod(mesh.size(index) for index, name in enumerate(axis_names(setup)) if name in names)


def data_ranks(setup: Setup) -> int:
    """Ranks that compute on different rows."""
    return size_of(setup, *DATA_AXES)


def rank_along(setup: Setup, *names: str) -> int:
    """This rank's index among the ranks along the axes of those names together, row-major."""
    coordinate = mesh_of(setup).get_coordinate()
    assert coordinate is not None, "every rank of the world is in the mesh"
    index = 0
    for axis, name in enumerate(axis_names(setup)):
        if name in names:
            index = index * mesh_of(setup).size(axis) + coordinate[axis]
    return index


def data_rank(setup: Setup) -> int:
    """Which share of the rows this rank has."""
    return rank_along(setup, *DATA_AXES)


def stepped(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def gradients(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The gradients that the parameters of an optimizer have."""
    for parameter in stepped(optimizer):
        if parameter.grad is not None:
            yield parameter.grad
