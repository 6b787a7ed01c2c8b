"""Mutants for tests of the selftest."""

from __future__ import annotations

import torch
import torch.distributed as dist

from equivcheck.mutants.mutant import Family, Minimum, Mutant
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.training.setup import Setup


def _scale(setup: Setup, factor: float) -> None:
    for parameter in setup.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def double_from_the_second_step(setup: Setup) -> None:
    """Double gradients at every step but the first, where there are several ranks."""
    if dist.get_world_size() > 1:
        setup.before_update.append(lambda optimizer, step: _scale(setup, 2.0 if step else 1.0))


def change_nothing(setup: Setup) -> None:
    """Leave everything as it is."""


def change_a_last_digit(setup: Setup) -> None:
    """Move gradients by what rounding may move them by."""
    setup.before_update.append(lambda optimizer, step: _scale(setup, 1 + torch.finfo(torch.float64).eps))


def mutant(name: str, **changes: object) -> Mutant:
    """A mutant of DDP that doubles gradients from the second step on."""
    values: dict[str, object] = {
        "name": name,
        "wrong": "Gradients are doubled from the second step on.",
        "family": Family.DATA_PARALLEL,
        "layouts": ("ddp",),
        "plant": double_from_the_second_step,
        "causes": (Cause.SUMMED,),
        "minimum": Minimum(ranks=2, steps=2, because="the first step is right, and so is a single rank"),
    }
    return Mutant(**(values | changes))  # type: ignore[arg-type]
