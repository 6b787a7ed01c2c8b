"""The reference of a layout that rounds: one device that computes each rank's part and rounds where that rank does.

Parameters are kept in the training's precision and cast anew at every step. Each part of a microbatch goes through the same
casts, and the parts' gradients are added up in the element type and divided in the way of the layout. What is left to differ is
the order of that sum and arithmetic in the training's own precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from equivcheck.layouts.data_rows import rows_of
from equivcheck.layouts.rounding import Division, Rounding
from equivcheck.reference.perturbed_rounding import Jitter
from equivcheck.scenario import Training
from equivcheck.scenario.rounding import ElementType, LowPrecision
from equivcheck.train.accumulate import part_loss, scalar
from equivcheck.train.material import Batch, material
from equivcheck.train.model import build_model, offset_of
from equivcheck.train.setup import Setup
from equivcheck.train.single_device import single_device

Gradients = dict[str, torch.Tensor]
"""Gradients of one part that wait for a reduction, by the name of their parameter."""


def rounded_setup(
    training: Training, rounding: Rounding, parameters: Mapping[str, torch.Tensor] | None = None, jitter: Jitter | None = None
) -> Setup:
    """The setup of one device that rounds as a layout does; `jitter` says where it may as well round otherwise."""
    setup = single_device(training, parameters)
    twin = MixedPrecisionModel(training, rounding, jitter or Jitter())
    setup.module, setup.compute, setup.loss_scale = twin, twin.compute, rounding.num_parts
    if rounding.autocast is not None:
        setup.around_forward = _autocast(rounding.autocast)
    return setup


def _autocast(kind: LowPrecision) -> Callable[[], AbstractContextManager[object]]:
    return lambda: torch.autocast("cpu", dtype=_dtype(kind))


class MixedPrecisionModel(nn.Module):
    """The model with parameters as they are computed with, and how its gradients become those of the model itself."""

    def __init__(self, training: Training, rounding: Rounding, jitter: Jitter) -> None:
        super().__init__()
        self.rounding, self.jitter = rounding, jitter
        self.dtype = None if rounding.compute is None else _dtype(rounding.compute)
        drawn = material(training).parameters
        cast = {name: values.to(self.dtype) for name, values in drawn.items()}
        self.twin = build_model(training.model, cast, training.data.batch_dim)
        if training.model.offset:
            # Buffers are not cast.
            self.twin.offset = offset_of(training.model, _dtype(ElementType(training.precision.value)))
        self.cast = dict(self.twin.named_parameters())

    def forward(self, inputs: torch.Tensor, masks: tuple[torch.Tensor | None, ...], step: int) -> torch.Tensor:
        """Map (rows, features) to (rows, outputs)."""
        cast = tuple(None if mask is None else mask.to(self.dtype) for mask in masks)
        outputs: torch.Tensor = self.twin(inputs.to(self.dtype), cast, step)
        if self.rounding.output is None:
            return outputs
        return self.jitter.rounded(outputs, outputs.to(_dtype(self.rounding.output)))

    def compute(self, setup: Setup, microbatches: Sequence[Batch], index: int) -> float:
        """Leave the gradients of a step as a layout leaves them; returns the mean of the parts' losses."""
        self.jitter.begin(index)
        masters = dict(setup.model.named_parameters())
        self._load(masters)
        waiting = [self._kept(masters) for _ in range(self.rounding.num_parts)]
        total = 0.0
        for number, batch in enumerate(microbatches):
            total += sum(self._backward(setup, batch, index, part, waits) for part, waits in enumerate(waiting))
            if number == len(microbatches) - 1 or not self.rounding.once:
                self._reduce(masters, waiting)
        if "forwards" in dict(setup.model.named_buffers()):
            setup.model.get_buffer("forwards").add_(len(microbatches))
        return total / self.rounding.num_parts

    def _load(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Cast the model's parameters as they are now."""
        with torch.no_grad():
            for name, cast in self.cast.items():
                cast.copy_(masters[name])
            self.jitter.flip(self.cast, masters)

    def _kept(self, masters: Mapping[str, torch.Tensor]) -> Gradients:
        """What a part begins to accumulate with: what is there already, if the layout keeps gradients whole."""
        if not self.rounding.whole:
            return {}
        return {name: master.grad.clone() for name, master in masters.items() if master.grad is not None}

    def _backward(self, setup: Setup, batch: Batch, index: int, part: int, waiting: Gradients) -> float:
        """Add a part's gradients to those that wait; returns the part's loss."""
        loss = part_loss(setup, rows_of(batch, part, self.rounding.num_parts), index, batch.rows)
        loss.backward()  # type: ignore[no-untyped-call]
        for name, cast in self.cast.items():
            if cast.grad is None:
                continue
            if name in waiting:
                waiting[name] += cast.grad
            else:
                waiting[name] = self._waits_as(cast.grad)
            cast.grad = None
        return scalar(loss)

    def _waits_as(self, gradient: torch.Tensor) -> torch.Tensor:
        """A part's gradient as it waits for those of further microbatches."""
        rounding = self.rounding
        if rounding.accumulates_reduced and rounding.once and rounding.reduce is not None:
            return self._rounded(gradient, rounding.reduce)
        return gradient

    def _rounded(self, gradient: torch.Tensor, kind: ElementType) -> torch.Tensor:
        return self.jitter.rounded(gradient, gradient.to(_dtype(kind), copy=True))

    def _reduce(self, masters: Mapping[str, torch.Tensor], waiting: list[Gradients]) -> None:
        """Average the parts' gradients into those of the model."""
        for name, master in masters.items():
            parts = [gradients[name] for gradients in waiting if name in gradients]
            if not parts:
                continue
            mean = self._mean(parts).to(master.dtype)
            if self.rounding.whole or master.grad is None:
                master.grad = mean
            else:
                master.grad += mean
        for gradients in waiting:
            gradients.clear()
            gradients.update(self._kept(masters))

    def _mean(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The mean of as many gradients as there are parts."""
        rounding = self.rounding
        if rounding.reduce is not None:
            parts = [self._rounded(part, rounding.reduce) for part in parts]
        before, after = _divisors(rounding)
        parts = [part / before for part in parts]
        rows = [parts[start : start + rounding.shards] for start in range(0, len(parts), rounding.shards)]
        total = self._sum([self._sum(row) for row in rows])
        return total / after

    def _sum(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The sum of one stage, divided if the layout divides after each."""
        first, *others = self.jitter.ordered(parts)
        for other in others:
            first = first + other
        return first / len(parts) if self.rounding.division is Division.AFTER else first


def _divisors(rounding: Rounding) -> tuple[float, float]:
    """What each part is divided by before the sums, and what the last sum is divided by."""
    count = rounding.num_parts
    if rounding.division is Division.BEFORE:
        return count, 1
    if rounding.division is Division.AFTER:
        return 1, 1
    power = 1
    while count % power == 0 and count / power > power:
        power *= 2
    return power, count / power


def _dtype(kind: ElementType | LowPrecision) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, kind.value)
    return dtype
