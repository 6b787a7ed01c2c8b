"""Clips gradients if only some are DTensors, or their meshes differ: torch cannot mix these in one operation."""

from __future__ import annotations

from equivcheck.layouts.base.script.draft import Draft
from equivcheck.layouts.base.script.loop import order_of
from equivcheck.layouts.base.script.text import block
from equivcheck.scenario import ClipNorm, ClipValue

_KINDS = (
    "kinds = {}",
    "for parameter in model.parameters():",
    "    if parameter.grad is not None:",
    '        kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)',
)


def clip_kinds(draft: Draft) -> None:
    """Define ``clip`` in the script. It clips each mesh's parameters, and the plain ones, separately."""
    clipping = draft.scenario.training.clipping
    if isinstance(clipping, ClipValue):
        body = ["for kind in kinds.values():", f"    nn.utils.clip_grad_value_(kind, {clipping.clip_value!r})"]
        _define(draft, "None", "Clip each element of plain tensors and DTensors", body)
        draft.clip_value = "clip(model)"
    elif isinstance(clipping, ClipNorm):
        norm = f"nn.utils.get_total_norm([parameter.grad for parameter in kind], {order_of(clipping)})"
        body = [
            f"norms = [full({norm}) for kind in kinds.values()]",
            f"norm = torch.linalg.vector_norm(torch.stack(norms), {order_of(clipping)})",
            "for kind in kinds.values():",
            f"    nn.utils.clip_grads_with_norm_(kind, {clipping.max_norm!r}, norm)",
            "return norm",
        ]
        _define(draft, "torch.Tensor", "Clip by the norm over all plain tensors and DTensors, and return it", body)
        draft.clip_norm = "clip(model)"


def _define(draft: Draft, returns: str, words: str, body: list[str]) -> None:
    text = f'"""{words}."""'
    draft.definitions.append(block(f"def clip(model: nn.Module) -> {returns}:", [text, *_KINDS, *body]))
