"""Composable `replicate`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from equivcheck.layouts.compile_limits import COMPILED_DDP, FSDP_WITHOUT_COMPILED_AUTOGRAD
from equivcheck.layouts.compression import NO_BF16_HOOK, SENT_AS
from equivcheck.layouts.ddp import as_reduced
from equivcheck.layouts.foreseen.foresight import Foresight
from equivcheck.layouts.foreseen.replicate import REPLICATE_FORESIGHT
from equivcheck.layouts.fsdp2 import NOTHING_TO_REDUCE
from equivcheck.layouts.kind import LayoutKind, LayoutLimit, Limit
from equivcheck.layouts.limits import DTENSOR_OPTIMIZERS, EVEN_ROWS, ROUNDING_LIMITS, parallelism_of
from equivcheck.layouts.repairs import has_shares, may_skip_parameters, without_shares, without_side
from equivcheck.layouts.rounding import Rounding
from equivcheck.scenario import Layout, Parallelism, Replicate, Replicator, Wrapping
from equivcheck.scenario.mesh import DP

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.train.setup import Setup


def _only(implementation: Replicator, limit: Limit) -> Limit:
    return replace(
        limit,
        applies=lambda training, layout: (
            parallelism_of(layout, Replicate).implementation is implementation and limit.applies(training, layout)
        ),
    )


COMPILED_AUTOGRAD_WITH_DDP_ONLY = replace(
    FSDP_WITHOUT_COMPILED_AUTOGRAD,
    applies=lambda layout: (
        parallelism_of(layout, Replicate).implementation is Replicator.FSDP and FSDP_WITHOUT_COMPILED_AUTOGRAD.applies(layout)
    ),
)

UNUSED_PARAMETERS = Limit(
    reason="replicate: without find_unused_parameters every trained parameter must take part in every step",
    applies=lambda training, layout: may_skip_parameters(as_reduced(training, layout)),
    repair=lambda training, _layout: without_side(training),
    upstream=True,
)

ONE_UNIT_FOR_SHARED_WEIGHTS = Limit(
    reason="replicate_with_fsdp: layers that share a weight must be in one unit, but each layer is a unit of its own",
    applies=lambda training, layout: (
        parallelism_of(layout, Replicate).wrapping is Wrapping.PER_LAYER and has_shares(training.model)
    ),
    repair=lambda training, _layout: without_shares(training),
    upstream=True,
)


class ReplicateKind(LayoutKind):
    """Calls one of the two `replicate` on the model."""

    parallelism: ClassVar[type[Parallelism]] = Replicate
    limits: ClassVar[tuple[Limit, ...]] = (
        EVEN_ROWS,
        _only(Replicator.DDP, UNUSED_PARAMETERS),
        ONE_UNIT_FOR_SHARED_WEIGHTS,
        *(_only(Replicator.FSDP, limit) for limit in (NOTHING_TO_REDUCE, *DTENSOR_OPTIMIZERS)),
    )

    layout_limits: ClassVar[tuple[LayoutLimit, ...]] = (
        *COMPILED_DDP,
        COMPILED_AUTOGRAD_WITH_DDP_ONLY,
        NO_BF16_HOOK,
        *ROUNDING_LIMITS,
    )
    foresight: ClassVar[Foresight] = REPLICATE_FORESIGHT

    def apply(self, setup: Setup, parallelism: Parallelism, mesh: DeviceMesh) -> None:
        """Replicate the model in place."""
        from equivcheck.layouts.data_rows import take_rows
        from equivcheck.layouts.localized import clip_across, is_localized, localized_slots
        from equivcheck.layouts.replicating import replicate_model, synchronises_only

        assert isinstance(parallelism, Replicate), parallelism
        model = setup.model
        replicate_model(model, parallelism, mesh)
        setup.loss_scale = mesh.size()
        if is_localized(model):
            setup.find_slots = localized_slots
            setup.clip_norm = clip_across
        if parallelism.no_sync:
            setup.accumulation = lambda last: synchronises_only(model, last)
        take_rows(setup, mesh)

    def rounding(self, parallelism: Parallelism, layout: Layout) -> Rounding | None:
        """The element type of compressed gradients."""
        assert isinstance(parallelism, Replicate), parallelism
        reduce = SENT_AS.get(parallelism.compression)
        if reduce is None:
            return None
        return Rounding(replicas=1, shards=layout.mesh.size(DP), reduce=reduce, once=parallelism.no_sync, whole=True)
