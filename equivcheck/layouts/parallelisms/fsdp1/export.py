"""Writes `FullyShardedDataParallel` into a script."""

from __future__ import annotations

from equivcheck.layouts.base.script.draft import ROUNDS, Draft, LoopPosition, refuse
from equivcheck.layouts.base.script.form import Form
from equivcheck.layouts.base.script.loop import may_lack_gradients, norm_arguments
from equivcheck.layouts.base.script.mesh import add_no_sync, inner_ranks, mesh_of, take_rows
from equivcheck.layouts.base.script.shards import define_full_tensor
from equivcheck.layouts.base.script.text import block, call, indent_lines
from equivcheck.scenario import FSDP1, ClipNorm, Layout, ShardingStrategy, Training, Wrapping
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD
from equivcheck.training.layers.parameters import parameters_of


def write(draft: Draft, parallelism: FSDP1) -> None:
    """Let the exported script wrap its model in `FullyShardedDataParallel`, or each layer and then the model."""
    layout, form = draft.scenario.layout, draft.form
    if parallelism.mixed_precision is not None:
        raise refuse("FSDP1.mixed_precision", ROUNDS)
    draft.need("torch.distributed.fsdp", "FullyShardedDataParallel")
    draft.module, draft.loss_scale = "module", layout.num_data_ranks
    draft.parameters = "module.parameters()"
    options: dict[str, object] = {"device_id": 'torch.device("cpu")', "use_orig_params": parallelism.use_orig_params}
    if parallelism.strategy is not ShardingStrategy.FULL_SHARD:
        draft.need("torch.distributed.fsdp", "ShardingStrategy")
        options["sharding_strategy"] = f"ShardingStrategy.{parallelism.strategy.value}"
    if parallelism.strategy.is_hybrid or len(draft.scenario.layout.parallelisms) > 1:
        options["device_mesh"] = mesh_of(draft, parallelism)
    if parallelism.wrapping is Wrapping.PER_LAYER:
        draft.add(LoopPosition.WRAP, *_wrapped_layers(form, options))
    draft.add(LoopPosition.WRAP, f"module = {call('FullyShardedDataParallel', 'model', **options)}")
    if isinstance(draft.scenario.training.clipping, ClipNorm):
        draft.clip_norm = f"module.clip_grad_norm_({norm_arguments(draft.scenario.training.clipping)})"
    _read(draft, parallelism)
    if parallelism.no_sync:
        add_no_sync(draft)
    take_rows(draft)


def _wrapped_layers(form: Form, options: dict[str, object]) -> list[str]:
    if len(form.layers) == 1:
        return [f"{form.layers[0]} = {call('FullyShardedDataParallel', form.layers[0], **options)}"]
    indices = [layer.removeprefix(f"{form.stack}[").removesuffix("]") for layer in form.layers]
    many = f"range({len(indices)})" if form.is_all_layers else f"({', '.join(indices)})"
    layer = f"{form.stack}[index]"
    return [f"for index in {many}:", f"    {layer} = {call('FullyShardedDataParallel', layer, **options)}"]


def _read(draft: Draft, parallelism: FSDP1) -> None:
    """Gather shards to compare them: a shard holds a slice from one original parameter, or from several in a flat parameter."""
    layout = draft.scenario.layout
    sharded = parallelism.strategy is not ShardingStrategy.NO_SHARD and layout.mesh.size(DP, SHARD) > 1
    draft.definitions.append(_unflattened(draft.scenario.training, layout, sharded=sharded))
    draft.before_wrap = ["units = [{name: parameter.shape} for name, parameter in model.named_parameters()]"]
    composed = len(layout.parallelisms) > 1
    if composed:
        define_full_tensor(draft)
        draft.need("torch.distributed.tensor", "DTensor")
        draft.definitions.append(list(_LOCAL))
    if composed or not parallelism.use_orig_params:
        units = _units(draft, parallelism, local=composed)
        # After tensor parallelism has sharded parameters, and before FSDP1 flattens them.
        lines = draft.lines[LoopPosition.WRAP]
        wraps = [index for index, line in enumerate(lines) if "FullyShardedDataParallel(" in line]
        start = wraps[0] - (lines[wraps[0]].startswith("    "))
        lines[start:start] = units
    # Only parameter groups use these names. With groups, each unit is one parameter, because flat parameters have no groups.
    draft.names = ("(name,), parameter", "zip(units, module.parameters())")
    arguments = ", parallel" * sharded
    each = f'unflattened(f"step {{{{step}}}} {{label}}", unit, {{attribute}}{arguments})'
    draft.reading = (
        "for unit, parameter in zip(units, module.parameters(), strict=True):",
        *(
            (
                f"    for place, part in {each}.items():",
                "        left[place] = whole(part, SHARDED.get(place.split()[-1]) if parallel else None)",
            )
            if composed
            else (f"    left |= {each}",)
        ),
    )


_LOCAL = (
    "def local(tensor: torch.Tensor) -> torch.Tensor:",
    '    """Local part of a tensor."""',
    "    return tensor.to_local() if isinstance(tensor, DTensor) else tensor",
)


def _units(draft: Draft, parallelism: FSDP1, *, local: bool) -> list[str]:
    """Write lines to store each unit's parameter shapes before FSDP flattens them."""
    shape = "local(parameter).shape" if local else "parameter.shape"
    if parallelism.use_orig_params:
        return [f"units = [{{name: {shape}}} for name, parameter in model.named_parameters()]"]
    if parallelism.wrapping is Wrapping.ROOT_ONLY:
        return [f"units = [{{name: {shape} for name, parameter in model.named_parameters()}}]"]
    form = draft.form
    prefix = "layers." if form.stack == "model.layers" else ""
    indices = [layer.removeprefix(f"{form.stack}[").removesuffix("]") for layer in form.layers]
    if form.is_all_layers:
        where = f"for index, layer in enumerate({form.stack})"
        named = f'{{f"{prefix}{{index}}.{{name}}": {shape} for name, parameter in layer.named_parameters()}}'
    else:
        where = f"for index in ({', '.join(indices)})"
        named = f'{{f"{prefix}{{index}}.{{name}}": {shape} for name, parameter in {form.stack}[index].named_parameters()}}'
    if all(parameter.layer is not None for parameter in parameters_of(draft.scenario.training.model)):
        return [f"units = [{named} {where}]"]
    own = f'{{name: {shape} for name, parameter in model.named_parameters() if not name.startswith("{prefix}")}}'
    return [f"units = [{own}]", f"units += [{named} {where}]"]


def _unflattened(training: Training, layout: Layout, *, sharded: bool) -> list[str]:
    several, inner = layout.mesh.size(REPLICATE) > 1, inner_ranks(layout)
    size = layout.mesh.size(SHARD) * inner
    gathering = [
        "shards = [None] * dist.get_world_size()",
        "dist.all_gather_object(shards, tensor if tensor is None else tensor.detach())",
        *([f"shards = shards[dist.get_rank() // {size} * {size} :][:{size}]"] if several else []),
        *([f"shards = shards[dist.get_rank() % {inner} :: {inner}]"] if inner > 1 else []),
    ]
    gather = ["shards = [tensor]", "if gather:", *indent_lines(gathering)] if sharded else ["shards = [tensor]"]
    nothing = [
        "if all(shard is None for shard in shards):",
        '    return dict.fromkeys(f"{label} {name}" for name in unit)',
    ]
    body = [
        f'"""Tensors in a unit by name{", from the flat shards on all ranks" * sharded}."""',
        *gather,
        *(nothing if may_lack_gradients(training) else []),
        "flat = torch.cat([shard.detach().flatten() for shard in shards if shard is not None])",
        "sizes = [shape.numel() for shape in unit.values()]",
        "parts = flat[: sum(sizes)].split(sizes)",
        'return {f"{label} {name}": part.view(unit[name]) for name, part in zip(unit, parts)}',
    ]
    return block(f"def unflattened(label, unit, tensor{', gather' * sharded}):", body)
