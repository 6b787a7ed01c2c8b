"""`torch.distributed.fsdp.fully_shard`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from equivcheck.layouts.compile_limits import FSDP_WITHOUT_COMPILED_AUTOGRAD
from equivcheck.layouts.foreseen.foresight import Foresight
from equivcheck.layouts.foreseen.fsdp2 import FSDP2_FORESIGHT
from equivcheck.layouts.kind import LayoutKind, LayoutLimit, Limit
from equivcheck.layouts.limits import (
    DTENSOR_OPTIMIZERS,
    EVEN_ROWS,
    ROUNDING_LIMITS,
    parallelism_of,
)
from equivcheck.layouts.plans import fits, leaves_nothing, trained_cuts
from equivcheck.layouts.repairs import has_shares, with_widths, without_shares
from equivcheck.layouts.rounding import Division, Rounding
from equivcheck.layouts.whole_parameters import WHOLE_PARAMETERS
from equivcheck.scenario import FSDP2, ElementType, Layout, MixedPrecision, Parallelism, TensorParallel, Training, Wrapping
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD, TP

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from equivcheck.train.setup import Setup


ONE_UNIT_FOR_SHARED_WEIGHTS = Limit(
    reason="fully_shard: layers that share a weight must be in one unit, but each layer is a unit of its own",
    applies=lambda training, layout: parallelism_of(layout, FSDP2).wrapping is Wrapping.PER_LAYER and has_shares(training.model),
    repair=lambda training, _layout: without_shares(training),
    upstream=True,
)


def _some_rank_reduces_nothing(training: Training, layout: Layout) -> bool:
    if not layout.has(TensorParallel):
        return False
    plan, ranks = parallelism_of(layout, TensorParallel).plan, layout.mesh.size(TP)
    return fits(training.model, plan) and any(leaves_nothing(size, ranks) for size in trained_cuts(training.model, plan))


NOTHING_TO_REDUCE = Limit(
    reason="fully_shard over tensor parallelism: a rank that holds nothing of a parameter cannot reduce its gradient "
    "('_chunk_cat expects non-empty tensor')",
    applies=_some_rank_reduces_nothing,
    repair=lambda training, layout: with_widths(training, layout.mesh.size(TP)),
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
        *WHOLE_PARAMETERS,
    )
    layout_limits: ClassVar[tuple[LayoutLimit, ...]] = (*ROUNDING_LIMITS, FSDP_WITHOUT_COMPILED_AUTOGRAD)
    foresight: ClassVar[Foresight] = FSDP2_FORESIGHT

    def apply(self, setup: Setup, parallelism: Parallelism, mesh: DeviceMesh) -> None:
        """Shard the model in place."""
        from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

        from equivcheck.layouts.data_rows import take_rows
        from equivcheck.train.model import Block

        assert isinstance(parallelism, FSDP2), parallelism
        model, policy = setup.model, parallelism.mixed_precision
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": parallelism.reshard_after_forward}
        if parallelism.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if parallelism.wrapping is Wrapping.PER_LAYER:
            for block in [module for module in model.modules() if isinstance(module, Block)]:
                fully_shard(block, **options, mp_policy=_policy(policy, is_root=False))
        fully_shard(model, **options, mp_policy=_policy(policy, is_root=True))
        assert isinstance(model, FSDPModule), "fully_shard changes the class of the model"
        setup.loss_scale = mesh.size()
        if parallelism.no_sync:
            setup.accumulation = lambda last: _reduce_only(model, last)
        take_rows(setup, mesh)

    def rounding(self, parallelism: Parallelism, layout: Layout) -> Rounding | None:
        """What its mixed precision casts."""
        assert isinstance(parallelism, FSDP2), parallelism
        policy = parallelism.mixed_precision
        if policy is None:
            return None
        reduce = policy.reduce or policy.param
        averages = reduce in (ElementType.FLOAT32, ElementType.BFLOAT16)
        return Rounding(
            replicas=layout.mesh.size(REPLICATE),
            shards=layout.mesh.size(DP, SHARD),
            compute=policy.param,
            output=policy.output,
            reduce=reduce,
            division=Division.AFTER if averages else Division.AROUND,
            once=parallelism.no_sync,
            accumulates_reduced=True,
        )


def _reduce_only(model: object, last: bool) -> AbstractContextManager[object]:
    model.set_requires_gradient_sync(last)  # type: ignore[attr-defined]
    return nullcontext()


def _policy(policy: MixedPrecision | None, *, is_root: bool) -> MixedPrecisionPolicy:
    """The policy of a unit; what leaves a layer inside the model is not cast."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if policy is None:
        return MixedPrecisionPolicy()
    kinds = (policy.param, policy.reduce, policy.output if is_root else None)
    param, reduce, output = (None if kind is None else getattr(torch, kind.value) for kind in kinds)
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=output)
