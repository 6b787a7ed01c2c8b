"""Applies `torch.distributed.pipelining` to a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivcheck.layouts.base.kind import LayoutKind
from equivcheck.layouts.parallelisms.pipeline.communication import PIPELINE_COMMUNICATION
from equivcheck.layouts.parallelisms.pipeline.limits import LAYOUT_LIMITS, LIMITS
from equivcheck.scenario import Pipeline

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.layouts.base.script.draft import Draft
    from equivcheck.training.setup import Setup


class PipelineKind(LayoutKind[Pipeline]):
    """Keeps only this rank's stages, and lets a schedule from torch run them."""

    parallelism = Pipeline
    limits = LIMITS
    layout_limits = LAYOUT_LIMITS
    communication = PIPELINE_COMMUNICATION

    def apply(self, setup: Setup, parallelism: Pipeline, mesh: DeviceMesh) -> None:
        """Split the model into stages, and let a schedule compute each step."""
        from equivcheck.layouts.parallelisms.pipeline.schedules import build_pipeline

        build_pipeline(setup, parallelism, mesh)

    def finish(self, setup: Setup, parallelism: Pipeline, mesh: DeviceMesh) -> None:  # noqa: ARG002 - of the base class
        """Clip by the norm over all stages, and give shared weights their names in the full model."""
        from equivcheck.layouts.parallelisms.pipeline.schedules import finish_pipeline

        finish_pipeline(setup)

    def imports(self, parallelism: Pipeline) -> tuple[str, ...]:  # noqa: ARG002 - of the base class
        """Return the name of the module that imports `torch.distributed.pipelining`, because this import is slow."""
        return ("equivcheck.layouts.parallelisms.pipeline.schedules",)

    def write_script(self, draft: Draft, parallelism: Pipeline) -> None:
        """Let the exported script run its steps by a pipeline schedule."""
        from equivcheck.layouts.parallelisms.pipeline.export import write

        write(draft, parallelism)

    def import_known(self) -> None:
        """Register the predicates for known issues with pipelines."""
        import equivcheck.layouts.parallelisms.pipeline.known  # noqa: F401
