"""Meshes over which `fully_shard` shards: units of experts may have another mesh than other units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from equivcheck.layouts.base.dtensor_experts import shards_over_ep
from equivcheck.layouts.parallelisms.fsdp2.division import has_expert_groups, hooks_replicas
from equivcheck.scenario import FSDP2
from equivcheck.scenario.mesh import EP, SHARD

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.training.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitMeshes:
    """Meshes for the units of a model or pipeline stage."""

    experts: DeviceMesh
    """Mesh for units of experts."""
    others: DeviceMesh
    """Mesh for other units. With `shard_over_ep`, it has the ranks along `ep`, too."""
    all_ranks: DeviceMesh | None
    """Mesh for `experts_on_all_ranks`, inside of units. None if the option has no effect."""


def meshes_of(setup: Setup, fsdp: FSDP2, mesh: DeviceMesh) -> UnitMeshes:
    """Return the units' meshes. `mesh` has the axis `dp`, or `dp_replicate` and `dp_shard`.

    The first call creates groups that are cached, so `FSDP2Kind.apply` must not destroy them.
    """
    from equivcheck.worlds.meshes import flattened_mesh, submesh

    layout = setup.layout
    assert layout is not None, "a layout is applied"
    assert setup.mesh is not None, "a layout has a mesh"
    is_hooked, (*replicas, shard) = hooks_replicas(fsdp, layout), layout.axes_of(fsdp)
    # A hook needs a slice of the full mesh, because torch 2.9 takes a slice's mesh for the full one.
    experts = submesh(setup.mesh, (SHARD,)) if is_hooked else mesh
    outer = () if is_hooked else tuple(replicas)
    return UnitMeshes(
        experts=experts,
        others=flattened_mesh(setup.mesh, (shard, EP), outer) if shards_over_ep(layout) else experts,
        all_ranks=flattened_mesh(setup.mesh, layout.mesh.names) if has_expert_groups(fsdp, layout) else None,
    )
