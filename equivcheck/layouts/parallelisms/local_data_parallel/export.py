"""Writes explicit data parallelism into a script."""

from __future__ import annotations

from equivcheck.layouts.base.script.draft import Draft, LoopPosition
from equivcheck.layouts.base.script.mesh import held_gradients, mesh_of, sum_gradients, take_rows
from equivcheck.scenario import LocalDataParallel
from equivcheck.scenario.mesh import DP


def write(draft: Draft, parallelism: LocalDataParallel) -> None:
    """Let the exported script average gradients explicitly, before it reads them."""
    layout = draft.scenario.layout
    draft.loss_scale = layout.num_data_ranks
    group, size = f"{mesh_of(draft, parallelism)}.get_group()", layout.mesh.size(DP)
    if parallelism.flat_buffer:
        draft.add(
            LoopPosition.BEFORE_READING,
            *held_gradients(draft),
            "buffer = torch.cat([gradient.flatten() for gradient in gradients])",
            f"dist.all_reduce(buffer, group={group})",
            "for gradient, total_of in zip(gradients, buffer.split([gradient.numel() for gradient in gradients])):",
            f"    gradient.copy_(total_of.view_as(gradient) / {size})",
        )
    else:
        sum_gradients(draft, group, f"gradient /= {size}")
    take_rows(draft)
