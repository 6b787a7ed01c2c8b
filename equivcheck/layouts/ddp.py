"""`torch.nn.parallel.DistributedDataParallel`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar

from equivcheck.layouts.kind import LayoutKind, Limit
from equivcheck.layouts.limits import EVEN_ROWS, has_parallelism, parallelism_of
from equivcheck.layouts.mends import may_skip_parameters, trained_sides, without_frozen, without_side
from equivcheck.scenario import DDP, Layout, Parallelism, Side, TensorParallel, Training

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.train.setup import Setup


def _as_reduced(training: Training, layout: Layout) -> Training:
    """The training with what DDP takes for frozen: over tensor parallelism nothing, as local tensors are made trainable."""
    return without_frozen(training) if has_parallelism(layout, TensorParallel) else training


def _may_miss_parameters(training: Training, layout: Layout) -> bool:
    ddp = parallelism_of(layout, DDP)
    return may_skip_parameters(_as_reduced(training, layout)) and not (ddp.find_unused_parameters or ddp.static_graph)


def _changes_graph(training: Training, layout: Layout) -> bool:
    sides = trained_sides(_as_reduced(training, layout).model)
    return parallelism_of(layout, DDP).static_graph and Side.EVEN_STEPS in sides and training.steps > 1


UNUSED_PARAMETERS = Limit(
    reason="DistributedDataParallel: parameters that take no part in a step need find_unused_parameters or static_graph",
    applies=_may_miss_parameters,
    mend=lambda training, _layout: without_side(training),
    upstream=True,
)

CHANGING_GRAPH = Limit(
    reason="DistributedDataParallel: static_graph promises the same parameters at every step, but a side runs at even steps only",
    applies=_changes_graph,
    mend=lambda training, _layout: without_side(training),
    upstream=True,
)


class DDPKind(LayoutKind):
    """Wraps the model in `DistributedDataParallel`."""

    parallelism: ClassVar[type[Parallelism]] = DDP
    limits: ClassVar[tuple[Limit, ...]] = (EVEN_ROWS, UNUSED_PARAMETERS, CHANGING_GRAPH)

    def apply(self, setup: Setup, parallelism: Parallelism, mesh: DeviceMesh) -> None:
        """Wrap the model and average over the mesh."""
        from torch.nn.parallel import DistributedDataParallel

        from equivcheck.layouts.data_rows import take_rows
        from equivcheck.layouts.localized import clip_across, is_localized, localized_slots

        assert isinstance(parallelism, DDP), parallelism
        module = DistributedDataParallel(
            setup.module,
            device_mesh=mesh,
            bucket_cap_mb=parallelism.bucket_cap_mb,
            gradient_as_bucket_view=parallelism.gradient_as_bucket_view,
            static_graph=parallelism.static_graph,
            find_unused_parameters=parallelism.find_unused_parameters,
        )
        setup.module = module
        setup.loss_scale = mesh.size()
        if is_localized(setup.model):
            setup.find_slots = localized_slots
            setup.clip_norm = clip_across
        if parallelism.no_sync:
            setup.accumulation = lambda last: nullcontext() if last else module.no_sync()
        if parallelism.zero_redundancy:
            from equivcheck.layouts.zero_redundancy import share_updates

            share_updates(setup, mesh, parameters_as_bucket_view=parallelism.parameters_as_bucket_view)
        take_rows(setup, mesh)
