"""Protocol between equivcheck and an adapter for a trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from equivcheck.user.usage import invalid

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalPart:
    """Elements of a tensor that a rank holds, and their position in the full tensor. No rank gathers the full tensor."""

    name: str
    """Name of the parameter in equivcheck's model. For optimizer state, with ``/key`` after it."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    tensor: torch.Tensor
    """The rank's elements: the full tensor, a box in it, or consecutive elements of the flattened tensor. A DTensor has its own
    placements.
    """
    start: tuple[int, ...] = ()
    """For a box: its first index along each dim. Otherwise empty."""
    offset: int | None = None
    """For consecutive elements: the first element's index in the flattened tensor. Otherwise None."""

    def __post_init__(self) -> None:
        if self.start and self.offset is not None:
            raise invalid(f"part {self.name!r}", "it has a start and an offset", "only one of them")
        if self.start and len(self.start) != len(self.shape):
            raise invalid(
                f"part {self.name!r}", f"start {self.start} has another length than shape {self.shape}", "an index for each dim"
            )


def import_framework(trainer: str, module: str, packages: str, **environment: str) -> ModuleType:
    """Import a trainer's framework on a rank.

    Before the import, set RANK, LOCAL_RANK, WORLD_SIZE and the variables in `environment`. Raises `UsageError` if the framework
    is not installed; the error names the `packages` to install. Raises it also if ranks are simulated, because a framework keeps
    state for the process.
    """
    import torch.distributed as dist

    from equivcheck.worlds.sim.process_group import SimGroup

    if isinstance(dist.group.WORLD, SimGroup):
        raise invalid(f"trainer {trainer}", "it needs processes", 'world="gloo"')
    rank = str(dist.get_rank())
    os.environ |= {"LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": str(dist.get_world_size())} | environment
    return import_or_refuse(trainer, module, packages)


def import_or_refuse(trainer: str, module: str, packages: str) -> ModuleType:
    """Import and return a module of a trainer's framework. Raises `UsageError` if it is not installed, with the `packages`."""
    try:
        return import_module(module)
    except ImportError as error:
        raise invalid(f"trainer {trainer}", f"it cannot be imported ({error})", f"pip install {packages}") from error


def number_of_microbatches(batches: Sequence[Sequence[Any]]) -> int:
    """Return how many microbatches an update has. Raises `UsageError` if updates have different numbers."""
    numbers = {len(microbatches) for microbatches in batches}
    if len(numbers) != 1:
        raise invalid("batches", "their updates have different numbers of microbatches", "the same number in each")
    return numbers.pop()


class Record(Protocol):
    """Functions with which an adapter records the values of each update on this rank."""

    def before_update(self, parts: Sequence[LocalPart], *, scale: float = 1.0) -> None:
        """Record the gradients after all reductions, once for each update. equivcheck divides them by `scale`, a loss scale."""

    def after_update(self, loss: float | None, parts: Sequence[LocalPart], *, norm: float | None = None) -> None:
        """Record the updated parameters, the loss over this rank's rows, and the gradient norm reported by the trainer."""

    def at_end(self, parts: Sequence[LocalPart]) -> None:
        """Record the optimizer state, with names such as ``parameter/key``. This call is optional."""


class Trainer(Protocol):
    """Adapter for a trainer that runs backward, reduction, clipping and optimizer step itself.

    equivcheck provides initial weights, batches, the optimizer, ranks, the single-device run, and tolerances. The adapter
    provides the trainer's configuration. It decides when values are read, and gives the positions of a rank's elements in the
    full tensor. It does not gather tensors.
    """

    @property
    def gradients_are(self) -> Literal["unclipped", "clipped"]:
        """Whether the gradients in `Record.before_update` are ``unclipped``, or ``clipped`` already."""

    def reference_step(self) -> Callable[..., Any]:
        """Return the training step for the single-device run, called as ``step(model, microbatches, optimizer, loss)``.

        It must accumulate and clip as the trainer does. If ranks record a norm, the step returns ``{"loss": ..., "norm": ...}``.
        """

    def train(  # noqa: PLR0913, PLR0917 - all that a trainer does not own
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        batches: Sequence[Sequence[Any]],
        loss: Callable[[Any, Any], torch.Tensor],
        make_optimizer: Callable[[list[Any]], Any],
        record: Record,
    ) -> None:
        """Train on this rank, and pass each update's values to `record`.

        `batches` has a list of microbatches for each update, with this rank's rows. `make_optimizer` builds the optimizer from
        parameters.
        """
