"""The single-device run with measured tolerances, cached for equal trainings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from equivcheck.layouts.base.limits.optimizers import rounds_shards
from equivcheck.layouts.base.rounding import Rounding
from equivcheck.layouts.composition.registry import rounding_of
from equivcheck.oracle.reference.coarse import expected_with_coarse_tolerances
from equivcheck.oracle.reference.doubt import Doubt, doubt_about, first_step_dominated_by_noise, tensors_with_uncertain_signs
from equivcheck.oracle.reference.logarithms import logarithm_traces, summed_z_loss_trace
from equivcheck.oracle.reference.noise import (
    NUM_CONFIRMATIONS,
    NUM_PERTURBATIONS,
    Expected,
    eps_of,
    expected_moments,
    perturbed_copies,
)
from equivcheck.oracle.reference.optimizer_rounding import rounding_setup
from equivcheck.oracle.reference.partial_sums import partial_sum_traces
from equivcheck.oracle.reference.rounded import rounded_setup
from equivcheck.oracle.reference.rounded_copies import reordered_traces, rounded_copies, unit_of
from equivcheck.oracle.reference.summation import split_traces, wide_norm_trace
from equivcheck.scenario import (
    Attention,
    AttentionExchange,
    ContextParallel,
    CrossEntropy,
    Layout,
    Model,
    PlannedParallelism,
    Precision,
    Scenario,
    Training,
)
from equivcheck.scenario.mesh import CP, TP
from equivcheck.training.ensemble import EnsembleTrace
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.threads import one_thread
from equivcheck.worlds.trace.trace import Trace

KEPT_REFERENCES = 32
"""Maximum number of cached references, some hundred KiB each. One training occurs under several layouts and while a scenario
shrinks.
"""

NUM_ROUNDED = 3
"""Number of perturbed runs if the reference rounds to low precision.
They run one after another, and most ranks reproduce the reference bit for bit."""
NUM_ROUNDED_CONFIRMATIONS = 16
"""Perturbed runs before a divergence is reported. They include all orders for a ring with 8 ranks, each with a flip."""


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Values from a single-device run with tolerances, and the first step at which they cannot decide a check."""

    moments: tuple[Expected, ...]
    """Values with tolerances at all compared points in the run."""
    doubt: Doubt | None
    """First step from which on agreement proves nothing, and the reason. None if every step is decided."""
    noise_limit: float
    """Largest noise at which a decision is possible, relative to the largest tensor of the same kind. It is half the digits."""
    uses_signs: bool = False
    """Whether the optimizer uses only gradient signs, such as Rprop."""
    loss_groups: tuple[tuple[int, ...], ...] = ()
    """Groups of ranks that must return the same loss, because they have the same rows. Empty if the groups are unknown."""
    loss_groups_before: tuple[tuple[int, ...], ...] = ()
    """`loss_groups` for the steps before a checkpoint."""

    @property
    def first_noisy_step(self) -> int | None:
        """First step in which noise exceeds the values, so that a difference proves nothing. None if no step does."""
        return first_step_dominated_by_noise(self.moments, self.noise_limit)

    def tensors_with_uncertain_signs(self, step: int) -> frozenset[str]:
        """Return the tensors with a gradient element so small that rounding may change its sign at `step`.

        Empty unless the optimizer uses only signs.
        """
        return tensors_with_uncertain_signs(self.moments, step) if self.uses_signs else frozenset()


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """A single-device training with the options that make it round like a layout. Equal objects share cached results."""

    training: Training
    """The training to run on one device."""
    rounding: Rounding | None = None
    """The casts in the layout's mixed precision or autocast. None if the layout casts nothing."""
    num_parts: int = 1
    """How many parts, by rows or positions, ranks make from a microbatch. The confirming reference also sums in such
    parts.
    """
    num_partial_sums: int = 1
    """How many partial sums the optimizer gets for a gradient. 1 if gradients are reduced before."""
    rounds_shards: bool = False
    """Whether the optimizer rounds each rank's matrix part to a lower precision."""
    rounds_scores: bool = False
    """Whether ranks round attention scores differently from one device, as context-parallel ranks do."""
    shards_classes: bool = False
    """Whether the loss is vocabulary-parallel, so that a z-loss is computed from sums."""

    @classmethod
    def of(cls, scenario: Scenario) -> ReferenceRun:
        """Return the single-device run with which the scenario's ranks are compared."""
        num_parts = max(layout.num_data_ranks * layout.num_chunks * layout.mesh.size(CP) for layout in scenario.layouts)
        training = scenario.training
        # In float32, the last place of a gradient can change the rounding of a whole matrix. In float64 it never did.
        rounds_parts = bool(training.optimizer.rounds_to)
        if training.precision is Precision.FLOAT64:
            rounds_parts = any(rounds_shards(training, layout) for layout in scenario.layouts)
        return cls(
            training,
            rounding_of(scenario.layout, training.precision),
            num_parts,
            _num_partial_sums(scenario),
            rounds_parts,
            rounds_scores=any(_has_rounded_scores(layout, training.model) for layout in scenario.layouts),
            shards_classes=any(each.loss_parallel for layout in scenario.layouts for each in layout.of(PlannedParallelism)),
        )

    def reference(self) -> Reference:
        """Return the reference for the first comparison, with tolerances from a few perturbed runs."""
        return _reference(self.training, self.rounding)

    def confirming_reference(self) -> Reference:
        """Return the reference that must confirm a divergence before it is reported.

        It has many more perturbed runs, and runs in other summation orders, such as the order under data parallelism. If a
        gradient is zero because terms cancel inside an operation, only another order changes it. Some runs also round inside the
        optimizer, like an optimizer on shards.
        """
        return _confirming_reference(self)

    def coarse_reference(self) -> Reference:
        """Return a reference from one run, with the noise limit as tolerance.

        Its `doubt` is None, because the full judgement ignores doubts if a difference exceeds the noise limit.
        """
        limit = noise_limit(self.training, self.rounding)
        return Reference(expected_with_coarse_tolerances(_trace(self.training, self.rounding), limit), None, limit)


def _has_rounded_scores(layout: Layout, model: Model) -> bool:
    if layout.mesh.size(CP) > 1 and any(each.exchange is AttentionExchange.RING for each in layout.of(ContextParallel)):
        return True
    is_fused = any(isinstance(layer, Attention) and layer.fused for layer in model.layers)
    return is_fused and layout.mesh.size(CP) * layout.mesh.size(TP) > 1


def _num_partial_sums(scenario: Scenario) -> int:
    optimizer = scenario.training.optimizer
    if optimizer.implementation not in optimizer.scales_partial_sums:
        return 1
    found = 1
    for layout in scenario.layouts:
        if not layout.redistributes_gradients:
            # Microbatches are split into equal parts. If their rows do not divide by all ranks, they are split by data ranks.
            is_even = all(rows % layout.mesh.num_ranks == 0 for rows in scenario.training.data.microbatches)
            found = max(found, layout.mesh.num_ranks if is_even else layout.num_data_ranks)
    return found


@lru_cache(maxsize=KEPT_REFERENCES)
def _trace(training: Training, rounding: Rounding | None) -> Trace:
    with _computing(rounding):
        return train(single_device_setup(training) if rounding is None else rounded_setup(training, rounding))


@lru_cache(maxsize=KEPT_REFERENCES)
def _reference(training: Training, rounding: Rounding | None) -> Reference:
    trace = _trace(training, rounding)
    with _computing(rounding):
        if rounding is None:
            copies = perturbed_copies(training, NUM_PERTURBATIONS)
        else:
            copies = rounded_copies(training, rounding, trace, NUM_ROUNDED)
        return _measured(training, rounding, copies, trace)


@lru_cache(maxsize=KEPT_REFERENCES)
def _confirming_reference(run: ReferenceRun) -> Reference:
    training, rounding = run.training, run.rounding
    trace = _trace(training, rounding)
    with _computing(rounding):
        if rounding is None:
            setup = rounding_setup(training) if run.rounds_shards else single_device_setup
            copies = perturbed_copies(training, NUM_PERTURBATIONS + NUM_CONFIRMATIONS, setup)
            others = [*split_traces(training, run.num_parts), wide_norm_trace(training)]
            if run.num_partial_sums > 1:
                others += partial_sum_traces(training, run.num_partial_sums)
            if run.rounds_scores:
                others += logarithm_traces(training)
            if run.shards_classes and isinstance(training.loss, CrossEntropy) and training.loss.z_loss:
                others.append(summed_z_loss_trace(training))
        else:
            copies = rounded_copies(training, rounding, trace, NUM_ROUNDED_CONFIRMATIONS, flips=True)
            others = [*reordered_traces(training, rounding)]
        return _measured(training, rounding, copies, trace, *others)


def _measured(training: Training, rounding: Rounding | None, copies: EnsembleTrace, trace: Trace, *others: Trace) -> Reference:
    eps = None if rounding is None else unit_of(training, rounding)
    found, limit = expected_moments(training, trace, copies, *others, eps=eps), noise_limit(training, rounding)
    return Reference(found, doubt_about(found, limit, copies), limit, training.optimizer.uses_signs)


@contextmanager
def _computing(rounding: Rounding | None) -> Iterator[None]:
    # Autocast warns about the element types that meet in it.
    with one_thread(), nullcontext() if rounding is None else warnings.catch_warnings(action="ignore"):
        yield


def noise_limit(training: Training, rounding: Rounding | None = None) -> float:
    """Return the largest noise at which a decision is possible, relative to the largest tensor of the same kind.

    The limit is the square root of eps for the coarsest element type in the training, so half of this type's digits must be
    correct.
    """
    own = (training.precision.value, training.optimizer.rounds_to)
    kinds = (*filter(None, own), *(rounding.element_types if rounding is not None else ()))
    return float(np.sqrt(max(map(eps_of, kinds))))
