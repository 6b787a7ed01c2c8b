"""Reduces gradients as backward leaves them, and runs again. If the ranks are right now, they reduce only parts of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from equivcheck.diagnosis.emulation.held_elements import held_elements
from equivcheck.diagnosis.words import gradients
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.repair import (
    CONFIRMED,
    MissingReduction,
    Reduction,
    flat_gradients,
    is_right_with,
    missing_reduction,
    reducing_rank,
)
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.tensors import Vector

NEAR = 1e-6
"""Tolerance for weights, and for the relative distance of a sum from a gradient."""


def partial_reductions(diverged: DivergedTraining) -> list[Diagnosis]:
    """Find gradients that are reduced over a part of the ranks, such as a shared weight's, if stages add unreduced gradients.

    Only reductions that also sum over ranks with the same rows are looked for. Empty if there are none.
    """
    if diverged.first.phase is not Phase.GRADIENT or not diverged.same_row_axes:
        return []
    names = tuple(name for name in diverged.differing(Phase.GRADIENT) if name in diverged.updated)
    after_backward = _after_backward(diverged, names)
    found: dict[str, MissingReduction] = {}
    for name in names:
        lacking = missing_reduction(diverged, name, after_backward, lambda axes: (_num_data_ranks(diverged, axes),))
        if lacking is None or not _sums_all(diverged, lacking) or not _are_parts(diverged, name, after_backward):
            return []
        found[name] = lacking
    axes = {each.reduction.axes for each in found.values()}
    if len(axes) != 1 or not is_right_with(diverged, reducing_rank, found, diverged.first.step, True):
        return []
    sentence = f"{gradients(diverged, names)} reduced over a part of the ranks only {_describe(diverged, axes.pop())}"
    return [Diagnosis(cause=Cause.REDUCED_OVER_PART, sentence=sentence, exact=True)]


def _describe(diverged: DivergedTraining, axes: Sequence[str]) -> str:
    summed, averaged = (tuple(name for name in axes if (name in diverged.data_axes) is is_data) for is_data in (False, True))
    mean = f", averaged over {diverged.ranks_text(averaged)}" if averaged else ""
    return CONFIRMED.format(f"the sum over {diverged.ranks_text(summed)} of the gradients after backward{mean}")


def _num_data_ranks(diverged: DivergedTraining, axes: Sequence[str]) -> int:
    return diverged.size([name for name in axes if name in diverged.data_axes])


def _sums_all(diverged: DivergedTraining, lacking: MissingReduction) -> bool:
    """Whether the reduction concerns all elements, and sums over ranks with the same rows."""
    has_sum = any(name in diverged.same_row_axes for name in lacking.reduction.axes)
    return has_sum and all(mask.all() for mask in lacking.elements)


def _are_parts(diverged: DivergedTraining, name: str, after_backward: Sequence[dict[str, Vector]]) -> bool:
    """Whether each row of a rank's gradient is a sum over only some ranks' gradients after backward.

    Rows that are right already do not count, but one row must be wrong.
    """
    right = diverged.expected_values(diverged.first.step, Phase.GRADIENT)[name]
    found, held = [each.get(name) for each in flat_gradients(diverged.traces, diverged.first.step)], held_elements(diverged)
    if any(values is None or not held.by(name, rank).all() for rank, values in enumerate(found)):
        return False
    shape = (len(right), -1) if right.ndim > 1 else (1, -1)
    parts = np.stack([each[name].reshape(shape) for each in after_backward], -1)
    wrong = 0
    for values in found:
        for row, expected, columns in zip(np.reshape(values, shape), right.reshape(shape), parts, strict=True):  # type: ignore[arg-type]
            if _is_near(row, expected):
                continue
            used = columns[:, columns.any(0)]
            weights = np.linalg.lstsq(used, row, rcond=None)[0]
            counts = np.abs(weights) > NEAR
            if len(row) <= used.shape[1] or not _is_near(used @ weights, row) or counts.all() or not counts.any():
                return False
            wrong += 1
    return wrong > 0


def _is_near(values: Vector, others: Vector) -> bool:
    return bool(np.linalg.norm(values - others) <= NEAR * np.linalg.norm(others))


def _after_backward(diverged: DivergedTraining, names: Sequence[str]) -> list[dict[str, Vector]]:
    """Return each rank's gradients after the last backward pass of the first wrong step, as flat arrays by name."""
    held, step = held_elements(diverged), diverged.first.step
    no_reduction = Reduction(axes=(), divisor=1)
    each_rank = range(diverged.task.num_ranks)
    kept = {
        name: MissingReduction(
            reduction=no_reduction, elements=tuple(np.ones(int(held.by(name, rank).sum()), dtype=np.bool_) for rank in each_rank)
        )
        for name in names
    }
    try:
        traces = ranks("sim", diverged.task.num_ranks).run(reducing_rank, diverged.task, kept, step, True).values
    except RanksFailed:
        return [{} for _ in each_rank]
    return flat_gradients(traces, step)
