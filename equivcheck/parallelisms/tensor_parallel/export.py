"""`parallelize_module`."""

from __future__ import annotations

from equivcheck.layers.parameters import parameters_of
from equivcheck.layouts.script.draft import Draft, LoopPosition
from equivcheck.layouts.script.mesh import inner_ranks, mesh_of
from equivcheck.layouts.script.text import call
from equivcheck.parallelisms.spmd.export import redistribute_gradients
from equivcheck.parallelisms.tensor_parallel.plans import cuts, is_outside
from equivcheck.scenario import ActivationSharding, LayerPlan, Parallelism, Split, TensorParallel
from equivcheck.scenario.mesh import TP

PLACEMENTS: dict[ActivationSharding, str] = {
    ActivationSharding.WHOLE: "Replicate()",
    ActivationSharding.ROWS: "Shard(0)",
    ActivationSharding.FEATURES: "Shard(-1)",
}
"""The placement of an activation of shape (rows, features)."""

_REPLICATED = (
    "def replicated(module: nn.Module, mesh: DeviceMesh, lies: Placement, runs: Placement, output: Placement):",
    '    """Run a module with whole parameters on its input redistributed; local tensors outside."""',
    "    def prepare(_module, inputs, mesh):",
    "        lying = DTensor.from_local(inputs[0], mesh, [lies], run_check=False)",
    "        return lying.redistribute(placements=[runs])",
    "",
    "    def finish(_module, outputs, _mesh):",
    "        return outputs.redistribute(placements=[output]).to_local()",
    "",
    "    distribute_module(module, mesh, input_fn=prepare, output_fn=finish)",
)


def write(draft: Draft, parallelism: Parallelism) -> None:
    """Parallelize each layer by its plan, and cut dropout masks as it spreads outputs."""
    assert isinstance(parallelism, TensorParallel), parallelism
    parameters = parameters_of(draft.scenario.training.model)
    draft.mixes_tensors = len({is_outside(parallelism, parameter) for parameter in parameters}) > 1
    mesh = mesh_of(draft, parallelism)
    draft.has_dtensors = True
    styles, by_hand = _styles(draft, parallelism, mesh)
    if styles:
        draft.need("torch.distributed.tensor.parallel", "parallelize_module")
        draft.add(LoopPosition.WRAP, f"parallelize_module(model, {mesh}, {{{', '.join(styles)}}})")
    draft.add(LoopPosition.WRAP, *by_hand)
    has_hooks = parallelism.redistribute_gradients and len(draft.scenario.layout.parallelisms) == 1
    uneven = any(size % draft.scenario.layout.mesh.size(TP) for _, size in cuts(draft.scenario.training.model, parallelism))
    if has_hooks and (by_hand or uneven or any("SequenceParallel" in style for style in styles)):
        # Only of whole layers cut evenly does each gradient lie as its parameter does, whatever propagation chooses.
        redistribute_gradients(draft)
    _cut_masks(draft, parallelism)


def _styles(draft: Draft, parallelism: TensorParallel, mesh: str) -> tuple[list[str], list[str]]:
    """Entries of a plan for `parallelize_module`, and lines for what it has no style for."""
    styles, by_hand = [], []
    sharding = ActivationSharding.WHOLE
    for index, (layer, entry) in enumerate(zip(draft.scenario.training.model.layers, parallelism.plan, strict=True)):
        owners = ["norm"] * (layer.norm is not None) + ["linear"] + ["auxiliary"] * (layer.auxiliary is not None)
        for owner in owners if entry.split is not Split.OUTSIDE else []:
            path, style = draft.form.paths[f"layers.{index}.{owner}"], _style(draft, owner, entry, sharding)
            if style:
                styles.append(f'"{path}": {style}')
            else:
                by_hand.append(_replicated(draft, path, mesh, owner, entry, sharding))
        sharding = entry.output
    return styles, by_hand


def _style(draft: Draft, owner: str, entry: LayerPlan, sharding: ActivationSharding) -> str:
    if owner == "norm":
        return (
            _named(draft, "SequenceParallel", sequence_dim="0", use_local_output="True")
            if sharding is ActivationSharding.ROWS
            else ""
        )
    if entry.split is Split.REPLICATED:
        return ""
    name, usual = ("ColwiseParallel", (ActivationSharding.WHOLE, ActivationSharding.FEATURES))
    if entry.split is Split.ROW:
        name, usual = "RowwiseParallel", (ActivationSharding.FEATURES, ActivationSharding.WHOLE)
    lies = None if sharding is usual[0] else _placement(draft, sharding)
    output = None if entry.output is usual[1] else _placement(draft, entry.output)
    return _named(draft, name, input_layouts=lies, output_layouts=output)


def _named(draft: Draft, style: str, **keywords: str | None) -> str:
    draft.need("torch.distributed.tensor.parallel", style)
    return call(style, **keywords)


def _placement(draft: Draft, sharding: ActivationSharding) -> str:
    code = PLACEMENTS[sharding]
    draft.need("torch.distributed.tensor", code.partition("(")[0])
    return code


def _replicated(draft: Draft, path: str, mesh: str, owner: str, entry: LayerPlan, sharding: ActivationSharding) -> str:  # noqa: PLR0913, PLR0917
    if list(_REPLICATED) not in draft.definitions:
        draft.definitions.append(list(_REPLICATED))
        draft.need("torch.distributed.device_mesh", "DeviceMesh")
        draft.need("torch.distributed.tensor", "DTensor", "Placement", "distribute_module")
    output = sharding if owner == "norm" else entry.output
    runs = sharding if owner != "norm" and sharding is ActivationSharding.ROWS else ActivationSharding.WHOLE
    places = ", ".join(_placement(draft, place) for place in (sharding, runs, output))
    return f'replicated(model.get_submodule("{path}"), {mesh}, {places})'


def _cut_masks(draft: Draft, parallelism: TensorParallel) -> None:
    size, layers = inner_ranks(draft.scenario.layout), draft.scenario.training.model.layers
    if size == 1:
        return
    masked = [entry for layer, entry in zip(layers, parallelism.plan, strict=True) if layer.dropout]
    for index, entry in enumerate(masked):
        if entry.output is not ActivationSharding.WHOLE:
            dim = ", 1" * (entry.output is ActivationSharding.FEATURES)
            draft.add(LoopPosition.TAKE, f"masks[{index}] = masks[{index}].chunk({size}{dim})[dist.get_rank() % {size}]")
