"""The train loop, used by the single-device run and by every rank in every layout."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import torch

from equivcheck.scenario import ClipNorm, ClipValue, Training, ZeroGrad
from equivcheck.system.choice import PrintableEnum
from equivcheck.training.accumulate import accumulate, scalar_value
from equivcheck.training.material import Batch, material
from equivcheck.training.model import build_model
from equivcheck.training.read import buffer_snapshot, full_snapshot, snapshot, state_snapshot
from equivcheck.training.setup import Setup
from equivcheck.training.update.clipping import clip_by_value
from equivcheck.training.update.optimizer import build_schedule
from equivcheck.training.update.router_bias import update_router_biases
from equivcheck.worlds.trace.stage import Stage
from equivcheck.worlds.trace.trace import Piece, Slot, Snapshot, Step, Trace


class Pause(PrintableEnum):
    """Point in a step at which a training pauses, so that other trainings can run in turns with it."""

    ZEROED = "zeroed"
    """Before forward."""
    UPDATED = "updated"
    """After the update, before parameters are read."""


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    setup: Setup
    slots: tuple[Slot, ...]
    pieces: tuple[Piece, ...]
    optimizer: torch.optim.Optimizer

    def gradients(self) -> Snapshot:
        return snapshot(self.slots, self.pieces, [slot.parameter.grad for slot in self.slots])

    def parameters(self) -> Snapshot:
        return snapshot(self.slots, self.pieces, [slot.parameter for slot in self.slots])

    def full_gradients(self) -> Snapshot:
        return full_snapshot(self.slots, [slot.parameter.grad for slot in self.slots])

    def full_parameters(self) -> Snapshot:
        return full_snapshot(self.slots, [slot.parameter for slot in self.slots])


def train(setup: Setup, steps: Sequence[Sequence[Batch]] | None = None) -> Trace:
    """Train with this setup and record every step. `steps` replaces the training's own microbatches."""
    running = train_in_turns(setup, steps)
    while True:
        try:
            next(running)
        except StopIteration as end:
            trace: Trace = end.value
            return trace


def train_in_turns(setup: Setup, steps: Sequence[Sequence[Batch]] | None = None) -> Generator[Pause, None, Trace]:
    """Train like `train`, but as a generator that yields twice per step. The caller can run several trainings in turns.

    The generator returns the trace.
    """
    training, slots = setup.training, setup.find_slots(setup.model)
    pieces = tuple(piece for slot in slots for piece in slot.pieces)
    optimizer = setup.build_optimizer(training, [(slot.pieces[0].name, slot.parameter) for slot in slots])
    run = _Run(setup, slots, pieces, optimizer)
    schedule = build_schedule(training.schedule, optimizer)
    for hook in setup.before_training:
        hook(optimizer, schedule)
    kept = []
    batches = material(training).steps if steps is None else steps
    span = range(len(batches)) if setup.span is None else setup.span
    for index in span:
        kept.append((yield from _step(run, batches[index], index, setup.reads_full_tensors and index == span[-1])))
        if schedule is not None:
            schedule.step()
    state, buffers = state_snapshot(setup.state_of(optimizer), slots), buffer_snapshot(setup.model)
    for hook in setup.after_training:
        hook(optimizer, schedule)
    return Trace(steps=tuple(kept), state=state, buffers=buffers)


def _step(run: _Run, microbatches: Sequence[Batch], index: int, reads_full: bool) -> Generator[Pause, None, Step]:
    setup, optimizer = run.setup, run.optimizer
    setup.announce(Stage.COMPUTE, index)
    for hook in setup.before_step:
        hook(optimizer, index)
    optimizer.zero_grad(set_to_none=setup.training.zero_grad is ZeroGrad.NONE)
    yield Pause.ZEROED
    with setup.compute_context():
        loss = setup.compute(setup, microbatches, index)
        loss = None if loss is None else setup.full_loss(loss)
    setup.announce(Stage.COMPUTE, index)
    if setup.training.model.has_router_bias:
        update_router_biases(setup.model, setup.sum_counts)
    for hook in setup.before_update:
        hook(optimizer, index)
    setup.announce(Stage.READING, index)
    gradients = run.gradients()
    full_gradients = run.full_gradients() if reads_full else None
    setup.announce(Stage.CLIPPING, index)
    clipping, parameters, norm = setup.training.clipping, [slot.parameter for slot in run.slots], None
    if isinstance(clipping, ClipNorm):
        norm = setup.clip_norm(setup.module, parameters, clipping)
    elif isinstance(clipping, ClipValue):
        clip_by_value(parameters, clipping)
    setup.announce(Stage.READING, index)
    clip_norm = None if norm is None else scalar_value(norm)  # announced first, because reading a DTensor norm communicates
    clipped = None if clipping is None else run.gradients()
    setup.announce(Stage.UPDATE, index)
    setup.update(optimizer)
    yield Pause.UPDATED
    setup.announce(Stage.READING, index)
    return Step(
        loss=loss,
        gradients=gradients,
        clip_norm=clip_norm,
        clipped=clipped,
        parameters=run.parameters(),
        full_gradients=full_gradients,
        full_parameters=run.full_parameters() if reads_full else None,
    )


def single_device_setup(training: Training, parameters: Mapping[str, torch.Tensor] | None = None) -> Setup:
    """Build the setup for a training on one device. `parameters` replaces the training's own initial parameters."""
    initial = material(training).parameters if parameters is None else parameters
    model = build_model(training.model, initial, training.data.batch_dim)
    return Setup(training=training, model=model, parts=[model], compute=accumulate)
