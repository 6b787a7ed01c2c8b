"""Applies expert parallelism to a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivcheck.layouts.base.dtensor_experts import has_expert_units, shards_over_ep
from equivcheck.layouts.base.kind import LayoutKind
from equivcheck.layouts.base.rounding import ONCE, WhenReduced
from equivcheck.layouts.parallelisms.expert_parallel.communication import EXPERT_PARALLEL_COMMUNICATION
from equivcheck.layouts.parallelisms.expert_parallel.limits import LAYOUT_LIMITS, LIMITS
from equivcheck.scenario import ExpertParallel, ExpertStorage, Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.layouts.base.script.draft import Draft
    from equivcheck.training.setup import Setup


class ExpertParallelKind(LayoutKind[ExpertParallel]):
    """Distributes rows and experts over ranks, and averages gradients explicitly unless FSDP2 reduces them (`shard_over_ep`)."""

    parallelism = ExpertParallel
    limits = LIMITS
    layout_limits = LAYOUT_LIMITS
    communication = EXPERT_PARALLEL_COMMUNICATION

    def apply(self, setup: Setup, parallelism: ExpertParallel, mesh: DeviceMesh) -> None:
        """Keep only this rank's experts in the model, and take only this rank's rows of each batch."""
        from equivcheck.layouts.base.data_rows import take_rows
        from equivcheck.layouts.parallelisms.expert_parallel import exchange

        is_plain = parallelism.storage is ExpertStorage.PLAIN
        exchange.shard_units(setup.model, mesh, exchange.own_tensor if is_plain else exchange.dtensor_of_all)
        setup.loss_scale *= mesh.size()
        take_rows(setup, mesh)

    def finish(self, setup: Setup, parallelism: ExpertParallel, mesh: DeviceMesh) -> None:
        """Set up the explicit reduction of gradients, and read plain expert tensors as shards.

        Other parallelisms may replace parameters, so this runs after all of them.
        """
        from equivcheck.layouts.base.local_tensors import read_plain_shards
        from equivcheck.layouts.parallelisms.expert_parallel import exchange

        assert setup.layout is not None, "a layout is applied"
        if not shards_over_ep(setup.layout):
            own, others = exchange.split_parameters(setup.model)
            divided = [] if has_expert_units(setup.layout) else own
            setup.before_update.append(lambda _optimizer, _step: exchange.reduce_gradients(divided, others, mesh))
        if parallelism.storage is ExpertStorage.PLAIN:
            read_plain_shards(setup, parallelism, mesh)

    def when_reduced(self, parallelism: ExpertParallel, layout: Layout) -> WhenReduced | None:  # noqa: ARG002 - of the base class
        """Return when gradients are reduced: once, after the last microbatch.

        Returns None if an outer parallelism reduces gradients.
        """
        return ONCE if layout.parallelisms[-1].tag == ExpertParallel.tag else None

    def write_script(self, draft: Draft, parallelism: ExpertParallel) -> None:
        """Distribute the script's experts over ranks."""
        from equivcheck.layouts.parallelisms.expert_parallel.export import write

        write(draft, parallelism)

    def import_known(self) -> None:
        """Register the predicates for known issues with experts."""
        import equivcheck.layouts.parallelisms.expert_parallel.known  # noqa: F401
