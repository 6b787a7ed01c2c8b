"""Writes data parallelism by DTensor propagation into a script."""

from __future__ import annotations

from equivcheck.layouts.base.limits.repairs import has_ties
from equivcheck.layouts.base.script.draft import Draft, LoopPosition
from equivcheck.layouts.base.script.mesh import mesh_of
from equivcheck.layouts.base.script.text import block, indent_lines
from equivcheck.scenario import SPMD, CrossEntropy, Distribution, ShapeOp, Training

_REDISTRIBUTE_GRADIENTS = (
    "for parameter in model.parameters():",
    "    if isinstance(parameter, DTensor) and parameter.requires_grad:",
    "        redistribute = partial(DTensor.redistribute, placements=parameter.placements)",
    "        parameter.register_hook(redistribute)  # before gradients are accumulated",
)

_BY_ROWS = (
    "def by_rows(whole: torch.Tensor, mesh: DeviceMesh, dim: int) -> DTensor:",
    '    """DTensor sharded along `dim`; this rank keeps its rows, with their strides."""',
    "    rows = whole.chunk(mesh.size(), dim)[mesh.get_local_rank()]",
    "    return DTensor.from_local(rows, mesh, [Shard(dim)], run_check=False)",
)

_BESIDE = (
    "def beside(values: torch.Tensor, made: torch.Tensor) -> torch.Tensor:",
    '    """Make a tensor that is equal on all ranks a replicated DTensor if `values` is a DTensor."""',
    "    if not isinstance(values, DTensor):",
    "        return made",
    "    return DTensor.from_local(made, values.device_mesh, [Replicate()], run_check=False)",
)


def write(draft: Draft, parallelism: SPMD) -> None:
    """Make parameters and batches DTensors."""
    placement = "Replicate()" if parallelism.distribution is Distribution.REPLICATE else "Shard(0)"
    mesh, training = mesh_of(draft, parallelism), draft.scenario.training
    draft.need("torch.distributed.tensor", "DTensor", "distribute_tensor", "Shard", placement.partition("(")[0])
    draft.need("torch.distributed.device_mesh", "DeviceMesh")
    draft.has_dtensors, draft.averages_loss = True, False
    if training.model.scale and placement == "Shard(0)":
        draft.need("torch.distributed.tensor", "Replicate")
        placement = "Shard(0) if parameter.dim() else Replicate()"
    draft.definitions.append(_distribute(placement, training))
    draft.add(LoopPosition.WRAP, f"distribute(model, {mesh})")
    if parallelism.redistribute_gradients:
        redistribute_gradients(draft)
    draft.definitions.append(list(_BY_ROWS))
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
    """Define a function in the script that converts a replicated tensor to a DTensor if the other operand is one."""
    draft.need("torch.distributed.tensor", "DTensor", "Replicate")
    draft.definitions.insert(0, list(_BESIDE))


def redistribute_gradients(draft: Draft) -> None:
    """Let the script redistribute gradients to their parameters' placements, because propagation may leave them partial."""
    draft.need("functools", "partial")
    draft.need("torch.distributed.tensor", "DTensor")
    draft.add(LoopPosition.WRAP, *_REDISTRIBUTE_GRADIENTS)


def _distribute(placement: str, training: Training) -> list[str]:
    spread = f"spread = distribute_tensor(parameter.detach(), mesh, [{placement}])"
    made = "nn.Parameter(spread, parameter.requires_grad)"
    shares = has_ties(training.model)
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
