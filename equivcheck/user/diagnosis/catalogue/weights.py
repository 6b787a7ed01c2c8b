"""Mistakes in the weights of microbatches, such as a mean over tokens in each microbatch. The weights are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial

import numpy as np

from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.words import join_words
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.pieces import TensorsByName
from equivcheck.worlds.trace.tensors import Vector

Weights = list[list[float]]
"""A factor for each step and microbatch."""
MAX_DENOMINATOR = 1000
"""Largest denominator in a measured weight, if counts such as numbers of tokens explain it."""


def wrong_weights(diverged: DivergedTraining, facts: StepFacts) -> Iterator[Mistake]:
    """Yield a possible mistake: microbatches have unequal weights in gradients or losses.

    The weights are fitted to the ranks' gradients.
    """
    if facts.num_backward == 1 or facts.clips:
        return
    change = _weigh_losses if diverged.first.phase is Phase.LOSS else _weigh_gradients
    weights: Weights = [[1.0] * facts.num_backward] * diverged.first.step
    while len(weights) < len(diverged.task.batches):
        found = _measured(diverged, facts, partial(change, weights=list(weights)), len(weights))
        if found is None:
            return
        weights.append(found)
    first = weights[diverged.first.step]
    if all(len(set(each)) == 1 for each in weights):
        return
    named = join_words([f"microbatch {number} counts {weight:.4g} times" for number, weight in enumerate(first)])
    what = "loss and gradients" if diverged.first.phase is Phase.LOSS else "gradients"
    words = f"microbatches have other weights in {what} than on one device: at step {diverged.first.step}, {named}"
    yield Mistake(Cause.SCALED, words, partial(change, weights=weights))


def _measured(diverged: DivergedTraining, facts: StepFacts, change: partial[None], step: int) -> list[float] | None:
    """Measure the weights at one step, given the weights at earlier steps.

    None if no weights reproduce the ranks' gradients.
    """
    ranks, parts = EmulatedUserRanks(diverged, own_rows=facts.own_rows), list[Gradients]()
    ranks.num_backward = facts.num_backward
    change(ranks)
    reduce = ranks.reduce

    def record(all_: list[Gradients], microbatch: int, at: int) -> list[Gradients]:
        reduced = reduce(all_, microbatch, at)
        if at == step:
            parts.append({name: value.clone() for name, value in reduced[0].items()})
        return reduced

    ranks.reduce = record
    ranks.train(step + 1)
    return (
        solve_weights(diverged, parts, diverged.found_values(step, Phase.GRADIENT)) if len(parts) == facts.num_backward else None
    )


def solve_weights(diverged: DivergedTraining, parts: Sequence[Gradients], found: TensorsByName) -> list[float] | None:
    """Return the weights with which the sum over `parts` equals the gradients `found`. None if no weights fit."""
    names = [name for name in diverged.updated if name in found]
    if not names:
        return None
    target = np.concatenate([found[name].reshape(-1) for name in names])
    columns = np.stack([np.concatenate([_flat(part, name, found[name].size) for name in names]) for part in parts], axis=1)
    if 2 * len(parts) > len(target) or not np.isfinite(target).all() or not np.isfinite(columns).all():
        return None
    weights = np.linalg.lstsq(columns, target, rcond=None)[0]
    if np.linalg.norm(columns @ weights - target) > diverged.eps**0.5 * np.linalg.norm(target):
        return None
    return [_as_ratio(float(weight)) for weight in weights]


def _flat(part: Gradients, name: str, size: int) -> Vector:
    return part[name].double().numpy().reshape(-1) if name in part else np.zeros(size)


def _as_ratio(weight: float) -> float:
    """Return the ratio of two small integers if the weight is close to one, else the weight itself."""
    ratio = float(Fraction(weight).limit_denominator(MAX_DENOMINATOR))
    return ratio if abs(ratio - weight) < 1e-9 else weight


def _weigh_gradients(ranks: EmulatedUserRanks, *, weights: Sequence[Sequence[float]]) -> None:
    ranks.multiply_gradients(lambda _name, microbatch, step: weights[step][microbatch] if step < len(weights) else 1.0)


def _weigh_losses(ranks: EmulatedUserRanks, *, weights: Sequence[Sequence[float]]) -> None:
    """Multiply the losses of the steps that have known weights. The next step's losses are not multiplied."""
    ranks.loss_weights = [weight for each in (*weights, [1.0] * ranks.num_backward) for weight in each]
