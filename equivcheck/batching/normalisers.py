"""Normalisers: rules for how much each example weighs in a step.

A step's gradient is a weighted sum over examples. A normaliser determines the weights from the counts in a batch: tokens, rows
and microbatches. So gradients from single examples predict the gradient in any arrangement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from equivcheck.arrangements.arrangement import Arrangement
from equivcheck.arrangements.rows import Example, Rows
from equivcheck.batching.runs import Runs
from equivcheck.system.choice import PrintableEnum
from equivcheck.worlds.trace.tensors import Vector


class Unit(PrintableEnum):
    """Unit in which a step counts, such as tokens or rows. The sum over token losses is divided by this count."""

    TOKENS = "the counted tokens"
    EXAMPLES = "the examples (each the mean over its tokens)"
    ROW_MEANS = "the rows (each the mean over its tokens)"
    WEIGHTS = "the rows, each with its weight from the batch,"
    LABELS = "the labels before the shift"
    LENGTHS = "the tokens, ignored ones included,"
    POSITIONS = "the positions, padding included,"
    POSITIONS_BUT_FIRST = "the positions except the first of each row, padding included,"
    PADDED_ROWS = "the rows (each divided by its length, padding included)"
    PADDED_ROWS_BUT_FIRST = "the rows (each divided by its length minus one, padding included)"
    ROWS = "the number of rows"
    ONE = "nothing"


class Over(PrintableEnum):
    """How the losses of several microbatches are combined."""

    ALL = "all microbatches"
    MEAN = "each microbatch, then the mean over microbatches"
    WINDOW = "each microbatch, then divided by the window"
    SUM = "each microbatch, then the sum over microbatches"
    ALL_MEAN = "all microbatches, then divided by the number of microbatches"
    ALL_WINDOW = "all microbatches, then divided by the window"
    LAST = "the last microbatch only"
    FIRST = "the first microbatch only"
    ALL_LAST = "all microbatches, but gradients of the last one only"


class Across(PrintableEnum):
    """How a step combines the losses of several ranks. On one device, all these ways give the same weights."""

    JOINT = ""
    """Ranks count like further microbatches on one device."""
    MEAN = ", on each rank, then the mean over ranks"
    SUM = ", on each rank, then the sum over ranks"
    JOINT_MEAN = ", then divided by the number of ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Normaliser:
    """A rule for how much each example weighs in a step."""

    unit: Unit
    """Number by which summed losses are divided."""
    over: Over
    """How the losses of microbatches are combined."""
    across: Across = Across.JOINT
    """How the losses of ranks are combined."""

    def __str__(self) -> str:
        return self.words()

    def words(self, *, is_sum: bool = True) -> str:
        """Return the rule as a phrase for a verdict.

        Set `is_sum` to False if an example's loss is neither a sum nor a mean over its tokens, such as the DPO loss.
        """
        of = f"of {self.over.value}{self.across.value}"
        if not is_sum:
            by = "" if self.unit in (Unit.EXAMPLES, Unit.ONE) else f", divided by {self.unit.value.rstrip(',')},"
            return f"mean over the examples {of}" if self.unit is Unit.EXAMPLES else f"sum over the examples{by} {of}"
        if self.unit in (Unit.ONE, Unit.ROWS):
            by = ", divided by the number of rows" if self.unit is Unit.ROWS else ""
            return f"sum over the counted tokens{by} {of}"
        return f"mean over {self.unit.value} {of}"

    def shares(self, runs: Runs, arrangement: Arrangement, window: int | None, single: Normaliser | None = None) -> Vector:
        """Return each example's weight in an arrangement, relative to its weight in a step on this example only.

        `single` is the rule for these steps on one example; None if it is also `self`. `window` is the number of microbatches in
        an update.
        """
        weights, of_single = self.weights(arrangement, window), self if single is None else single
        own = [of_single.weights(step, window)[id(example)] for example, step in zip(runs.examples, runs.singles, strict=True)]
        pairs = zip(runs.examples, own, strict=True)
        return np.array([weights[id(example)] / one if one else 0.0 for example, one in pairs])

    def weights(self, arrangement: Arrangement, window: int | None) -> dict[int, float]:
        """Return each example's weight in an arrangement, by the example's id. A microbatch without counted labels weighs 0.

        `window` is the number of microbatches in an update.
        """
        groups = arrangement.ranks or (arrangement.microbatches,)
        factor = 1.0 / len(groups) if self.across in (Across.MEAN, Across.JOINT_MEAN) else 1.0
        if self.across in (Across.JOINT, Across.JOINT_MEAN):
            groups = (arrangement.microbatches,)
        found: dict[int, float] = defaultdict(float)
        for group in groups:
            for example, weight in self._weights_in(group, window):
                found[id(example)] += factor * weight
        return found

    def _weights_in(self, microbatches: Sequence[Rows], window: int | None) -> Iterator[tuple[Example, float]]:
        num = len(microbatches)
        total = sum(_denominator(self.unit, rows) for rows in microbatches)
        factor = {Over.MEAN: 1 / num, Over.ALL_MEAN: 1 / num, Over.WINDOW: 1 / (window or 1), Over.ALL_WINDOW: 1 / (window or 1)}
        for number, rows in enumerate(microbatches):
            is_left_out = (self.over in _ONLY_LAST and number < num - 1) or (self.over is Over.FIRST and number)
            own = total if self.over in _OF_ALL else _denominator(self.unit, rows)
            share = 0.0 if is_left_out or not own else factor.get(self.over, 1.0) / own
            for row in rows.rows:
                for example in row:
                    yield example, share * _weight_in_unit(self.unit, example, row, rows.length)


_WITH_WINDOW = (Over.WINDOW, Over.ALL_WINDOW)
_OF_ALL = (Over.ALL, Over.ALL_MEAN, Over.ALL_WINDOW, Over.ALL_LAST)
_ONLY_LAST = (Over.LAST, Over.ALL_LAST)


def _denominator(unit: Unit, rows: Rows) -> float:
    of_example = _OF_EXAMPLE.get(unit)
    if of_example is not None:
        return sum(map(of_example, rows.examples))
    if unit in (Unit.POSITIONS, Unit.POSITIONS_BUT_FIRST):
        return len(rows.rows) * (rows.length - (unit is Unit.POSITIONS_BUT_FIRST))
    return 1 if unit is Unit.ONE else len(rows.rows)


_OF_EXAMPLE: dict[Unit, Callable[[Example], float]] = {
    Unit.TOKENS: lambda example: example.num_counted,
    Unit.LABELS: lambda example: example.num_labels,
    Unit.LENGTHS: lambda example: example.length,
    Unit.WEIGHTS: lambda example: example.weight,
    Unit.EXAMPLES: lambda _: 1,
}
"""Each example's part of the divisor."""


def _weight_in_unit(unit: Unit, example: Example, row: Sequence[Example], length: int) -> float:
    """Weight for an example's summed loss before it is divided."""
    if unit in (Unit.PADDED_ROWS, Unit.PADDED_ROWS_BUT_FIRST):
        positions = length - (unit is Unit.PADDED_ROWS_BUT_FIRST)
        return 1 / positions if positions else 0.0
    if unit is Unit.EXAMPLES:
        return 1 / example.num_counted if example.num_counted else 0.0
    if unit is Unit.WEIGHTS:
        return example.weight / example.num_counted if example.num_counted else 0.0
    counted = sum(each.num_counted for each in row)
    if unit is Unit.ROW_MEANS:
        return 1 / counted if counted else 0.0
    return 1.0


NORMALISERS = {
    "token": Normaliser(unit=Unit.TOKENS, over=Over.ALL),
    "sequence": Normaliser(unit=Unit.EXAMPLES, over=Over.ALL),
    "none": Normaliser(unit=Unit.ONE, over=Over.SUM),
}
"""Normalisers by the names in `check_batching`."""


def candidates(window: int | None, *, has_ranks: bool = False) -> Iterator[Normaliser]:
    """Yield the normalisers to try, the most common first. `window` is the number of microbatches in an update."""
    for across in Across if has_ranks else (Across.JOINT,):
        for over in Over:
            if over in _WITH_WINDOW and window is None:
                continue
            for unit in Unit:
                if unit is not Unit.ONE or over not in (Over.ALL, Over.ALL_MEAN, Over.ALL_WINDOW):
                    yield Normaliser(unit=unit, over=over, across=across)


def fits(
    normaliser: Normaliser, runs: Runs, arrangement: Arrangement, window: int | None, single: Normaliser | None = None
) -> bool:
    """Whether a normaliser predicts an arrangement's gradients from the gradients of steps on single examples.

    `single` is the normaliser in those steps; None if it is also `normaliser`. On ranks, the two may differ.
    """
    actual = runs.gradients(arrangement)
    if not np.isfinite(actual).all():
        return normaliser.over not in _OF_ALL and any(
            _denominator(normaliser.unit, rows) == 0 for rows in arrangement.microbatches
        )
    shares = normaliser.shares(runs, arrangement, window, single)
    expected = sum((share * own for share, own in zip(shares, runs.single_gradients, strict=True)), np.zeros_like(actual))
    return runs.fits(actual, expected)


def fits_within_example(normaliser: Normaliser, runs: Runs, window: int | None) -> bool:
    """Whether a normaliser predicts an example's gradients from two steps, each with one half of its labels.

    This distinguishes a mean over tokens from a sum. Returns True if no example has two labels, or if the loss, such as the DPO
    loss, is not a sum over tokens.
    """
    if runs.halves is None:
        return True
    sums = []
    for arrangement in runs.halves:
        (weight,) = normaliser.weights(arrangement, window).values()
        if not weight:
            return False
        sums.append(runs.gradients(arrangement) / weight)
    return runs.fits(sums[0], sums[1] + sums[2]) or not runs.is_additive


def measured_weights(runs: Runs, arrangement: Arrangement) -> Vector | None:
    """Return each example's weight in an arrangement's gradients.

    Weights are fitted by least squares to the gradients from steps on single examples. Returns None if no weights explain the
    gradients. All weights are NaN if a gradient is not finite, or if several weights give the same gradients.
    """
    actual = runs.gradients(arrangement)
    singles = np.stack(runs.single_gradients, axis=1)
    unknown: Vector = np.full(singles.shape[1], np.nan)
    if not (np.isfinite(actual).all() and np.isfinite(singles).all()):
        return unknown
    found, _, rank, _ = np.linalg.lstsq(singles, actual, rcond=None)
    weights: Vector = found.astype(np.float64)
    if not runs.fits(actual, singles @ weights):
        return None
    return weights if rank == singles.shape[1] else unknown
