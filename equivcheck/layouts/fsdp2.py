"""`torch.distributed.fsdp.fully_shard`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

from equivcheck.layouts.kind import LayoutKind, LayoutLimit, Limit
from equivcheck.layouts.limits import DTENSOR_OPTIMIZERS, EVEN_ROWS, NO_COMPILED_AUTOGRAD, has_parallelism, parallelism_of
from equivcheck.layouts.mends import has_shares, with_widths, without_shares
from equivcheck.layouts.plans import fits, leaves_nothing, trained_cuts
from equivcheck.scenario import FSDP2, Layout, Parallelism, TensorParallel, Training, Wrapping
from equivcheck.scenario.mesh import TP

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.train.setup import Setup


ONE_UNIT_FOR_SHARED_WEIGHTS = Limit(
    reason="fully_shard: layers that share a weight must be in one unit, but each layer is a unit of its own",
    applies=lambda training, layout: parallelism_of(layout, FSDP2).wrapping is Wrapping.PER_LAYER and has_shares(training.model),
    mend=lambda training, _layout: without_shares(training),
    upstream=True,
)


def _some_rank_reduces_nothing(training: Training, layout: Layout) -> bool:
    if not has_parallelism(layout, TensorParallel):
        return False
    plan, ranks = parallelism_of(layout, TensorParallel).plan, layout.mesh.size(TP)
    return fits(training.model, plan) and any(leaves_nothing(size, ranks) for size in trained_cuts(training.model, plan))


NOTHING_TO_REDUCE = Limit(
    reason="fully_shard over tensor parallelism: a rank that holds nothing of a parameter cannot reduce its gradient "
    "('_chunk_cat expects non-empty tensor')",
    applies=_some_rank_reduces_nothing,
    mend=lambda training, layout: with_widths(training, layout.mesh.size(TP)),
    upstream=True,
)


class FSDP2Kind(LayoutKind):
    """Shards the model, or each layer and then the model, by `fully_shard`; on two axes it is HSDP."""

    parallelism: ClassVar[type[Parallelism]] = FSDP2
    limits: ClassVar[tuple[Limit, ...]] = (
        EVEN_ROWS,
        ONE_UNIT_FOR_SHARED_WEIGHTS,
        NOTHING_TO_REDUCE,
        *DTENSOR_OPTIMIZERS,
    )
    layout_limits: ClassVar[tuple[LayoutLimit, ...]] = (NO_COMPILED_AUTOGRAD,)

    def apply(self, setup: Setup, parallelism: Parallelism, mesh: DeviceMesh) -> None:
        """Shard the model in place."""
        from torch.distributed.fsdp import FSDPModule, fully_shard

        from equivcheck.layouts.data_rows import take_rows
        from equivcheck.train.model import Block

        assert isinstance(parallelism, FSDP2), parallelism
        model = setup.model
        if parallelism.wrapping is Wrapping.PER_LAYER:
            for block in [module for module in model.modules() if isinstance(module, Block)]:
                fully_shard(block, mesh=mesh, reshard_after_forward=parallelism.reshard_after_forward)
        fully_shard(model, mesh=mesh, reshard_after_forward=parallelism.reshard_after_forward)
        assert isinstance(model, FSDPModule), "fully_shard changes the class of the model"
        setup.loss_scale = mesh.size()
        if parallelism.no_sync:
            setup.accumulation = lambda last: _reduce_only(model, last)
        take_rows(setup, mesh)


def _reduce_only(model: object, last: bool) -> AbstractContextManager[object]:
    model.set_requires_gradient_sync(last)  # type: ignore[attr-defined]
    return nullcontext()
