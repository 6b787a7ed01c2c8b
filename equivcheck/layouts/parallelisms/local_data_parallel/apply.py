"""Applies explicit data parallelism to a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivcheck.layouts.base.kind import LayoutKind
from equivcheck.layouts.base.rounding import ONCE, WhenReduced
from equivcheck.layouts.parallelisms.local_data_parallel.communication import LOCAL_DATA_PARALLEL_COMMUNICATION
from equivcheck.layouts.parallelisms.local_data_parallel.limits import LAYOUT_LIMITS, LIMITS
from equivcheck.scenario import Layout, LocalDataParallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.layouts.base.script.draft import Draft
    from equivcheck.training.setup import Setup


class LocalDataParallelKind(LayoutKind[LocalDataParallel]):
    """Distributes rows over ranks, and averages gradients explicitly after each step's last backward."""

    parallelism = LocalDataParallel
    limits = LIMITS
    layout_limits = LAYOUT_LIMITS
    communication = LOCAL_DATA_PARALLEL_COMMUNICATION

    def apply(self, setup: Setup, parallelism: LocalDataParallel, mesh: DeviceMesh) -> None:
        """Take only this rank's rows from each batch, and average gradients after each step's last backward."""
        from equivcheck.layouts.base import gradients_by_hand
        from equivcheck.layouts.base.data_rows import take_rows

        model, group, size, flat = setup.model, mesh.get_group(), mesh.size(), parallelism.flat_buffer

        def average(_optimizer: object, _step: int) -> None:
            reduce = gradients_by_hand.sum_flat_gradients if flat else gradients_by_hand.sum_gradients
            reduce(model.parameters(), group)
            gradients_by_hand.divide_gradients(model.parameters(), size)

        setup.loss_scale *= size
        setup.before_update.append(average)
        take_rows(setup, mesh)

    def when_reduced(self, parallelism: LocalDataParallel, layout: Layout) -> WhenReduced:  # noqa: ARG002 - of the base class
        """Return when gradients are reduced: once, after the last microbatch."""
        return ONCE

    def write_script(self, draft: Draft, parallelism: LocalDataParallel) -> None:
        """Let the exported script average gradients explicitly after backward."""
        from equivcheck.layouts.parallelisms.local_data_parallel.export import write

        write(draft, parallelism)
