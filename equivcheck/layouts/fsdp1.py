"""`torch.distributed.fsdp.FullyShardedDataParallel`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from equivcheck.layouts.kind import LayoutKind, Limit
from equivcheck.layouts.limits import EVEN_ROWS
from equivcheck.scenario import FSDP1, Parallelism, Wrapping

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.train.setup import Setup


class FSDP1Kind(LayoutKind):
    """Wraps the model, or each layer and then the model, in `FullyShardedDataParallel`."""

    parallelism: ClassVar[type[Parallelism]] = FSDP1
    limits: ClassVar[tuple[Limit, ...]] = (EVEN_ROWS,)

    def apply(self, setup: Setup, parallelism: Parallelism, mesh: DeviceMesh) -> None:
        """Wrap the model, read flat parameters and clip as FSDP asks for."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        from equivcheck.layouts.data_rows import take_rows
        from equivcheck.layouts.flat_parameters import clip_flat, flat_slots

        assert isinstance(parallelism, FSDP1), parallelism
        module = FullyShardedDataParallel(setup.module, **_options(parallelism, mesh))
        setup.module = module
        setup.loss_scale = mesh.size()
        setup.clip_norm = clip_flat
        setup.find_slots = lambda model: flat_slots(module)
        if parallelism.no_sync:
            setup.accumulation = lambda last: nullcontext() if last else module.no_sync()
        take_rows(setup, mesh)


def _options(parallelism: FSDP1, mesh: DeviceMesh) -> dict[str, Any]:
    import torch
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from equivcheck.train.model import Block

    return {
        "device_mesh": mesh,
        "sharding_strategy": ShardingStrategy[parallelism.strategy.value],
        "auto_wrap_policy": ModuleWrapPolicy({Block}) if parallelism.wrapping is Wrapping.PER_LAYER else None,
        "device_id": torch.device("cpu"),
        "use_orig_params": parallelism.use_orig_params,
    }
