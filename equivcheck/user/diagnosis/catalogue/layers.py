"""Mistakes in sharded layers: repeated or missing bias, missing reduction, positions split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from equivcheck.diagnosis.emulation.emulated_ranks import total_of
from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.suspects import wrong_elements
from equivcheck.diagnosis.words import gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.diverged import DivergedTraining, split_dim
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.ranks import build_model
from equivcheck.worlds.trace.differences import Phase

MAX_LAYERS = 16
"""Largest number of layers to try."""


def wrong_splits(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes in the way a linear layer is split. Each layer and each tensor-parallel axis is tried."""
    modules = {name: module for name, module in build_model(diverged.task).named_modules() if isinstance(module, nn.Linear)}
    for axis in diverged.same_row_axes:
        where = diverged.ranks_text((axis,))
        lost = f"is not summed over {where}: each rank continues with its partial sum"
        for name, module in list(modules.items())[:MAX_LAYERS]:
            if module.bias is not None:
                yield from _biases(name, diverged, axis)
            if split_dim(diverged, f"{name}.weight", axis) == 1:
                output = partial(_leave_output_partial, name=name, axis=axis)
                yield Mistake(Cause.PARTIAL_OUTPUT, f"the output of row-wise `{name}` {lost}", output)
            if diverged.first.phase is Phase.GRADIENT and split_dim(diverged, f"{name}.weight", axis) == 0:
                gradient = partial(_replace, name=name, axis=axis, forward=_partial_gradient)
                words = f"the gradient of the input of column-wise `{name}` {lost}"
                yield Mistake(Cause.PARTIAL_INPUT_GRADIENT, words, gradient)


def _biases(name: str, diverged: DivergedTraining, axis: str) -> Iterator[Mistake]:
    size, where, kind = diverged.size((axis,)), diverged.ranks_text((axis,)), diverged.ranks_kind((axis,))
    for factor, words in (
        (float(size), f"the bias of `{name}` is added on each of {where}, not once"),
        (1 / size, f"the bias of `{name}` is divided by {size}, the number of {kind}"),
        (0.0, f"the bias of `{name}` is left out of its output"),
    ):
        for of_gradient, more in ((1.0, ""), (factor, ", and so is its gradient")):
            change = partial(_scale_bias, name=name, factor=factor, of_gradient=of_gradient)
            yield Mistake(Cause.BIAS_ON_EVERY_RANK, words + more, change)


def _scale_bias(ranks: EmulatedUserRanks, *, name: str, factor: float, of_gradient: float) -> None:
    """Scale the bias in the output, and its gradient by another factor."""

    def scale_bias_in_output(module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor = module.bias
        return output + (of_gradient - 1) * (bias - bias.detach()) + (factor - 1) * bias.detach()

    for model in ranks.models:
        model.get_submodule(name).register_forward_hook(scale_bias_in_output)


Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """One rank's layer, with the weight elements that each rank holds."""

    ranks: EmulatedUserRanks
    rank: int
    linear: Any
    held: list[torch.Tensor]
    axis: str


def _replace(ranks: EmulatedUserRanks, *, name: str, axis: str, forward: Callable[[_Split], Forward]) -> None:
    held = [ranks.held.by(f"{name}.weight", rank) for rank in range(len(ranks.models))]
    for rank, model in enumerate(ranks.models):
        linear: Any = model.get_submodule(name)
        linear.forward = forward(_Split(ranks=ranks, rank=rank, linear=linear, held=held, axis=axis))


def _leave_output_partial(ranks: EmulatedUserRanks, *, name: str, axis: str) -> None:
    """Leave the layer's output as partial sums.

    Their gradients are still reduced, at the input to each column-wise layer.
    """
    _replace(ranks, name=name, axis=axis, forward=_partial_output)
    for other, module in ranks.models[0].named_modules():
        if isinstance(module, nn.Linear) and other != name and split_dim(ranks.diverged, f"{other}.weight", axis) == 0:
            _replace(ranks, name=other, axis=axis, forward=_summed_gradient)


def _partial_output(split: _Split) -> Forward:
    linear, held = split.linear, split.held[split.rank]
    return lambda inputs: functional.linear(inputs, linear.weight * held, linear.bias)


def _partial_gradient(split: _Split) -> Forward:
    """Return the full output, but the input gradient only from the rank's own weight rows."""
    linear = split.linear

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        own = functional.linear(inputs.detach(), linear.weight, linear.bias)
        part = functional.linear(inputs, (linear.weight * split.held[split.rank]).detach())
        outputs = split.ranks.exchange(split.rank, own.detach().clone(), lambda all_: [all_] * len(all_))
        full = own.detach().clone()
        for peer in split.ranks.peers(split.rank, (split.axis,)):
            columns = split.held[peer].any(1)
            full[..., columns] = outputs[peer][..., columns]
        return full + (own - own.detach()) + (part - part.detach())

    return forward


def _summed_gradient(split: _Split) -> Forward:
    own: Forward = split.linear.forward
    return lambda inputs: own(split.ranks.with_gradient(split.rank, inputs, (split.axis,), total_of))


_DIMS = (1, 0)
"""Dims along which a module's output may be split into positions: 1, or 0."""


def wrong_positions(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield possible mistakes: ranks split a module's output, such as by positions, but do not sum gradients over their parts.

    Each axis whose ranks have the same rows is tried.
    """
    names = tuple(name for name in wrong_elements(diverged, Phase.GRADIENT) if name in diverged.updated)
    for axis in diverged.same_row_axes:
        for dim in _DIMS if names else ():
            what, where = gradients(diverged, names), diverged.ranks_text((axis,))
            words = f"{what} not summed over {where}: each rank keeps the gradient of its own part of dim {dim}"
            yield Mistake(Cause.NOT_REDUCED, words, partial(_split_positions, names=names, axis=axis, dim=dim))


def _split_positions(ranks: EmulatedUserRanks, *, names: tuple[str, ...], axis: str, dim: int) -> None:
    by_owner: dict[str, list[str]] = {}
    for name in names:
        owner, _, own = name.rpartition(".")
        by_owner.setdefault(owner, []).append(own)
    for rank, model in enumerate(ranks.models):
        for owner, own_names in by_owner.items():
            module: Any = model.get_submodule(owner)
            module.forward = _InParts(ranks, rank, module, module.forward, own_names, axis, dim)


@dataclass(frozen=True, slots=True)
class _InParts:
    """A module's forward that concatenates each rank's part of the output, computed with its own parameters."""

    ranks: EmulatedUserRanks
    rank: int
    module: Any
    forward: Callable[..., Any]
    names: list[str]
    axis: str
    dim: int

    def __call__(self, *inputs: Any, **keywords: Any) -> torch.Tensor:
        module, peers = self.module, self.ranks.peers(self.rank, (self.axis,))
        own = {name: getattr(module, name).detach().clone() for name in self.names}
        given = self.ranks.exchange(self.rank, own, lambda all_: [all_] * len(all_))
        module.forward = self.forward
        try:
            outputs = [
                module(*inputs, **keywords) if peer == self.rank else functional_call(module, given[peer], inputs, keywords)
                for peer in peers
            ]
        finally:
            module.forward = self
        parts = [output.chunk(len(peers), dim=self.dim) for output in outputs]
        return torch.cat([each[number] for number, each in enumerate(parts) if number < len(each)], dim=self.dim)
