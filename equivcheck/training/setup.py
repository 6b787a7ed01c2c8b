"""What one rank trains with: every step of the loop that a layout (or a planted fault) may replace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler

from equivcheck.scenario import ClipNorm, Layout, Training
from equivcheck.training.balance import Counts, own_counts
from equivcheck.training.clipping import clip_by_norm
from equivcheck.training.loss import loss_of
from equivcheck.training.material import Batch
from equivcheck.training.optimizer import build_optimizer
from equivcheck.training.read import State, default_slots
from equivcheck.worlds.trace.stage import Stage
from equivcheck.worlds.trace.trace import Slot


def own_state(optimizer: torch.optim.Optimizer) -> State:
    """The state of an optimizer that keeps all of it itself."""
    return optimizer.state


def step(optimizer: torch.optim.Optimizer) -> None:
    """Update as the optimizer does."""
    optimizer.step()


@dataclass(slots=True, kw_only=True)
class Setup:
    """A model and how to train it, single-device unless a layout changes it. Mutable: layouts are applied one after the other."""

    training: Training
    """What is trained."""
    model: nn.Module
    """The model itself: its parameters, wrapper prefixes aside, have canonical names."""
    module: nn.Module
    """What is called: the model or a wrapper around it."""
    take: Callable[[Batch], Batch] = lambda batch: batch
    """The part of a microbatch that this rank computes on."""
    loss: Callable[[Training, torch.Tensor, torch.Tensor, float], torch.Tensor] = loss_of
    """The loss of outputs beside targets, of a training whose labels are divided by a number."""
    loss_scale: float = 1.0
    """Factor of a sum loss before backward: data-parallel ranks average gradients, so it is their number."""
    whole_counts: Callable[[nn.Module, Counts, Batch, int], Counts] = own_counts
    """How often units of layers are chosen in a whole microbatch, where they are in the part of it that this rank computes on.

    Called with the model, the part and the step's index after its forward, for layers that have a loss of their own."""
    gradient_scale: float = 1.0
    """Factor of a loss in backward, not in what is reported: undoes a division of gradients by another number than the ranks."""
    accumulation: Callable[[bool], AbstractContextManager[object]] = lambda _last: nullcontext()
    """Entered around forward and backward of a microbatch; told whether it is the step's last."""
    around_forward: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered around forward and loss of a microbatch, not around its backward."""
    around_compute: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered around forward and backward of all microbatches of a step."""
    compute: Callable[[Setup, Sequence[Batch], int], float | None]
    """Leaves the gradients of a step's microbatches and returns the step's loss, if this rank has it; told the step's index."""
    clip_norm: Callable[[nn.Module, list[torch.Tensor], ClipNorm], torch.Tensor] = clip_by_norm
    """Clips the gradients of parameters by norm and returns the norm before."""
    update: Callable[[torch.optim.Optimizer], None] = step
    """Lets the optimizer update the parameters from the gradients."""
    find_slots: Callable[[nn.Module], tuple[Slot, ...]] = default_slots
    """What this rank holds of each parameter of the model."""
    build_optimizer: Callable[[Training, Iterable[tuple[str, torch.Tensor]]], torch.optim.Optimizer] = build_optimizer
    """Builds the optimizer over (name, parameter) pairs; a parameter of several pieces has the name of its first."""
    state_of: Callable[[torch.optim.Optimizer], State] = own_state
    """Where the optimizer keeps this rank's state, by parameter; a parameter of which this rank has none is not there."""
    mesh: DeviceMesh | None = None
    """The ranks with the names of the axes; None on one device."""
    layout: Layout | None = None
    """How the training is spread; None on one device."""
    reads_full_tensors: bool = False
    """Whether what `full_tensor()` gives of DTensors is read as well, at the last step that is run."""
    span: range | None = None
    """The steps of the training that are run, in a row; None for all."""
    before_training: list[Callable[[torch.optim.Optimizer, LRScheduler | None], None]] = field(default_factory=list)
    """Called with the optimizer and the schedule before the first step that is run."""
    after_training: list[Callable[[torch.optim.Optimizer, LRScheduler | None], None]] = field(default_factory=list)
    """Called with both after the last one, when all has been read."""
    release: Callable[[], None] = lambda: None
    """Called when all is over, also after an error, to let go of what would stay in memory."""
    announce: Callable[[Stage, int], None] = lambda _stage, _step: None
    """Told of every stage of every step as it begins, with the step's index."""
    before_step: list[Callable[[torch.optim.Optimizer, int], None]] = field(default_factory=list)
    """Called with the optimizer and the step's index before gradients are zeroed."""
    before_update: list[Callable[[torch.optim.Optimizer, int], None]] = field(default_factory=list)
    """Called with the optimizer and the step's index after backward, before gradients are read."""
