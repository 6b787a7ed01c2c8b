"""Helpers for building mistakes as changes to a scenario's `Setup`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from equivcheck.diagnosis.emulation.scenario_ranks import ScenarioRanks
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import CrossEntropy
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup

Change = Callable[[Setup], None]
"""Function to plant a fault in a setup."""
Module = TypeVar("Module", bound=nn.Module)
Item = TypeVar("Item")


def on_one_device(cause: Cause, sentence: str, change: Change) -> Mistake:
    """Return a mistake that affects all ranks in the same way. One training on one device, with `change`, reproduces it."""

    def change_all(ranks: ScenarioRanks) -> None:
        for setup in ranks.setups:
            change(setup)

    return Mistake(cause, sentence, change_all, is_quick=True)


def on_emulated_ranks(cause: Cause, sentence: str, change: Callable[[ScenarioRanks], None]) -> Mistake:
    """Return a mistake that affects ranks differently. One emulated training for each rank, with `change`, reproduces it."""
    return Mistake(cause, sentence, change, own_rows=True)


def all_then_each(items: Sequence[Item]) -> Iterator[tuple[Item, ...]]:
    """Yield one tuple with all items, then a tuple for each item if there are several."""
    if items:
        yield tuple(items)
    if len(items) > 1:
        yield from ((item,) for item in items)


def submodule(setup: Setup, name: str, kind: type[Module]) -> Module:
    """Return the model's submodule called `name`. It must be of the class `kind`."""
    found = setup.model.get_submodule(name)
    assert isinstance(found, kind), f"{name} is a {type(found).__name__}"
    return found


def changing_layers(layers: Sequence[int], kind: type[Module], change: Callable[[Module], object]) -> Change:
    """Return a change to a `Setup`: it calls `change` with the module of each layer in `layers`."""

    def apply(setup: Setup) -> None:
        for layer in layers:
            change(submodule(setup, f"layers.{layer}", kind))

    return apply


def gradients_of(setup: Setup) -> Gradients:
    """Return the model's current gradients by parameter name. Parameters without a gradient are left out."""
    return {name: value.grad for name, value in setup.model.named_parameters() if value.grad is not None}


def changing_gradients(change: Callable[[str, torch.Tensor], object], names: Collection[str] | None = None) -> Change:
    """Return a change to a `Setup`: it adds a hook that calls `change` with each gradient before the update.

    `names` are the parameters concerned; None for all.
    """

    def apply(setup: Setup) -> None:
        for name, gradient in gradients_of(setup).items():
            if names is None or name in names:
                change(name, gradient)

    return lambda setup: setup.before_update.append(lambda _optimizer, _step: apply(setup))


def multiplying_gradients(factor: float, names: Collection[str] | None = None) -> Change:
    """Return a change to a `Setup`: it adds a hook that multiplies gradients before the update.

    `names` are the parameters concerned; None for all.
    """
    return changing_gradients(lambda _name, gradient: gradient.mul_(factor), names)


def changing_batches(change: Callable[[Sequence[Batch]], Sequence[Batch]]) -> Change:
    """Return a change to a `Setup`: it replaces each step's microbatches by the result of `change`.

    `change` gets full batches, before a rank takes its rows.
    """

    def apply(setup: Setup) -> None:
        inner = setup.compute
        setup.compute = lambda setup, microbatches, index: inner(setup, change(microbatches), index)

    return apply


def changing_loss(**changes: float | bool) -> Change:
    """Return a change to a `Setup`: it replaces fields of the cross-entropy loss. The loss keeps its divisor."""

    def apply(setup: Setup) -> None:
        loss, inner = setup.training.loss, setup.loss
        assert isinstance(loss, CrossEntropy), "the loss is a cross-entropy"
        other = replace(setup.training, loss=replace(loss, **changes))  # type: ignore[arg-type]
        setup.loss = lambda _training, *given: inner(other, *given)

    return apply
