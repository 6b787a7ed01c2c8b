"""Runs one training step on arrangements of the user's batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import nn

from equivcheck.arrangements.arrangement import Arrangement, Kind, single_example, whole_batch
from equivcheck.arrangements.format import Format
from equivcheck.arrangements.rows import Example, Rows
from equivcheck.batching.outputs import Observed, Watch
from equivcheck.batching.ranks import RankRuns
from equivcheck.errors import UsageError
from equivcheck.oracle.comparison.assemble import Assembler
from equivcheck.oracle.comparison.compare import Comparison, compare
from equivcheck.oracle.reference.noise import Expected
from equivcheck.oracle.reference.reference import Reference
from equivcheck.training.threads import one_thread
from equivcheck.user.batches import convert_batch
from equivcheck.user.ranks import build_model
from equivcheck.user.reference import SingleDeviceRun, eps_of, trace_of
from equivcheck.user.task import Task
from equivcheck.user.traces.optimizers import has_hooks, hook_steps, optimizers_in
from equivcheck.worlds.trace.differences import Divergence, Phase
from equivcheck.worlds.trace.moments import ValueTrace, moments
from equivcheck.worlds.trace.tensors import Table, Vector, full_vector, norms
from equivcheck.worlds.trace.trace import Trace

COMPARED = (Phase.LOSS, Phase.GRADIENT, Phase.UPDATE)
"""Phases with the same values in all arrangements. Buffers may count microbatches."""


class Runs:
    """Trains one step on each arrangement of the user's batch, and keeps the results."""

    def __init__(self, task: Task, given: Format, examples: Sequence[Example], ranks: RankRuns | None = None) -> None:
        self._task, self._format, self._ranks = task.with_new_optimizers(self._count_updates), given, ranks
        self.examples = tuple(examples)
        """The user's examples."""
        self._traces: dict[Arrangement, tuple[Trace, ...]] = {}
        self.whole = whole_batch(given, examples)
        """Arrangement with all examples in one microbatch."""
        self._num_updates: int | None = 0
        self._base = SingleDeviceRun(replace(self._task, batches=(self._batch(self.whole.microbatches),)))
        self._traces[self.whole] = (self._base.trace,)
        self._updates: dict[Arrangement, int | None] = {self.whole: self._num_updates}
        self.precision = self._base.precision
        """Element type with the fewest digits."""
        self._gradients: dict[Arrangement, Vector] = {}
        self._observed: dict[Arrangement, Observed] = {}
        self.narrows = task.dtype is not None and eps_of(self.precision) > eps_of(task.dtype)
        """Whether the model casts to a type with fewer digits than it was converted to."""

    def _batch(self, microbatches: Sequence[Rows]) -> list[Any]:
        return [self._format.microbatch(rows) for rows in microbatches]

    def traces(self, arrangement: Arrangement) -> tuple[Trace, ...]:
        """Train one step on an arrangement. Returns a trace for each rank, or one trace if it runs on one device."""
        if arrangement not in self._traces:
            if arrangement.ranks:
                assert self._ranks is not None
                batches = [convert_batch(self._batch(own), self._task.dtype) for own in arrangement.ranks]
                traces = self._ranks.traces(batches)
            else:
                traces = (self._train(arrangement),)
                self._updates[arrangement] = self._num_updates
            self._traces[arrangement] = traces
        return self._traces[arrangement]

    def _train(self, arrangement: Arrangement, model: nn.Module | None = None) -> Trace:
        with one_thread():
            return trace_of(self._task, seed=self._task.seed, model=model, batches=[self._batch(arrangement.microbatches)])

    def _count_updates(self, built: Any) -> None:
        self._num_updates = 0 if any(map(has_hooks, optimizers_in(built))) else None
        hook_steps(built, self._add_update)

    def _add_update(self, *_: Any) -> None:
        assert self._num_updates is not None, "there is a hook"
        self._num_updates += 1

    def observation(self, arrangement: Arrangement) -> Observed:
        """Return each example's model outputs and their gradients in an arrangement.

        An output is left out if its positions are not in dim 1, because its values at padding cannot be removed.
        """
        if arrangement not in self._observed:
            self._observed[arrangement] = self.watch(arrangement).observation(arrangement, self.is_by_row)
        return self._observed[arrangement]

    def watch(self, arrangement: Arrangement) -> Watch:
        """Train one step on an arrangement, and return the recorded outputs of the model."""
        model = self.build()
        watch = Watch(model)
        self._train(arrangement, model)
        return watch

    def is_by_row(self, output: torch.Tensor, rows: Rows) -> bool:
        """Whether a model output has one row for each row in the microbatch `rows`, but no dim for token positions."""
        has_positions = self._format.has_tokens and rows.length in output.shape[1:]
        return len(output) == len(rows.rows) and not has_positions

    def outputs_differ(self, one: Arrangement, other: Arrangement) -> bool | None:
        """Whether the model has different outputs for the same example in two arrangements.

        None if no example's outputs can be compared.
        """
        first, second = self.observation(one).values, self.observation(other).values
        shared = [key for key in first if key in second]
        if not shared:
            return None
        if any([each.shape for each in first[key]] != [each.shape for each in second[key]] for key in shared):
            return None
        pairs = [pair for key in shared for pair in zip(first[key], second[key], strict=True)]
        return not all(float((one - other).norm()) <= self.rounding * float(other.norm()) for one, other in pairs)

    @property
    def rounding(self) -> float:
        """Limit for rounding, relative to the norm or ratio that is compared.

        Outputs for different inputs differ by more than this limit.
        """
        return float(eps_of(self.precision) ** 0.75)

    def is_one(self, ratio: float) -> bool:
        """Whether a ratio between two gradients is 1, up to rounding."""
        return abs(ratio - 1.0) <= self.rounding

    def ratios_by_output(self, one: Arrangement, other: Arrangement) -> list[dict[int, float]] | None:
        """Return the factors by which gradients in `one` are larger than in `other`: a dict for each model output.

        Each dict maps an example's id to its factor. An example without gradients has no factor. Returns None if an example's
        gradients in `one` are not a multiple of those in `other`.
        """
        first, second = self.observation(one).gradients, self.observation(other).gradients
        found: list[dict[int, float]] = [{} for _ in self.observation(other).names]
        for key, gradients in second.items():
            for ratios, before, after in zip(found, gradients, first.get(key, ()), strict=False):
                scale = float(before.norm())
                if before.shape != after.shape or not bool(torch.isfinite(after).all()):
                    return None
                if not scale:
                    continue
                ratio = float((after * before).sum()) / scale**2
                distance = float((after - ratio * before).norm())
                if not distance <= self.rounding * max(abs(ratio), 1.0) * scale:  # also if it is NaN
                    return None
                ratios[key] = ratio
        return found

    def build(self) -> nn.Module:
        """Build the user's model."""
        return build_model(self._task)

    def is_without_update(self, arrangement: Arrangement) -> bool:
        """Whether the optimizer made no step in an arrangement on one device.

        False if this is unknown, because the optimizer has no hooks.
        """
        return self.num_updates(arrangement) == 0

    def num_updates(self, arrangement: Arrangement) -> int | None:
        """How many steps the optimizer made in an arrangement on one device. None if the optimizer has no hooks to count them."""
        self.traces(arrangement)
        return self._updates[arrangement]

    def ratio(self, arrangement: Arrangement, found: Divergence) -> float:
        """Return the norm of the gradient that differs in `found`, divided by its norm for the whole batch.

        Returns 1 if `found` is a difference in another tensor than a gradient.
        """
        if found.phase is not Phase.GRADIENT or found.tensor not in self.gradient_moment.table.rows:
            return 1.0
        row = self.gradient_moment.table.rows[found.tensor]
        own = norms(self.gradient_moment.table, self.gradients(arrangement))[row]
        before = self.gradient_moment.norms[row]
        return float(own / before) if before else float("inf")

    @cached_property
    def reference(self) -> Reference:
        """Values of the step on the whole batch in one microbatch, with their tolerances."""
        return self._base.reference()

    @cached_property
    def confirming_reference(self) -> Reference:
        """Values of the step on the whole batch, with tolerances from many more perturbed runs.

        A difference is reported only if this reference confirms it.
        """
        return self._base.confirming_reference(None)

    @cached_property
    def with_blank(self) -> Trace:
        """Trace of a step on the whole batch with one additional row that has no labels."""
        examples = (*self.examples, self._format.without_labels(self.examples[0]))
        (trace,) = self.traces(whole_batch(self._format, examples))
        return trace

    def compare(self, arrangement: Arrangement, phases: Collection[Phase] = COMPARED, *, factor: float = 1.0) -> Comparison:
        """Compare an arrangement with the whole batch, in these phases of the step. Gradients must be `factor` times as large."""
        own = [[moment for moment in moments(trace) if moment.phase in phases] for trace in self.traces(arrangement)]
        found = [ValueTrace(moments=tuple(each)) for each in own]
        expected = partial(self._expected, arrangement=arrangement, phases=phases, factor=factor)
        compared = compare(expected(self.reference), found)
        return compare(expected(self.confirming_reference), found) if compared.divergences else compared

    def _expected(self, reference: Reference, arrangement: Arrangement, phases: Collection[Phase], factor: float) -> Reference:
        """Return the reference in some phases. If the arrangement has one row more, return the reference that has it too."""
        found = list(reference.moments)
        if arrangement.has_blank:
            own = [moment.snapshot for moment in moments(self.with_blank)]
            found = [
                replace(moment, values=full_vector(moment.table, each.present, each.values), present=each.present)
                if np.isfinite(each.values).all()  # NaN is no agreement: it is compared with the batch without the row
                else moment
                for moment, each in zip(found, own, strict=True)
            ]
        if factor != 1.0:
            found = [replace(each, values=each.values * factor, tolerances=each.tolerances * factor) for each in found]
        return replace(reference, moments=tuple(moment for moment in found if moment.phase in phases))

    def only_loss_differs(self, arrangement: Arrangement) -> bool:
        """Whether an arrangement's gradients and parameters agree with those of the whole batch, so only its loss can differ.

        Returns False if the arrangement repeats the batch (`Kind.TWICE`).
        """
        return arrangement.kind is not Kind.TWICE and not self.compare(arrangement, (Phase.GRADIENT, Phase.UPDATE)).divergences

    def has_nan(self, arrangement: Arrangement) -> bool:
        """Whether an arrangement has a NaN or infinite gradient."""
        return not np.isfinite(self.gradients(arrangement)).all()

    @cached_property
    def gradient_moment(self) -> Expected:
        """Gradients in `confirming_reference`: those for the whole batch, with tolerances from many perturbed runs."""
        return next(moment for moment in self.confirming_reference.moments if moment.phase is Phase.GRADIENT)

    def gradients(self, arrangement: Arrangement) -> Vector:
        """Return an arrangement's gradients as one vector. It has zeros for parameters without a gradient."""
        if arrangement not in self._gradients:
            snapshots = [trace.steps[0].gradients for trace in self.traces(arrangement)]
            found = Assembler().assemble(self.gradient_moment, snapshots)
            self._gradients[arrangement] = np.where(found.covered, found.values, 0.0)
        return self._gradients[arrangement]

    def local_gradients(self, arrangement: Arrangement) -> list[Vector]:
        """Return each rank's gradients in an arrangement, as one vector each. Empty if ranks hold different shards."""
        snapshots = [trace.steps[0].gradients for trace in self.traces(arrangement)]
        found = [Assembler().assemble(self.gradient_moment, [snapshot]) for snapshot in snapshots]
        has_shards = not all(np.array_equal(each.covered, found[0].covered) for each in found)
        return [] if has_shards else [np.where(each.covered, each.values, 0.0) for each in found]

    def would_be_right(self, gradients: Vector, arrangement: Arrangement) -> bool:
        """Whether `gradients` agree with those of the whole batch, up to rounding.

        If the arrangement has an additional row without labels, the whole batch also gets this row.
        """
        (expected,) = self._expected(self.confirming_reference, arrangement, (Phase.GRADIENT,), 1.0).moments
        return self.fits(gradients, expected.values)

    @cached_property
    def singles(self) -> tuple[Arrangement, ...]:
        """An arrangement for each example, which contains only this example."""
        return tuple(single_example(self._format, example) for example in self.examples)

    @cached_property
    def single_gradients(self) -> tuple[Vector, ...]:
        """For each example, the gradients of a step on this example only; NaN if the step fails."""
        return tuple(map(self._gradients_or_nan, self.singles))

    def _gradients_or_nan(self, arrangement: Arrangement) -> Vector:
        try:
            return self.gradients(arrangement)
        except UsageError:
            raise
        except Exception:  # such as a batch norm over one row
            return np.full(self.gradient_moment.table.total, np.nan)

    @cached_property
    def halves(self) -> tuple[Arrangement, ...] | None:
        """Three arrangements of one example: with all labels, with every second label, and with the other labels.

        None if no example has two labels.
        """
        for example in self.examples:
            parts = self._format.halves(example)
            if parts is not None:
                return tuple(single_example(self._format, each) for each in (example, *parts))
        return None

    @cached_property
    def is_additive(self) -> bool:
        """Whether the gradients in the first of the `halves` are a weighted sum of the gradients in the other two.

        True if no example has two labels.
        """
        if self.halves is None:
            return True
        example, *parts = (self.gradients(each) for each in self.halves)
        basis = np.stack(parts, axis=1)
        weights = np.linalg.lstsq(basis, example, rcond=None)[0]
        return self.fits(example, basis @ weights)

    @cached_property
    def _scale(self) -> Vector:
        """Each tensor's tolerance for sums over single examples' gradients, which may be larger than the sum."""
        moment = self.gradient_moment
        singles = [norms(moment.table, single) for single in self.single_gradients]
        with np.errstate(invalid="ignore"):
            size = np.nansum(singles, axis=0)
        found: Vector = moment.tolerances * (1.0 + size / np.maximum(moment.norms, np.finfo(np.float64).tiny))
        return found

    def fits(self, actual: Vector, expected: Vector) -> bool:
        """Whether two gradient vectors agree, up to rounding."""
        table: Table = self.gradient_moment.table
        with np.errstate(invalid="ignore"):
            distance = norms(table, actual - expected)
        return bool((distance <= self._scale).all())
