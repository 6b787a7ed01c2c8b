"""Mistakes of optimizers that step inside backward, so that no gradients are left after it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.words import count_description
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.worlds.trace.differences import Phase


def wrong_in_backward(diverged: DivergedTraining, facts: StepFacts) -> Iterator[Mistake]:
    """Yield possible mistakes: gradients are scaled, or not reduced, before an optimizer uses them inside backward."""
    if not facts.updates_in_backward:
        return
    ratio = diverged.ratio(diverged.updated, Phase.GRADIENT)
    if ratio is not None:
        words = f"all gradients are {ratio:g} times as large as on one device{count_description(diverged, ratio)}"
        yield Mistake(Cause.SCALED, words, partial(_scale_gradients, factor=ratio), is_quick=True)
    if diverged.has_own_rows:
        where = diverged.ranks_text(diverged.data_axes)
        words = f"all gradients are left unreduced over {where}: each rank updates inside backward, with those of its own rows"
        yield Mistake(Cause.NOT_REDUCED, words, _keep_own, own_rows=True)


def _scale_gradients(ranks: EmulatedUserRanks, *, factor: float) -> None:
    """Scale the gradient of the loss, but not the loss."""

    def loss_with_factor(outputs: Any, targets: Any, *, loss: Any) -> Any:
        value = loss(outputs, targets)
        return factor * value + ((1 - factor) * value).detach()

    ranks.wraps_loss = lambda _rank, loss: partial(loss_with_factor, loss=loss)


def _keep_own(ranks: EmulatedUserRanks) -> None:
    ranks.may_update_in_backward = True
