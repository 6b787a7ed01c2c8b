"""Skipped updates, and lost or stale state, parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from equivcheck.diagnosis.catalogue.counterfactual import (
    Change,
    Counterfactual,
    around_update,
    on_one_device,
    replaced_gradients,
)
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.words import rows_of_tensor, tensors
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.training.material import material
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.pieces import TensorsByName

Values = TypeVar("Values")


def skipped_updates(diverged: DivergedRun) -> Iterator[Counterfactual]:
    """Updates skipped for all tensors, for some, or for some rows."""
    masks = _unchanged(diverged)
    if not masks:
        return
    if all(mask.all() for mask in masks.values()):
        everything = set(masks) >= set(diverged.updated)
        words = "the optimizer updates no parameter" if everything else f"the optimizer does not update {tensors(tuple(masks))}"
        yield on_one_device(diverged, Cause.NOT_UPDATED, words, _without_gradients(tuple(masks)))
        yield on_one_device(diverged, Cause.NOT_UPDATED, words, _restoring(masks))
        return
    words = f"the optimizer does not update {rows_of_tensor(masks)}"
    yield on_one_device(diverged, Cause.NOT_UPDATED, words, _restoring(masks))
    yield on_one_device(diverged, Cause.NOT_UPDATED, words, _restoring(masks, state=True))


def _unchanged(diverged: DivergedRun) -> dict[str, np.ndarray]:
    """Masks for the elements that the optimizer left unchanged; empty unless these explain every difference."""
    step = diverged.first.step
    if diverged.first.phase is not Phase.UPDATE:
        return {}
    before, after = _parameters(diverged, step - 1), _parameters(diverged, step)
    expected = diverged.expected_values(step, Phase.UPDATE)
    masks = {}
    for name in diverged.differing(Phase.UPDATE):
        if name not in after or name not in expected:
            return {}
        still = after[name] == before[name]
        near = np.isclose(after[name], expected[name], rtol=1e-6, atol=0.0)
        if not (still | near).all():
            return {}
        masks[name] = np.asarray(still & (expected[name] != before[name]))
        if not masks[name].any():
            # The first rank that holds the tensor has updated it correctly, but another has not.
            return {}
    return masks


def _parameters(diverged: DivergedRun, step: int) -> TensorsByName:
    """Full parameters after a step; -1 for the initial ones."""
    if step < 0:
        return {name: values.numpy() for name, values in material(diverged.training).parameters.items()}
    return diverged.found_values(step, Phase.UPDATE)


def _without_gradients(names: Sequence[str]) -> Change:
    return lambda setup: around_update(setup, lambda _optimizer: replaced_gradients(setup, dict.fromkeys(names)))


def _restoring(masks: Mapping[str, np.ndarray], *, state: bool = False) -> Change:
    """Undo the update for some elements."""
    chosen = {name: torch.from_numpy(mask) for name, mask in masks.items()}

    def change(setup: Setup) -> None:
        parameters = dict(setup.model.named_parameters())

        @contextmanager
        def undo_update(optimizer: torch.optim.Optimizer) -> Iterator[None]:
            before = {name: parameters[name].detach().clone() for name in chosen}
            yield
            for name, mask in chosen.items():
                parameters[name].data[mask] = before[name][mask]
                for value in optimizer.state.get(parameters[name], {}).values() if state else ():
                    if isinstance(value, torch.Tensor) and value.shape == mask.shape:
                        value[mask] = 0

        around_update(setup, undo_update)

    return change


def lost_state(diverged: DivergedRun) -> Iterator[Counterfactual]:
    """Optimizer state cleared at each step."""
    if diverged.training.steps > 1:
        words = "the optimizer state is lost at each step"
        yield on_one_device(diverged, Cause.STATE_LOST, words, _clearing(None))
        names = tuple(name for name in diverged.differing(Phase.UPDATE) if name in diverged.updated)
        if names and set(names) != set(diverged.updated):
            words = f"the optimizer state of {tensors(names)} is lost at each step"
            yield on_one_device(diverged, Cause.STATE_LOST, words, _clearing(names))


def _clearing(names: Sequence[str] | None) -> Change:
    def change(setup: Setup) -> None:
        parameters = dict(setup.model.named_parameters())

        def clear(optimizer: torch.optim.Optimizer, _step: int) -> None:
            for name in parameters if names is None else names:
                optimizer.state.pop(parameters[name], None)

        setup.before_step.append(clear)

    return change


def stale_values(diverged: DivergedRun) -> Iterator[Counterfactual]:
    """Parameters or gradients from an earlier step."""
    if diverged.training.steps > 1:
        ways: tuple[tuple[str, Change], ...] = (
            ("loss and gradients are computed with the parameters of the previous step", _with_old_parameters(first=False)),
            ("loss and gradients are computed with the parameters of the first step", _with_old_parameters(first=True)),
            ("the optimizer uses the gradients of the previous step", _by_old_gradients),
            ("gradients are from the previous step", _with_old_gradients),
        )
        for words, change in ways:
            yield on_one_device(diverged, Cause.STALE, words, change)


def _with_old_parameters(*, first: bool) -> Change:
    def change(setup: Setup) -> None:
        parameters = dict(setup.model.named_parameters())
        kept: list[dict[str, torch.Tensor]] = []

        def load(values: Mapping[str, torch.Tensor]) -> None:
            for name, value in values.items():
                parameters[name].data.copy_(value)

        def load_old(_optimizer: torch.optim.Optimizer, _step: int) -> None:
            kept.append({name: value.detach().clone() for name, value in parameters.items()})
            load(kept[0] if first else _previous(kept))

        setup.before_step.append(load_old)
        setup.before_update.append(lambda _optimizer, _step: load(kept[-1]))

    return change


def _previous(kept: Sequence[Values]) -> Values:
    """Value one step ago; in the first step, the current one."""
    return kept[max(0, len(kept) - 2)]


def _old_gradients(setup: Setup) -> Callable[[], dict[str, torch.Tensor | None]]:
    """Each call stores the current gradients and returns those one step ago."""
    kept: list[dict[str, torch.Tensor | None]] = []

    def previous_gradients() -> dict[str, torch.Tensor | None]:
        kept.append({name: _copy(value.grad) for name, value in setup.model.named_parameters()})
        return {name: _copy(gradient) for name, gradient in _previous(kept).items()}

    return previous_gradients


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()


def _by_old_gradients(setup: Setup) -> None:
    """Only the update sees the old gradients."""
    old = _old_gradients(setup)
    around_update(setup, lambda _optimizer: replaced_gradients(setup, old()))


def _with_old_gradients(setup: Setup) -> None:
    """Clipping and traces see the old gradients too."""
    old, parameters = _old_gradients(setup), dict(setup.model.named_parameters())

    def replace(_optimizer: torch.optim.Optimizer, _step: int) -> None:
        for name, gradient in old().items():
            parameters[name].grad = gradient

    setup.before_update.append(replace)
