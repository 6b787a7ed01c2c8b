"""Which module writes which parallelism."""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.export.draft import Draft, LoopPosition
from equivcheck.export.layouts import ddp, fsdp1, fsdp2, pipeline, replicate, spmd, tensor_parallel
from equivcheck.export.layouts.kinds import clip_kinds
from equivcheck.export.layouts.units import loop_over_units
from equivcheck.export.refusal import refuse
from equivcheck.scenario import DDP, FSDP1, FSDP2, SPMD, Compile, Parallelism, Pipeline, Replicate, TensorParallel

WRITERS: dict[type[Parallelism], Callable[[Draft, Parallelism], None]] = {
    DDP: ddp.write,
    FSDP1: fsdp1.write,
    FSDP2: fsdp2.write,
    Replicate: replicate.write,
    TensorParallel: tensor_parallel.write,
    SPMD: spmd.write,
    Pipeline: pipeline.write,
}


def write_layout(draft: Draft) -> None:
    """Apply the parallelisms of a draft's scenario to it, innermost first, and what compiles. Raises `CannotExport`."""
    layout = draft.scenario.layout
    for parallelism in layout.parallelisms:
        writer = WRITERS.get(type(parallelism))
        if writer is None:
            raise refuse(f"parallelism {parallelism.tag}", "only those that ship with the package are written")
        writer(draft, parallelism)
    if draft.mixes_tensors and draft.has_dtensors:
        clip_kinds(draft)
    if layout.mesh.num_ranks == 1:
        draft.averages_loss = False
    _compile(draft)


def _compile(draft: Draft) -> None:
    execution = draft.scenario.layout.execution
    if execution.whole_step:
        raise refuse("Execution.whole_step", "a script would hold the tracer")
    if execution.compiled_autograd:
        raise refuse("Execution.compiled_autograd", "it takes private settings of the compiler")
    if execution.compile is Compile.NONE:
        return
    if execution.per_layer:
        applied = f'layer.compile(backend="{execution.compile.value}", dynamic=False)'
        draft.add(LoopPosition.WRAP, *loop_over_units(draft, applied))
        return
    draft.add(LoopPosition.WRAP, f'module = torch.compile({draft.module}, backend="{execution.compile.value}")')
    draft.module = "module"
