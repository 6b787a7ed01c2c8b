"""Mistakes with weights that should be shared between layers but are separate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from equivcheck.diagnosis.catalogue.counterfactual import Change, on_one_device, submodule
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.diagnosis.words import join_words
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Training
from equivcheck.training.read import default_slots
from equivcheck.training.setup import Setup
from equivcheck.training.update.optimizer import build_optimizer


def wrong_sharing(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes with a shared weight: an old value in one layer, no gradient from one layer, or two separate parameters."""
    if diverged.rounding is not None:
        return
    layers = diverged.training.model.layers
    for owner in sorted({layer.shares for layer in layers if layer.shares is not None}):
        weight = f"`layers.{owner}.linear.weight`"
        sharers = [index for index, layer in enumerate(layers) if layer.shares == owner]
        choices = [tuple(sharers), *((place,) for place in (*sharers, owner))]
        for places in dict.fromkeys(choices):
            linears = [f"layers.{place}.linear" for place in places]
            where = f"layer{'' if len(places) == 1 else 's'} {join_words([str(at) for at in places])}"
            words = f"the use of the shared {weight} in {where} adds nothing to its gradient"
            yield on_one_device(Cause.UNTIED, words, using_weight(linears, detached_weight))
            words = f"the shared {weight} keeps its initial value in {where}"
            yield on_one_device(Cause.UNTIED, words, using_weight(linears, initial_weight))
        for trained, fate in ((True, "updated on its own"), (False, "never updated")):
            words = f"{weight} is no longer shared: each layer that shares it has a copy that is {fate}"
            yield on_one_device(Cause.UNTIED, words, partial(_give_own_copies, sharers=sharers, trained=trained))


Weight = Callable[[nn.Linear], Callable[[], torch.Tensor]]
"""Function that makes the weight that a linear uses instead of its own."""


def using_weight(names: Iterable[str], weight: Weight) -> Change:
    """Return a change to a `Setup`: the linear modules in `names` use another weight, which `weight` returns."""

    def change(setup: Setup) -> None:
        for name in names:
            linear = submodule(setup, name, nn.Linear)
            linear.forward = partial(_through, linear, weight(linear))  # type: ignore[method-assign]

    return change


def _through(linear: nn.Linear, weight: Callable[[], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    return functional.linear(values, weight(), linear.bias)


def detached_weight(linear: nn.Linear) -> Callable[[], torch.Tensor]:
    """Return a function that returns the module's detached weight, so that it gets no gradient."""
    return linear.weight.detach


def initial_weight(linear: nn.Linear) -> Callable[[], torch.Tensor]:
    """Return a function that returns the module's weight with its initial value. The gradient goes to the current weight."""
    start = linear.weight.detach().clone()
    return lambda: start + (linear.weight - linear.weight.detach())


def _give_own_copies(setup: Setup, sharers: list[int], *, trained: bool) -> None:
    own: dict[str, nn.Parameter] = {}
    for place in sharers:
        linear = submodule(setup, f"layers.{place}.linear", nn.Linear)
        linear.weight = own[f"layers.{place}.linear.weight"] = nn.Parameter(
            linear.weight.detach().clone(), requires_grad=linear.weight.requires_grad
        )
    setup.find_slots = lambda model: tuple(slot for slot in default_slots(model) if slot.pieces[0].name not in own)

    def build(training: Training, parameters: Iterable[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        return build_optimizer(training, [*parameters, *(own.items() if trained else ())])

    setup.build_optimizer = build
