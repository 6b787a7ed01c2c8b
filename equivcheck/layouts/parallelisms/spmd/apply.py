"""Applies data parallelism by DTensor propagation to a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivcheck.layouts.base.kind import LayoutKind
from equivcheck.layouts.parallelisms.spmd.communication import SPMD_COMMUNICATION
from equivcheck.layouts.parallelisms.spmd.limits import LIMITS
from equivcheck.scenario import SPMD

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.layouts.base.script.draft import Draft
    from equivcheck.training.setup import Setup


class SPMDKind(LayoutKind[SPMD]):
    """Makes parameters DTensors, and shards batches by rows."""

    parallelism = SPMD
    limits = LIMITS
    communication = SPMD_COMMUNICATION

    def apply(self, setup: Setup, parallelism: SPMD, mesh: DeviceMesh) -> None:
        """Make parameters and batches DTensors. Losses and gradients are then those of the full batch."""
        from equivcheck.layouts.base.data_rows import take_rows
        from equivcheck.layouts.base.distribute import distribute_batch, distribute_parameters, redistribute_gradients

        distribute_parameters(setup.model, mesh, parallelism.distribution)
        if parallelism.redistribute_gradients:
            redistribute_gradients(setup.model.parameters())
        setup.take = lambda batch: distribute_batch(batch, mesh)
        take_rows(setup, mesh, propagates=True)

    def write_script(self, draft: Draft, parallelism: SPMD) -> None:
        """Let the exported script make its parameters and batches DTensors."""
        from equivcheck.layouts.parallelisms.spmd.export import write

        write(draft, parallelism)

    def import_known(self) -> None:
        """Register the predicates for known issues with SPMD."""
        import equivcheck.layouts.parallelisms.spmd.known  # noqa: F401
