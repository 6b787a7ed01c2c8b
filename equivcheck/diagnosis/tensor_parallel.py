"""Layers that are split over ranks, with what these exchange left out, averaged or done twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from equivcheck.diagnosis.case import Case
from equivcheck.diagnosis.counterfactual import Counterfactual, alone, side_by_side
from equivcheck.diagnosis.side_by_side import Reduction, SideBySide, data_axes
from equivcheck.diagnosis.suspects import suspects
from equivcheck.diagnosis.words import gradients, listed, over
from equivcheck.parallelisms.tensor_parallel.plans import fits
from equivcheck.scenario import Split, TensorParallel
from equivcheck.scenario.mesh import TP
from equivcheck.train.setup import Setup
from equivcheck.verdict.cause import Cause

Forward = Callable[[nn.Linear, torch.Tensor], torch.Tensor]
"""What a linear then computes."""


def wrong_splits(case: Case) -> Iterator[Counterfactual]:
    """Of all layers that are split alike, or of one."""
    plan = next((each.plan for each in case.scenario.layout.of(TensorParallel)), None)
    ranks = case.scenario.layout.mesh.size(TP)
    if plan is None or ranks == 1 or case.rounding is not None or not fits(case.scenario.training.model, plan):
        return
    yield from _replicated(case, ranks)
    for layers in _choices([at for at, entry in enumerate(plan) if entry.split is Split.ROW]):
        yield from _of_rows(case, layers, ranks)
    for layers in _choices([at for at, entry in enumerate(plan) if entry.split is Split.COLUMN]):
        yield from _of_columns(case, layers, ranks)


def _choices(layers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if layers:
        yield tuple(layers)
    if len(layers) > 1:
        yield from ((layer,) for layer in layers)


def _replicated(case: Case, ranks: int) -> Iterator[Counterfactual]:
    """Gradients of what every rank of the axis holds, from its own rows, or summed once more."""
    where = over(case.scenario.layout.mesh, (TP,))
    for names in suspects(case):
        rows = f"{gradients(case, names)} not reduced over {where}: each has what its own rows give"
        if case.scenario.start is None:
            yield side_by_side(case, Cause.NOT_REDUCED, rows, _own_rows(names, 1 / ranks))
            yield side_by_side(case, Cause.NOT_REDUCED, f"{rows}, divided by their number all the same", _own_rows(names, 1.0))


def _own_rows(names: Sequence[str], factor: float) -> Callable[[SideBySide], None]:
    def change(trainings: SideBySide) -> None:
        axes = data_axes(trainings.layout)
        trainings.rows_along = (*axes, TP)
        trainings.reductions.update(dict.fromkeys(names, Reduction(axes=axes, factor=factor)))

    return change


def _of_rows(case: Case, layers: tuple[int, ...], ranks: int) -> Iterator[Counterfactual]:
    who, where = _named(layers), over(case.scenario.layout.mesh, (TP,))
    words = f"the bias of {who} is added on each of {where}"
    for counted in (True, False):
        yield alone(case, Cause.BIAS_ON_EVERY_RANK, words, _forwarding(layers, _biased(ranks, counted=counted)))
    for backward in (True, False):
        words = f"the output of {who} is averaged over {where}, not summed"
        yield alone(case, Cause.OUTPUT_AVERAGED, words, _forwarding(layers, _averaged(ranks, backward=backward)))
    words = f"the output of {who} is that of each rank's own features: it is not summed over {where}"
    for share in (1.0, 1 / ranks, 0.0):
        # Of no share for the others, the first has all of it.
        shares = [share or 1.0, *[share] * (ranks - 1)]
        change = _on_each(layers, lambda place, shares=shares: _own_features(place, ranks, shares[place]))  # type: ignore[misc]
        yield side_by_side(case, Cause.PARTIAL_OUTPUT, words, change)


def _of_columns(case: Case, layers: tuple[int, ...], ranks: int) -> Iterator[Counterfactual]:
    who, where = _named(layers), over(case.scenario.layout.mesh, (TP,))
    words = f"the gradient of the input of {who} is summed twice over {where}"
    yield alone(case, Cause.INPUT_GRADIENT_SUMMED_TWICE, words, _forwarding(layers, _louder(ranks)))
    words = f"the gradient of the input of {who} is that of each rank's own features: it is not summed over {where}"
    yield side_by_side(case, Cause.PARTIAL_INPUT_GRADIENT, words, _on_each(layers, lambda place: _partly(place, ranks)))


def _named(layers: tuple[int, ...]) -> str:
    names = [f"`layers.{layer}.linear`" for layer in layers]
    return listed(names) if len(names) < 4 else f"{len(names)} layers"


def _forwarding(layers: tuple[int, ...], forward: Forward) -> Callable[[Setup], None]:
    def change(setup: Setup) -> None:
        for layer in layers:
            for name in ("linear", "side"):
                linear = getattr(setup.model.get_submodule(f"layers.{layer}"), name)
                if linear is not None:
                    linear.forward = partial(forward, linear)

    return change


def _on_each(layers: tuple[int, ...], forward_of: Callable[[int], Forward]) -> Callable[[SideBySide], None]:
    def change(trainings: SideBySide) -> None:
        for seat, setup in zip(trainings.seats, trainings.setups, strict=True):
            _forwarding(layers, forward_of(seat.coordinate[TP]))(setup)

    return change


def _biased(ranks: int, *, counted: bool) -> Forward:
    def forward(linear: nn.Linear, values: torch.Tensor) -> torch.Tensor:
        outputs = functional.linear(values, linear.weight, linear.bias)
        if linear.bias is None:
            return outputs
        return outputs + (ranks - 1) * (linear.bias if counted else linear.bias.detach())

    return forward


def _averaged(ranks: int, *, backward: bool) -> Forward:
    def forward(linear: nn.Linear, values: torch.Tensor) -> torch.Tensor:
        outputs = functional.linear(values, linear.weight)
        outputs = outputs / ranks if backward else outputs + (outputs / ranks - outputs).detach()
        return outputs if linear.bias is None else outputs + linear.bias

    return forward


def _own_features(place: int, ranks: int, share: float) -> Forward:
    """With so much of the bias; its gradient is that of all of it."""

    def forward(linear: nn.Linear, values: torch.Tensor) -> torch.Tensor:
        size = -(-values.shape[-1] // ranks)
        own = slice(place * size, (place + 1) * size)
        outputs = functional.linear(values[..., own], linear.weight[:, own])
        return outputs if linear.bias is None else outputs + (linear.bias + (share - 1.0) * linear.bias.detach())

    return forward


def _louder(ranks: int) -> Forward:
    def forward(linear: nn.Linear, values: torch.Tensor) -> torch.Tensor:
        twice = ranks * values - (ranks - 1) * values.detach() if values.requires_grad else values
        return functional.linear(twice, linear.weight, linear.bias)

    return forward


def _partly(place: int, ranks: int) -> Forward:
    def forward(linear: nn.Linear, values: torch.Tensor) -> torch.Tensor:
        outputs = functional.linear(values.detach(), linear.weight, linear.bias)
        size = -(-outputs.shape[-1] // ranks)
        own = torch.zeros(outputs.shape[-1], dtype=outputs.dtype)
        own[place * size : (place + 1) * size] = 1.0
        through = functional.linear(values, linear.weight.detach())
        return outputs + (through - through.detach()) * own

    return forward
