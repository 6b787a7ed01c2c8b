"""DTensor parameters and batches in a script."""

from __future__ import annotations

from equivcheck.layouts.base.limits.repairs import has_ties
from equivcheck.layouts.base.script.draft import Draft, LoopPosition
from equivcheck.layouts.base.script.text import block, indent_lines
from equivcheck.scenario import CrossEntropy, ShapeOp

_BESIDE = (
    "def beside(values: torch.Tensor, made: torch.Tensor) -> torch.Tensor:",
    '    """Make a tensor that is equal on all ranks a replicated DTensor if `values` is a DTensor."""',
    "    if not isinstance(values, DTensor):",
    "        return made",
    "    return DTensor.from_local(made, values.device_mesh, [Replicate()], run_check=False)",
)


def distribute_model(draft: Draft, mesh: str, placement: str) -> None:
    """Let the script replace parameters by DTensors. `placement` is their placement along each axis of the mesh."""
    draft.need("torch.distributed.tensor", "DTensor", "distribute_tensor")
    draft.need("torch.distributed.device_mesh", "DeviceMesh")
    draft.has_dtensors, draft.averages_loss = True, False
    draft.definitions.append(_distribute(draft, placement))
    draft.add(LoopPosition.WRAP, f"distribute(model, {mesh})")


def distribute_rows(draft: Draft, mesh: str) -> None:
    """Let the script turn each rank's batches into DTensors that are sharded by rows."""
    training = draft.scenario.training
    draft.need("torch.distributed.tensor", "Shard")
    draft.definitions.append(_by_rows(draft))
    dim = training.data.batch_dim
    draft.add(LoopPosition.TAKE, f"inputs, targets = (by_rows(values, {mesh}, {dim}) for values in (inputs, targets))")
    if "masks" in draft.form.extras:
        draft.add(LoopPosition.TAKE, f"masks = [by_rows(mask, {mesh}, 0) for mask in masks]")
    if training.model.length is not None or isinstance(training.loss, CrossEntropy):
        # Attention and label losses create tensors that are equal on all ranks: masks, positions, class weights.
        draft.need("contextlib", "nullcontext")
        draft.need("torch.distributed.tensor.experimental", "implicit_replication")
        draft.context = "implicit_replication() if parallel else nullcontext()"
    if training.model.offset or any(layer.shape_op is ShapeOp.ARANGE for layer in training.model.layers):
        define_beside(draft)


def define_beside(draft: Draft) -> None:
    """Define a function ``beside`` in the script: it makes a tensor a replicated DTensor if another tensor is a DTensor."""
    draft.need("torch.distributed.tensor", "DTensor", "Replicate")
    draft.definitions.insert(0, list(_BESIDE))


def _by_rows(draft: Draft) -> list[str]:
    several = len(draft.scenario.layout.mesh.names) > 1
    part, placements = ("get_rank", "[Shard(dim)] * mesh.ndim") if several else ("get_local_rank", "[Shard(dim)]")
    return [
        "def by_rows(whole: torch.Tensor, mesh: DeviceMesh, dim: int) -> DTensor:",
        '    """DTensor sharded along `dim`; this rank keeps its rows, with their strides."""',
        f"    rows = whole.chunk(mesh.size(), dim)[mesh.{part}()]",
        f"    return DTensor.from_local(rows, mesh, {placements}, run_check=False)",
    ]


def _distribute(draft: Draft, placement: str) -> list[str]:
    placements = f"[{placement}]" + " * mesh.ndim" * (len(draft.scenario.layout.mesh.names) > 1)
    spread = f"spread = distribute_tensor(parameter.detach(), mesh, {placements})"
    made = "nn.Parameter(spread, parameter.requires_grad)"
    shares = has_ties(draft.scenario.training.model)
    if not shares:
        inner = [spread, f"setattr(module, name, {made})"]
    else:
        inner = [*block("if parameter not in made:", [spread, f"made[parameter] = {made}"])]
        inner.append("setattr(module, name, made[parameter])")
    return [
        "def distribute(model: nn.Module, mesh: DeviceMesh) -> None:",
        f'    """Make each parameter a DTensor{"; a shared parameter stays shared" * shares}."""',
        *indent_lines(["made = {}"] * shares),
        "    for module in model.modules():",
        "        for name, parameter in list(module.named_parameters(recurse=False)):",
        *indent_lines(inner, 3),
    ]
