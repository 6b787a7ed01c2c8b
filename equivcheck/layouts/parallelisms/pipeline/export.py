"""Writes `torch.distributed.pipelining` into a script."""

from __future__ import annotations

from collections.abc import Sequence

from equivcheck.layouts.base.limits.optimizers import keeps_dtensors
from equivcheck.layouts.base.script.draft import Draft, LoopPosition, refuse
from equivcheck.layouts.base.script.mesh import mesh_of, take_rows
from equivcheck.layouts.base.script.shards import read_local_shards
from equivcheck.layouts.base.script.text import block, call, indent_lines
from equivcheck.layouts.parallelisms.pipeline.export_balance import balance_lines, define_balance
from equivcheck.layouts.parallelisms.pipeline.export_chunks import define_chunks
from equivcheck.layouts.parallelisms.pipeline.export_stages import build_stages, define_placed, stage_class
from equivcheck.layouts.parallelisms.pipeline.export_steps import clip_function, compute_lines, group_code, loss_number, rank_code
from equivcheck.layouts.parallelisms.pipeline.schedules import SCHEDULES
from equivcheck.layouts.parallelisms.pipeline.stages import (
    SharedWeight,
    has_fsdp_stages,
    layers_of_stages,
    weights_of_several_ranks,
)
from equivcheck.scenario import (
    DDP,
    FSDP2,
    ClipNorm,
    ContextParallel,
    ExpertParallel,
    LocalDataParallel,
    LocalTensorParallel,
    Pipeline,
    Replicate,
    TensorParallel,
)
from equivcheck.scenario.mesh import PP


def write(draft: Draft, parallelism: Pipeline) -> None:
    """Let the exported script keep only each rank's stages of its model, and run them by a schedule."""
    layout, training = draft.scenario.layout, draft.scenario.training
    if not all(isinstance(each, WRITTEN) for each in layout.parallelisms):
        raise refuse(
            f"layout {layout.name}",
            "scripts support a pipeline by itself, or with DDP, replicate, fully_shard, local_data_parallel, "
            "local_tensor_parallel, tensor_parallel, context_parallel or expert_parallel",
        )
    if any(each.loss_parallel for each in layout.of(TensorParallel)):
        raise refuse("TensorParallel.loss_parallel in a pipeline", "a loss of DTensors takes too much code for a short script")
    ranks = layout.mesh.size(PP)
    draft.has_parts = any(each.reduces_each_module for each in layout.parallelisms)
    draft.need("torch.distributed.pipelining", "PipelineStage")
    draft.need("torch.distributed.pipelining.schedules", SCHEDULES[parallelism.schedule])
    spans = layers_of_stages(parallelism, ranks, len(training.model.layers))
    stages = ", ".join(f"range({span.start}, {span.stop})" for span in spans)
    draft.definitions.append([f"STAGES = [{stages}]  # layers of each"])
    draft.loss_axes = tuple(name for name in layout.mesh.names if name != PP)
    draft.averages_loss, draft.may_lack = bool(draft.loss_axes), True
    draft.loss_rank = layout.mesh.lines(PP)[0][loss_number(parallelism, ranks)]
    if draft.loss_axes:
        draft.add(LoopPosition.WRAP, f"pipe_rank = {mesh_of(draft, parallelism)}.get_local_rank()")
    if draft.form.stack != "model":
        draft.definitions.append(stage_class(draft))
    if training.model.balances:
        define_balance(draft, parallelism)
    if parallelism.sends_dtensors:
        define_placed(draft, spans)
    shared = weights_of_several_ranks(training.model, parallelism, ranks)
    if shared and (has_fsdp_stages(layout) or draft.reading or draft.has_dtensors):
        raise refuse(
            f"layout {layout.name} with a weight shared by several ranks",
            "the other parallelism replaces each rank's copy of the weight",
        )
    if shared:
        draft.add(LoopPosition.WRAP, WEIGHTS)
    build_stages(draft, parallelism, ranks, spans)
    if shared:
        copy_weights(draft, shared)
    if parallelism.presplit:
        define_chunks(draft, parallelism)
    if parallelism is layout.parallelisms[-1]:
        take_rows(draft)
    draft.computes = [*compute_lines(draft, parallelism, ranks), *balance_lines(draft, parallelism)]
    if isinstance(training.clipping, ClipNorm):
        _clip_across_stages(draft, parallelism, training.clipping, has_copies=bool(shared))


def _clip_across_stages(draft: Draft, parallelism: Pipeline, clipping: ClipNorm, *, has_copies: bool) -> None:
    """Clip by the norm over all stages. Each weight with copies on several ranks counts once."""
    if draft.scenario.layout.has(TensorParallel) and not keeps_dtensors(draft.scenario.layout):
        read_local_shards(draft)  # data parallelism around the stages will replace DTensors by local tensors
    if draft.mixes_tensors and draft.has_dtensors:
        raise refuse(
            "clipping by norm in a pipeline with several kinds of parameters",
            "on each stage, plain tensors and the DTensors of each mesh need separate norms, which take too much code",
        )
    draft.definitions.append(clip_function(draft, clipping, "counted" if has_copies else "parameters"))
    counted = ["[weight for weight in model.parameters() if weight not in uncounted]"] * has_copies
    clipped = ["parameters", "neighbours"] if draft.reading else ["list(model.parameters())", *counted]
    draft.clip_norm = call("clip_across_stages", *clipped, group=group_code(draft, parallelism))


WRITTEN = (
    Pipeline,
    LocalDataParallel,
    DDP,
    Replicate,
    FSDP2,
    LocalTensorParallel,
    TensorParallel,
    ContextParallel,
    ExpertParallel,
)
"""Parallelisms supported by scripts together with a pipeline."""


WEIGHTS = "weights = [model.get_submodule(owner).weight for owner, _ in SHARED]"
"""Line to collect the shared weights, before ranks remove other stages' layers."""


SUM_GRADIENTS = (
    "for weight, group in copies:",
    "    weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad",
    "    dist.all_reduce(weight.grad, group=group)",
)
"""Lines to sum the gradients of shared weights over their copies, after all microbatches."""


def copy_weights(draft: Draft, shared: Sequence[SharedWeight]) -> None:
    """Let the exported script name each copy of a shared weight as in the full model, and sum the copies' gradients."""
    entries = [
        (
            draft.form.paths.get(weight.owner, weight.owner),
            [weight.first_rank, *(rank for rank in weight.ranks if rank != weight.first_rank)],
        )
        for weight in shared
    ]
    draft.definitions.append([f"SHARED = {entries}  # owner of each shared weight, and ranks with a copy"])
    naming = [
        '"""Register a weight under its name in the full model, with modules that do nothing."""',
        'for part in owner.split("."):',
        "    if getattr(module, part, None) is None:",
        "        module.add_module(part, nn.Identity())",
        "    module = getattr(module, part)",
        "module.weight = weight",
    ]
    draft.definitions.append(block("def keep_name(module: nn.Module, owner: str, weight: nn.Parameter) -> None:", naming))
    groups = ["group = dist.new_group(users)"]
    if draft.loss_axes:
        lines = list(draft.scenario.layout.mesh.lines(PP))
        draft.definitions.append([f"PIPELINES = {lines}  # global ranks of each"])
        made = "[dist.new_group([pipeline[number] for number in users]) for pipeline in PIPELINES]"
        groups = [f"groups = {made}", "group = groups[[dist.get_rank() in pipeline for pipeline in PIPELINES].index(True)]"]
    draft.add(
        LoopPosition.WRAP,
        "copies, uncounted = [], set()",
        "for weight, (owner, users) in zip(weights, SHARED, strict=True):",
        *indent_lines(groups),
        f"    if {rank_code(draft)} in users and weight.requires_grad:",
        "        copies.append((weight, group))",
        f"    if {rank_code(draft)} in users[1:]:",
        "        keep_name(model, owner, weight)",
        "        uncounted.add(weight)",
    )
    draft.add(LoopPosition.BEFORE_READING, *SUM_GRADIENTS)
