"""Reading local tensors that data parallelism has put in the place of a tensor-parallel plan's DTensors."""

from __future__ import annotations

from equivcheck.layers.parameters import parameters_of
from equivcheck.layouts.limits.limit import parallelism_of
from equivcheck.layouts.partition import cut_dim
from equivcheck.layouts.script.draft import Draft
from equivcheck.layouts.script.loop import order_of
from equivcheck.layouts.script.mesh import inner_ranks
from equivcheck.layouts.script.text import block, indented
from equivcheck.scenario import ClipNorm, PlannedParallelism


def read_local_shards(draft: Draft) -> None:
    """Gather each parameter along the dim that the plan cuts, and clip by the norm of what is gathered; once."""
    if draft.reading:
        return
    define_whole(draft)
    draft.after_wrap.append("parameters = dict(model.named_parameters())  # as they are outside of forward")
    draft.parameters, draft.names = "parameters.values()", ("name, parameter", "parameters.items()")
    draft.reading = (
        "for name, parameter in parameters.items():",
        "    dim = SHARDED.get(name) if parallel else None",
        '    left[f"step {{step}} {label} {{name}}"] = whole({attribute}, dim)',
    )
    clipping = draft.scenario.training.clipping
    if isinstance(clipping, ClipNorm):
        draft.definitions.append(_clip(clipping))
        draft.clip_norm = "clip_across_shards(parameters)"


def define_whole(draft: Draft) -> None:
    """Define the function that puts a tensor together."""
    layout = draft.scenario.layout
    size = inner_ranks(layout)
    draft.has_dtensors = False
    draft.definitions.append([f"SHARDED = {sharded_dims(draft)}  # dims along which tensor parallelism cuts"])
    first = f"dist.get_rank() // {size} * {size}"
    shards = "shards" if layout.num_data_ranks == 1 else f"shards[{first} :][:{size}]"
    draft.definitions.append(
        [
            "def whole(tensor: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:",
            *indented(
                [
                    '"""A copy of a tensor, put together from the shards along a dim that neighbouring ranks hold."""',
                    *block("if tensor is None or dim is None:", ["return None if tensor is None else tensor.detach().clone()"]),
                    "shards = [None] * dist.get_world_size()",
                    "dist.all_gather_object(shards, tensor.detach())",
                    f"return torch.cat({shards}, dim)",
                ]
            ),
        ]
    )


def _clip(clipping: ClipNorm) -> list[str]:
    order = order_of(clipping)
    return [
        "def clip_across_shards(parameters: dict[str, nn.Parameter]) -> torch.Tensor:",
        '    """Clip by the norm over the shards of all ranks, and return it."""',
        "    gradients = [whole(parameter.grad, SHARDED.get(name)) for name, parameter in parameters.items()]",
        f"    norm = nn.utils.get_total_norm([each for each in gradients if each is not None], {order})",
        f"    nn.utils.clip_grads_with_norm_(parameters.values(), {clipping.max_norm!r}, norm)",
        "    return norm",
    ]


def sharded_dims(draft: Draft) -> str:
    """The dims along which parameters are cut, by name, as code."""
    plan = parallelism_of(draft.scenario.layout, PlannedParallelism)
    parameters = parameters_of(draft.scenario.training.model)
    dims = {draft.form.name_of(found.full_name): cut_dim(plan, found) for found in parameters}
    items = ", ".join(f'"{name}": {dim}' for name, dim in dims.items() if dim is not None)
    return f"{{{items}}}"
