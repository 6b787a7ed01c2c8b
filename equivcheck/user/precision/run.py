"""Single-device run for ranks that round: it computes the same parts of the rows, and rounds at the same points."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from equivcheck.layouts.base.rounding import Division
from equivcheck.oracle.reference.coarse import expected_with_coarse_tolerances
from equivcheck.oracle.reference.noise import Expected
from equivcheck.oracle.reference.perturbed_rounding import Jitter, PerturbedRounding, Shuffled
from equivcheck.oracle.reference.reference import NUM_ROUNDED, NUM_ROUNDED_CONFIRMATIONS, Reference
from equivcheck.training.threads import one_thread
from equivcheck.user.batches import perturbation_factors
from equivcheck.user.precision.model import Drift, RoundedModel
from equivcheck.user.precision.policy import computes_in_few_digits, rounding_of, sums_in_parts
from equivcheck.user.reference import (
    SingleDeviceRun,
    coarsest_type,
    eps_of,
    far_moment,
    perturbed_start,
    reference_from,
    trace_of,
)
from equivcheck.user.task import Task
from equivcheck.user.traces.settings import UserTrace
from equivcheck.worlds.trace.trace import Trace

FLOAT32_EPS = eps_of(torch.float32)

_OTHER_DIVISIONS = (Division.BEFORE, Division.SCALED, Division.AROUND)
"""Other points in a step at which ranks may divide a gradient sum."""


class RoundedRun(SingleDeviceRun):
    """Single-device run that rounds as the ranks do. It trains a `RoundedModel`.

    Copies of the run measure noise. Each copy starts from perturbed values, perturbs updated parameters, and adds gradients in
    another order. To confirm a divergence, copies also round differently at random points. If all matrix products are in bfloat16
    or float16, copies may start from equal values, because equal operands give equal products.
    """

    def __init__(self, task: Task, exact_run: SingleDeviceRun, casting: Collection[str], *, in_parts: bool = True) -> None:
        """`exact_run` is the run without rounding (`exact_task`); `casting` names modules that cast their inputs on ranks.

        If not `in_parts`, the full batch goes through the model, and tolerances are as wide as the casts' rounding. Raises
        `UsageError` if two runs differ.
        """
        self._exact_run, self._casting, self._in_parts = exact_run, casting, in_parts
        self._rounding = rounding_of(task, in_parts=in_parts)
        super().__init__(task)
        self._limit = float(np.sqrt(self.eps))
        self._begins_alike = False
        if not in_parts or sums_in_parts(task) or self._model.divides_inexactly:
            self.eps /= 2  # the largest relative error of a cast
        else:
            self.eps = max(eps for eps in map(eps_of, (*self.element_types, torch.float64)) if eps <= FLOAT32_EPS)
            self._begins_alike = computes_in_few_digits(self._rounding)

    def over_full_batch(self) -> RoundedRun:
        """Return a run that rounds at the same points, but computes all rows at once."""
        return RoundedRun(self.task, self._exact_run, self._casting, in_parts=False)

    def train(
        self, *, division: Division | None = None, jitter: Jitter | None = None, drift: Drift = torch.clone, **given: Any
    ) -> UserTrace:
        """Train on one device with the ranks' rounding.

        `division` says when a step divides gradients by the number of ranks; None for the same time as on the ranks. `jitter`
        perturbs rounding, and `drift` perturbs updates.
        """
        rounding = self._rounding if division is None else replace(self._rounding, division=division)

        def spread(module: nn.Module) -> tuple[nn.Module, Task]:
            self._model = RoundedModel(module, rounding, self._casting, jitter or Jitter(), drift)
            return self._model, _by_parts(self.task, self._model)

        return trace_of(self.task, **given, spread=spread)

    def reference(self) -> Reference:
        """Return the reference for a first comparison.

        It is quick, because only a few perturbed copies of the run measure its noise.
        """
        return self._from_copies(NUM_ROUNDED, Shuffled)

    def confirming_reference(self, parts: Trace | None) -> Reference:  # noqa: ARG002 - this run is in parts itself
        """Return the reference for confirming a divergence. Many copies of the run with perturbed rounding measure its noise.

        The noise also covers runs that divide gradients before or after other operations in the step.
        """
        with one_thread():
            others = [self.train(seed=self.task.seed, division=division) for division in _OTHER_DIVISIONS]
        return self._from_copies(NUM_ROUNDED_CONFIRMATIONS, self._perturbed_rounding, *others)

    def parts(self) -> Trace | None:
        """Return None, because this run already computes the ranks' parts of the rows."""
        return None

    def far_moment(self, reference: Reference, parts: Trace | None) -> Expected | None:  # noqa: ARG002 - of runs of its own
        """Return the first step and stage at which values depend on how rows are split, even without low precision.

        There, a run on the ranks' parts of the rows and a run on all rows agree in less than half of the digits. Returns None if
        this never happens.
        """
        exact, limit = self._exact_run.task, float(np.sqrt(self._exact_run.eps))

        def spread(module: nn.Module) -> tuple[nn.Module, Task]:
            model = RoundedModel(module, rounding_of(exact, in_parts=self._in_parts), (), Jitter(), torch.clone)
            return model, _by_parts(exact, model)

        with one_thread():
            in_parts = trace_of(exact, seed=exact.seed, spread=spread)
        return far_moment(Reference(expected_with_coarse_tolerances(self._exact_run.trace, limit), None, limit), in_parts)

    def _from_copies(self, num_copies: int, jitter: Callable[[np.random.Generator, int], Jitter], *others: Trace) -> Reference:
        generator = np.random.default_rng((self.task.seed, num_copies))
        with one_thread():
            copies = [self._copy(copy, jitter(generator, 1 + copy), generator) for copy in range(num_copies)]
        return reference_from(self.task, self.trace, copies, self.eps, *others, limit=self._limit)

    def _copy(self, copy: int, jitter: Jitter, generator: np.random.Generator) -> UserTrace:
        task, eps = self.task, min(FLOAT32_EPS, eps_of(self._kept))
        given = {} if self._begins_alike else perturbed_start(task, copy, self.eps)
        return self.train(
            seed=task.seed, jitter=jitter, drift=lambda tensor: tensor * perturbation_factors(tensor, eps, generator), **given
        )

    def _perturbed_rounding(self, generator: np.random.Generator, copy: int) -> Jitter:
        kept, to = str(self._kept).removeprefix("torch."), self._rounding.compute or self._rounding.autocast
        return PerturbedRounding(generator, copy, kept, kept if to is None else to.value)

    @property
    def _kept(self) -> torch.dtype:
        """The master parameters' element type."""
        return self.task.dtype or coarsest_type(self._tensors())


def casting_of(traces: Sequence[UserTrace]) -> set[str]:
    """Return the names of modules that cast their inputs on any rank."""
    return {name for trace in traces for name in trace.casting}


def exact_task(task: Task) -> Task:
    """Return the task without `precision`. If it converts element types, it converts them to float64."""
    return replace(task, precision=None, dtype=None if task.dtype is None else torch.float64)


def _by_parts(task: Task, model: RoundedModel) -> Task:
    return replace(task, loss=model.loss_by_parts(task.loss, task.reduction))
