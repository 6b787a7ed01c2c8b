"""A scenario on more ranks, or on fewer: the same layout with other axis sizes, and as many rows for each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from equivcheck.errors import UsageError
from equivcheck.scenario import Axis, Mesh, Scenario
from equivcheck.scenario.mesh import DP, MAX_RANKS, REPLICATE, SHARD

DATA_AXES = (DP, REPLICATE, SHARD)


def grown(scenario: Scenario, num_ranks: int) -> Scenario:
    """The scenario on so many ranks: its outermost data axis grows (its outermost axis, if it has no data axis).

    Raises `UsageError` where the other axes do not divide the number of ranks.
    """
    mesh = scenario.layout.mesh
    index = next((index for index, name in enumerate(mesh.names) if name in DATA_AXES), 0)
    others = mesh.num_ranks // mesh.shape[index]
    if num_ranks < 1 or num_ranks % others:
        kept = " x ".join(f"{axis.name} {axis.size}" for number, axis in enumerate(mesh.axes) if number != index)
        allowed = f"multiples of {others}, as the layout has {kept}" if others > 1 else "at least 1"
        raise UsageError(f"{num_ranks} ranks do not fill the mesh of {scenario.layout.name}; allowed: {allowed}")
    return resized(scenario, [num_ranks // others if number == index else size for number, size in enumerate(mesh.shape)])


def shrunk(scenario: Scenario) -> Scenario:
    """The scenario on few enough ranks to run all of them, with every axis that has ranks to talk to."""
    sizes = scenario.layout.mesh.shape
    if math.prod(sizes) > MAX_RANKS:
        sizes = tuple(min(size, 2) for size in sizes)
    return resized(scenario, sizes)


def resized(scenario: Scenario, sizes: Sequence[int]) -> Scenario:
    """The scenario with other axis sizes, and each microbatch with as many rows for each data rank as before."""
    layout = scenario.layout
    axes = tuple(Axis(name=axis.name, size=size) for axis, size in zip(layout.mesh.axes, sizes, strict=True))
    wider = replace(layout, mesh=Mesh(axes=axes))
    rows = tuple(max(rows // layout.num_data_ranks, 1) * wider.num_data_ranks for rows in scenario.training.data.microbatches)
    data = replace(scenario.training.data, microbatches=rows)
    return replace(scenario, training=replace(scenario.training, data=data), layout=wider)
