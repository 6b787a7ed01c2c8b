"""`torch.nn.parallel.DistributedDataParallel`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar

from equivcheck.layouts.kind import LayoutKind, Limit
from equivcheck.layouts.limits import EVEN_ROWS, parallelism_of
from equivcheck.layouts.mends import may_skip_parameters, trained_sides, without_side
from equivcheck.scenario import DDP, Layout, Parallelism, Side, Training

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.train.setup import Setup


def _may_miss_parameters(training: Training, layout: Layout) -> bool:
    ddp = parallelism_of(layout, DDP)
    return may_skip_parameters(training) and not (ddp.find_unused_parameters or ddp.static_graph)


UNUSED_PARAMETERS = Limit(
    reason="DistributedDataParallel: parameters that take no part in a step need find_unused_parameters or static_graph",
    applies=_may_miss_parameters,
    mend=lambda training, _layout: without_side(training),
)

CHANGING_GRAPH = Limit(
    reason="DistributedDataParallel: static_graph promises the same parameters at every step, but a side runs at even steps only",
    applies=lambda training, layout: (
        parallelism_of(layout, DDP).static_graph and Side.EVEN_STEPS in trained_sides(training.model) and training.steps > 1
    ),
    mend=lambda training, _layout: without_side(training),
)


class DDPKind(LayoutKind):
    """Wraps the model in `DistributedDataParallel`."""

    parallelism: ClassVar[type[Parallelism]] = DDP
    limits: ClassVar[tuple[Limit, ...]] = (EVEN_ROWS, UNUSED_PARAMETERS, CHANGING_GRAPH)

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
        if parallelism.zero_redundancy:
            from equivcheck.layouts.zero_redundancy import share_updates

            share_updates(setup, mesh, parameters_as_bucket_view=parallelism.parameters_as_bucket_view)
        take_rows(setup, mesh)
