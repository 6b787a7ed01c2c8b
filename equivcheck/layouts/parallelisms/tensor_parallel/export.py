"""Writes `parallelize_module` into a script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from equivcheck.layouts.base.plan.linears import LinearPlan, head_plan, linear_plan
from equivcheck.layouts.base.plan.rules import cuts, inputs_of, is_outside, rows_dim
from equivcheck.layouts.base.script.draft import Draft, LoopPosition
from equivcheck.layouts.base.script.dtensor_values import define_beside
from equivcheck.layouts.base.script.mesh import mesh_of
from equivcheck.layouts.base.script.shards import placement_code, shard_masks
from equivcheck.layouts.base.script.text import call
from equivcheck.layouts.parallelisms.spmd.export import redistribute_gradients
from equivcheck.scenario import ActivationSharding, Model, Pipeline, PlannedParallelism, Split, TensorParallel
from equivcheck.scenario.mesh import TP
from equivcheck.training.layers.parameters import parameters_of
from equivcheck.training.layers.registry import layer_kind

_REPLICATED = (
    "def replicated(module: nn.Module, mesh: DeviceMesh, lies: Placement, runs: Placement, output: Placement):",
    '    """Run a module with replicated parameters on its redistributed input; take and return local tensors."""',
    "    def prepare(_module, inputs, mesh):",
    "        lying = DTensor.from_local(inputs[0], mesh, [lies], run_check=False)",
    "        return lying.redistribute(placements=[runs])",
    "",
    "    def finish(_module, outputs, _mesh):",
    "        return outputs.redistribute(placements=[output]).to_local()",
    "",
    "    distribute_module(module, mesh, input_fn=prepare, output_fn=finish)",
)


def write(draft: Draft, parallelism: TensorParallel) -> None:
    """Let the exported script parallelize each layer as the plan says, and shard dropout masks."""
    parameters = parameters_of(draft.scenario.training.model)
    draft.mixes_tensors = len({is_outside(parallelism, parameter) for parameter in parameters}) > 1
    mesh = mesh_of(draft, parallelism)
    draft.has_dtensors = True
    styles, by_hand = _styles(draft, parallelism, mesh)
    if styles:
        draft.need("torch.distributed.tensor.parallel", "parallelize_module")
        draft.add(LoopPosition.WRAP, f"parallelize_module(model, {mesh}, {{{', '.join(styles)}}})")
    draft.add(LoopPosition.WRAP, *by_hand)
    _need_placements(draft, (*styles, *by_hand))
    replaces = any(not isinstance(each, (TensorParallel, Pipeline)) for each in draft.scenario.layout.parallelisms)
    has_hooks = parallelism.redistribute_gradients and not replaces
    uneven = any(size % draft.scenario.layout.mesh.size(TP) for _, size in cuts(draft.scenario.training.model, parallelism))
    by_rows = any("SequenceParallel" in style for style in styles)
    if has_hooks and (by_hand or uneven or by_rows or parallelism.source is Split.ROWWISE):
        # Only evenly sharded full layers are sure to get gradients with the placements of their parameters.
        redistribute_gradients(draft)
    shard_masks(draft, parallelism)
    if parallelism.loss_parallel:
        _keep_logits_apart(draft, mesh)


def _keep_logits_apart(draft: Draft, mesh: str) -> None:
    """Compute losses under `loss_parallel` with labels that are DTensors."""
    draft.need("contextlib", "nullcontext")
    draft.need("torch.distributed.tensor", "DTensor", "Replicate")
    draft.need("torch.distributed.tensor.parallel", "loss_parallel")
    draft.around_loss = "loss_parallel() if parallel else nullcontext()"
    draft.add(LoopPosition.TAKE, f"targets = DTensor.from_local(targets, {mesh}, [Replicate()], run_check=False)")
    draft.add(LoopPosition.SCALE, "loss = loss.full_tensor()")
    if draft.scenario.training.model.offset:
        define_beside(draft)


def _styles(draft: Draft, parallelism: TensorParallel, mesh: str) -> tuple[list[str], list[str]]:
    """Plan entries for `parallelize_module`, and lines for modules without a style."""
    styles, by_hand = [], []
    for path, style, places in _modules(draft, parallelism):
        if style:
            styles.append(f'"{path}": {style}')
        else:
            by_hand.append(_replicated(draft, path, mesh, places))
    by_hand += tied_again(draft.scenario.training.model, parallelism)
    return styles, by_hand


def tied_again(model: Model, parallelism: PlannedParallelism) -> Iterator[str]:
    """Yield code that ties the head to the embedding again, because `parallelize_module` gave each its own parameter."""
    if model.head is not None and model.head.tied and parallelism.source is not Split.NOT_IN_PLAN:
        yield 'model.get_submodule("head.linear").weight = model.get_submodule("embedding").weight  # tied again'


_Modules = Iterator[tuple[str, str, tuple[str, str, str]]]
"""Name in the script and parallel style for each module. Without a style: placements for input, computation and output."""


def _modules(draft: Draft, parallelism: TensorParallel) -> _Modules:
    model = draft.scenario.training.model
    inputs = inputs_of(model, parallelism)
    if model.source is not None and parallelism.source is not Split.NOT_IN_PLAN:
        whole, lies = (
            placement_code(draft, ActivationSharding.REPLICATED),
            placement_code(draft, inputs[0]),
        )
        yield "embedding", _embedding_style(draft, parallelism), (whole, whole, lies)
        if model.source.learned_positions:
            yield "positions", "", (whole, whole, whole if inputs[0] is ActivationSharding.REPLICATED else "Shard(0)")
    for index, (layer, entry) in enumerate(zip(model.layers, parallelism.plan, strict=True)):
        parts = layer_kind(layer).linears(layer) if entry.split is not Split.NOT_IN_PLAN else ()
        if parts and layer.norm is not None:
            yield draft.form.paths[f"layers.{index}.norm"], *_norm(draft, inputs[index])
        for part in parts:
            yield draft.form.paths[f"layers.{index}.{part.name}"], *_linear(draft, linear_plan(model, part, entry, inputs[index]))
    if model.head is not None and parallelism.head is not Split.NOT_IN_PLAN:
        if model.head.norm is not None:
            yield "head.norm", *_norm(draft, inputs[-1])
        yield "head.linear", *_linear(draft, head_plan(model, parallelism))


def _embedding_style(draft: Draft, parallelism: TensorParallel) -> str:
    if parallelism.source is Split.REPLICATED:
        return ""
    inputs = placement_code(draft, ActivationSharding.REPLICATED) if parallelism.source is Split.ROWWISE else None
    output = placement_code(draft, parallelism.source_output)
    if parallelism.source is Split.ROWWISE:
        outputs = None if parallelism.source_output is ActivationSharding.REPLICATED else output
        return _named(draft, "RowwiseParallel", input_layouts=inputs, output_layouts=outputs)
    return _named(draft, "ColwiseParallel", output_layouts=output)


def _norm(draft: Draft, sharding: ActivationSharding) -> tuple[str, tuple[str, str, str]]:
    lies, style = placement_code(draft, sharding), ""
    if sharding is ActivationSharding.ROWS:
        dim = str(rows_dim(draft.scenario.training.model))
        style = _named(draft, "SequenceParallel", sequence_dim=dim, use_local_output="True")
    return style, (lies, placement_code(draft, ActivationSharding.REPLICATED), lies)


def _linear(draft: Draft, plan: LinearPlan) -> tuple[str, tuple[str, str, str]]:
    lies, output = (
        placement_code(draft, plan.input),
        placement_code(draft, plan.output),
    )
    runs = lies if plan.is_by_rows else placement_code(draft, ActivationSharding.REPLICATED)
    if plan.split is Split.REPLICATED:
        return "", (lies, runs, output)
    name, usual = ("ColwiseParallel", (ActivationSharding.REPLICATED, ActivationSharding.FEATURES))
    if plan.split is Split.ROWWISE:
        name, usual = "RowwiseParallel", (ActivationSharding.FEATURES, ActivationSharding.REPLICATED)
    inputs, outputs = (None if plan.input is usual[0] else lies), (None if plan.output is usual[1] else output)
    local = "False" if plan.leaves_dtensor else None
    style = _named(draft, name, input_layouts=inputs, output_layouts=outputs, use_local_output=local)
    return style, (lies, runs, output)


def _named(draft: Draft, style: str, **keywords: str | None) -> str:
    draft.need("torch.distributed.tensor.parallel", style)
    return call(style, **keywords)


def _need_placements(draft: Draft, lines: Iterable[str]) -> None:
    text = " ".join(lines)
    draft.need("torch.distributed.tensor", *(name for name in ("Replicate", "Shard") if f"{name}(" in text))


def _replicated(draft: Draft, path: str, mesh: str, places: tuple[str, str, str]) -> str:
    if list(_REPLICATED) not in draft.definitions:
        draft.definitions.append(list(_REPLICATED))
        draft.need("torch.distributed.device_mesh", "DeviceMesh")
        draft.need("torch.distributed.tensor", "DTensor", "Placement", "distribute_module")
    return f'replicated(model.get_submodule("{path}"), {mesh}, {", ".join(places)})'
