"""`torch.distributed.pipelining`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from equivcheck.layouts.base.expected_calls.model import CommunicationModel
from equivcheck.layouts.base.kind import LayoutKind
from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit
from equivcheck.layouts.parallelisms.pipeline.communication import PIPELINE_COMMUNICATION
from equivcheck.layouts.parallelisms.pipeline.limits import LAYOUT_LIMITS, LIMITS
from equivcheck.scenario import Parallelism, Pipeline

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.training.setup import Setup


class PipelineKind(LayoutKind):
    """Keeps the layers of this rank's stages, and runs them by a schedule."""

    parallelism: ClassVar[type[Parallelism]] = Pipeline
    limits: ClassVar[tuple[Limit, ...]] = LIMITS
    layout_limits: ClassVar[tuple[LayoutLimit, ...]] = LAYOUT_LIMITS
    communication: ClassVar[CommunicationModel] = PIPELINE_COMMUNICATION

    def apply(self, setup: Setup, parallelism: Parallelism, mesh: DeviceMesh) -> None:
        """Take the model apart, and let a schedule compute each step."""
        from equivcheck.layouts.parallelisms.pipeline.schedules import build_pipeline

        assert isinstance(parallelism, Pipeline), parallelism
        build_pipeline(setup, parallelism, mesh)

    def imports(self, parallelism: Parallelism) -> tuple[str, ...]:  # noqa: ARG002 - of the base class
        """`torch.distributed.pipelining`."""
        return ("equivcheck.layouts.parallelisms.pipeline.schedules",)
