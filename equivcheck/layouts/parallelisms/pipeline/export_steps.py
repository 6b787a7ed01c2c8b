"""Writes the loss, the steps and the clipping of a pipeline into a script."""

from __future__ import annotations

from equivcheck.layouts.base.script.draft import Draft
from equivcheck.layouts.base.script.loop import has_several_microbatches, loss_of, order_of
from equivcheck.layouts.base.script.mesh import last_number, mesh_of
from equivcheck.layouts.base.script.text import block, call, indent_lines
from equivcheck.layouts.parallelisms.pipeline.export_chunks import has_equal_chunks, step_code
from equivcheck.layouts.parallelisms.pipeline.stages import defers_reduction, has_fsdp_stages
from equivcheck.scenario import ClipNorm, CrossEntropy, NormType, Pipeline
from equivcheck.scenario.mesh import CP


def loss_number(parallelism: Pipeline, ranks: int) -> int:
    """Return the pipeline rank with the last stage."""
    return 0 if parallelism.schedule.is_v else ranks - 1


def group_code(draft: Draft, parallelism: Pipeline) -> str | None:
    """Return an expression for the pipeline's process group; None if the group has all ranks."""
    return f"{mesh_of(draft, parallelism)}.get_group()" if draft.loss_axes else None


def rank_code(draft: Draft) -> str:
    """Return an expression for the rank's number in its pipeline."""
    return "pipe_rank" if draft.loss_axes else "dist.get_rank()"


def rows_on_rank(draft: Draft) -> tuple[int, ...]:
    """Return the rows of each microbatch on one rank."""
    return tuple(rows // draft.scenario.layout.num_data_ranks for rows in draft.scenario.training.data.microbatches)


def define_loss(draft: Draft, parallelism: Pipeline, rows: tuple[int, ...]) -> str:
    """Define a chunk's loss as its part of the step's loss, and return code for it."""
    training = draft.scenario.training
    loss, arguments = loss_of(draft, "outputs").replace("[step]", "[loss_fn.step]"), "outputs, targets"
    chunks = 1 if parallelism.scale_grads else parallelism.num_chunks
    uneven, batch = training.loss.is_mean and len(rows) > 1, sum(rows_on_rank(draft))
    data_ranks = draft.scenario.layout.num_data_ranks
    if parallelism.presplit and training.loss.is_mean:
        scale = f" * {parallelism.num_chunks}" if parallelism.scale_grads and parallelism.num_chunks > 1 else ""
        of = "ROWS[loss_fn.step]" if training.has_trailing_window else str(batch)
        loss, uneven = f"{loss} * len(targets){scale} / {of}", False
    elif uneven:
        loss, arguments = f"{loss} * share", f"{arguments}, share"
        if training.has_trailing_window:
            loss = f"{loss} * {batch} / ROWS[loss_fn.step]"
    elif training.loss.is_mean and training.has_trailing_window:
        loss = f"{loss} * {rows[0]} / {chunks} / ROWS[loss_fn.step]"
    elif training.loss.is_mean and chunks * batch > rows[0]:
        loss = f"{loss} / {chunks * batch // rows[0]}"
    elif not training.loss.is_mean and data_ranks > 1:
        loss = f"{loss} * {data_ranks}"
    if training.loss.is_mean and training.has_trailing_window:
        counts = [training.rows_at(step) // data_ranks for step in range(training.steps)]
        draft.definitions.append([f"ROWS = {counts}  # in each step"])
    text = '"""A chunk\'s share of the step\'s loss."""'
    positions = draft.scenario.layout.mesh.size(CP) > 1 and training.loss.is_mean
    if positions:
        loss, arguments = f"{loss} * positions", f"{arguments}, positions"
    cut = [] if has_equal_chunks(draft) else ["outputs = outputs[: len(targets)]  # without padding"]
    draft.definitions.append(block(f"def loss_fn({arguments}):", [text, *cut, f"return {loss}"]))
    bound = {}
    if uneven:
        bound["share"] = f"rows / {chunks * batch}"
    if positions:
        bound["positions"] = "len(ranks.own) / ranks.length"
    if not bound:
        return "loss_fn"
    draft.need("functools", "partial")
    return call("partial", "loss_fn", **bound)


def compute_lines(draft: Draft, parallelism: Pipeline, ranks: int) -> list[str]:
    """Return the lines that run the schedule for a microbatch, and add up its loss."""
    training = draft.scenario.training
    several_rows = len(set(training.data.microbatches)) > 1
    pipe = f"pipes[len({'targets' if parallelism.presplit else 'inputs'})]" if several_rows else "pipe"
    scale = f" / {parallelism.num_chunks}" if parallelism.scale_grads and parallelism.num_chunks > 1 else ""
    total = f"sum(losses, torch.zeros(())).detach(){scale}"
    first, target = "inputs", "targets"
    if ranks > 1:
        first = f"*([inputs] if {rank_code(draft)} == 0 else [])"
        target = f"targets if {rank_code(draft)} == {loss_number(parallelism, ranks)} else None"
    masks = ['**{f"mask_{number}": mask for number, mask in enumerate(masks)}'] if "masks" in draft.form.extras else []
    options = {}
    if defers_reduction(training, draft.scenario.layout):
        draft.needs_number = True
        options["finalize_gradients"] = f"number == {last_number(draft)}"
    run = call(f"{pipe}.step", first, f"target={target}", "losses=losses", *masks, **options)
    if parallelism.presplit:
        run = step_code(
            draft, parallelism, pipe, f"inputs if {rank_code(draft)} == 0 else None" if ranks > 1 else "inputs", target, **options
        )
    return [
        "losses = []",
        *(["loss_fn.step = step"] if isinstance(training.loss, CrossEntropy) or training.has_trailing_window else []),
        *(["Stage.step = step"] if "step" in draft.form.extras else []),
        run,
        f"total = total + {total}" if has_several_microbatches(draft) else f"total = {total}",
    ]


def clip_function(draft: Draft, clipping: ClipNorm, counted: str) -> list[str]:
    """Return the definition of a function that clips by the norm over all stages."""
    order, group = order_of(clipping), "group" if draft.loss_axes else None
    if clipping.norm_type is NormType.INF:
        across = [call("dist.all_reduce", "norm", op="dist.ReduceOp.MAX", group=group)]
    else:
        across = [f"norm = norm**{order}", call("dist.all_reduce", "norm", group=group), f"norm = norm ** (1 / {order})"]
    norm = f"nn.utils.get_total_norm(gradients, {order})"
    norm = f"full({norm})" if has_fsdp_stages(draft.scenario.layout) or draft.has_dtensors else norm
    taken = f", {counted}: list[nn.Parameter]" * (counted != "parameters") + ", group: dist.ProcessGroup" * (group is not None)
    head = [f"def clip_across_stages(parameters: list[nn.Parameter]{taken}) -> torch.Tensor:"]
    gradients = [f"gradients = [parameter.grad for parameter in {counted} if parameter.grad is not None]"]
    if draft.reading:
        group_types = "neighbours: dist.ProcessGroup, group: dist.ProcessGroup"
        head = [f"def clip_across_stages(parameters: dict[str, nn.Parameter], {group_types}) -> torch.Tensor:"]
        gradients = [
            "gradients = [whole(each.grad, SHARDED.get(name), neighbours) for name, each in parameters.items()]",
            "gradients = [gradient for gradient in gradients if gradient is not None]",
            "parameters = list(parameters.values())",
        ]
    return [
        *head,
        '    """Clip by the norm over the parameters of all stages, and return it."""',
        *indent_lines(gradients),
        f"    norm = {norm}.to(parameters[0].dtype)",
        *indent_lines(across),
        f"    nn.utils.clip_grads_with_norm_(parameters, {clipping.max_norm!r}, norm)",
        "    return norm",
    ]
