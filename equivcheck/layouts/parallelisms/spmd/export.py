"""Writes data parallelism by DTensor propagation into a script."""

from __future__ import annotations

from equivcheck.layouts.base.script.draft import Draft, LoopPosition
from equivcheck.layouts.base.script.dtensor_values import distribute_model, distribute_rows
from equivcheck.layouts.base.script.mesh import mesh_of
from equivcheck.scenario import SPMD, Distribution

_REDISTRIBUTE_GRADIENTS = (
    "for parameter in model.parameters():",
    "    if isinstance(parameter, DTensor) and parameter.requires_grad:",
    "        redistribute = partial(DTensor.redistribute, placements=parameter.placements)",
    "        parameter.register_hook(redistribute)  # before gradients are accumulated",
)


def write(draft: Draft, parallelism: SPMD) -> None:
    """Let the exported script make its parameters and batches DTensors."""
    placement = "Replicate()" if parallelism.distribution is Distribution.REPLICATE else "Shard(0)"
    mesh, training = mesh_of(draft, parallelism), draft.scenario.training
    draft.need("torch.distributed.tensor", placement.partition("(")[0])
    if training.model.scale and placement == "Shard(0)":
        draft.need("torch.distributed.tensor", "Replicate")
        placement = "Shard(0) if parameter.dim() else Replicate()"
    distribute_model(draft, mesh, placement)
    if parallelism.redistribute_gradients:
        redistribute_gradients(draft)
    distribute_rows(draft, mesh)


def redistribute_gradients(draft: Draft) -> None:
    """Let the exported script redistribute each gradient to its parameter's placements, because DTensor may leave it partial."""
    draft.need("functools", "partial")
    draft.need("torch.distributed.tensor", "DTensor")
    draft.add(LoopPosition.WRAP, *_REDISTRIBUTE_GRADIENTS)
