"""Mistakes in sharded linear layers: repeated or missing bias, missing reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.counterfactual import Change, Counterfactual, Honest
from equivcheck.user.diagnosis.diverged import DivergedTraining, held_elements
from equivcheck.user.diagnosis.emulated_ranks import EmulatedRanks
from equivcheck.user.ranks import build
from equivcheck.worlds.trace.differences import Phase

MAX_LAYERS = 16
"""Largest number of layers to try."""


def wrong_splits(diverged: DivergedTraining, _honest: Honest) -> Iterator[Counterfactual]:
    """Yield mistakes for each linear layer and each axis whose ranks have the same rows."""
    if diverged.first.phase not in (Phase.LOSS, Phase.GRADIENT):
        return
    modules = [name for name, module in build(diverged.task).named_modules() if isinstance(module, nn.Linear)]
    for axis in (name for name in diverged.wide_axes if name not in diverged.data_axes):
        size, where = diverged.size((axis,)), diverged.over((axis,))
        for name in modules[:MAX_LAYERS]:
            yield from _biases(name, size, where)
            if held_elements(diverged).is_sharded:
                yield from _parts(name, axis, where)


def _biases(name: str, size: int, where: str) -> Iterator[Counterfactual]:
    for factor, words in (
        (float(size), f"the bias of `{name}` is added on each of {where}, not once"),
        (1 / size, f"the bias of `{name}` is divided by the number of {where}"),
        (0.0, f"the bias of `{name}` is left out of its output"),
    ):
        for of_gradient, more in ((1.0, ""), (factor, ", and so is its gradient")):
            yield Counterfactual(
                cause=Cause.BIAS_ON_EVERY_RANK, sentence=words + more, change=_with_bias(name, factor, of_gradient)
            )


def _with_bias(name: str, factor: float, of_gradient: float) -> Change:
    """Scale the bias in the output, and its gradient by another factor."""

    def change(ranks: EmulatedRanks) -> None:
        for model in ranks.models:
            linear: Any = model.get_submodule(name)
            if linear.bias is not None:
                linear.register_forward_hook(
                    lambda module, _inputs, output: (
                        output + (of_gradient - 1) * (module.bias - module.bias.detach()) + (factor - 1) * module.bias.detach()
                    )
                )

    return change


def _parts(name: str, axis: str, where: str) -> Iterator[Counterfactual]:
    cut_along_inputs = f"the output of `{name}` is not summed over {where}: each rank continues with its partial sum"
    yield Counterfactual(
        cause=Cause.PARTIAL_OUTPUT, sentence=cut_along_inputs, change=lambda ranks: _partial_sum(ranks, name, axis)
    )
    cut_along_outputs = (
        f"the gradient of the input of `{name}` is not summed over {where}: each rank continues with its partial sum"
    )
    yield Counterfactual(
        cause=Cause.PARTIAL_INPUT_GRADIENT,
        sentence=cut_along_outputs,
        change=lambda ranks: _replace(ranks, name, axis, _partial_gradient),
    )


Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """One rank's layer, with each rank's weight elements."""

    ranks: EmulatedRanks
    rank: int
    linear: Any
    held: list[torch.Tensor]
    axis: str


def _replace(ranks: EmulatedRanks, name: str, axis: str, forward: Callable[[_Split], Forward]) -> None:
    held = [ranks.held.by(f"{name}.weight", rank) for rank in range(len(ranks.models))]
    for rank, model in enumerate(ranks.models):
        linear: Any = model.get_submodule(name)
        linear.forward = forward(_Split(ranks=ranks, rank=rank, linear=linear, held=held, axis=axis))


def _partial_sum(ranks: EmulatedRanks, name: str, axis: str) -> None:
    """Leave the layer's output as partial sums.

    Their gradients are still reduced, at the input to each column-wise layer.
    """
    _replace(ranks, name, axis, _partial_output)
    for other, module in ranks.models[0].named_modules():
        if isinstance(module, nn.Linear) and other != name and _is_split_along_outputs(ranks, other, axis):
            _replace(ranks, other, axis, _summed_gradient)


def _is_split_along_outputs(ranks: EmulatedRanks, name: str, axis: str) -> bool:
    first, *others = (ranks.held.by(f"{name}.weight", rank).any(1) for rank in ranks.peers(0, (axis,)))
    return any(not torch.equal(first, other) for other in others)


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
        whole = own.detach().clone()
        for peer in split.ranks.peers(split.rank, (split.axis,)):
            columns = split.held[peer].any(1)
            whole[..., columns] = outputs[peer][..., columns]
        return whole + (own - own.detach()) + (part - part.detach())

    return forward


def _summed_gradient(split: _Split) -> Forward:
    ranks = split.ranks
    own: Forward = split.linear.forward

    def total(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.stack([parts[peer] for peer in ranks.peers(rank, (split.axis,))]).sum(0) for rank in range(len(parts))]

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        copied = inputs.view_as(inputs)
        if copied.requires_grad:
            copied.register_hook(lambda gradient: ranks.exchange(split.rank, gradient, total))  # type: ignore[no-untyped-call]
        return own(copied)

    return forward
