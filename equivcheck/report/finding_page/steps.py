"""Losses, and how far values are off, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equivcheck.report.finding_page.second_run import Compared
from equivcheck.worlds.trace.differences import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step."""

    step: int
    """From 0."""
    expected_loss: float
    """On one device."""
    loss: float
    """The mean over the ranks that have one."""
    errors: dict[Phase, float]
    """The largest error of each part of the step, in units of tolerance."""


def step_rows(moments: Sequence[Compared]) -> list[StepRow]:
    """A row for each step; optimizer state and buffers count to the last one."""
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
    """The parts that any step has, in order."""
    return [phase for phase in Phase if any(phase in row.errors for row in rows)]
