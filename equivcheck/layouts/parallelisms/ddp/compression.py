"""Gradient compression for `DistributedDataParallel` and composable `replicate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from equivcheck.layouts.base.limits.limit import LayoutLimit
from equivcheck.layouts.base.limits.repairs import with_options
from equivcheck.scenario import DDP, Compression, ElementType, Layout, Replicate

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SENT_AS: dict[Compression, ElementType] = {Compression.FP16: ElementType.FLOAT16, Compression.BF16: ElementType.BFLOAT16}
"""Element type that gradients are reduced in."""


def _has_bf16_hook(layout: Layout) -> bool:
    compressions = [ddp.compression for ddp in layout.of(DDP)] + [replicate.compression for replicate in layout.of(Replicate)]
    return Compression.BF16 in compressions


NO_BF16_HOOK = LayoutLimit(
    reason="DistributedDataParallel: bf16_compress_hook on CPU ranks is not supported: it is refused without CUDA and NCCL (or "
    "XPU)",
    applies=_has_bf16_hook,
    repair=lambda layout: with_options(layout, (DDP, Replicate), compression=Compression.FP16),
)


def compress(module: Any, compression: Compression, mesh: DeviceMesh) -> None:
    """Register a compression hook with a module that has `register_comm_hook`. Does nothing without compression."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

    if compression is not Compression.NONE:
        hook = fp16_compress_hook if compression is Compression.FP16 else bf16_compress_hook
        module.register_comm_hook(mesh.get_group(), hook)
