"""Writes `fully_shard` into a script."""

from __future__ import annotations

from dataclasses import fields

from equivcheck.layouts.base.dtensor_experts import dtensor_experts, shards_over_ep
from equivcheck.layouts.base.partition import chunk_size, chunk_sizes
from equivcheck.layouts.base.script.draft import ROUNDS, Draft, LoopPosition, layer_iterable, loop_over_layers, refuse
from equivcheck.layouts.base.script.dtensor_values import distribute_model, distribute_rows
from equivcheck.layouts.base.script.mesh import layers_of_part, mesh_of, reduce_at_last_microbatch, repr_of, submesh_of, take_rows
from equivcheck.layouts.base.script.text import call, source_of
from equivcheck.layouts.parallelisms.fsdp2.division import (
    averaging_ranks,
    expert_divide_factor,
    has_expert_groups,
    hooks_replicas,
)
from equivcheck.scenario import FSDP2, Layout, MeshDims, Muon, Wrapping
from equivcheck.scenario.mesh import DP, EP, REPLICATE, SHARD
from equivcheck.training.layers.parameters import parameters_of


def write(draft: Draft, parallelism: FSDP2) -> None:
    """Let the exported script call `fully_shard` on its model or layers, and set the units' options."""
    if parallelism.mixed_precision is not None:
        raise refuse("FSDP2.full_precision_norms" if parallelism.full_precision_norms else "FSDP2.mixed_precision", ROUNDS)
    if parallelism.loss_chunks > 1 and draft.scenario.training.model.head is not None:
        raise refuse("FSDP2.loss_chunks", "scripts compute the loss for all positions at once")
    draft.need("torch.distributed.fsdp", "fully_shard")
    draft.has_dtensors = True
    if parallelism.mesh_dims is None:
        draft.loss_scale = draft.scenario.layout.num_data_ranks
        _scale(draft, parallelism)
    else:
        draft.need("torch.distributed.tensor", "Replicate")
        distribute_model(draft, _mesh(draft, parallelism), "Replicate()")
    if draft.has_parts:
        _wrap_parts(draft, parallelism)
    else:
        _wrap(draft, parallelism, _options(draft, parallelism))
    if parallelism.explicit_prefetch and parallelism.wrapping is Wrapping.PER_LAYER:
        draft.add(LoopPosition.WRAP, *_prefetches(draft, parallelism.layers_per_unit))
    if parallelism.separate_reduce_group:
        draft.add(LoopPosition.WRAP, "model.set_separate_reduce_scatter_group(True)")
    _start_microbatches(draft, parallelism)
    if parallelism.distributed_muon and isinstance(draft.scenario.training.optimizer, Muon):
        _deal_out_matrices(draft, parallelism)
    if parallelism.mesh_dims is None:
        take_rows(draft)
    else:
        distribute_rows(draft, _mesh(draft, parallelism))


def _wrap_parts(draft: Draft, fsdp: FSDP2) -> None:
    """Shard each stage, or each of its layers and then the stage."""
    simple = FSDP2(**{name: getattr(fsdp, name) for name in WRITTEN_WITH_PARTS})
    for field in fields(FSDP2):
        if getattr(fsdp, field.name) != getattr(simple, field.name):
            raise refuse(f"FSDP2.{field.name}", "scripts with a pipeline do not support this option")
    if dtensor_experts(draft.scenario.training.model, draft.scenario.layout) or shards_over_ep(draft.scenario.layout):
        raise refuse("fully_shard of DTensor experts", "scripts with a pipeline have no units of experts")
    options = _options(draft, fsdp)
    draft.add(LoopPosition.WRAP, "for part in parts:")
    if fsdp.wrapping is Wrapping.PER_LAYER:
        draft.add(
            LoopPosition.WRAP, f"    for layer in {layers_of_part(draft)}:", f"        {call('fully_shard', 'layer', **options)}"
        )
    draft.add(LoopPosition.WRAP, f"    {call('fully_shard', 'part', **options)}")


WRITTEN_WITH_PARTS = (
    "wrapping",
    "reshard_after_forward",
    "reshard_to",
    "reshard_after_backward",
    "no_sync",
    "all_reduce_once",
    "cpu_offload",
    "shard_last_dim",
    "shard_largest_dim",
    "ignore_frozen",
    "shard_over_ep",
)
"""Options supported by scripts for `FSDP2` together with a pipeline."""


def _mesh(draft: Draft, fsdp: FSDP2) -> str:
    return mesh_of(draft, fsdp, named=fsdp.mesh_dims is not None)


def _wrap(draft: Draft, fsdp: FSDP2, options: dict[str, object]) -> None:
    """Shard each unit, then set how it divides gradients."""
    experts = bool(dtensor_experts(draft.scenario.training.model, draft.scenario.layout))
    if experts:
        draft.add(LoopPosition.WRAP, 'experts = [layer.units() for layer in model.modules() if hasattr(layer, "by_units")]')
        sharded = call("fully_shard", "units", **options | {"mesh": _mesh_of_units(draft, fsdp, of_experts=True)})
        draft.add(LoopPosition.WRAP, "for units in experts:", f"    {sharded}")
    if fsdp.wrapping is Wrapping.PER_LAYER:
        draft.add(LoopPosition.WRAP, *_wraps(draft, fsdp.layers_per_unit, options))
    for unit in _token_units(draft, fsdp):
        draft.add(LoopPosition.WRAP, call("fully_shard", unit, **options))
    draft.add(LoopPosition.WRAP, call("fully_shard", "model", **options))
    if fsdp.embedding_unit and draft.scenario.training.model.source is not None:
        draft.add(LoopPosition.WRAP, "model.embedding.set_unshard_in_backward(False)  # its backward needs no weight")
    if experts:
        divided = _divided(fsdp, expert_divide_factor(fsdp, draft.scenario.layout))
        draft.add(LoopPosition.WRAP, "for units in experts:", *(f"    units.{line}" for line in divided))
    for line in _divided(fsdp, fsdp.gradient_divide_factor):
        if fsdp.wrapping is Wrapping.PER_LAYER:
            draft.add(LoopPosition.WRAP, *loop_over_layers(draft, f"layer.{line}"))
        draft.add(LoopPosition.WRAP, *(f"{module}.{line}" for module in (*_token_modules(draft, fsdp), "model")))
    if hooks_replicas(fsdp, draft.scenario.layout):
        _reduce_by_hook(draft, fsdp, has_experts=experts)


def _head_modules(draft: Draft, fsdp: FSDP2) -> list[str]:
    head = draft.scenario.training.model.head
    if not fsdp.head_unit or head is None:
        return []
    return ['model.head["norm"]'] * bool(head.norm) + ['model.head["linear"]']


def _token_units(draft: Draft, fsdp: FSDP2) -> list[str]:
    """Return the code for each unit outside the layers."""
    head = _head_modules(draft, fsdp)
    has_embedding = fsdp.embedding_unit and draft.scenario.training.model.source is not None
    units = [["model.embedding"]] * has_embedding + [head] * bool(head)
    return [unit[0] if len(unit) == 1 else f"[{', '.join(unit)}]" for unit in units]


def _token_modules(draft: Draft, fsdp: FSDP2) -> list[str]:
    """Return the code for one module in each unit outside the layers."""
    return [unit.removeprefix("[").split(", ")[0] for unit in _token_units(draft, fsdp)]


def _reduce_by_hook(draft: Draft, fsdp: FSDP2, *, has_experts: bool) -> None:
    """Set a hook that averages gradients over replicas, or sums them if a divide factor counts all ranks."""
    replicas = submesh_of(draft, REPLICATE)
    divided = [f"    reduced /= {draft.scenario.layout.mesh.size(REPLICATE)}"] * (fsdp.gradient_divide_factor is None)
    draft.add(
        LoopPosition.WRAP,
        "def reduce_over_replicas(reduced):",
        f"    dist.all_reduce(reduced, group={replicas}.get_group())",
        *divided,
    )
    if fsdp.wrapping is Wrapping.PER_LAYER:
        draft.add(LoopPosition.WRAP, *loop_over_layers(draft, "layer.set_all_reduce_hook(reduce_over_replicas)"))
    for module in (*_token_modules(draft, fsdp), "model"):
        draft.add(LoopPosition.WRAP, f"{module}.set_all_reduce_hook(reduce_over_replicas)")
    if has_experts:  # their divide factor is that of all ranks
        hook = f"lambda reduced: dist.all_reduce(reduced, group={replicas}.get_group())"
        draft.add(LoopPosition.WRAP, "for units in experts:", f"    units.set_all_reduce_hook({hook})")


def _start_microbatches(draft: Draft, fsdp: FSDP2) -> None:
    """Let each microbatch gather, reduce and reshard as the options say."""
    if fsdp.explicit_unshard:
        draft.need("torch.distributed.fsdp", "FSDPModule")
        draft.add(LoopPosition.TAKE, "for unit in [each for each in model.modules() if isinstance(each, FSDPModule)]:")
        draft.add(LoopPosition.TAKE, "    unit.unshard(async_op=True)")
    for at_last_only, method in (
        (not fsdp.reshard_after_backward, "set_reshard_after_backward"),
        (fsdp.no_sync, "set_requires_gradient_sync"),
        (fsdp.all_reduce_once, "set_requires_all_reduce"),
    ):
        if at_last_only:
            reduce_at_last_microbatch(draft, method)


def _deal_out_matrices(draft: Draft, fsdp: FSDP2) -> None:
    """Define the distributed Muon optimizer that the ranks use here."""
    from equivcheck.layouts.parallelisms.fsdp2 import distributed_muon

    for name in ("Callable", "Iterable", "Mapping"):
        draft.need("collections.abc", name)
    draft.need("itertools", "chain")
    draft.need("typing", "Any")
    draft.need("torch.distributed.tensor", "DTensor")
    draft.need("torch.distributed.tensor", "Shard")
    draft.definitions += map(source_of, (chunk_size, chunk_sizes, *distributed_muon.DEFINED))
    mesh = mesh_of(draft, fsdp)
    draft.add(LoopPosition.WRAP, f"group = {mesh}.get_group({len(draft.scenario.layout.axes_of(fsdp)) - 1})")
    trained = "enumerate(each for each in model.parameters() if each.requires_grad)"
    owners = f"{{parameter: number % group.size() for number, parameter in {trained}}}"
    draft.optimizer = ("DistributedMuon", {"group": "group", "owners": owners})


def _scale(draft: Draft, fsdp: FSDP2) -> None:
    """Scale the loss before backward to compensate for the divide factor."""
    factor, ranks = fsdp.gradient_divide_factor, averaging_ranks(draft.scenario.layout)
    if factor not in (None, ranks):
        draft.gradient_scale = f"{factor!r} / {ranks}"


def _options(draft: Draft, fsdp: FSDP2) -> dict[str, object]:
    """Return the keyword arguments for `fully_shard`."""
    options: dict[str, object] = {"mesh": _mesh_of_units(draft, fsdp)}
    if fsdp.mesh_dims is not None:
        draft.need("torch.distributed.fsdp", "DataParallelMeshDims")
        options["dp_mesh_dims"] = _mesh_dims(fsdp, draft.scenario.layout)
    if fsdp.reshard_to is not None or not fsdp.reshard_after_forward:
        options["reshard_after_forward"] = fsdp.reshard_to or False
    if fsdp.shard_last_dim:
        draft.need("torch.distributed.tensor", "Shard")
        options["shard_placement_fn"] = "lambda parameter: Shard(parameter.ndim - 1)"
    if fsdp.shard_largest_dim:
        draft.need("torch.distributed.tensor", "Shard")
        options["shard_placement_fn"] = "lambda parameter: Shard(parameter.shape.index(max(parameter.shape)))"
    if _has_expert_mesh(draft, fsdp):
        options["shard_placement_fn"] = _place_experts(draft, options.get("shard_placement_fn"))
    if fsdp.ignore_frozen:
        options["ignored_params"] = "{parameter for parameter in model.parameters() if not parameter.requires_grad}"
    if fsdp.cpu_offload:
        draft.need("torch.distributed.fsdp", "CPUOffloadPolicy")
        options["offload_policy"] = "CPUOffloadPolicy(pin_memory=False)"
    return options


def _mesh_of_units(draft: Draft, fsdp: FSDP2, *, of_experts: bool = False) -> str:
    """Return code for the mesh of units with experts, or of other units."""
    layout, mesh = draft.scenario.layout, _mesh(draft, fsdp)
    if of_experts or not shards_over_ep(layout):
        return submesh_of(draft, SHARD) if hooks_replicas(fsdp, layout) else mesh
    replicas, shards = layout.mesh.size(REPLICATE), layout.mesh.size(DP, SHARD, EP)
    sizes = (
        f'({replicas}, {shards}), mesh_dim_names=("{REPLICATE}", "flat")' if REPLICATE in layout.mesh.names else f"({shards},)"
    )
    line = f'flattened = init_device_mesh("cpu", {sizes})'
    if line not in draft.lines[LoopPosition.WRAP]:
        draft.add(LoopPosition.WRAP, line)
    return 'flattened["flat"]' if hooks_replicas(fsdp, layout) else "flattened"


def _has_expert_mesh(draft: Draft, fsdp: FSDP2) -> bool:
    has_experts = any(found.expert_dim is not None for found in parameters_of(draft.scenario.training.model))
    return has_experts and has_expert_groups(fsdp, draft.scenario.layout)


def _place_experts(draft: Draft, placement: object) -> str:
    """Define a `shard_placement_fn` that shards experts over all ranks. `placement` is code that chooses each sharded dim."""
    for name in ("FSDPMeshInfo", "ShardPlacementResult"):
        draft.need("torch.distributed.fsdp._fully_shard._fsdp_common", name)
    draft.need("torch.distributed.device_mesh", "init_device_mesh")
    draft.mixes_tensors = True
    # Layers with other options have a class of their own, such as `Experts2`.
    own = '{each for layer in model.modules() if hasattr(layer, "experts") for each in layer.experts.parameters()}'
    draft.add(
        LoopPosition.WRAP,
        f"all_ranks = FSDPMeshInfo(init_device_mesh(mesh.device_type, ({draft.scenario.layout.mesh.num_ranks},)), 0)",
        f"of_experts = {own}",
        f"shard = {placement or 'lambda parameter: None'}",
        "def place(parameter):",
        "    return ShardPlacementResult(shard(parameter), all_ranks) if parameter in of_experts else shard(parameter)",
    )
    return "place"


def _mesh_dims(fsdp: FSDP2, layout: Layout) -> str:
    names = [repr_of(name) for name in layout.axes_of(fsdp)]
    if fsdp.mesh_dims is MeshDims.REPLICATE:
        return call("DataParallelMeshDims", replicate=names[0])
    return call("DataParallelMeshDims", shard=names[-1], replicate=names[0] if len(names) > 1 else None)


def _wraps(draft: Draft, count: int, options: dict[str, object]) -> list[str]:
    """Write a loop that shards layers, or lists of `count` layers."""
    if count == 1 or len(draft.form.layers) == 1:
        return loop_over_layers(draft, call("fully_shard", "layer", **options))
    sharded = call("fully_shard", f"layers[first : first + {count}]", **options)
    return [f"layers = list({layer_iterable(draft)})", f"for first in range(0, len(layers), {count}):", f"    {sharded}"]


def _prefetches(draft: Draft, count: int) -> list[str]:
    """Write a loop that lets neighbouring units prefetch each other, by each unit's first layer."""
    if len(draft.form.layers) == 1:
        return []
    draft.need("itertools", "pairwise")
    units = layer_iterable(draft) if count == 1 else f"layers[::{count}]"
    return [
        f"for layer, following in pairwise({units}):",
        "    layer.set_modules_to_forward_prefetch([following])",
        "    following.set_modules_to_backward_prefetch([layer])",
    ]


def _divided(fsdp: FSDP2, factor: float | None) -> list[str]:
    lines = [] if factor is None else [f"set_gradient_divide_factor({factor!r})"]
    return lines + ["set_force_sum_reduction_for_comms(True)"] * fsdp.sum_reductions
