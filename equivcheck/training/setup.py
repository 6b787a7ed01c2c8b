"""Everything that the train loop needs on one rank. Layouts and mutants replace parts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.optim.lr_scheduler import LRScheduler

from equivcheck.scenario import ClipNorm, Layout, Training
from equivcheck.training.balance import Counts, counts_of_microbatch
from equivcheck.training.loss import loss_of
from equivcheck.training.material import Batch
from equivcheck.training.read import State, default_slots
from equivcheck.training.update.clipping import clip_by_norm, norm_of_norms
from equivcheck.training.update.optimizer import build_optimizer
from equivcheck.training.update.router_bias import SumCounts
from equivcheck.worlds.trace.stage import Stage
from equivcheck.worlds.trace.trace import Slot


def unsharded_state(optimizer: torch.optim.Optimizer) -> State:
    """Return `optimizer.state` unchanged, without communication. This is the default for `Setup.state_of`."""
    return optimizer.state


def optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """Take an optimizer step. This is the default for `Setup.update`."""
    optimizer.step()


@dataclass(slots=True, kw_only=True)
class Setup:
    """Model and functions that the train loop uses on one rank.

    The default functions train on a single device. Each layout replaces some of them.
    """

    training: Training
    """The training to run."""
    model: nn.Module
    """The model without wrappers. Its parameters have canonical names, apart from wrapper prefixes."""
    parts: list[nn.Module]
    """Modules that the train loop calls, with the wrappers around them: the model, or this rank's pipeline stages."""
    has_stages: bool = False
    """Whether `parts` are pipeline stages, which a pipeline schedule calls."""
    num_chunks: int = 1
    """Number of chunks of rows in which each microbatch is computed; unlike chunks are padded. Pipelines set it."""
    activation_mesh: DeviceMesh | None = None
    """Mesh of the DTensors in layers' modules. None if they compute plain tensors."""
    activation_placements: tuple[Placement, ...] = ()
    """DTensor placement of each layer's input, and as the last entry the last layer's output placement.

    Empty if layers' modules compute plain tensors.
    """
    take: Callable[[Batch], Batch] = lambda batch: batch
    """Function that selects this rank's rows or positions from a microbatch."""
    loss: Callable[[Training, torch.Tensor, torch.Tensor, float], torch.Tensor] = loss_of
    """Function that computes the loss from training, outputs, targets and the divisor."""
    loss_scale: float = 1.0
    """Factor on a loss that sums over rows. It is the number of data-parallel ranks, because these ranks average gradients."""
    full_counts: Callable[[nn.Module, Counts, Batch, int], Counts] = counts_of_microbatch
    """Function that returns the tokens per expert over a whole microbatch, given those for this rank's part.

    Called after forward with the model, the counts, the batch and the step index, if layers have a load-balancing loss.
    """
    sum_counts: SumCounts = lambda counts: counts
    """Function that sums the tokens per expert in a step over ranks with other rows or positions.

    Called after a step's backwards, if routers choose experts with a bias.
    """
    gradient_scale: float = 1.0
    """Factor on the loss in backward, but not in the recorded loss. It is not 1 if gradients are divided by another number than
    the number of ranks.
    """
    accumulation: Callable[[bool], AbstractContextManager[object]] = lambda _last: nullcontext()
    """Function that returns a context for one microbatch's forward and backward. Its argument says whether it is the last one."""
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Function that returns a context for one microbatch's forward and loss, without backward."""
    compute_context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Function that returns a context for a step's forwards and backwards."""
    compute: Callable[[Setup, Sequence[Batch], int], float | None]
    """Function that computes gradients from a step's microbatches and the step index. Returns the loss if this rank has it, else
    None.
    """
    full_loss: Callable[[float], float] = lambda loss: loss
    """Function that computes a step's full loss from this rank's part."""
    clip_norm: Callable[[nn.Module, list[torch.Tensor], ClipNorm], torch.Tensor] = clip_by_norm
    """Function that clips gradients by norm and returns the norm before clipping."""
    total_norm: Callable[[list[torch.Tensor], ClipNorm], torch.Tensor] = norm_of_norms
    """Function that returns the norm over gradients, including their shards on other ranks. Pipelines combine such norms over
    stages.
    """
    update: Callable[[torch.optim.Optimizer], None] = optimizer_step
    """Function that updates the parameters with the optimizer."""
    find_slots: Callable[[nn.Module], tuple[Slot, ...]] = default_slots
    """Function that returns, for each parameter, which elements this rank has."""
    build_optimizer: Callable[[Training, Iterable[tuple[str, torch.Tensor]]], torch.optim.Optimizer] = build_optimizer
    """Function that builds the optimizer from names and parameters. A parameter with several pieces has the first piece's name.
    """
    state_of: Callable[[torch.optim.Optimizer], State] = unsharded_state
    """Function that returns this rank's optimizer state by parameter. A parameter without state on this rank is missing."""
    mesh: DeviceMesh | None = None
    """Device mesh; None on one device."""
    layout: Layout | None = None
    """The layout that was applied; None on one device."""
    reads_full_tensors: bool = False
    """Whether `full_tensor()` for parameters and gradients is recorded too, in the last step."""
    span: range | None = None
    """Consecutive steps to run; None for all steps."""
    before_training: list[Callable[[torch.optim.Optimizer, LRScheduler | None], None]] = field(default_factory=list)
    """Functions called with optimizer and learning rate scheduler before the first step."""
    after_training: list[Callable[[torch.optim.Optimizer, LRScheduler | None], None]] = field(default_factory=list)
    """Functions called with optimizer and learning rate scheduler after the last step, when all values are recorded."""
    release: Callable[[], None] = lambda: None
    """Function called at the end, even after an error, to free memory."""
    announce: Callable[[Stage, int], None] = lambda _stage, _step: None
    """Function called with stage and step index when a stage starts."""
    before_step: list[Callable[[torch.optim.Optimizer, int], None]] = field(default_factory=list)
    """Functions called with optimizer and step index before gradients are zeroed."""
    before_update: list[Callable[[torch.optim.Optimizer, int], None]] = field(default_factory=list)
    """Functions called with optimizer and step index after backward, before gradients are recorded."""

    @property
    def module(self) -> nn.Module:
        """Module with all of this rank's parameters.

        If the rank calls its pipeline stages one by one, it is the model with these stages. Otherwise it is the only module that
        the rank calls.
        """
        return self.model if self.has_stages else self.parts[0]
