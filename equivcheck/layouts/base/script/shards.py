"""Read sharded plain tensors in a script, such as experts or a tensor-parallel plan's local tensors."""

from __future__ import annotations

from equivcheck.layouts.base.partition import shard_dim
from equivcheck.layouts.base.plan.rules import rows_dim
from equivcheck.layouts.base.script.draft import Draft, LoopPosition, refuse
from equivcheck.layouts.base.script.loop import order_of
from equivcheck.layouts.base.script.mesh import inner_ranks, mesh_of
from equivcheck.layouts.base.script.text import block, call, indent_lines
from equivcheck.scenario import ActivationSharding, ClipNorm, ExpertParallel, Pipeline, PlannedParallelism
from equivcheck.scenario.mesh import CP, EP, TP
from equivcheck.training.layers.parameters import parameters_of


def read_local_shards(draft: Draft) -> None:
    """Let the script gather each parameter along its sharded dim, and clip by the norm over all shards.

    If several parallelisms call this function, only the first call changes the script.
    """
    if draft.reading:
        return
    define_full_tensor(draft)
    draft.after_wrap.append("parameters = dict(model.named_parameters())  # as they are outside of forward")
    draft.parameters, draft.names = "parameters.values()", ("name, parameter", "parameters.items()")
    group = ""
    if has_stages(draft):
        # Ranks of other stages have other parameters, so only ranks that split the same stage call `whole` together.
        cutting = draft.scenario.layout.of(PlannedParallelism, ExpertParallel)[0]
        draft.after_wrap.append(f"neighbours = {mesh_of(draft, cutting)}.get_group() if parallel else None")
        group = ", neighbours"
    draft.reading = (
        "for name, parameter in parameters.items():",
        "    dim = SHARDED.get(name) if parallel else None",
        f'    left[f"step {{{{step}}}} {{label}} {{{{name}}}}"] = whole({{attribute}}, dim{group})',
    )
    clipping = draft.scenario.training.clipping
    if isinstance(clipping, ClipNorm) and not has_stages(draft):
        draft.definitions.append(_clip(clipping))
        draft.clip_norm = "clip_across_shards(parameters)"


def define_full_tensor(draft: Draft) -> None:
    """Define the script's function ``whole``. It gathers a full tensor from shards."""
    layout = draft.scenario.layout
    size = inner_ranks(layout) * layout.mesh.size(EP)
    draft.has_dtensors = False
    draft.definitions.append([f"SHARDED = {sharded_dims(draft)}  # sharded dims"])
    first = f"dist.get_rank() // {size} * {size}"
    shards = "shards" if layout.mesh.num_ranks == size or has_stages(draft) else f"shards[{first} :][:{size}]"
    taken, group = (", group: dist.ProcessGroup | None", "group") if has_stages(draft) else ("", "")
    draft.definitions.append(
        [
            f"def whole(tensor: torch.Tensor | None, dim: int | None{taken}) -> torch.Tensor | None:",
            *indent_lines(
                [
                    '"""A full copy of a tensor, gathered along a dim from neighbouring ranks."""',
                    *_unsharded(draft),
                    *block("if tensor is None or dim is None:", ["return None if tensor is None else tensor.detach().clone()"]),
                    f"shards = [None] * dist.get_world_size({group})",
                    call("dist.all_gather_object", "shards", "tensor.detach()", group=group or None),
                    f"return torch.cat({shards}, dim)",
                ]
            ),
        ]
    )


def has_stages(draft: Draft) -> bool:
    """Whether ranks keep pipeline stages, so that they have different parameters."""
    return draft.scenario.layout.has(Pipeline)


def _unsharded(draft: Draft) -> list[str]:
    """Write lines to gather shards made by the outer parallelisms."""
    _, *around = draft.scenario.layout.parallelisms
    if all(parallelism.trains_local_tensors for parallelism in around):
        return []
    draft.need("torch.distributed.tensor", "DTensor")
    return ["tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor"]


def _clip(clipping: ClipNorm) -> list[str]:
    order = order_of(clipping)
    return [
        "def clip_across_shards(parameters: dict[str, nn.Parameter]) -> torch.Tensor:",
        '    """Clip by the norm over the shards on all ranks, and return it."""',
        "    gradients = [whole(parameter.grad, SHARDED.get(name)) for name, parameter in parameters.items()]",
        f"    norm = nn.utils.get_total_norm([each for each in gradients if each is not None], {order})",
        f"    nn.utils.clip_grads_with_norm_(parameters.values(), {clipping.max_norm!r}, norm)",
        "    return norm",
    ]


def sharded_dims(draft: Draft) -> str:
    """Return code for a dict with the sharded dim of each parameter."""
    cutting = draft.scenario.layout.of(PlannedParallelism, ExpertParallel)[0]
    parameters = parameters_of(draft.scenario.training.model)
    dims = {draft.form.name_of(found.full_name): shard_dim(cutting, found) for found in parameters}
    items = ", ".join(f'"{name}": {dim}' for name, dim in dims.items() if dim is not None)
    return f"{{{items}}}"


def placement_code(draft: Draft, sharding: ActivationSharding) -> str:
    """Return code for the DTensor placement of an activation."""
    rows = rows_dim(draft.scenario.training.model)
    placements = {
        ActivationSharding.REPLICATED: "Replicate()",
        ActivationSharding.ROWS: f"Shard({rows})",
        ActivationSharding.FEATURES: "Shard(-1)",
    }
    return placements[sharding]


def shard_masks(draft: Draft, parallelism: PlannedParallelism) -> None:
    """Let the script shard each dropout mask like its layer's output."""
    layout, model = draft.scenario.layout, draft.scenario.training.model
    if inner_ranks(layout) == 1:
        return
    size = layout.mesh.size(TP, CP)
    masked = [entry for layer, entry in zip(model.layers, parallelism.plan, strict=True) if layer.dropout]
    if has_stages(draft) and model.length is None and any(entry.output is ActivationSharding.ROWS for entry in masked):
        raise refuse("dropout on sharded rows in a pipeline", "sharding each chunk's rows takes too much code for a short script")
    for index, entry in enumerate(masked):
        if entry.output is not ActivationSharding.REPLICATED:
            rows = rows_dim(model)
            dim = rows if entry.output is ActivationSharding.ROWS else rows + 1
            along = f", {dim}" if dim else ""
            draft.add(LoopPosition.TAKE, f"masks[{index}] = masks[{index}].chunk({size}{along})[dist.get_rank() % {size}]")
