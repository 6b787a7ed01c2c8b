"""The device mesh in a script, each rank's rows, and explicit gradient reductions."""

from __future__ import annotations

from equivcheck.layouts.base.dtensor_experts import has_dtensor_experts
from equivcheck.layouts.base.limits.optimizers import has_units_of_dtensors, keeps_dtensors
from equivcheck.layouts.base.script.draft import Draft, LoopPosition, refuse
from equivcheck.layouts.base.script.text import tuple_code
from equivcheck.scenario import Layout, Parallelism, Pipeline
from equivcheck.scenario.mesh import CP, DP, EP, PP, REPLICATE, SHARD, TP


def mesh_of(draft: Draft, parallelism: Parallelism, *, named: bool = False) -> str:
    """Return code for a parallelism's submesh, and add a line to the script to build the mesh.

    If the mesh has one axis, the script gives the axis a name only if `named`.
    """
    mesh, axes = draft.scenario.layout.mesh, draft.scenario.layout.axes_of(parallelism)
    draft.need("torch.distributed.device_mesh", "init_device_mesh")
    names = f", mesh_dim_names={tuple_code([repr_of(name) for name in mesh.names])}" if named or len(mesh.names) > 1 else ""
    made = f'mesh = init_device_mesh("cpu", {tuple_code(list(map(str, mesh.shape)))}{names})'
    if made not in draft.lines[LoopPosition.WRAP]:
        draft.add(LoopPosition.WRAP, made)
    return "mesh" if axes == mesh.names else f"mesh[{', '.join(map(repr_of, axes))}]"


def submesh_of(draft: Draft, axis: str) -> str:
    """Return the expression for the submesh of one axis. The script's mesh must have several axes."""
    assert draft.scenario.layout.mesh.names != (axis,), "a mesh of one axis is not sliced"
    return f"mesh[{repr_of(axis)}]"


def repr_of(text: str) -> str:
    """Return a text in double quotes, as a string literal."""
    return f'"{text}"'


def inner_ranks(layout: Layout) -> int:
    """Number of ranks that compute on the same rows. Raises `CannotExport` if they do not have consecutive numbers."""
    if {TP, CP} & set(layout.mesh.names[:-1]) and layout.mesh.size(TP, CP) > 1:
        raise refuse(f"mesh {layout.mesh.names}", "scripts need tensor or context parallelism on the last axis")
    if PP in layout.mesh.names and {*layout.mesh.names[layout.mesh.names.index(PP) :]} & {DP, REPLICATE, SHARD}:
        raise refuse(f"mesh {layout.mesh.names}", "scripts need the pipeline's axis after the data-parallel axes")
    return layout.mesh.size(TP, CP, PP)


def data_rank(draft: Draft) -> str:
    """Return code for a rank's data-parallel index."""
    layout = draft.scenario.layout
    inner, experts = inner_ranks(layout), layout.mesh.size(EP)
    if inner == 1:
        return "dist.get_rank()"
    # Expert parallelism is on the last axis, so ranks that compute on other rows are inside a stage and outside a pipeline.
    within = f" * {experts} + dist.get_rank() % {experts}" if experts > 1 else ""
    return f"dist.get_rank() // {inner * experts}{within}"


def take_rows(draft: Draft) -> None:
    """Let each data-parallel rank in the script select its rows, before other parallelisms split them."""
    size, rank = draft.scenario.layout.num_data_ranks, data_rank(draft)
    if size == 1:
        return
    dim = ", 1" * draft.scenario.training.data.batch_dim
    lines = [f"inputs, targets = (values.chunk({size}{dim})[{rank}] for values in (inputs, targets))"]
    if "masks" in draft.form.extras:
        lines.append(f"masks = [mask.chunk({size})[{rank}] for mask in masks]")
    draft.lines[LoopPosition.TAKE][:0] = lines


def last_number(draft: Draft) -> str:
    """Return Python code for the index of a step's last microbatch."""
    training = draft.scenario.training
    return "len(microbatches) - 1" if training.has_trailing_window else str(len(training.data.microbatches) - 1)


def add_no_sync(draft: Draft) -> None:
    """Let the script run all microbatches except the last under ``module.no_sync()``."""
    if len(draft.scenario.training.data.microbatches) > 1:
        draft.need("contextlib", "nullcontext")
        draft.needs_number = True
        draft.context = f"module.no_sync() if parallel and number < {last_number(draft)} else nullcontext()"


def reduce_at_last_microbatch(draft: Draft, method: str = "set_requires_gradient_sync") -> None:
    """Let the script call the model's `method` so that gradients are reduced at the last microbatch only."""
    if len(draft.scenario.training.data.microbatches) > 1:
        draft.needs_number = True
        called = f"{{}}.{method}(number == {last_number(draft)})"
        draft.add(LoopPosition.TAKE, *for_each_part(draft, called))


def for_each_part(draft: Draft, line: str) -> list[str]:
    """Return lines to run `line` on the model, or on each module in a pipeline schedule.

    ``{}`` in `line` stands for the module.
    """
    return ["for part in parts:", f"    {line.format('part')}"] if draft.has_parts else [line.format("model")]


def layers_of_part(draft: Draft) -> str:
    """Return code for the layers of the stage in ``part``. `Balanced` and `Placed` wrap a stage, and hold it as `.stage`."""
    sends_dtensors = any(pipeline.sends_dtensors for pipeline in draft.scenario.layout.of(Pipeline))
    stage = "part" + ".stage" * (sends_dtensors + draft.scenario.training.model.balances)
    return stage if draft.form.stack == "model" else f"{stage}.layers"


def sum_gradients(draft: Draft, group: str, *then: str) -> None:
    """Let the script sum each local gradient over a group, and then run the lines `then` for each gradient.

    In these lines the gradient is called ``gradient``.
    """
    draft.add(
        LoopPosition.BEFORE_READING,
        *held_gradients(draft),
        "for gradient in gradients:",
        f"    dist.all_reduce(gradient, group={group})",
        *(f"    {line}" for line in then),
    )


def held_gradients(draft: Draft) -> list[str]:
    """Return lines to collect this rank's local gradients in a list, without empty gradients."""
    if has_dtensor_experts(draft.scenario.layout):
        return ["gradients = list(held_gradients(model.parameters()))"]  # expert parallelism adds this function to the script
    layout = draft.scenario.layout
    local = ".to_local()" if has_units_of_dtensors(layout) and keeps_dtensors(layout) else ""
    return [
        f"gradients = [parameter.grad{local} for parameter in model.parameters() if parameter.grad is not None]",
        "gradients = [gradient for gradient in gradients if gradient.numel()]",
    ]
