"""The one train loop: the reference and every rank of every layout run it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from equivcheck.scenario import ClipNorm, ClipValue, Training, ZeroGrad
from equivcheck.train.material import Batch, material
from equivcheck.train.optimizer import build_schedule
from equivcheck.train.read import buffer_snapshot, snapshot, state_snapshot
from equivcheck.train.setup import Setup
from equivcheck.train.trace import Piece, Slot, Snapshot, Step, Trace


def train(setup: Setup, steps: Sequence[Sequence[Batch]] | None = None) -> Trace:
    """Train as the setup says, on the training's own batches unless others are given, and keep what every step leaves."""
    training = setup.training
    slots = setup.find_slots(setup.model)
    pieces = tuple(piece for slot in slots for piece in slot.pieces)
    optimizer = setup.build_optimizer(training, [(slot.pieces[0].name, slot.parameter) for slot in slots])
    schedule = build_schedule(training.schedule, optimizer)
    kept = []
    for index, microbatches in enumerate(material(training).steps if steps is None else steps):
        kept.append(_step(setup, optimizer, slots, pieces, microbatches, index))
        if schedule is not None:
            schedule.step()
    return Trace(steps=tuple(kept), state=state_snapshot(optimizer, slots), buffers=buffer_snapshot(setup.model))


def _step(
    setup: Setup,
    optimizer: torch.optim.Optimizer,
    slots: tuple[Slot, ...],
    pieces: tuple[Piece, ...],
    microbatches: Sequence[Batch],
    index: int,
) -> Step:
    for hook in setup.before_step:
        hook(optimizer, index)
    optimizer.zero_grad(set_to_none=setup.training.zero_grad is ZeroGrad.NONE)
    loss = _accumulate(setup, microbatches, index)
    for hook in setup.before_update:
        hook(optimizer, index)
    gradients = _gradients(slots, pieces)
    clip_norm = _clip(setup, [slot.parameter for slot in slots])
    clipped = None if setup.training.clipping is None else _gradients(slots, pieces)
    optimizer.step()
    parameters = snapshot(slots, pieces, [slot.parameter for slot in slots])
    return Step(loss=loss, gradients=gradients, clip_norm=clip_norm, clipped=clipped, parameters=parameters)


def _accumulate(setup: Setup, microbatches: Sequence[Batch], index: int) -> float:
    total = 0.0
    for number, batch in enumerate(microbatches):
        with setup.accumulation(number == len(microbatches) - 1):
            loss = _loss(setup, setup.take(batch), index, batch.inputs.shape[0])
            loss.backward()  # type: ignore[no-untyped-call]
        total += scalar(loss)
    return total


def _loss(setup: Setup, batch: Batch, index: int, rows: int) -> torch.Tensor:
    """The loss of a microbatch, scaled so that the sum over microbatches (and, for a mean, the mean over ranks) is the step's loss."""
    training = setup.training
    outputs = setup.module(batch.inputs, batch.masks, index)
    loss = loss_of(training, outputs, batch.targets)
    share = rows / training.data.batch if training.loss.is_mean else setup.loss_scale
    return loss if share == 1.0 else loss * share


def loss_of(training: Training, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss noun applied to outputs and targets of shape (rows, outputs)."""
    if training.loss.is_linear:
        difference = outputs - targets
        return difference.mean() if training.loss.is_mean else difference.sum()
    return functional.mse_loss(outputs, targets, reduction="mean" if training.loss.is_mean else "sum")


def _clip(setup: Setup, parameters: list[torch.Tensor]) -> float | None:
    clipping = setup.training.clipping
    if isinstance(clipping, ClipNorm):
        return scalar(setup.clip_norm(setup.module, parameters, clipping))
    if isinstance(clipping, ClipValue):
        nn.utils.clip_grad_value_(parameters, clipping.clip_value)
    return None


def _gradients(slots: tuple[Slot, ...], pieces: tuple[Piece, ...]) -> Snapshot:
    return snapshot(slots, pieces, [slot.parameter.grad for slot in slots])


def scalar(value: torch.Tensor) -> float:
    """The full value of a scalar tensor, reduced over ranks first if it is a DTensor with a pending sum."""
    value = value.detach()
    return float(value.full_tensor() if isinstance(value, DTensor) else value)
