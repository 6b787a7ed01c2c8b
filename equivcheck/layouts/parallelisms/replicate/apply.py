"""Applies composable `replicate` to a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivcheck.layouts.base.kind import LayoutKind
from equivcheck.layouts.base.rounding import Rounding, WhenReduced
from equivcheck.layouts.parallelisms.ddp.apply import SENT_AS
from equivcheck.layouts.parallelisms.replicate.communication import REPLICATE_COMMUNICATION
from equivcheck.layouts.parallelisms.replicate.limits import LAYOUT_LIMITS, LIMITS
from equivcheck.scenario import Layout, Precision, Replicate, Replicator
from equivcheck.scenario.mesh import DP

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.layouts.base.script.draft import Draft
    from equivcheck.training.setup import Setup


class ReplicateKind(LayoutKind[Replicate]):
    """Calls torch's composable `replicate` or `replicate_with_fsdp` on the model."""

    parallelism = Replicate
    limits = LIMITS
    layout_limits = LAYOUT_LIMITS
    communication = REPLICATE_COMMUNICATION

    def apply(self, setup: Setup, parallelism: Replicate, mesh: DeviceMesh) -> None:
        """Add torch's hooks for replicated data parallelism to the model, or to each pipeline stage."""
        from equivcheck.layouts.base.data_rows import take_rows
        from equivcheck.layouts.base.local_tensors import clip_across, has_localized_tensors, local_tensor_slots, norm_across
        from equivcheck.layouts.parallelisms.replicate.torch_private import replicate_model, synchronises_only

        model, parts = setup.model, list(setup.parts)
        for part in parts:
            replicate_model(part, parallelism, mesh)
        setup.loss_scale *= mesh.size()
        if has_localized_tensors(model):
            setup.find_slots = local_tensor_slots
            setup.clip_norm, setup.total_norm = clip_across, norm_across
        if parallelism.no_sync:
            setup.accumulation = lambda last: synchronises_only(parts, last)
        take_rows(setup, mesh)

    def when_reduced(self, parallelism: Replicate, layout: Layout) -> WhenReduced:  # noqa: ARG002 - of the base class
        """Return when gradients are reduced: with `no_sync` only after the last microbatch, otherwise after each one.

        The result also says whether ranks keep full gradients. They do with `Replicator.DDP`.
        """
        return WhenReduced(once=parallelism.no_sync, whole=parallelism.implementation is Replicator.DDP)

    def rounding(self, parallelism: Replicate, layout: Layout, precision: Precision) -> Rounding | None:  # noqa: ARG002
        """Return how gradient compression rounds gradients. None without compression."""
        reduce = SENT_AS.get(parallelism.compression)
        if reduce is None:
            return None
        when = self.when_reduced(parallelism, layout)
        return Rounding(replicas=1, shards=layout.mesh.size(DP), when=when, reduce=reduce)

    def write_script(self, draft: Draft, parallelism: Replicate) -> None:
        """Let the exported script call `replicate` or `replicate_with_fsdp` on its model."""
        from equivcheck.layouts.parallelisms.replicate.export import write

        write(draft, parallelism)
