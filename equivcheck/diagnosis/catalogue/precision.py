"""Gradients and parameters rounded to another element type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from equivcheck.diagnosis.catalogue.counterfactual import (
    Counterfactual,
    around_update,
    changing_gradients,
    on_emulated_ranks,
    on_one_device,
)
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.layouts.base.rounding import EACH, ONCE, WHOLE, Division, WhenReduced
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.training.setup import Setup


def other_types(diverged: DivergedRun) -> Iterator[tuple[torch.dtype, str]]:
    """Element types different from the training's, with their names."""
    for name in ("bfloat16", "float16", "float32"):
        if name != diverged.training.precision.value:
            yield getattr(torch, name), name


def wrong_reduction_precision(diverged: DivergedRun) -> Iterator[Counterfactual]:
    """Gradients reduced in, or rounded to, another element type."""
    if diverged.rounding is not None:
        return
    cause = Cause.REDUCED_IN_LOWER_PRECISION
    for kind, name in other_types(diverged):
        for when in () if diverged.resumes else (None, ONCE, EACH, WHOLE):
            for division in (Division.AFTER, Division.BEFORE):
                change = partial(_reducing_in, kind=kind, when=when, division=division)
                yield on_emulated_ranks(diverged, cause, f"gradients are reduced in {name}", change)
        rounding = changing_gradients(lambda _name, gradient, kind=kind: gradient.copy_(gradient.to(kind)))  # type: ignore[misc]
        yield on_one_device(diverged, cause, f"gradients are rounded to {name}", rounding)


def _reducing_in(ranks: EmulatedRanks, kind: torch.dtype, when: WhenReduced | None, division: Division) -> None:
    ranks.reduces_in, ranks.division, ranks.when_reduced = kind, division, when or ranks.when_reduced


def wrong_parameter_precision(diverged: DivergedRun) -> Iterator[Counterfactual]:
    """Parameters rounded after each update, and optionally before the first."""
    cause = Cause.MASTERS_IN_LOWER_PRECISION
    for kind, name in other_types(diverged):
        words = f"parameters are kept in {name} between steps"
        yield on_one_device(diverged, cause, words, partial(_rounding_parameters, kind=kind, initially=False))
        yield on_one_device(
            diverged, cause, f"{words}, including their initial values", partial(_rounding_parameters, kind=kind, initially=True)
        )


def _rounding_parameters(setup: Setup, kind: torch.dtype, *, initially: bool) -> None:
    def cast() -> None:
        for parameter in setup.model.parameters():
            parameter.data.copy_(parameter.data.to(kind))

    @contextmanager
    def cast_after_update(_optimizer: torch.optim.Optimizer) -> Iterator[None]:
        yield
        cast()

    around_update(setup, cast_after_update)
    if initially:
        cast()
