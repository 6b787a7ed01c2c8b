"""Updates that are skipped, and optimizer state or values that are lost, swapped or old."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from equivcheck.diagnosis.case import Case
from equivcheck.diagnosis.counterfactual import Counterfactual, alone
from equivcheck.diagnosis.gathering import Gathering, gathering_of
from equivcheck.diagnosis.rank_coordinates import coordinates_of_ranks
from equivcheck.diagnosis.shards import swap
from equivcheck.diagnosis.unchanged import unchanged
from equivcheck.diagnosis.words import rows_of_tensor, tensors
from equivcheck.trace.differences import Phase
from equivcheck.train.setup import Setup
from equivcheck.verdict.cause import Cause


def wrong_updates(case: Case) -> Iterator[Counterfactual]:
    """Not at all, or not of some tensors or rows; and state that is lost or another's."""
    yield from _not_updated(case)
    if case.scenario.training.steps > 1:
        yield from _lost(case)
        yield from _of_another(case)


def _not_updated(case: Case) -> Iterator[Counterfactual]:
    masks = unchanged(case)
    if not masks:
        return
    names = tuple(masks)
    if all(mask.all() for mask in masks.values()):
        everything = set(names) >= set(case.updated)
        words = "no parameter is ever updated" if everything else f"{tensors(names)} {_is(names)} never updated"
        yield alone(case, Cause.NOT_UPDATED, words, _without_gradients(names))
        yield alone(case, Cause.NOT_UPDATED, words, _restoring(masks))
        return
    words = f"{rows_of_tensor(masks)} are never updated"
    yield alone(case, Cause.NOT_UPDATED, words, _restoring(masks))
    yield alone(case, Cause.NOT_UPDATED, words, _restoring(masks, state=True))


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _without_gradients(names: Sequence[str]) -> Callable[[Setup], None]:
    """The optimizer finds no gradients of some tensors."""

    def change(setup: Setup) -> None:
        inner, parameters = setup.update, dict(setup.model.named_parameters())

        def update(optimizer: torch.optim.Optimizer) -> None:
            kept = {name: parameters[name].grad for name in names}
            for name in names:
                parameters[name].grad = None
            inner(optimizer)
            for name, gradient in kept.items():
                parameters[name].grad = gradient

        setup.update = update

    return change


def _restoring(masks: Mapping[str, np.ndarray], *, state: bool = False) -> Callable[[Setup], None]:
    """Elements get back the value that they had before the update."""
    chosen = {name: torch.from_numpy(mask) for name, mask in masks.items()}

    def change(setup: Setup) -> None:
        inner, parameters = setup.update, dict(setup.model.named_parameters())

        def update(optimizer: torch.optim.Optimizer) -> None:
            before = {name: parameters[name].detach().clone() for name in chosen}
            inner(optimizer)
            for name, mask in chosen.items():
                parameters[name].data[mask] = before[name][mask]
                if state:
                    for value in optimizer.state.get(parameters[name], {}).values():
                        if isinstance(value, torch.Tensor) and value.shape == mask.shape:
                            value[mask] = 0

        setup.update = update

    return change


def _lost(case: Case) -> Iterator[Counterfactual]:
    names = tuple(name for name in case.differing(Phase.UPDATE) if name in case.updated)
    words = "the state of the optimizer is lost at each step"
    yield alone(case, Cause.STATE_LOST, words, _clearing(None))
    if names and set(names) != set(case.updated):
        words = f"the optimizer's state of {tensors(names)} is lost at each step"
        yield alone(case, Cause.STATE_LOST, words, _clearing(names))


def _clearing(names: Sequence[str] | None) -> Callable[[Setup], None]:
    def change(setup: Setup) -> None:
        parameters = dict(setup.model.named_parameters())

        def clear(optimizer: torch.optim.Optimizer, _step: int) -> None:
            for name in parameters if names is None else names:
                optimizer.state.pop(parameters[name], None)

        setup.before_step.append(clear)

    return change


def _of_another(case: Case) -> Iterator[Counterfactual]:
    seats = coordinates_of_ranks(case.scenario.layout.mesh)
    if case.scenario.start is not None or len(seats) == 1:
        return
    gathering = gathering_of(case)
    if not gathering.is_sharded:
        return
    for shift in range(1, len(seats)):
        words = f"each rank's optimizer state is that of the rank {shift} after it"
        yield alone(case, Cause.STATE_OF_ANOTHER, words, _swapping(gathering, len(seats), lambda rank, n=shift: rank + n))  # type: ignore[misc]
    words = "every rank's optimizer state is that of rank 0"
    yield alone(case, Cause.STATE_OF_ANOTHER, words, _swapping(gathering, len(seats), lambda _rank: 0))


def _swapping(gathering: Gathering, num_ranks: int, source_of: Callable[[int], int]) -> Callable[[Setup], None]:
    def change(setup: Setup) -> None:
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in setup.model.named_parameters()}

        def swap_all(optimizer: torch.optim.Optimizer, _step: int) -> None:
            for parameter, state in optimizer.state.items():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        swap(value, gathering, names[parameter], num_ranks, source_of)

        setup.before_step.append(swap_all)

    return change


def stale_values(case: Case) -> Iterator[Counterfactual]:
    """Parameters or gradients of an earlier step."""
    if case.scenario.training.steps > 1:
        words = "loss and gradients are computed with the parameters of the step before"
        yield alone(case, Cause.STALE, words, _with_old_parameters(first=False))
        words = "loss and gradients are computed with the parameters of the first step"
        yield alone(case, Cause.STALE, words, _with_old_parameters(first=True))
        words = "the optimizer updates by the gradients of the step before"
        yield alone(case, Cause.STALE, words, _by_old_gradients)
        yield alone(case, Cause.STALE, words, _with_old_gradients)


def _with_old_parameters(*, first: bool) -> Callable[[Setup], None]:
    def change(setup: Setup) -> None:
        parameters = dict(setup.model.named_parameters())
        kept: list[dict[str, torch.Tensor]] = []
        now: dict[str, torch.Tensor] = {}

        def load(values: Mapping[str, torch.Tensor]) -> None:
            for name, value in values.items():
                parameters[name].data.copy_(value)

        def before(_optimizer: torch.optim.Optimizer, _step: int) -> None:
            now.update({name: value.detach().clone() for name, value in parameters.items()})
            kept.append(dict(now))
            load(kept[0] if first else kept[max(0, len(kept) - 2)])

        setup.before_step.append(before)
        setup.before_update.append(lambda _optimizer, _step: load(now))

    return change


def _by_old_gradients(setup: Setup) -> None:
    inner, kept = setup.update, []

    def update(optimizer: torch.optim.Optimizer) -> None:
        parameters = list(setup.model.parameters())
        now = [parameter.grad for parameter in parameters]
        kept.append(now)
        for parameter, old in zip(parameters, kept[max(0, len(kept) - 2)], strict=True):
            parameter.grad = None if old is None else old.clone()
        inner(optimizer)
        for parameter, gradient in zip(parameters, now, strict=True):
            parameter.grad = gradient

    setup.update = update


def _with_old_gradients(setup: Setup) -> None:
    kept: list[list[torch.Tensor | None]] = []

    def replace(_optimizer: torch.optim.Optimizer, _step: int) -> None:
        parameters = list(setup.model.parameters())
        kept.append([None if parameter.grad is None else parameter.grad.clone() for parameter in parameters])
        for parameter, old in zip(parameters, kept[max(0, len(kept) - 2)], strict=True):
            parameter.grad = None if old is None else old.clone()

    setup.before_update.append(replace)
