"""Losses and largest errors by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equivcheck.report.finding_page.second_run import Compared
from equivcheck.worlds.trace.differences import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step."""

    step: int
    """Step, from 0."""
    expected_loss: float
    """Loss on one device."""
    loss: float
    """Mean loss over the ranks with one."""
    errors: dict[Phase, float]
    """Largest error per part of the step, relative to tolerance."""


def step_rows(moments: Sequence[Compared]) -> list[StepRow]:
    """A row per step. Optimizer state and buffers belong to the last one."""
    losses: dict[int, tuple[float, float]] = {}
    errors: dict[int, dict[Phase, float]] = {}
    for moment in moments:
        expected = moment.expected
        if expected.phase is Phase.LOSS:
            losses[expected.step] = float(expected.values[0]), float(moment.assembled.values[0])
        found = errors.setdefault(expected.step, {})
        worst = float("inf") if moment.assembled.misfits else float(moment.errors.max(initial=0.0))
        found[expected.phase] = max(worst, found.get(expected.phase, 0.0))
    return [StepRow(step=step, expected_loss=loss[0], loss=loss[1], errors=errors[step]) for step, loss in sorted(losses.items())]


def phases_of(rows: Sequence[StepRow]) -> list[Phase]:
    """Parts that any step has, in order."""
    return [phase for phase in Phase if any(phase in row.errors for row in rows)]
