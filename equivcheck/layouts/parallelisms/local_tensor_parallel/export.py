"""Writes tensor parallelism on plain tensors into a script, with the same modules and collectives as on the ranks here."""

from __future__ import annotations

from equivcheck.layouts.base.partition import chunk_size, chunk_sizes
from equivcheck.layouts.base.plan.linears import ActivationPlacement
from equivcheck.layouts.base.script.draft import Draft, LoopPosition, refuse
from equivcheck.layouts.base.script.loop import ties
from equivcheck.layouts.base.script.mesh import mesh_of
from equivcheck.layouts.base.script.shards import read_local_shards, shard_masks
from equivcheck.layouts.base.script.text import source_of
from equivcheck.layouts.parallelisms.local_tensor_parallel.planned_modules import (
    COPY_TO_PARTIAL,
    PlannedModule,
    Redistribution,
    planned_modules,
    planned_regions,
)
from equivcheck.scenario import (
    FSDP2,
    Collectives,
    ContextParallel,
    ExpertParallel,
    LocalTensorParallel,
)


def write(draft: Draft, parallelism: LocalTensorParallel) -> None:
    """Let the exported script replace its model's modules by sharded modules as the plan says, and shard dropout masks."""
    layout, training = draft.scenario.layout, draft.scenario.training
    if layout.has(FSDP2):
        raise refuse("LocalTensorParallel inside FSDP2", "gathering two kinds of shards takes too much code for a short script")
    if layout.has(ContextParallel):
        raise refuse(
            "LocalTensorParallel inside ContextParallel", "sharding heads and positions takes too much code for a short script"
        )
    if layout.has(ExpertParallel):
        raise refuse("LocalTensorParallel inside ExpertParallel", "sharding each expert takes too much code for a short script")
    if parallelism.loss_parallel:
        raise refuse("LocalTensorParallel.loss_parallel", "a vocabulary-parallel loss takes too much code for a short script")
    if parallelism.collectives is not Collectives.FUNCTIONAL:
        raise refuse("LocalTensorParallel.collectives", "it needs the package spmd_types, but scripts need only torch")
    mesh, rows = mesh_of(draft, parallelism), training.model.length or 0
    regions = planned_regions(training.model, parallelism)
    _define(draft)
    if regions:
        _define_regions(draft)
    draft.add(LoopPosition.WRAP, f"ranks = AxisRanks({mesh}.get_group(), {mesh}.size(), {mesh}.get_local_rank(), {rows})")
    for planned in planned_modules(training.model, parallelism):
        path = draft.form.paths.get(planned.name, planned.name)
        draft.add(LoopPosition.WRAP, f'model.set_submodule("{path}", {_code(path, planned)})')
    for region in regions:
        moves = ", ".join(map(_route, (region.enter, COPY_TO_PARTIAL, region.leave)))
        dims = ", ".join(f'"{name}": {dim}' for name, dim in region.dims)
        layer = draft.form.layers[region.layer]
        draft.add(LoopPosition.WRAP, f"shard_region({layer}, LocalRegion(ranks, {moves}), {{{dims}}})")
    draft.add(LoopPosition.WRAP, *ties(draft))
    if not rows:
        chunk = f" // {layout.num_chunks}" if layout.num_chunks > 1 else ""
        draft.add(LoopPosition.TAKE, f"ranks.rows = inputs.shape[{training.data.batch_dim}]{chunk}")
    shard_masks(draft, parallelism)
    read_local_shards(draft)


def _define(draft: Draft) -> None:
    from equivcheck.layouts.parallelisms.local_tensor_parallel import modules, regions

    draft.need("dataclasses", "dataclass")
    draft.need("enum", "Enum")
    draft.need("typing", "Any")
    draft.need("torch.nn", "functional")
    draft.need("torch.distributed", "ProcessGroup")
    draft.need("torch.distributed._functional_collectives", "as collectives")
    draft.definitions += map(source_of, (ActivationPlacement, chunk_size, chunk_sizes, Redistribution))
    draft.definitions += map(
        source_of, (regions.dim_of, regions.padded, regions.wait_for, regions.AxisRanks, regions.Redistribute)
    )
    draft.definitions += map(source_of, (regions.CopyToRegion, regions.BiasOnFirstRank))
    draft.definitions += map(source_of, (modules.LocalLinear, modules.LocalNorm, modules.LocalEmbedding))


def _define_regions(draft: Draft) -> None:
    from equivcheck.layouts.parallelisms.local_tensor_parallel.modules import LocalRegion, shard_region
    from equivcheck.training.layers.region import Region

    draft.need("collections.abc", "Mapping")
    draft.definitions += map(source_of, (Region, LocalRegion, shard_region))


def _code(path: str, planned: PlannedModule) -> str:
    full = f'model.get_submodule("{path}")'
    if planned.leave is None:
        return f"LocalNorm({full}, ranks)"
    if planned.enter is None:
        return f"LocalEmbedding({full}, ranks, {_route(planned.leave)}, {planned.dims[0]})"
    return f"LocalLinear({full}, ranks, {_route(planned.enter)}, {_route(planned.leave)}, {planned.dims})"


def _route(route: Redistribution) -> str:
    lies = (route.source, route.target, route.gradient_source, route.gradient_target)
    return f"Redistribution({', '.join(map(str, lies))}, {route.features})"
