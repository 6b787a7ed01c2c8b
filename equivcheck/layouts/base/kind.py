"""What a layout has to say about one kind of parallelism."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from equivcheck.layouts.base.expected_calls.model import NO_COMMUNICATION_MODEL, CommunicationModel
from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit
from equivcheck.layouts.base.rounding import Rounding, WhenReduced
from equivcheck.scenario import Layout, Parallelism, Precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.training.setup import Setup


class LayoutKind(ABC):
    """How one parallelism is applied.

    Importing the module of a kind must not import torch: the generator asks for limits only.
    """

    parallelism: ClassVar[type[Parallelism]]
    """The noun that it applies."""
    model_limits: ClassVar[tuple[Limit, ...]] = ()
    """Which kinds of layers and losses it cannot run; asked before all other limits of all parallelisms of a layout."""
    limits: ClassVar[tuple[Limit, ...]] = ()
    """What it cannot run."""
    layout_limits: ClassVar[tuple[LayoutLimit, ...]] = ()
    """How it cannot be laid out."""
    communication: ClassVar[CommunicationModel] = NO_COMMUNICATION_MODEL
    """What it is expected to communicate."""

    @abstractmethod
    def apply(self, setup: Setup, parallelism: Parallelism, mesh: DeviceMesh) -> None:
        """Change the setup of this rank; `mesh` has the parallelism's own axes only. Every rank calls it."""

    def finish(self, setup: Setup, parallelism: Parallelism, mesh: DeviceMesh) -> None:  # noqa: B027 - for those that need it
        """Change the setup further, once every parallelism has been applied: how this rank reads, for one."""

    def imports(self, parallelism: Parallelism) -> tuple[str, ...]:  # noqa: ARG002 - for those that need any
        """Modules that only this parallelism needs and that are slow to import. Ranks that are threads must not import them."""
        return ()

    def when_reduced(self, parallelism: Parallelism, layout: Layout) -> WhenReduced | None:  # noqa: ARG002 - for those that do
        """When it reduces gradients of several microbatches; None for a parallelism that averages none."""
        return None

    def rounding(self, parallelism: Parallelism, layout: Layout, precision: Precision) -> Rounding | None:  # noqa: ARG002 - same
        """What it rounds to other element types than the training's; None for nothing, in whatever precision."""
        return None
