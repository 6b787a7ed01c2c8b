"""A rank's position in the mesh, and its optimizer's gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivcheck.scenario import Layout
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD
from equivcheck.training.setup import Setup

OnUpdate = Callable[[torch.optim.Optimizer], object]
DATA_AXES = (DP, REPLICATE, SHARD)
"""Axes along which ranks compute on different rows."""


def mesh_of(setup: Setup) -> DeviceMesh:
    """Return the mesh of the setup's layout, which must have been applied."""
    assert setup.mesh is not None, "a mutant is planted after the layout has been applied"
    return setup.mesh


def layout_of(setup: Setup) -> Layout:
    """Return the layout of the rank's setup."""
    assert setup.layout is not None, "a mutant is planted after the layout has been applied"
    return setup.layout


def around_update(setup: Setup, *, before: OnUpdate = lambda _optimizer: None, after: OnUpdate = lambda _optimizer: None) -> None:
    """Call functions with the optimizer before and after each update."""
    inner = setup.update

    def update(optimizer: torch.optim.Optimizer) -> None:
        before(optimizer)
        inner(optimizer)
        after(optimizer)

    setup.update = update


def axis_names(setup: Setup) -> tuple[str, ...]:
    """Return the names of the mesh axes, outermost first."""
    return tuple(mesh_of(setup).mesh_dim_names or ())


def size_of(setup: Setup, *names: str) -> int:
    """Return the number of ranks along the named axes. An axis that the mesh does not have counts as 1."""
    mesh = mesh_of(setup)
    return math.prod(mesh.size(index) for index, name in enumerate(axis_names(setup)) if name in names)


def rank_along(setup: Setup, *names: str) -> int:
    """Return this rank's row-major index along the named axes."""
    coordinate = mesh_of(setup).get_coordinate()
    assert coordinate is not None, "every rank of the world is in the mesh"
    index = 0
    for axis, name in enumerate(axis_names(setup)):
        if name in names:
            index = index * mesh_of(setup).size(axis) + coordinate[axis]
    return index


def data_ranks(setup: Setup) -> int:
    """Number of ranks with different rows."""
    return size_of(setup, *DATA_AXES)


def data_rank(setup: Setup) -> int:
    """Index of this rank among the ranks with different rows."""
    return rank_along(setup, *DATA_AXES)


def num_microbatches(setup: Setup) -> int:
    """Return the number of microbatches per step."""
    return len(setup.training.data.microbatches)


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters in all groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def gradients_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the gradients of an optimizer's parameters. Parameters without a gradient are skipped."""
    for parameter in optimizer_parameters(optimizer):
        if parameter.grad is not None:
            yield parameter.grad


def scale(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiply the gradients of all the optimizer's parameters by `factor`, in place."""
    with torch.no_grad():
        for gradient in gradients_of(optimizer):
            gradient.mul_(factor)


def scale_gradients(setup: Setup, factor: float) -> None:
    """Multiply gradients by `factor` in each step, before clipping and the update."""
    setup.before_update.append(lambda optimizer, _index: scale(optimizer, factor))
