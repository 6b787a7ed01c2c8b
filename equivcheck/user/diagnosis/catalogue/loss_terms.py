"""Mistakes in one term of the loss, such as an auxiliary loss: it is missing, or multiplied by a count such as the ranks."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import isclose
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.words import count_description
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.catalogue.function_modes import enter_in_step
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.frames import deepest_line
from equivcheck.worlds.trace.differences import Phase

ADDITIONS = ("add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__")
"""Functions for sums and differences, by name."""
MAX_ADDITIONS = 8
"""Maximum number of additions to try, from the last addition backwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """An addition in a user's step through which a gradient flows, such as a loss plus an auxiliary loss."""

    place: str
    """File and line number of the addition in the user's code."""
    values: tuple[float, float]
    """The terms in the first step's first microbatch."""


def wrong_loss_terms(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield a possible mistake: a term of the loss is multiplied by a wrong factor. Each term is tried.

    The terms in the last addition are tried first, because this addition is nearest to the loss.
    """
    changes_loss = diverged.first.phase is Phase.LOSS
    for number, addition in list(enumerate(_additions(diverged)))[: -MAX_ADDITIONS - 1 : -1]:
        for side, which in enumerate(("first", "second")):
            for factor in dict.fromkeys((0.0, *_factors(diverged, addition.values[side]))):
                words = f"multiplied by {factor:g}{count_description(diverged, factor)}" if factor else "missing"
                sentence = f"{'' if changes_loss else 'the gradient of '}the {which} term in {addition.place} is {words}"
                change = partial(_scale_term, number=number, side=side, factor=factor, changes_loss=changes_loss)
                yield Mistake(Cause.ANOTHER_LOSS, sentence, change)


def _factors(diverged: DivergedTraining, term: float) -> Iterator[float]:
    """Yield known numbers and their inverses, then the factor that explains the first loss."""
    yield from (factor for size in diverged.counts for factor in (float(size), 1 / size))
    losses = [trace.steps[0].loss for trace in diverged.traces if trace.steps[0].loss is not None]
    right = diverged.single.steps[0].loss
    if diverged.first.phase is Phase.LOSS and not diverged.first.step and term and losses and right is not None:
        factor = 1 + (sum(losses) / len(losses) - right) / term
        yield round(factor) if isclose(factor, round(factor), rel_tol=1e-6) else factor


def _additions(diverged: DivergedTraining) -> list[Addition]:
    """The additions in one single-device microbatch."""
    ranks, mode = EmulatedUserRanks(diverged, own_rows=False, one=True), _Additions()
    enter_in_step(ranks, lambda _model: mode)
    try:
        ranks.train(1)
    except Exception:  # torch or the user's code rejects the mode
        return []
    return mode.found


def _scale_term(ranks: EmulatedUserRanks, *, number: int, side: int, factor: float, changes_loss: bool) -> None:
    def scale(term: torch.Tensor) -> torch.Tensor:
        scaled = term * factor
        return scaled if changes_loss else scaled + (term - scaled).detach()

    enter_in_step(ranks, lambda _model: _Additions(number, side, scale))


class _Additions(TorchFunctionMode):
    """Finds additions before each backward pass, and changes one term in one addition."""

    def __init__(self, number: int = -1, side: int = 0, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.found: list[Addition] = []
        self._number, self._side, self._change = number, side, change
        self._seen = 0

    def __torch_function__(self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "backward":
            self._seen = 0
        elif name in ADDITIONS and _are_terms(args):
            if self._seen == len(self.found) and self._change is None:
                self.found.append(
                    Addition(place=deepest_line(traceback.extract_stack()), values=(float(args[0]), float(args[1])))
                )
            if self._seen == self._number and self._change is not None:
                args = tuple(self._change(each) if at == self._side else each for at, each in enumerate(args))
            self._seen += 1
        return func(*args, **(kwargs or {}))


def _are_terms(args: tuple[Any, ...]) -> bool:
    return (
        len(args) == 2
        and torch.is_grad_enabled()
        and all(isinstance(each, torch.Tensor) and each.numel() == 1 for each in args)
        and any(each.requires_grad for each in args)
    )
