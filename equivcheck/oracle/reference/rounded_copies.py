"""Rounding noise for a reference with low precision.

The perturbed copies run one by one, because batched products in low precision round differently.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from equivcheck.layouts.base.rounding import Rounding
from equivcheck.oracle.reference.noise import eps_of, perturbed_material
from equivcheck.oracle.reference.optimizer_rounding import round_in_optimizer
from equivcheck.oracle.reference.perturbed_rounding import PerturbedRounding, Shuffled
from equivcheck.oracle.reference.rounded import rounded_setup
from equivcheck.oracle.reference.summation import clip_by_wide_norm, clip_flat
from equivcheck.scenario import ElementType, Training
from equivcheck.training.copies import stack_traces
from equivcheck.training.ensemble import EnsembleTrace
from equivcheck.training.loop import train
from equivcheck.worlds.trace.trace import Trace


def unit_of(training: Training, rounding: Rounding) -> float:
    """Return the machine epsilon of the element type in which correct runs may round differently.

    This is the training's precision, or float32 if the layout computes in float32. A float32 matrix product rounds differently if
    its operands have another memory layout. A product in lower precision is summed in float32, so memory layout does not change
    its bits.
    """
    kind = ElementType.FLOAT32 if rounding.compute is ElementType.FLOAT32 else training.precision
    return max(eps_of(kind.value), eps_of(training.precision.value))


def rounded_copies(
    training: Training, rounding: Rounding, trace: Trace, num_copies: int, *, flips: bool = False
) -> EnsembleTrace:
    """Return `trace` together with the traces of `num_copies` perturbed trainings that round like the layout.

    The copies add gradients in other orders. With `flips`, they also change single roundings.
    """
    parameters, steps = perturbed_material(training, num_copies, unit_of(training, rounding))
    generator = np.random.default_rng((training.seed, num_copies))
    traces = [trace]
    for copy in range(1, 1 + num_copies):
        jitter = Shuffled(generator, copy)
        if flips:
            kind = rounding.compute or rounding.autocast or training.precision
            jitter = PerturbedRounding(generator, copy, training.precision.value, kind.value)
        moved = {name: values[copy] for name, values in parameters.items()}
        setup = rounded_setup(training, rounding, moved, jitter)
        if flips:
            round_in_optimizer(setup, generator)
        moved_steps = [
            [replace(batch, inputs=batch.inputs[copy], targets=batch.targets[copy]) for batch in step] for step in steps
        ]
        traces.append(train(setup, moved_steps))
    return stack_traces(traces)


def reordered_traces(training: Training, rounding: Rounding) -> tuple[Trace, Trace]:
    """Train twice on one device, and return both traces.

    The first run adds gradients in another order, and clips by one norm over all gradients. The second run computes the norm in
    the widest floating-point type.
    """
    reordered = rounded_setup(training, rounding, None, Shuffled(np.random.default_rng(training.seed), rounding.num_parts))
    reordered.clip_norm = clip_flat
    with_wide_norm = rounded_setup(training, rounding)
    with_wide_norm.clip_norm = clip_by_wide_norm
    return train(reordered), train(with_wide_norm)
