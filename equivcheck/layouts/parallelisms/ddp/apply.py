"""Applies `torch.nn.parallel.DistributedDataParallel` to a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from equivcheck.layouts.base.kind import LayoutKind
from equivcheck.layouts.base.rounding import Division, Rounding, WhenReduced
from equivcheck.layouts.parallelisms.ddp.communication import DDP_COMMUNICATION
from equivcheck.layouts.parallelisms.ddp.limits import LAYOUT_LIMITS, LIMITS
from equivcheck.scenario import DDP, Compression, ElementType, Layout, Precision
from equivcheck.scenario.mesh import DP

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel import DistributedDataParallel

    from equivcheck.layouts.base.script.draft import Draft
    from equivcheck.training.setup import Setup


SENT_AS: dict[Compression, ElementType] = {Compression.FP16: ElementType.FLOAT16, Compression.BF16: ElementType.BFLOAT16}
"""Dtype for reducing compressed gradients."""


class DDPKind(LayoutKind[DDP]):
    """Wraps the model in `DistributedDataParallel`."""

    parallelism = DDP
    limits = LIMITS
    layout_limits = LAYOUT_LIMITS
    communication = DDP_COMMUNICATION

    def apply(self, setup: Setup, parallelism: DDP, mesh: DeviceMesh) -> None:
        """Wrap the model, or each pipeline stage, in `DistributedDataParallel`, and set its options."""
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from equivcheck.layouts.base.data_rows import take_rows
        from equivcheck.layouts.base.local_tensors import clip_across, has_localized_tensors, local_tensor_slots, norm_across

        if parallelism.unequal_start:
            from equivcheck.layouts.base.unequal_start import make_unequal

            for part in setup.parts:
                make_unequal(part, mesh)
        wrappers = [
            DistributedDataParallel(
                part,
                device_mesh=mesh,
                bucket_cap_mb=parallelism.bucket_cap_mb,
                gradient_as_bucket_view=parallelism.gradient_as_bucket_view,
                static_graph=parallelism.static_graph,
                find_unused_parameters=parallelism.find_unused_parameters,
            )
            for part in setup.parts
        ]
        setup.parts = [*wrappers]
        setup.loss_scale *= mesh.size()
        if has_localized_tensors(setup.model):
            setup.find_slots = local_tensor_slots
            setup.clip_norm, setup.total_norm = clip_across, norm_across
        if parallelism.no_sync:
            setup.accumulation = lambda last: nullcontext() if last else no_sync(wrappers)
        for wrapper in wrappers:
            compress(wrapper, parallelism.compression, mesh)
        if parallelism.autocast is not None:
            dtype: torch.dtype = getattr(torch, parallelism.autocast.value)
            setup.forward_context = lambda: torch.autocast(mesh.device_type, dtype=dtype)
        if parallelism.zero_redundancy:
            from equivcheck.layouts.parallelisms.ddp.zero_redundancy import use_zero_redundancy

            use_zero_redundancy(setup, mesh, parameters_as_bucket_view=parallelism.parameters_as_bucket_view)
        take_rows(setup, mesh)

    def imports(self, parallelism: DDP) -> tuple[str, ...]:
        """Return the name of the module that imports `ZeroRedundancyOptimizer`, because this import is slow.

        Empty if it is not used.
        """
        return ("equivcheck.layouts.parallelisms.ddp.zero_redundancy",) if parallelism.zero_redundancy else ()

    def when_reduced(self, parallelism: DDP, layout: Layout) -> WhenReduced:  # noqa: ARG002 - of the base class
        """Return when gradients are reduced: with `no_sync` at the last microbatch, else at each. Ranks keep full gradients."""
        return WhenReduced(once=parallelism.no_sync, whole=True)

    def rounding(self, parallelism: DDP, layout: Layout, precision: Precision) -> Rounding | None:  # noqa: ARG002
        """Return how autocast and gradient compression round. None if neither is used.

        While DDP copies gradients to a bucket, it multiplies them by the reciprocal of the world size. If gradients are views of
        the bucket, DDP divides by the world size (reducer.cpp), and so do compression hooks (`default_hooks`).
        """
        reduce = SENT_AS.get(parallelism.compression)
        if parallelism.autocast is None and reduce is None:
            return None
        return Rounding(
            replicas=1,
            shards=layout.mesh.size(DP),
            autocast=parallelism.autocast,
            reduce=reduce,
            division=Division.SCALED if reduce is None else Division.BEFORE,
            division_again=Division.BEFORE if reduce is None and parallelism.gradient_as_bucket_view else None,
            when=self.when_reduced(parallelism, layout),
        )

    def write_script(self, draft: Draft, parallelism: DDP) -> None:
        """Wrap the script's model in `DistributedDataParallel`."""
        from equivcheck.layouts.parallelisms.ddp.export import write

        write(draft, parallelism)

    def import_known(self) -> None:
        """Register the predicates for known issues with DDP."""
        import equivcheck.layouts.parallelisms.ddp.known  # noqa: F401


@contextmanager
def no_sync(wrappers: Iterable[DistributedDataParallel]) -> Iterator[None]:
    """Context manager to run backward without gradient reductions in these wrappers."""
    with ExitStack() as stack:
        for wrapper in wrappers:
            stack.enter_context(wrapper.no_sync())
        yield


def compress(module: Any, compression: Compression, mesh: DeviceMesh) -> None:
    """Register the communication hook for gradient compression. Does nothing without compression."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

    if compression is not Compression.NONE:
        hook = fp16_compress_hook if compression is Compression.FP16 else bf16_compress_hook
        module.register_comm_hook(mesh.get_group(), hook)
