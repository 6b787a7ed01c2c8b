"""Reads a training's tensors at each point in a step that `compare` compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from equivcheck.recording.adapters.adapter import Adapter
from equivcheck.recording.tensors import gradients_of, local_loss, local_of, state_of
from equivcheck.recording.trace import Entry, Moment
from equivcheck.recording.watch.models import Models
from equivcheck.recording.watch.settings import settings_of
from equivcheck.recording.watch.step_record import StepRecord, rename_entry
from equivcheck.worlds.trace.trace import Slot

_MAX_ACCUMULATED = 8
"""Maximum microbatches in a step, apart from the first, before which accumulated gradients are read."""


class Reader:
    """Reads parameters, gradients, optimizer state and buffers, and writes their sketches into the record of the current step."""

    def __init__(self, adapter: Adapter, moved: int) -> None:
        self._adapter, self._moved = adapter, moved
        self.models = Models(adapter)
        self.record = StepRecord()
        """Records of the present step."""
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        """Optimizers of torch that have made a step, by id."""
        self._parameters: list[Entry] = []
        self._found_by_hand: list[Entry] = []

    def watch_called(self, module: nn.Module, *, is_wanted: bool) -> None:
        """Find and record the initial parameters of a module when it is called for training.

        In a run recorded with ``moved``, also perturb these parameters. Nothing is recorded unless `is_wanted`.
        """
        before = self.models.slots
        if new := self.models.add_called(module):
            if self._moved:
                self._adapter.move_parameters(new, self._moved - 1)
            self._read_start(before, new, is_wanted=is_wanted)

    def _read_start(self, before: Sequence[Slot], new: Sequence[Slot], *, is_wanted: bool) -> None:
        """Read new parameters, and rename the other parameters if their root was replaced."""
        names = self.models.new_names(before)
        self.record.rename(names)
        self._parameters = [rename_entry(entry, names) for entry in self._parameters]
        start = list(self._adapter.entries(Moment.START, [(slot.pieces, slot.parameter) for slot in new], exactly=True))
        self._parameters += start
        self.record.entries += start if is_wanted else []

    def read_before_backward(self, tensors: Any, number: int) -> None:
        """Read the losses in `tensors`, and the gradients accumulated so far.

        `number` is the number of earlier backward passes in the step.
        """
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        # Pipelines also start backward passes from nodes in the graph.
        self.record.losses += [local_loss(each) for each in given if isinstance(each, torch.Tensor) and each.numel() == 1]
        if number > _MAX_ACCUMULATED:
            return
        gradients = gradients_of(self.models.trained_slots)
        # FSDP1's `no_sync` leaves unsharded gradients, of which some have their shard's size by chance.
        if all(local_of(tensor).numel() == sum(piece.numel for piece in pieces) for pieces, tensor in gradients):
            found = [replace(each, microbatch=number) for each in self._adapter.entries(Moment.ACCUMULATED, gradients)]
            is_zero = not number and not any(entry.sketch.squares for entry in found)
            self.record.accumulated[number] = [] if is_zero else found

    def read_unclipped(self, parameters: Sequence[torch.Tensor]) -> None:
        """Read the gradients of `parameters` before they are clipped."""
        self.record.entries += self._adapter.entries(Moment.UNCLIPPED, gradients_of(self.models.slots_for(parameters)))

    def read_update(self, optimizer: torch.optim.Optimizer, *, is_wanted: bool) -> None:
        """Read an optimizer's settings and gradients at the start of its step. Nothing is recorded unless `is_wanted`."""
        self.optimizers[id(optimizer)] = optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        before = self.models.slots
        if new := self.models.add_optimized(parameters):
            self._read_start(before, new, is_wanted=is_wanted)
        if not is_wanted:
            return
        self.record.settings += settings_of(optimizer)
        # A GradScaler gives these to fused optimizers, because they scale gradients themselves.
        scale, found_inf = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if found_inf is not None and float(found_inf):
            self.record.num_skipped += 1
        else:
            factor = 1.0 if scale is None else 1.0 / float(scale)
            found = self._adapter.entries(Moment.GRADIENT, gradients_of(self.models.slots_for(parameters)))
            self.record.entries += [replace(each, sketch=each.sketch.times(factor)) for each in found]

    def is_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a `GradScaler` skips this optimizer's update, because its gradients are infinite or NaN."""
        gradients = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        return not all(bool(local_of(gradient).isfinite().all()) for gradient in gradients)

    def read_by_hand(self) -> None:
        """Read all gradients, because the script may update parameters without an optimizer.

        Gradients from an earlier call in the same step are dropped.
        """
        if not self.optimizers:
            self._found_by_hand = list(self._adapter.entries(Moment.GRADIENT, gradients_of(self.models.slots)))

    def is_updated_by_hand(self) -> bool:
        """Whether parameters have changed in this step, although the script uses no optimizer of torch."""
        if self.optimizers:
            return False
        before = {(entry.piece, entry.dtype): entry.sketch.sums for entry in self._parameters}
        now = self._adapter.entries(Moment.UPDATE, self.models.parameters())
        pairs = ((before.get((entry.piece, entry.dtype)), entry.sketch.sums) for entry in now)
        return any(sums is not None and not np.array_equal(sums, other, equal_nan=True) for sums, other in pairs)

    def read_parameters(self) -> None:
        """Read all parameters after an update."""
        self._adapter.require_right_copies()
        self._parameters = list(self._adapter.entries(Moment.UPDATE, self.models.parameters()))
        self.record.entries += [*([] if self.optimizers else self._found_by_hand), *self._parameters]

    def read_end(self) -> None:
        """Read optimizer state and buffers, at the end of the recording."""
        state = [row for optimizer in self.optimizers.values() for row in state_of(optimizer, self.models.trained_slots)]
        self.record.entries += self._adapter.entries(Moment.STATE, state)
        self.record.entries += self._adapter.entries(Moment.BUFFER, self.models.buffers(), exactly=True)

    def begin_step(self) -> None:
        """Begin an empty record for the next step."""
        self.record, self._found_by_hand = StepRecord(), []
