"""Explicit gradient reductions in a script, before gradients are read."""

from __future__ import annotations

from equivcheck.layouts.base.dtensor_experts import has_dtensor_experts
from equivcheck.layouts.base.limits.optimizers import keeps_dtensors
from equivcheck.layouts.base.script.draft import Draft, LoopPosition
from equivcheck.scenario import FSDP2, Layout, Replicate, Replicator


def sum_gradients(draft: Draft, group: str, *then: str) -> None:
    """Sum each local gradient over a group, then run the lines `then` on it. They call it ``gradient``."""
    draft.add(
        LoopPosition.BEFORE_READING,
        *held_gradients(draft),
        "for gradient in gradients:",
        f"    dist.all_reduce(gradient, group={group})",
        *(f"    {line}" for line in then),
    )


def held_gradients(draft: Draft) -> list[str]:
    """Lines that collect this rank's local gradients and skip empty ones."""
    if has_dtensor_experts(draft.scenario.layout):
        return ["gradients = list(held_gradients(model.parameters()))"]  # as expert parallelism defines it
    local = ".to_local()" if _has_dtensors(draft.scenario.layout) else ""
    return [
        f"gradients = [parameter.grad{local} for parameter in model.parameters() if parameter.grad is not None]",
        "gradients = [gradient for gradient in gradients if gradient.numel()]",
    ]


def _has_dtensors(layout: Layout) -> bool:
    is_sharded = layout.has(FSDP2) or any(each.implementation is Replicator.FSDP for each in layout.of(Replicate))
    return is_sharded and keeps_dtensors(layout)
