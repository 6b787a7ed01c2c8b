"""Gradients clipped by another norm than that of all."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.export.bugs.snippet import Snippet
from equivcheck.layouts.base.script.draft import Draft, refuse
from equivcheck.layouts.base.script.loop import norm_arguments, order_of
from equivcheck.layouts.base.script.text import block
from equivcheck.scenario import ClipNorm, NormType


def _clipping(draft: Draft) -> ClipNorm:
    clipping = draft.scenario.training.clipping
    if not isinstance(clipping, ClipNorm):
        raise refuse("the mutant", "it needs clipping by norm")
    return clipping


def _clipped_by(draft: Draft, name: str, words: str, body: list[str]) -> None:
    text = f'"""{words}."""'
    draft.definitions.append(block(f"def {name}(parameters: list[nn.Parameter]) -> torch.Tensor:", [text, *body]))
    draft.clip_norm = f"{name}(list({draft.parameters}))"


def _gradients(condition: str = "") -> str:
    return f"gradients = [parameter.grad for parameter in parameters if parameter.grad is not None{condition}]"


def _local_norm(draft: Draft) -> None:
    clipping = _clipping(draft)
    held = "[gradient for gradient in gradients if gradient.numel()]"
    if draft.has_dtensors:
        held = "[gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]"
    body = [
        _gradients(),
        f"held = {held}",
        f"norm = nn.utils.get_total_norm([gradient for gradient in held if gradient.numel()], {order_of(clipping)})",
        "for gradient in gradients:",
        f"    gradient.mul_(float(min(1.0, {clipping.max_norm!r} / (norm + 1e-6))))",
        "return norm",
    ]
    _clipped_by(draft, "clip_by_local_norm", "Clip by the norm of what this rank holds, and return it", body)


def _not_clipped(draft: Draft) -> None:
    clipping = _clipping(draft)
    if draft.clip_norm:
        raise refuse("the mutant", f"{draft.scenario.layout.name} has a norm of its own")
    body = [_gradients(), f"return nn.utils.get_total_norm(gradients, {order_of(clipping)})"]
    _clipped_by(draft, "forget_to_clip", "Return the norm, and leave gradients as they are", body)


def _vectors_not_in_norm(draft: Draft) -> None:
    clipping = _clipping(draft)
    if draft.clip_norm:
        raise refuse("the mutant", f"{draft.scenario.layout.name} has a norm of its own")
    body = [
        _gradients(" and parameter.dim() > 1"),
        f"norm = nn.utils.get_total_norm(gradients, {order_of(clipping)})",
        *(["norm = norm.full_tensor() if isinstance(norm, DTensor) else norm"] if draft.has_dtensors else []),
        f"nn.utils.clip_grads_with_norm_(parameters, {clipping.max_norm!r}, norm)",
        "return norm",
    ]
    _clipped_by(draft, "clip_by_norm_of_matrices", "Clip by the norm of matrices alone, and return it", body)


def _another_norm_type(draft: Draft) -> None:
    clipping = _clipping(draft)
    other = replace(clipping, norm_type=NormType.INF if clipping.norm_type is NormType.TWO else NormType.TWO)
    usual = f"nn.utils.clip_grad_norm_({draft.parameters}, {norm_arguments(clipping)})"
    draft.clip_norm = (draft.clip_norm or usual).replace(norm_arguments(clipping), norm_arguments(other))


SNIPPETS: dict[str, Snippet] = {
    "local_norm": _local_norm,
    "not_clipped": _not_clipped,
    "vectors_not_in_norm": _vectors_not_in_norm,
    "another_norm_type": _another_norm_type,
}
"""By the name of the mutant."""
