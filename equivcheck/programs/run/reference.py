"""A tensor program's reference: its run on one device, and tolerances from runs in which each value is slightly changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from equivcheck.oracle.reference.doubt import Doubt
from equivcheck.oracle.reference.noise import Expected, expected_of
from equivcheck.oracle.reference.reference import Reference
from equivcheck.programs.run.one_device import Disturb, PlainRun, ProgramPlan, run_on_one_device
from equivcheck.programs.run.rank import moment, value_names
from equivcheck.programs.verdict import BACKWARD
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.moments import Moment, ValueTrace

NUM_COPIES = 2
"""Disturbed runs before ranks are compared."""
NUM_CONFIRMING = 24
"""Disturbed runs before a difference is reported."""
ROUNDING_UNITS = 4.0
"""Disturbance in units in the last place. A few additions in another order cause as much."""
NOISE_LIMIT = 1e-4
"""Maximum noise relative to the largest value, or to 1 if values are smaller. Larger noise makes a comparison useless."""


def reference_of(plan: ProgramPlan, refused: frozenset[int], num_copies: int) -> Reference:
    """Return a program's values and gradients on one device, with tolerances from `num_copies` runs with slightly changed values.

    `refused` contains the numbers of statements refused on ranks. If it also contains `BACKWARD`, the backward pass was refused,
    and the result has no gradients.
    """
    original = _moments(plan, run_on_one_device(plan, refused), with_gradients=BACKWARD not in refused)
    copies = [original, *(_disturbed_moments(plan, refused, seed) for seed in range(num_copies))]
    alike = [each if each is not None and _shapes(each) == _shapes(original) else original for each in copies]
    moved = [np.stack([each.snapshot.values for each in same]) for same in zip(*alike, strict=True)]
    expected = expected_of(ValueTrace(moments=original), moved, None)
    changed = any(each is not copy for each, copy in zip(alike, copies, strict=True))
    doubt = Doubt(reason="rounding alone changes the shape of a value", step=0) if changed else doubt_of(expected)
    return Reference(moments=expected, doubt=doubt, noise_limit=NOISE_LIMIT)


def _disturbed_moments(plan: ProgramPlan, refused: frozenset[int], seed: int) -> tuple[Moment, Moment] | None:
    """Return values and gradients of a disturbed run.

    None if an operation refuses the values, because an earlier value has another shape.
    """
    try:
        run = run_on_one_device(plan, refused, disturbance(seed))
    except (IndexError, RuntimeError, ValueError):  # the run without disturbance has passed
        return None
    return _moments(plan, run, with_gradients=BACKWARD not in refused)


def _shapes(copy: tuple[Moment, ...]) -> list[tuple[int, ...]]:
    """Return the tensors' shapes. Shapes can depend on values, because some operations pick elements."""
    return [piece.shape for each in copy for piece in each.snapshot.pieces]


def disturbance(seed: int) -> Disturb:
    """Return a function to add a random rounding error to each element of a value.

    The error is at most a few machine epsilons, relative to the largest element in the value and its arguments.
    """
    generator = torch.Generator().manual_seed(seed)

    def disturb(value: torch.Tensor, arguments: list[torch.Tensor], unit: float) -> torch.Tensor:
        if not value.is_floating_point() or not value.numel():
            return value
        sizes = [each.detach().abs().max() for each in (value, *arguments) if each.numel() and each.is_floating_point()]
        scale = ROUNDING_UNITS * max(unit, torch.finfo(value.dtype).eps) * max(map(float, sizes))
        return value + (scale * (2 * torch.rand(value.shape, generator=generator, dtype=torch.float64) - 1)).to(value.dtype)

    return disturb


def _moments(plan: ProgramPlan, run: PlainRun, *, with_gradients: bool) -> tuple[Moment, Moment]:
    values: dict[str, torch.Tensor | None] = {}
    for number, outputs in enumerate(run.outputs):
        if plan.is_read(number):
            values |= dict(zip(value_names(plan, number, len(outputs)), outputs, strict=True))
    pairs = zip(plan.compared_gradients, run.gradients, strict=True)
    gradients = {name: gradient if with_gradients else None for name, gradient in pairs}
    return moment(Phase.VALUE, values), moment(Phase.GRADIENT, gradients)


def doubt_of(expected: Sequence[Expected]) -> Doubt | None:
    """Return a `Doubt` if rounding noise in any value is above `NOISE_LIMIT`; otherwise None.

    Agreement with so much noise would prove nothing.
    """
    for each in expected:
        lost = each.tolerances > NOISE_LIMIT * np.maximum(each.scales, 1.0)
        if lost.any():
            name = each.table.names[int(np.flatnonzero(lost)[0])]
            return Doubt(reason=f"rounding alone changes {each.phase.value} {name} by as much as its size", step=0)
    return None
