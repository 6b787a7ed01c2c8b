"""Expert parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from equivcheck.layouts.expected_calls.model import CommunicationModel
from equivcheck.layouts.kind import LayoutKind
from equivcheck.layouts.limits.limit import LayoutLimit, Limit
from equivcheck.layouts.rounding import ONCE, WhenReduced
from equivcheck.parallelisms.expert_parallel.communication import EXPERT_PARALLEL_COMMUNICATION
from equivcheck.parallelisms.expert_parallel.limits import LAYOUT_LIMITS, LIMITS
from equivcheck.scenario import ExpertParallel, Layout, Parallelism

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.train.setup import Setup


class ExpertParallelKind(LayoutKind):
    """Gives each rank rows and experts of its own, and averages gradients by hand after backward."""

    parallelism: ClassVar[type[Parallelism]] = ExpertParallel
    limits: ClassVar[tuple[Limit, ...]] = LIMITS
    layout_limits: ClassVar[tuple[LayoutLimit, ...]] = LAYOUT_LIMITS
    communication: ClassVar[CommunicationModel] = EXPERT_PARALLEL_COMMUNICATION

    def apply(self, setup: Setup, parallelism: Parallelism, mesh: DeviceMesh) -> None:  # noqa: ARG002 - it has no options
        """Share out experts and rows."""
        from equivcheck.layouts.data_rows import take_rows
        from equivcheck.parallelisms.expert_parallel.exchange import reduce_gradients, share_out_units

        model = setup.model
        share_out_units(model, mesh)
        setup.loss_scale *= mesh.size()
        setup.before_update.append(lambda _optimizer, _step: reduce_gradients(model, mesh))
        take_rows(setup, mesh)

    def finish(self, setup: Setup, parallelism: Parallelism, mesh: DeviceMesh) -> None:
        """Read experts as parts of all, and clip by the norm over all of them."""
        from equivcheck.layouts.local_parts import read_parts

        read_parts(setup, parallelism, mesh)

    def when_reduced(self, parallelism: Parallelism, layout: Layout) -> WhenReduced | None:  # noqa: ARG002 - of the base class
        """Once, after the last microbatch; data parallelism around it says when it does."""
        return ONCE if layout.parallelisms[-1].tag == ExpertParallel.tag else None
