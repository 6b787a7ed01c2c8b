"""The single-device run for a low-precision layout: one device computes each rank's part with the rank's casts.

Parameters stay in the training's precision and are cast at every step. Each part of a microbatch goes through the same casts. The
parts' gradients are added in the layout's element type and divided as the layout divides. Correct ranks can then differ only by
that sum's order and by arithmetic in the training's own precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from equivcheck.layouts.base.data_rows import rows_of
from equivcheck.layouts.base.rounding import Rounding
from equivcheck.oracle.reference.perturbed_rounding import Jitter
from equivcheck.oracle.reference.reduction import AccumulatedGradients, Averaging, Gradients
from equivcheck.scenario import Training
from equivcheck.scenario.rounding import ElementType, LowPrecision
from equivcheck.training.accumulate import backward, microbatch_loss, scalar_value
from equivcheck.training.layers.module import use_rank_implementations
from equivcheck.training.layers.parameters import is_norm_parameter
from equivcheck.training.loop import single_device_setup
from equivcheck.training.material import Batch, material
from equivcheck.training.model import build_model, offset_of
from equivcheck.training.setup import Setup


def rounded_setup(
    training: Training, rounding: Rounding, parameters: Mapping[str, torch.Tensor] | None = None, jitter: Jitter | None = None
) -> Setup:
    """Set up a training on one device with the casts of a low-precision layout, such as FSDP2 with bfloat16 parameters.

    `rounding` lists these casts. `parameters` are the initial parameters; None for those of the training. A perturbed run passes
    a `jitter`, which changes summation orders and single roundings.
    """
    setup = single_device_setup(training, parameters)
    twin = MixedPrecisionModel(training, rounding, jitter or Jitter())
    setup.parts, setup.compute = [twin], twin.compute
    setup.loss_scale, setup.gradient_scale = rounding.num_parts, rounding.gradient_scale
    if rounding.autocast is not None:
        setup.forward_context = partial(torch.autocast, "cpu", dtype=_dtype(rounding.autocast))
    return setup


class MixedPrecisionModel(nn.Module):
    """A copy of the model with parameters cast as the layout casts them. It writes reduced gradients to the original model."""

    def __init__(self, training: Training, rounding: Rounding, jitter: Jitter) -> None:
        super().__init__()
        self.rounding, self.jitter = rounding, jitter
        self.averaging = Averaging(
            division=rounding.division,
            divisor=rounding.divisor or rounding.num_parts,
            shards=rounding.shards,
            ordered=jitter.ordered,
        )
        self.averaging_again = replace(self.averaging, division=rounding.division_again or rounding.division)
        self.were_reduced: set[str] = set()
        self.dtype = _dtype(rounding.compute or ElementType(training.precision.value))
        self.reduced = None if rounding.reduce is None else _dtype(rounding.reduce)
        self.widens = self.reduced is not None and self.reduced.itemsize > self.dtype.itemsize
        drawn = material(training).parameters
        cast = {name: values.clone() if self._keeps(name) else values.to(self.dtype) for name, values in drawn.items()}
        self.twin = build_model(training.model, cast, training.data.batch_dim)
        # Other operations may round their results at other places.
        use_rank_implementations(self.twin)
        if training.model.offset:
            # Buffers are not cast.
            self.twin.offset = offset_of(training.model, _dtype(ElementType(training.precision.value)))
        self.cast = dict(self.twin.named_parameters())

    def _keeps(self, name: str) -> bool:
        return self.rounding.keeps_norms and is_norm_parameter(name)

    def forward(self, inputs: torch.Tensor, masks: tuple[torch.Tensor | None, ...], step: int) -> torch.Tensor:
        """Run the cast model: map (rows, features) to (rows, outputs)."""
        cast = tuple(None if mask is None else mask.to(self.dtype) for mask in masks)
        fed = inputs.to(self.dtype) if inputs.is_floating_point() else inputs
        outputs: torch.Tensor = self.twin(fed, cast, step)
        if self.rounding.output is None:
            return outputs
        return self.jitter.rounded(outputs, outputs.to(_dtype(self.rounding.output)))

    def compute(self, setup: Setup, microbatches: Sequence[Batch], index: int) -> float:
        """Compute gradients for step `index` like the layout's ranks, and return the mean loss over these ranks."""
        self.jitter.begin(index)
        masters = dict(setup.model.named_parameters())
        self._load(masters)
        gradients = self._accumulated(masters)
        total = 0.0
        for number, batch in enumerate(microbatches):
            last = number == len(microbatches) - 1
            for part in range(self.rounding.num_parts):
                if self.rounding.grad_dtype:
                    self._accept(gradients, part, reduces=last or not self.rounding.when.once)
                total += self._backward(setup, batch, index, part, gradients)
            gradients.end_microbatch(last=last)
        for name, gradient in gradients.reduced[0].items():
            masters[name].grad = gradient
        if "forwards" in dict(setup.model.named_buffers()):
            setup.model.get_buffer("forwards").add_(len(microbatches))
        return total / self.rounding.num_parts

    def _load(self, masters: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, cast in self.cast.items():
                cast.copy_(masters[name])
            self.jitter.flip(self.cast, masters)

    def _accumulated(self, masters: Mapping[str, torch.Tensor]) -> AccumulatedGradients:
        rounding = self.rounding
        kept = {name: master.grad for name, master in masters.items() if master.grad is not None}
        self.were_reduced = set(kept)
        waits_rounded = rounding.accumulates_reduced and rounding.when.once and rounding.reduce is not None
        return AccumulatedGradients(
            [kept] * rounding.num_parts,
            partial(self._reduced, masters, {}),
            when=rounding.when,
            waits_as=self._rounded if waits_rounded else None,
        )

    def _backward(self, setup: Setup, batch: Batch, index: int, part: int, gradients: AccumulatedGradients) -> float:
        loss = microbatch_loss(setup, rows_of(batch, part, self.rounding.num_parts), index, batch.rows)
        backward(setup, loss)
        gradients.add(
            part, {name: self._left(cast.grad, cast.dtype) for name, cast in self.cast.items() if cast.grad is not None}
        )
        for cast in self.cast.values():
            cast.grad = None
        return scalar_value(loss)

    def _accept(self, gradients: AccumulatedGradients, part: int, *, reduces: bool) -> None:
        for name, cast in self.cast.items():
            # As `FSDPParamGroup._set_unsharded_grad_dtypes` does. A gradient that is reduced at once, or added to a waiting one,
            # needs no cast to the wider type.
            as_computed = self.widens and (reduces or gradients.waits(part, name))
            cast.grad_dtype = None if as_computed else self.reduced

    def _left(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rounded = self.rounding.grad_dtype and not self.widens
        return self.jitter.rounded(gradient.to(dtype), gradient) if rounded else gradient

    def _rounded(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.reduced is None:
            return gradient
        return self.jitter.rounded(gradient, gradient.to(self.reduced, copy=True))

    def _reduced(
        self, masters: Mapping[str, torch.Tensor], kept: dict[str, list[torch.Tensor]], waiting: list[Gradients], last: bool
    ) -> list[Gradients]:
        means = Gradients()
        for name, master in masters.items():
            parts = [self._rounded(gradients[name]) for gradients in waiting if name in gradients]
            if not parts:
                continue
            averaging = self.averaging_again if name in self.were_reduced else self.averaging
            self.were_reduced.add(name)
            sums = averaging.sums(parts)
            if name in kept:
                sums = list(map(torch.add, kept[name], sums))
            if self.rounding.replicas_once and not last:
                kept[name] = sums
            else:
                means[name] = averaging.mean_of_sums(sums).to(master.dtype)
        return [means] * self.rounding.num_parts


def _dtype(kind: ElementType | LowPrecision) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, kind.value)
    return dtype
