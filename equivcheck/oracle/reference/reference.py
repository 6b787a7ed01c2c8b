"""The reference of a training: run once, kept, with the evidence that it gives."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from equivcheck.layouts.base.limits.optimizers import rounds_parts
from equivcheck.layouts.base.rounding import Rounding
from equivcheck.layouts.composition.registry import rounding_of
from equivcheck.oracle.reference.addends import addend_traces
from equivcheck.oracle.reference.coarse import coarse_moments
from equivcheck.oracle.reference.doubt import Doubt, doubt_about, drowned_from, turned_signs
from equivcheck.oracle.reference.logarithms import logarithm_trace, summed_trace
from equivcheck.oracle.reference.noise import (
    NUM_CONFIRMATIONS,
    NUM_PERTURBATIONS,
    Expected,
    eps_of,
    expected_moments,
    perturbed,
)
from equivcheck.oracle.reference.optimizer_rounding import rounding_setup
from equivcheck.oracle.reference.rounded import rounded_setup
from equivcheck.oracle.reference.rounded_copies import reordered_traces, rounded_copies, unit_of
from equivcheck.oracle.reference.summation import split_traces, widely_clipped_trace
from equivcheck.scenario import (
    Attention,
    ContextParallel,
    CrossEntropy,
    Exchange,
    Layout,
    Model,
    PlannedParallelism,
    Precision,
    Scenario,
    Training,
)
from equivcheck.scenario.mesh import CP, TP
from equivcheck.training.ensemble import EnsembleTrace
from equivcheck.training.loop import train
from equivcheck.training.single_device import single_device
from equivcheck.training.threads import one_thread
from equivcheck.worlds.trace.trace import Trace

KEPT_REFERENCES = 32
"""References kept, some hundred KiB each: the same training comes again under other layouts and while a scenario shrinks."""

NUM_ROUNDED = 3
"""Perturbed runs of a reference that rounds: they come one after the other, and most ranks leave the very bits of it."""
NUM_ROUNDED_CONFIRMATIONS = 16
"""Such runs before a divergence is believed: among them all orders of a ring of 8, and a rounding flipped in each."""


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """What one device computes, and how sure that is."""

    moments: tuple[Expected, ...]
    """Every moment of the run."""
    doubt: Doubt | None
    """From where on agreement with it proves nothing, and why; None if it does at every step."""
    noise_limit: float
    """The share of a tensor's kind below which a difference is less than half of its digits: larger noise is a doubt."""
    takes_signs: bool = False
    """Whether the optimizer goes by signs of gradients."""

    @property
    def drowned(self) -> int | None:
        """The first step of which noise is larger than all that is there, so that no difference says anything; None for none."""
        return drowned_from(self.moments, self.noise_limit)

    def turned_signs(self, step: int) -> frozenset[str]:
        """Tensors of which rounding may turn signs in a step that the optimizer goes by; none where it goes by none."""
        return turned_signs(self.moments, step) if self.takes_signs else frozenset()


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """A training on one device, which rounds where a layout rounds; equal ones share what has been computed."""

    training: Training
    """What is trained."""
    rounding: Rounding | None = None
    """What the layout rounds to other element types; None for nothing."""
    num_parts: int = 1
    """Parts of each microbatch, of rows or positions, that ranks add up, in which the confirming reference sums it as well."""
    num_addends: int = 1
    """Ranks that each have an addend of a gradient when the optimizer scales it; 1 where it is summed before."""
    rounds_parts: bool = False
    """Whether ranks compute parts of a matrix where the optimizer rounds to fewer digits, so that these round otherwise."""
    by_logarithms: bool = False
    """Whether ranks round scores of attention otherwise, so that its weights are off by units in the last place of these."""
    sums_classes: bool = False
    """Whether ranks have some of the classes each, so that a z-loss is computed of sums."""

    @classmethod
    def of(cls, scenario: Scenario) -> ReferenceRun:
        """What the ranks of a scenario are compared with."""
        num_parts = max(layout.num_data_ranks * layout.mesh.size(CP) for layout in scenario.layouts)
        rounding = rounding_of(scenario.layout, scenario.training.precision)
        return cls(
            scenario.training,
            rounding,
            num_parts,
            _num_addends(scenario),
            _rounds_parts(scenario),
            by_logarithms=any(_rounds_scores(layout, scenario.training.model) for layout in scenario.layouts),
            sums_classes=any(map(_cuts_classes, scenario.layouts)),
        )

    def reference(self) -> Reference:
        """With the noise floor of a few runs with perturbed inputs."""
        return _reference(self.training, self.rounding)

    def confirming_reference(self) -> Reference:
        """With a noise floor that decides before a divergence is reported.

        It comes from many more perturbed runs, and from other orders of arithmetic on one device, among them that of data
        parallelism: a gradient that is zero by cancellation inside an operation moves with those, not with its inputs. What an
        optimizer rounds to fewer digits on its way counts too: over shards it rounds in other places.
        """
        return _confirming_reference(self)

    def coarse_reference(self) -> Reference:
        """Of one run alone: what is beyond its tolerances is so far off that noise of that size would be a doubt.

        A doubt does not count against such a difference in the full judgement either, so that none is looked for.
        """
        limit = noise_limit(self.training, self.rounding)
        return Reference(coarse_moments(_trace(self.training, self.rounding), limit), None, limit)


def _rounds_scores(layout: Layout, model: Model) -> bool:
    """Whether keys and values go round a ring, or fused attention has heads of other strides, by which its products round."""
    if layout.mesh.size(CP) > 1 and any(each.exchange is Exchange.RING for each in layout.of(ContextParallel)):
        return True
    is_fused = any(isinstance(layer, Attention) and layer.fused for layer in model.layers)
    return is_fused and layout.mesh.size(CP) * layout.mesh.size(TP) > 1


def _cuts_classes(layout: Layout) -> bool:
    return any(each.loss_parallel for each in layout.of(PlannedParallelism))


def _rounds_parts(scenario: Scenario) -> bool:
    """In float32 the last place of a gradient now and then changes what whole matrices are rounded to, in float64 never."""
    training = scenario.training
    if training.precision is not Precision.FLOAT64:
        return bool(training.optimizer.rounds_to)
    return any(rounds_parts(training, layout) for layout in scenario.layouts)


def _num_addends(scenario: Scenario) -> int:
    """Taken from as many parts of the rows, of all data ranks at least: a microbatch is split into equal parts."""
    optimizer = scenario.training.optimizer
    if optimizer.implementation not in optimizer.scales_addends:
        return 1
    scaling = [layout for layout in scenario.layouts if not layout.redistributes_gradients]
    return max((_num_parts(scenario.training, layout) for layout in scaling), default=1)


def _num_parts(training: Training, layout: Layout) -> int:
    are_even = all(rows % layout.mesh.num_ranks == 0 for rows in training.data.microbatches)
    return layout.mesh.num_ranks if are_even else layout.num_data_ranks


@lru_cache(maxsize=KEPT_REFERENCES)
def _trace(training: Training, rounding: Rounding | None) -> Trace:
    with _computing(rounding):
        return train(single_device(training) if rounding is None else rounded_setup(training, rounding))


@lru_cache(maxsize=KEPT_REFERENCES)
def _reference(training: Training, rounding: Rounding | None) -> Reference:
    trace = _trace(training, rounding)
    with _computing(rounding):
        if rounding is None:
            copies = perturbed(training, NUM_PERTURBATIONS)
        else:
            copies = rounded_copies(training, rounding, trace, NUM_ROUNDED)
        return _measured(training, rounding, copies, trace)


@lru_cache(maxsize=KEPT_REFERENCES)
def _confirming_reference(run: ReferenceRun) -> Reference:
    training, rounding = run.training, run.rounding
    trace = _trace(training, rounding)
    with _computing(rounding):
        if rounding is None:
            setup = rounding_setup(training) if run.rounds_parts else single_device
            copies = perturbed(training, NUM_PERTURBATIONS + NUM_CONFIRMATIONS, setup)
            others = (*split_traces(training, run.num_parts), widely_clipped_trace(training), *_other_traces(run))
        else:
            copies = rounded_copies(training, rounding, trace, NUM_ROUNDED_CONFIRMATIONS, flips=True)
            others = reordered_traces(training, rounding)
        return _measured(training, rounding, copies, trace, *others)


def _other_traces(run: ReferenceRun) -> Iterator[Trace]:
    """Of what the ranks compute otherwise than one device."""
    if run.num_addends > 1:
        yield from addend_traces(run.training, run.num_addends)
    if run.by_logarithms:
        yield logarithm_trace(run.training)
    loss = run.training.loss
    if run.sums_classes and isinstance(loss, CrossEntropy) and loss.z_loss:
        yield summed_trace(run.training)


def _measured(training: Training, rounding: Rounding | None, copies: EnsembleTrace, trace: Trace, *others: Trace) -> Reference:
    """A run with the noise floor that its copies show, and other runs of the same training."""
    eps = None if rounding is None else unit_of(training, rounding)
    found, limit = expected_moments(training, trace, copies, *others, eps=eps), noise_limit(training, rounding)
    return Reference(found, doubt_about(found, limit, copies), limit, training.optimizer.takes_signs)


@contextmanager
def _computing(rounding: Rounding | None) -> Iterator[None]:
    """Compute with one thread; where something is rounded, without torch's remarks on types that meet under autocast."""
    with one_thread(), nullcontext() if rounding is None else warnings.catch_warnings(action="ignore"):
        yield


def noise_limit(training: Training, rounding: Rounding | None = None) -> float:
    """The share of a tensor's kind below which a difference is less than half of the digits: the square root of eps.

    Digits are those of the coarsest element type that the training passes through.
    """
    own = (training.precision.value, training.optimizer.rounds_to)
    kinds = (*filter(None, own), *(rounding.element_types if rounding is not None else ()))
    return float(np.sqrt(max(map(eps_of, kinds))))
