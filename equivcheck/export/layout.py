"""Writes a script's layout: each parallelism writes its own part, then `torch.compile` is added."""

from __future__ import annotations

from equivcheck.layouts.base.script.counts import add_counts
from equivcheck.layouts.base.script.draft import Draft, LoopPosition, loop_over_layers, refuse
from equivcheck.layouts.base.script.in_backward import write_in_backward
from equivcheck.layouts.base.script.loop import order_of
from equivcheck.layouts.base.script.text import block
from equivcheck.layouts.composition.registry import kind_of
from equivcheck.scenario import ClipNorm, ClipValue, Compile


def write_layout(draft: Draft) -> None:
    """Add code for the layout to the script: for all parallelisms, innermost first, and for `torch.compile`.

    Raises `CannotExport` if the script cannot express an option.
    """
    layout = draft.scenario.layout
    for parallelism in layout.parallelisms:
        kind_of(parallelism).write_script(draft, parallelism)
    if draft.mixes_tensors and draft.has_dtensors:
        _clip_by_mesh(draft)
    if layout.mesh.num_ranks == 1:
        draft.averages_loss = False
    add_counts(draft)
    if layout.execution.optimizer_in_backward:
        write_in_backward(draft)
    _compile(draft)


def _compile(draft: Draft) -> None:
    execution = draft.scenario.layout.execution
    if execution.whole_step:
        raise refuse("Execution.whole_step", "tracing a whole step takes too much code for a short script")
    if execution.compiled_autograd:
        raise refuse("Execution.compiled_autograd", "it needs private settings of torch's compiler")
    if execution.compile is Compile.NONE:
        return
    if execution.per_layer:
        applied = f'layer.compile(backend="{execution.compile.value}", dynamic=False)'
        draft.add(LoopPosition.WRAP, *loop_over_layers(draft, applied))
        return
    draft.add(LoopPosition.WRAP, f'module = torch.compile({draft.module}, backend="{execution.compile.value}")')
    draft.module = "module"


_BY_MESH = (
    "kinds = {}",
    "for parameter in model.parameters():",
    "    if parameter.grad is not None:",
    '        kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)',
)


def _clip_by_mesh(draft: Draft) -> None:
    """Define ``clip`` in the script. ``clip`` clips each mesh's parameters, and the plain parameters, separately."""
    # Torch cannot mix DTensors with plain tensors, or DTensors of several meshes, in one operation.
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
    draft.definitions.append(block(f"def clip(model: nn.Module) -> {returns}:", [text, *_BY_MESH, *body]))
