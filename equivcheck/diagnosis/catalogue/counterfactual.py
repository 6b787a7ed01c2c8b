"""What a counterfactual is: a training without ranks that is wrong in a known way; and how a setup is made wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch

from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.reference.rounded import rounded_setup
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import CrossEntropy
from equivcheck.training.loop import train
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup
from equivcheck.training.single_device import single_device
from equivcheck.worlds.trace.trace import Trace

Change = Callable[[Setup], None]
"""Makes a setup wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterfactual:
    """One way to be wrong."""

    cause: Cause
    """In a word."""
    sentence: str
    """What is wrong, for people, without a full stop."""
    run: Callable[[int], tuple[Trace, ...]]
    """Trains that many steps; one trace for all ranks, or one for each."""
    is_quick: bool
    """Whether it is one training, rather than one for each rank."""


def on_one_device(diverged: DivergedRun, cause: Cause, sentence: str, change: Change) -> Counterfactual:
    """One training, changed."""

    def run(num_steps: int) -> tuple[Trace, ...]:
        training, rounding = diverged.training, diverged.rounding
        setup = single_device(training) if rounding is None else rounded_setup(training, rounding)
        setup.span = range(num_steps)
        change(setup)
        return (train(setup),)

    return Counterfactual(cause=cause, sentence=sentence, run=run, is_quick=True)


def on_emulated_ranks(
    diverged: DivergedRun, cause: Cause, sentence: str, change: Callable[[EmulatedRanks], None]
) -> Counterfactual:
    """One training for each rank on one device, changed."""

    def run(num_steps: int) -> tuple[Trace, ...]:
        ranks = EmulatedRanks(diverged)
        change(ranks)
        return ranks.train(num_steps)

    return Counterfactual(cause=cause, sentence=sentence, run=run, is_quick=False)


def gradients_of(setup: Setup) -> Gradients:
    """The gradients that there are, by name."""
    return {name: value.grad for name, value in setup.model.named_parameters() if value.grad is not None}


def changing_gradients(change: Callable[[str, torch.Tensor], object], names: Collection[str] | None = None) -> Change:
    """Change some gradients (None for all) in place before they are read."""

    def apply(setup: Setup) -> None:
        for name, gradient in gradients_of(setup).items():
            if names is None or name in names:
                change(name, gradient)

    return lambda setup: setup.before_update.append(lambda _optimizer, _step: apply(setup))


def multiplying_gradients(factor: float, names: Collection[str] | None = None) -> Change:
    """Multiply some gradients before they are read."""
    return changing_gradients(lambda _name, gradient: gradient.mul_(factor), names)


def changing_batches(change: Callable[[Sequence[Batch]], Sequence[Batch]]) -> Change:
    """Compute each step on other microbatches; these are whole, before a rank takes its part."""

    def apply(setup: Setup) -> None:
        inner = setup.compute
        setup.compute = lambda setup, microbatches, index: inner(setup, change(microbatches), index)

    return apply


def changing_loss(**changes: float | bool) -> Change:
    """Minimise a loss of labels with other values of some fields, divided by the same number."""

    def apply(setup: Setup) -> None:
        loss, inner = setup.training.loss, setup.loss
        assert isinstance(loss, CrossEntropy), "it is a loss of labels"
        other = replace(setup.training, loss=replace(loss, **changes))  # type: ignore[arg-type]
        setup.loss = lambda _training, *given: inner(other, *given)

    return apply


def around_update(setup: Setup, context: Callable[[torch.optim.Optimizer], AbstractContextManager[None]]) -> None:
    """Do something before and after each update of the optimizer."""
    inner = setup.update

    def update(optimizer: torch.optim.Optimizer) -> None:
        with context(optimizer):
            inner(optimizer)

    setup.update = update


@contextmanager
def other_gradients(setup: Setup, gradients: dict[str, torch.Tensor | None]) -> Iterator[None]:
    """Let some parameters have other gradients for a while; None for none."""
    parameters = dict(setup.model.named_parameters())
    kept = {name: parameters[name].grad for name in gradients}
    for name, gradient in gradients.items():
        parameters[name].grad = gradient
    yield
    for name, own in kept.items():
        parameters[name].grad = own
