"""Changes a scenario's number of ranks: same layout, other axis sizes, as many rows for each data rank as before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from equivcheck.errors import UsageError
from equivcheck.scenario import Axis, Mesh, Scenario
from equivcheck.scenario.mesh import DP, MAX_RANKS, REPLICATE, SHARD

DATA_AXES = (DP, REPLICATE, SHARD)


def scenario_on_ranks(scenario: Scenario, num_ranks: int) -> Scenario:
    """Return the scenario on `num_ranks` ranks. Only the outermost data axis changes its size; without data axes, the first axis.

    Raises `UsageError` if `num_ranks` is not a multiple of the number of ranks along the other axes.
    """
    mesh = scenario.layout.mesh
    index = next((index for index, name in enumerate(mesh.names) if name in DATA_AXES), 0)
    others = mesh.num_ranks // mesh.shape[index]
    if num_ranks < 1 or num_ranks % others:
        kept = " x ".join(f"{axis.name} {axis.size}" for number, axis in enumerate(mesh.axes) if number != index)
        why = f"{scenario.layout.name} keeps the axes {kept}" if others > 1 else f"{scenario.layout.name} needs a rank"
        raise UsageError(f"ranks {num_ranks} is not valid: {why}. Expected a multiple of {others}")
    return with_axis_sizes(scenario, [num_ranks // others if number == index else size for number, size in enumerate(mesh.shape)])


def small_scenario(scenario: Scenario) -> Scenario:
    """Return the scenario on few ranks. If it has more than `MAX_RANKS`, axis sizes are reduced to at most 2."""
    sizes = scenario.layout.mesh.shape
    if math.prod(sizes) > MAX_RANKS:
        sizes = tuple(min(size, 2) for size in sizes)
    return with_axis_sizes(scenario, sizes)


def with_axis_sizes(scenario: Scenario, sizes: Sequence[int]) -> Scenario:
    """Return the scenario with other axis sizes. Microbatches are scaled, so that every data rank keeps its number of rows."""
    layout = scenario.layout
    axes = tuple(Axis(name=axis.name, size=size) for axis, size in zip(layout.mesh.axes, sizes, strict=True))
    wider = replace(layout, mesh=Mesh(axes=axes))
    rows = tuple(max(rows // layout.num_data_ranks, 1) * wider.num_data_ranks for rows in scenario.training.data.microbatches)
    data = replace(scenario.training.data, microbatches=rows)
    return replace(scenario, training=replace(scenario.training, data=data), layout=wider)
