"""Base class for all kinds of parallelism. Third parties subclass it, too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

from equivcheck.layouts.base.expected_calls.model import NO_COMMUNICATION_MODEL, CommunicationModel
from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit
from equivcheck.layouts.base.rounding import Rounding, WhenReduced
from equivcheck.scenario import Layout, Parallelism, Precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.layouts.base.script.draft import Draft
    from equivcheck.training.setup import Setup

P = TypeVar("P", bound=Parallelism)


class LayoutKind(ABC, Generic[P]):
    """Applies one kind of parallelism, and knows its limits, its collective calls and its code in exported scripts.

    Scenarios are generated without torch. A subclass's module must therefore not import torch, but its methods may.
    """

    parallelism: type[P]
    """Dataclass with this parallelism's options."""
    model_limits: tuple[Limit, ...] = ()
    """Layers and losses that the parallelism cannot run. They are checked before all other limits in the layout."""
    limits: tuple[Limit, ...] = ()
    """Trainings that the parallelism cannot run."""
    layout_limits: tuple[LayoutLimit, ...] = ()
    """Options, meshes and other parallelisms with which the parallelism cannot run any training."""
    communication: CommunicationModel = NO_COMMUNICATION_MODEL
    """Predicts the parallelism's collective calls."""

    @abstractmethod
    def apply(self, setup: Setup, parallelism: P, mesh: DeviceMesh) -> None:
        """Apply the parallelism to this rank's setup. Every rank calls it; `mesh` has only this parallelism's axes."""

    def finish(self, setup: Setup, parallelism: P, mesh: DeviceMesh) -> None:
        """Change the setup again after all parallelisms in the layout have been applied."""

    def imports(self, parallelism: P) -> tuple[str, ...]:  # noqa: ARG002 - for subclasses
        """Return the names of slow modules that only this parallelism needs.

        They are imported before the ranks start, because ranks that are threads must not import them.
        """
        return ()

    def when_reduced(self, parallelism: P, layout: Layout) -> WhenReduced | None:  # noqa: ARG002 - for subclasses
        """Return when gradients from several microbatches are reduced over ranks.

        Returns None if this parallelism does not average gradients.
        """
        return None

    def rounding(self, parallelism: P, layout: Layout, precision: Precision) -> Rounding | None:  # noqa: ARG002 - for subclasses
        """Return how the layout rounds gradients and activations to lower-precision dtypes.

        Returns None if the layout uses no other dtype than the training.
        """
        return None

    def write_script(self, draft: Draft, parallelism: P) -> None:  # noqa: ARG002 - for subclasses
        """Add this parallelism to an exported, torch-only script. Raises `CannotExport` if the script cannot express it."""
        from equivcheck.layouts.base.script.draft import refuse

        raise refuse(f"parallelism {parallelism.tag}", f"{type(self).__name__} does not implement write_script")

    def import_known(self) -> None:
        """Import this parallelism's predicates for known issues. Importing registers them."""
