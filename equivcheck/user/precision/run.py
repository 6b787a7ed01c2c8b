"""The run on one device of a training whose ranks round: in the parts of the ranks, rounded alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from equivcheck.layouts.rounding import Division, Rounding
from equivcheck.reference.coarse import coarse_moments
from equivcheck.reference.noise import Expected
from equivcheck.reference.perturbed_rounding import Jitter, PerturbedRounding, Shuffled
from equivcheck.reference.reference import NUM_ROUNDED, NUM_ROUNDED_CONFIRMATIONS, Reference
from equivcheck.trace.trace import Trace
from equivcheck.train.threads import one_thread
from equivcheck.user.precision.model import RoundedModel
from equivcheck.user.precision.policy import rounding_of, sums_in_parts
from equivcheck.user.reference import SingleDeviceRun, coarsest, far_moment, measured, moved_material, trace_of
from equivcheck.user.settings import UserTrace
from equivcheck.user.task import Task


class RoundedRun(SingleDeviceRun):
    """As the run on one device, of a `RoundedModel`.

    Copies are moved by a unit of the widest type that is computed in: products of fewer digits add up in float32, and come out alike
    where operands are the same. They add up in other orders, and those that confirm a divergence round here and there otherwise.
    """

    def __init__(self, task: Task, whole: SingleDeviceRun, casting: Sequence[str]) -> None:
        """`whole` is the run that rounds nothing (`exact_task`), `casting` names modules that cast on ranks.

        Raises `UsageError` for a training that is not the same each time.
        """
        self._whole, self._casting = whole, casting
        super().__init__(task)
        self._limit = float(np.sqrt(self.eps))
        if not sums_in_parts(task):
            self.eps = max(eps for eps in map(_eps, (*self.element_types, torch.float64)) if eps <= _eps(torch.float32))

    def train(self, *, jitter: Jitter | None = None, division: Division | None = None, **given: Any) -> UserTrace:
        """As ranks round and divide, unless they are said to do otherwise."""
        rounding = rounding_of(self.task)
        rounding = rounding if division is None else replace(rounding, division=division)
        return _trained(self.task, rounding, jitter, self._casting, **given)

    def reference(self) -> Reference:
        """With the noise floor of a few copies."""
        return self._measured(NUM_ROUNDED, Shuffled)

    def confirming_reference(self, parts: Trace | None) -> Reference:  # noqa: ARG002 - this run is in parts itself
        """With that of many, which round otherwise here and there, and of other ways to divide."""
        with one_thread():
            others = [self.train(seed=self.task.seed, division=division) for division in (Division.BEFORE, Division.AROUND)]
        return self._measured(NUM_ROUNDED_CONFIRMATIONS, self._shaken, *others)

    def parts(self) -> Trace | None:
        """None: ranks are compared with parts already."""
        return None

    def far_moment(self, reference: Reference, parts: Trace | None) -> Expected | None:  # noqa: ARG002 - of runs of its own
        """The same of runs that round nothing, on whole batches and in parts."""
        exact, limit = self._whole.task, float(np.sqrt(self._whole.eps))
        with one_thread():
            in_parts = _trained(exact, rounding_of(exact), None, (), seed=exact.seed)
        return far_moment(Reference(coarse_moments(self._whole.trace, limit), None, limit), in_parts)

    def _measured(self, num_copies: int, jitter: Callable[[np.random.Generator, int], Jitter], *others: Trace) -> Reference:
        task, generator = self.task, np.random.default_rng((self.task.seed, num_copies))
        with one_thread():
            copies = [
                self.train(seed=task.seed, jitter=jitter(generator, 1 + copy), **moved_material(task, copy, self.eps))
                for copy in range(num_copies)
            ]
        return measured(self.trace, copies, self.eps, self._limit, *others)

    def _shaken(self, generator: np.random.Generator, copy: int) -> Jitter:
        rounding = rounding_of(self.task)
        kept = _name(self.task.dtype or coarsest(self._tensors()))
        to = rounding.compute or rounding.autocast
        return PerturbedRounding(generator, copy, kept, kept if to is None else to.value)


def exact_task(task: Task) -> Task:
    """The same in the types that it would have without a precision, the widest where they are converted at all."""
    return replace(task, precision=None, dtype=None if task.dtype is None else torch.float64)


def _trained(task: Task, rounding: Rounding, jitter: Jitter | None, casting: Sequence[str], **given: Any) -> UserTrace:
    def spread(module: nn.Module) -> tuple[nn.Module, Task]:
        rounded = RoundedModel(module, rounding, jitter or Jitter(), casting)
        return rounded, replace(task, loss=rounded.loss_by_parts(task.loss, task.reduction))

    return trace_of(task, **given, spread=spread)


def _eps(kind: torch.dtype) -> float:
    return float(torch.finfo(kind).eps)


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
