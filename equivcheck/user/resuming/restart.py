"""`Restart`: a checkpoint in the middle of a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

Checkpointing = Callable[["nn.Module", Any, Any, Path], Any]
"""A function ``fn(model, optimizer, scheduler, folder)`` that saves or loads a checkpoint. `scheduler` may be None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A checkpoint for `resume` in `check_training`. Ranks save it and end; new ranks load it and train the remaining steps.

    The single-device run trains all steps without a break::

        def save(model, optimizer, scheduler, folder):
            if dist.get_rank() == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "checkpoint.pt")

        def load(model, optimizer, scheduler, folder):
            state = torch.load(folder / "checkpoint.pt")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        check_training(..., resume=Restart(after=2, save=save, load=load))
    """

    after: int
    """How many steps are trained before the checkpoint."""
    save: Checkpointing
    """Called on every rank as ``save(model, optimizer, scheduler, folder)``.

    `model` is the module from `parallelize`, `optimizer` the result of `optimizer`, and `scheduler` is None if the training has
    no scheduler. `folder` is an empty folder that all ranks share."""
    load: Checkpointing
    """Called on every rank as ``load(model, optimizer, scheduler, folder)``, with a new model, optimizer and scheduler."""
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module | None] | None = None
    """Function for parallelizing the model after the checkpoint. None for the function given to `check_training`."""
    mesh: Mapping[str, int] | None = None
    """Axis names and sizes after the checkpoint. None for the same mesh."""
    data_axes: Sequence[str] | None = None
    """Axes of `mesh` whose ranks get different rows. None for axes with the usual names."""
