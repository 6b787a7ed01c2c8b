"""`FullyShardedDataParallel`."""

from __future__ import annotations

from equivcheck.export.draft import Draft, Place
from equivcheck.export.form import Form
from equivcheck.export.layouts.mesh import keep_local_between_microbatches, mesh_of, take_rows
from equivcheck.export.loop import may_be_none, norm_arguments
from equivcheck.export.refusal import refuse
from equivcheck.export.text import block, call, indented
from equivcheck.scenario import FSDP1, ClipNorm, Layout, Parallelism, ShardingStrategy, Training, Wrapping
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD


def write(draft: Draft, parallelism: Parallelism) -> None:
    """Wrap the model, or each layer and then the model."""
    assert isinstance(parallelism, FSDP1), parallelism
    layout, form = draft.scenario.layout, draft.form
    if parallelism.mixed_precision is not None:
        raise refuse("FSDP1.mixed_precision", "one device has to round as the ranks do, which no short script shows")
    if len(layout.parallelisms) > 1:
        raise refuse(f"layout {layout.name}", "flat parameters of tensor-parallel shards take private API to be read")
    draft.need("torch.distributed.fsdp", "FullyShardedDataParallel")
    draft.module, draft.loss_scale = "module", layout.num_data_ranks
    draft.parameters = "module.parameters()"
    options = _options(draft, parallelism)
    if parallelism.wrapping is Wrapping.PER_LAYER:
        draft.add(Place.WRAP, *_wrapped_layers(form, options))
    draft.add(Place.WRAP, f"module = {call('FullyShardedDataParallel', 'model', **options)}")
    if isinstance(draft.scenario.training.clipping, ClipNorm):
        draft.clip_norm = f"module.clip_grad_norm_({norm_arguments(draft.scenario.training.clipping)})"
    _read(draft, parallelism)
    if parallelism.no_sync:
        keep_local_between_microbatches(draft)
    take_rows(draft)


def _options(draft: Draft, parallelism: FSDP1) -> dict[str, object]:
    options: dict[str, object] = {"device_id": 'torch.device("cpu")', "use_orig_params": parallelism.use_orig_params}
    if parallelism.strategy is not ShardingStrategy.FULL_SHARD:
        draft.need("torch.distributed.fsdp", "ShardingStrategy")
        options["sharding_strategy"] = f"ShardingStrategy.{parallelism.strategy.value}"
    if parallelism.strategy.is_hybrid:
        options["device_mesh"] = mesh_of(draft, parallelism)
    return options


def _wrapped_layers(form: Form, options: dict[str, object]) -> list[str]:
    if len(form.layers) == 1:
        return [f"{form.layers[0]} = {call('FullyShardedDataParallel', form.layers[0], **options)}"]
    indices = [layer.removeprefix(f"{form.stack}[").removesuffix("]") for layer in form.layers]
    many = f"range({len(indices)})" if form.is_all_layers else f"({', '.join(indices)})"
    layer = f"{form.stack}[index]"
    return [f"for index in {many}:", f"    {layer} = {call('FullyShardedDataParallel', layer, **options)}"]


def _read(draft: Draft, parallelism: FSDP1) -> None:
    """Read shards by gathering them: a parameter is a run of its shard, or shares a flat one with others."""
    layout = draft.scenario.layout
    sharded = parallelism.strategy is not ShardingStrategy.NO_SHARD and layout.mesh.size(DP, SHARD) > 1
    draft.definitions.append(_unflattened(draft.scenario.training, layout, sharded=sharded))
    draft.before_wrap = ["units = [{name: parameter.shape} for name, parameter in model.named_parameters()]"]
    if not parallelism.use_orig_params:
        draft.lines[Place.WRAP][:0] = _units(draft, parallelism)
    # Of groups alone, which flat parameters have not: each unit is then one parameter.
    draft.names = ("(name,), parameter", "zip(units, module.parameters())")
    arguments = ", parallel" * sharded
    draft.reading = (
        "for unit, parameter in zip(units, module.parameters(), strict=True):",
        f'    left |= unflattened(f"step {{{{step}}}} {{label}}", unit, {{attribute}}{arguments})',
    )


def _units(draft: Draft, parallelism: FSDP1) -> list[str]:
    """What is in each flat parameter, before they are made."""
    if parallelism.wrapping is Wrapping.WHOLE:
        return ["units = [{name: shape for unit in units for name, shape in unit.items()}]"]
    form = draft.form
    many = form.stack if form.is_all_layers else f"({', '.join(form.layers)},)"
    prefix = "layers." if form.stack == "model.layers" else ""
    if form.is_all_layers:
        named = f'{{f"{prefix}{{index}}.{{name}}": parameter.shape for name, parameter in layer.named_parameters()}}'
        return [f"units = [{named} for index, layer in enumerate({many})]"]
    indices = [layer.removeprefix(f"{form.stack}[").removesuffix("]") for layer in form.layers]
    named = f'{{f"{prefix}{{index}}.{{name}}": parameter.shape for name, parameter in {form.stack}[index].named_parameters()}}'
    return [f"units = [{named} for index in ({', '.join(indices)})]"]


def _unflattened(training: Training, layout: Layout, *, sharded: bool) -> list[str]:
    several = layout.mesh.size(REPLICATE) > 1
    size = layout.mesh.size(SHARD)
    gathering = [
        "shards = [None] * dist.get_world_size()",
        "dist.all_gather_object(shards, tensor if tensor is None else tensor.detach())",
        *([f"shards = shards[dist.get_rank() // {size} * {size} :][:{size}]"] if several else []),
    ]
    gather = ["shards = [tensor]", "if gather:", *indented(gathering)] if sharded else ["shards = [tensor]"]
    nothing = [
        "if all(shard is None for shard in shards):",
        '    return dict.fromkeys(f"{label} {name}" for name in unit)',
    ]
    body = [
        f'"""The tensors of a unit by name{", out of the flat shards that ranks hold of it" * sharded}."""',
        *gather,
        *(nothing if may_be_none(training) else []),
        "flat = torch.cat([shard.detach().flatten() for shard in shards if shard is not None])",
        "sizes = [shape.numel() for shape in unit.values()]",
        "parts = flat[: sum(sizes)].split(sizes)",
        'return {f"{label} {name}": part.view(unit[name]) for name, part in zip(unit, parts)}',
    ]
    return block(f"def unflattened(label, unit, tensor{', gather' * sharded}):", body)
