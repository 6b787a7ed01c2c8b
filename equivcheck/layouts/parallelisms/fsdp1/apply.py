"""Applies `torch.distributed.fsdp.FullyShardedDataParallel` to a rank."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from equivcheck.layouts.base.kind import LayoutKind
from equivcheck.layouts.base.rounding import Division, Rounding, WhenReduced, reduced_in
from equivcheck.layouts.parallelisms.fsdp1.communication import FSDP1_COMMUNICATION
from equivcheck.layouts.parallelisms.fsdp1.limits import LAYOUT_LIMITS, LIMITS, is_sharded
from equivcheck.scenario import FSDP1, Layout, MixedPrecision, Precision, Wrapping
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.layouts.base.script.draft import Draft
    from equivcheck.training.setup import Setup


class FSDP1Kind(LayoutKind[FSDP1]):
    """Wraps the model in `FullyShardedDataParallel`, with one unit for each layer or one unit for the whole model."""

    parallelism = FSDP1
    limits = LIMITS
    layout_limits = LAYOUT_LIMITS
    communication = FSDP1_COMMUNICATION

    def apply(self, setup: Setup, parallelism: FSDP1, mesh: DeviceMesh) -> None:
        """Wrap the model, read parameters from FSDP's flat parameters, and clip by FSDP's own method."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        from equivcheck.layouts.base.data_rows import take_rows
        from equivcheck.layouts.parallelisms.fsdp1.flat_parameters import clip_flat, flat_slots, release

        module = FullyShardedDataParallel(setup.parts[0], **_options(parallelism, mesh))
        setup.parts = [module]
        setup.loss_scale = mesh.size()
        setup.clip_norm = lambda _module, _parameters, clipping: clip_flat(module, clipping)
        setup.find_slots = lambda _model: flat_slots(module)
        setup.release = lambda: release(module)
        if parallelism.no_sync:
            setup.accumulation = lambda last: nullcontext() if last else module.no_sync()
        take_rows(setup, mesh)

    def when_reduced(self, parallelism: FSDP1, layout: Layout) -> WhenReduced:
        """Return when gradients are reduced: with `no_sync` only at the last microbatch, otherwise at each one.

        The result also says whether ranks keep full gradients. They do if nothing is sharded.
        """
        return WhenReduced(once=parallelism.no_sync, whole=not is_sharded(layout))

    def rounding(self, parallelism: FSDP1, layout: Layout, precision: Precision) -> Rounding | None:
        """Return how `mixed_precision` rounds parameters, activations and gradients. None without mixed precision."""
        policy = parallelism.mixed_precision
        if policy is None:
            return None
        return Rounding(
            replicas=layout.mesh.size(REPLICATE),
            shards=layout.mesh.size(DP, SHARD),
            compute=policy.param,
            reduce=reduced_in(precision, parallelism),
            division=Division.AROUND,
            when=self.when_reduced(parallelism, layout),
        )

    def write_script(self, draft: Draft, parallelism: FSDP1) -> None:
        """Let the exported script wrap its model in `FullyShardedDataParallel`."""
        from equivcheck.layouts.parallelisms.fsdp1.export import write

        write(draft, parallelism)

    def import_known(self) -> None:
        """Register the predicates for known issues with FSDP1."""
        import equivcheck.layouts.parallelisms.fsdp1.known  # noqa: F401


def _options(parallelism: FSDP1, mesh: DeviceMesh) -> dict[str, Any]:
    import torch
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from equivcheck.training.layers.module import LayerModule

    return {
        "device_mesh": mesh,
        "sharding_strategy": ShardingStrategy[parallelism.strategy.value],
        "auto_wrap_policy": ModuleWrapPolicy({LayerModule}) if parallelism.wrapping is Wrapping.PER_LAYER else None,
        "device_id": torch.device("cpu"),
        "use_orig_params": parallelism.use_orig_params,
        "mixed_precision": _policy(parallelism.mixed_precision),
    }


def _policy(policy: MixedPrecision | None) -> torch.distributed.fsdp.MixedPrecision | None:
    import torch
    from torch.distributed import fsdp

    if policy is None:
        return None
    param, reduce = (None if kind is None else getattr(torch, kind.value) for kind in (policy.param, policy.reduce))
    return fsdp.MixedPrecision(param_dtype=param, reduce_dtype=reduce)
