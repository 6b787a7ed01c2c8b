"""What a counterfactual is: a training without ranks that is wrong in a known way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from equivcheck.diagnosis.case import Case
from equivcheck.diagnosis.side_by_side import SideBySide
from equivcheck.reference.rounded import rounded_setup
from equivcheck.trace.trace import Trace
from equivcheck.train.loop import train
from equivcheck.train.setup import Setup
from equivcheck.train.single_device import single_device
from equivcheck.verdict.cause import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterfactual:
    """One way to be wrong."""

    cause: Cause
    """In a word."""
    sentence: str
    """What is wrong, for people, without a full stop."""
    run: Callable[[int], tuple[Trace, ...]]
    """Trains that many steps; one trace for all ranks, or one for each."""
    alone: bool
    """Whether it is one training, rather than one for each rank: quick."""


def alone(case: Case, cause: Cause, sentence: str, change: Callable[[Setup], None]) -> Counterfactual:
    """One device, changed."""

    def run(num_steps: int) -> tuple[Trace, ...]:
        setup = single_device(case.scenario.training)
        if case.rounding is not None:
            setup = rounded_setup(case.scenario.training, case.rounding)
        setup.span = range(num_steps)
        change(setup)
        return (train(setup),)

    return Counterfactual(cause=cause, sentence=sentence, run=run, alone=True)


def side_by_side(case: Case, cause: Cause, sentence: str, change: Callable[[SideBySide], None]) -> Counterfactual:
    """One training for each rank on one device, changed."""

    def run(num_steps: int) -> tuple[Trace, ...]:
        trainings = SideBySide(case)
        change(trainings)
        return trainings.train(num_steps)

    return Counterfactual(cause=cause, sentence=sentence, run=run, alone=False)
