"""What a layout has to say about one kind of parallelism."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from equivcheck.layouts.foreseen.foresight import NO_FORESIGHT, Foresight
from equivcheck.layouts.rounding import Rounding
from equivcheck.scenario import Layout, Parallelism, Training

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.train.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Something that a layout cannot run, or for which it is not equivalent by definition."""

    reason: str
    """One sentence for people: what, and why."""
    applies: Callable[[Training, Layout], bool]
    """Whether a scenario is beyond the limit."""
    repair: Callable[[Training, Layout], Training]
    """The nearest training within the limit, used instead of rejecting; it never adds what another limit forbids."""
    upstream: bool = False
    """Whether torch alone draws the line. Beyond it a run must be right or raise on every rank, and `frontier` goes there; beyond
    any other limit results differ by definition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutLimit:
    """A combination of parallelisms, options and mesh that cannot run whatever is trained."""

    reason: str
    """One sentence for people: what, and why."""
    applies: Callable[[Layout], bool]
    """Whether a layout is beyond the limit."""
    repair: Callable[[Layout], Layout]
    """The nearest layout within the limit, on the same mesh if any on that can run; it never adds what another limit forbids."""


class LayoutKind(ABC):
    """How one parallelism is applied.

    Importing the module of a kind must not import torch: the generator asks for limits only.
    """

    parallelism: ClassVar[type[Parallelism]]
    """The noun that it applies."""
    limits: ClassVar[tuple[Limit, ...]] = ()
    """What it cannot run."""
    layout_limits: ClassVar[tuple[LayoutLimit, ...]] = ()
    """How it cannot be laid out."""
    foresight: ClassVar[Foresight] = NO_FORESIGHT
    """What it can say of what it communicates."""

    @abstractmethod
    def apply(self, setup: Setup, parallelism: Parallelism, mesh: DeviceMesh) -> None:
        """Change the setup of this rank; `mesh` has the parallelism's own axes only. Every rank calls it."""

    def rounding(self, parallelism: Parallelism, layout: Layout) -> Rounding | None:  # noqa: ARG002 - for those that do
        """What it rounds to other element types than the training's; None for nothing."""
        return None
