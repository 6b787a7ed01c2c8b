"""`torch.nn.parallel.DistributedDataParallel`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar

from equivcheck.layouts.kind import LayoutKind, Limit
from equivcheck.layouts.limits import EVEN_ROWS
from equivcheck.scenario import DDP, Parallelism

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.train.setup import Setup


class DDPKind(LayoutKind):
    """Wraps the model in `DistributedDataParallel`."""

    parallelism: ClassVar[type[Parallelism]] = DDP
    limits: ClassVar[tuple[Limit, ...]] = (EVEN_ROWS,)

    def apply(self, setup: Setup, parallelism: Parallelism, mesh: DeviceMesh) -> None:
        """Wrap the model and average over the mesh."""
        from torch.nn.parallel import DistributedDataParallel

        from equivcheck.layouts.data_rows import take_rows

        assert isinstance(parallelism, DDP), parallelism
        module = DistributedDataParallel(
            setup.module,
            process_group=mesh.get_group(),
            bucket_cap_mb=parallelism.bucket_cap_mb,
            gradient_as_bucket_view=parallelism.gradient_as_bucket_view,
            static_graph=parallelism.static_graph,
            find_unused_parameters=parallelism.find_unused_parameters,
        )
        setup.module = module
        setup.loss_scale = mesh.size()
        if parallelism.no_sync:
            setup.accumulation = lambda last: nullcontext() if last else module.no_sync()
        take_rows(setup, mesh)
