"""Reading local tensors that data parallelism has put in the place of a tensor-parallel plan's DTensors."""

from __future__ import annotations

from equivcheck.export.draft import Draft
from equivcheck.export.layouts.mesh import inner_ranks
from equivcheck.export.layouts.plans import sharded_dims
from equivcheck.export.refusal import refuse
from equivcheck.export.text import block, indented
from equivcheck.scenario import ClipNorm


def read_local_shards(draft: Draft) -> None:
    """Gather each parameter along the dim that the plan cuts."""
    layout = draft.scenario.layout
    if isinstance(draft.scenario.training.clipping, ClipNorm):
        raise refuse("ClipNorm", f"under {layout.name} torch leaves the norm over local shards to its users")
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
    draft.after_wrap.append("parameters = dict(model.named_parameters())  # as they are outside of forward")
    draft.parameters, draft.names = "parameters.values()", ("name, parameter", "parameters.items()")
    draft.reading = (
        "for name, parameter in parameters.items():",
        "    dim = SHARDED.get(name) if parallel else None",
        '    left[f"step {{step}} {label} {{name}}"] = whole({attribute}, dim)',
    )
