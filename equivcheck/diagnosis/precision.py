"""Gradients and parameters that pass through another element type."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from equivcheck.diagnosis.case import Case
from equivcheck.diagnosis.counterfactual import Counterfactual, alone, side_by_side
from equivcheck.diagnosis.side_by_side import SideBySide, WhenReduced
from equivcheck.train.setup import Setup
from equivcheck.verdict.cause import Cause

KINDS = (torch.bfloat16, torch.float16, torch.float32)


def _lower(case: Case) -> Iterator[tuple[torch.dtype, str]]:
    for kind in KINDS:
        name = str(kind).removeprefix("torch.")
        if name != case.scenario.training.precision.value:
            yield kind, name


def wrong_reduction_precision(case: Case) -> Iterator[Counterfactual]:
    """Gradients are added up in fewer digits, or rounded to them."""
    if case.rounding is not None:
        return
    for kind, name in _lower(case):
        words = f"gradients are reduced in {name}"
        if case.scenario.start is None:
            for meeting in dict.fromkeys((None, WhenReduced.ONCE, WhenReduced.EACH, WhenReduced.WHOLE)):
                for first in (False, True):
                    change = _reducing_in(kind, meeting, first=first)
                    yield side_by_side(case, Cause.REDUCED_IN_LOWER_PRECISION, words, change)
        yield alone(case, Cause.REDUCED_IN_LOWER_PRECISION, f"gradients are rounded to {name}", _rounding_gradients(kind))


def _reducing_in(kind: torch.dtype, meeting: WhenReduced | None, *, first: bool) -> Callable[[SideBySide], None]:
    def change(trainings: SideBySide) -> None:
        trainings.reduces_in, trainings.divides_first = kind, first
        if meeting is not None:
            trainings.meeting = meeting

    return change


def _rounding_gradients(kind: torch.dtype) -> Callable[[Setup], None]:
    def change(setup: Setup) -> None:
        def cast(_optimizer: torch.optim.Optimizer, _step: int) -> None:
            for parameter in setup.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.copy_(parameter.grad.to(kind))

        setup.before_update.append(cast)

    return change


def wrong_masters(case: Case) -> Iterator[Counterfactual]:
    """Parameters are rounded after each update, and perhaps before the first."""
    for kind, name in _lower(case):
        words = f"parameters are kept in {name} between steps"
        yield alone(case, Cause.MASTERS_IN_LOWER_PRECISION, words, _rounding_parameters(kind, begins=False))
        yield alone(case, Cause.MASTERS_IN_LOWER_PRECISION, f"{words}, from the start", _rounding_parameters(kind, begins=True))


def _rounding_parameters(kind: torch.dtype, *, begins: bool) -> Callable[[Setup], None]:
    def change(setup: Setup) -> None:
        inner = setup.update

        def cast() -> None:
            for parameter in setup.model.parameters():
                parameter.data.copy_(parameter.data.to(kind))

        def update(optimizer: torch.optim.Optimizer) -> None:
            inner(optimizer)
            cast()

        setup.update = update
        if begins:
            cast()

    return change
