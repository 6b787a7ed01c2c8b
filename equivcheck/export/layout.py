"""Writes a script's layout: each parallelism writes its own part, then `torch.compile` is added."""

from __future__ import annotations

from equivcheck.export.clipping_by_mesh import clip_kinds
from equivcheck.layouts.base.script.balance import add_balance
from equivcheck.layouts.base.script.draft import Draft, LoopPosition, loop_over_layers, refuse
from equivcheck.layouts.composition.registry import kind_of
from equivcheck.scenario import Compile


def write_layout(draft: Draft) -> None:
    """Add all parallelisms, innermost first, and `torch.compile` to the script. Raises `CannotExport`."""
    layout = draft.scenario.layout
    for parallelism in layout.parallelisms:
        kind_of(parallelism).write_script(draft, parallelism)
    if draft.mixes_tensors and draft.has_dtensors:
        clip_kinds(draft)
    if layout.mesh.num_ranks == 1:
        draft.averages_loss = False
    add_balance(draft)
    _compile(draft)


def _compile(draft: Draft) -> None:
    execution = draft.scenario.layout.execution
    if execution.whole_step:
        raise refuse("Execution.whole_step", "a script would have to contain the tracer")
    if execution.compiled_autograd:
        raise refuse("Execution.compiled_autograd", "it needs private settings of the compiler")
    if execution.compile is Compile.NONE:
        return
    if execution.per_layer:
        applied = f'layer.compile(backend="{execution.compile.value}", dynamic=False)'
        draft.add(LoopPosition.WRAP, *loop_over_layers(draft, applied))
        return
    draft.add(LoopPosition.WRAP, f'module = torch.compile({draft.module}, backend="{execution.compile.value}")')
    draft.module = "module"
