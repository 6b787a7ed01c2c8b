"""Setup for one rank's training, with every part of the loop that a layout or a mutant can replace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler

from equivcheck.scenario import ClipNorm, Layout, Training
from equivcheck.training.balance import Counts, counts_of_microbatch
from equivcheck.training.clipping import clip_by_norm, norm_of_norms
from equivcheck.training.loss import loss_of
from equivcheck.training.material import Batch
from equivcheck.training.optimizer import build_optimizer
from equivcheck.training.read import State, default_slots
from equivcheck.worlds.trace.stage import Stage
from equivcheck.worlds.trace.trace import Slot


def unsharded_state(optimizer: torch.optim.Optimizer) -> State:
    """Return an optimizer's state without communication."""
    return optimizer.state


def optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.step()`."""
    optimizer.step()


@dataclass(slots=True, kw_only=True)
class Setup:
    """Model and functions for the train loop.

    The functions train on a single device until layouts replace them, one layout after another.
    """

    training: Training
    """Training to run."""
    model: nn.Module
    """Unwrapped model. Its parameters have canonical names, apart from wrapper prefixes."""
    parts: list[nn.Module]
    """Modules to call: the model, or this rank's pipeline stages, each with the wrappers around it."""
    has_stages: bool = False
    """Whether the parts are pipeline stages, which a schedule calls."""
    take: Callable[[Batch], Batch] = lambda batch: batch
    """Function to select this rank's part of a microbatch."""
    loss: Callable[[Training, torch.Tensor, torch.Tensor, float], torch.Tensor] = loss_of
    """Function to compute the loss from outputs, targets and the divisor for labels."""
    loss_scale: float = 1.0
    """Factor on a sum loss before backward: the number of data-parallel ranks, because these ranks average gradients."""
    full_counts: Callable[[nn.Module, Counts, Batch, int], Counts] = counts_of_microbatch
    """Function to compute routing counts over a whole microbatch, given the counts for this rank's part.

    Called after forward with the model, the counts, the batch and the step index, if layers have a load-balancing loss."""
    gradient_scale: float = 1.0
    """Factor on the loss in backward but not in the reported loss.
    The factor undoes a gradient divisor other than the number of ranks."""
    accumulation: Callable[[bool], AbstractContextManager[object]] = lambda _last: nullcontext()
    """Context around a microbatch's forward and backward. The argument says whether this is the last microbatch."""
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context around a microbatch's forward and loss, without backward."""
    compute_context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context around forward and backward of all microbatches in a step."""
    compute: Callable[[Setup, Sequence[Batch], int], float | None]
    """Function to compute the gradients of a step's microbatches, given the step index. Returns the loss if this rank has it."""
    full_loss: Callable[[float], float] = lambda loss: loss
    """Function to complete a step's loss, given the part of it that this rank has."""
    clip_norm: Callable[[nn.Module, list[torch.Tensor], ClipNorm], torch.Tensor] = clip_by_norm
    """Function to clip gradients by norm. Returns the norm before clipping."""
    total_norm: Callable[[list[torch.Tensor], ClipNorm], torch.Tensor] = norm_of_norms
    """Function to compute a norm over gradients and their shards on other ranks. Pipelines combine such norms over stages."""
    update: Callable[[torch.optim.Optimizer], None] = optimizer_step
    """Function to update the parameters with the optimizer."""
    find_slots: Callable[[nn.Module], tuple[Slot, ...]] = default_slots
    """Function to find the pieces of each parameter that this rank holds."""
    build_optimizer: Callable[[Training, Iterable[tuple[str, torch.Tensor]]], torch.optim.Optimizer] = build_optimizer
    """Function to build the optimizer from (name, parameter) pairs.
    A parameter with several pieces has the name of the first piece."""
    state_of: Callable[[torch.optim.Optimizer], State] = unsharded_state
    """Function to return this rank's optimizer state by parameter. A parameter without state on this rank is missing."""
    mesh: DeviceMesh | None = None
    """Device mesh; None on one device."""
    layout: Layout | None = None
    """Applied layout; None on one device."""
    reads_full_tensors: bool = False
    """Whether `full_tensor()` of DTensors is recorded too, at the last step."""
    span: range | None = None
    """Consecutive steps to run; None for all."""
    before_training: list[Callable[[torch.optim.Optimizer, LRScheduler | None], None]] = field(default_factory=list)
    """Hooks before the first step, with optimizer and schedule."""
    after_training: list[Callable[[torch.optim.Optimizer, LRScheduler | None], None]] = field(default_factory=list)
    """Hooks after the last step and all reading, with optimizer and schedule."""
    release: Callable[[], None] = lambda: None
    """Called at the end, even after an error, to free memory."""
    announce: Callable[[Stage, int], None] = lambda _stage, _step: None
    """Called with stage and step index when a stage starts."""
    before_step: list[Callable[[torch.optim.Optimizer, int], None]] = field(default_factory=list)
    """Hooks with optimizer and step index before gradients are zeroed."""
    before_update: list[Callable[[torch.optim.Optimizer, int], None]] = field(default_factory=list)
    """Hooks with optimizer and step index after backward, before gradients are read."""

    @property
    def module(self) -> nn.Module:
        """Return the module with all this rank's parameters: the called module, or the model if stages are called."""
        return self.model if self.has_stages else self.parts[0]
