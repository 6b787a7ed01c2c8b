"""Data parallelism by DTensor propagation alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from equivcheck.layouts.base.expected_calls.model import CommunicationModel
from equivcheck.layouts.base.kind import LayoutKind
from equivcheck.layouts.base.limits.limit import Limit
from equivcheck.layouts.parallelisms.spmd.communication import SPMD_COMMUNICATION
from equivcheck.layouts.parallelisms.spmd.limits import LIMITS
from equivcheck.scenario import SPMD, Parallelism

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.training.setup import Setup


class SPMDKind(LayoutKind):
    """Distributes the parameters, and the batch by rows."""

    parallelism: ClassVar[type[Parallelism]] = SPMD
    limits: ClassVar[tuple[Limit, ...]] = LIMITS
    communication: ClassVar[CommunicationModel] = SPMD_COMMUNICATION

    def apply(self, setup: Setup, parallelism: Parallelism, mesh: DeviceMesh) -> None:
        """Make parameters and batch DTensors; losses are then of the whole batch, and so are gradients."""
        from equivcheck.layouts.base.data_rows import take_rows
        from equivcheck.layouts.base.distribute import distribute_batch, distribute_parameters, redistribute_gradients

        assert isinstance(parallelism, SPMD), parallelism
        distribute_parameters(setup.model, mesh, parallelism.distribution)
        if parallelism.redistribute_gradients:
            redistribute_gradients(setup.model.parameters())
        setup.take = lambda batch: distribute_batch(batch, mesh)
        take_rows(setup, mesh, propagates=True)
