"""Mistakes in the weights of microbatches, such as a mean over tokens in each microbatch. The weights are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from math import isclose
from typing import Any

import numpy as np

from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.words import join_words
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.training.labels import IGNORED
from equivcheck.user.batches import tensors_of
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
    yield Mistake(Cause.SCALED, _sentence(diverged, named), partial(change, weights=weights))


def _sentence(diverged: DivergedTraining, named: str) -> str:
    what = "loss and gradients" if diverged.first.phase is Phase.LOSS else "gradients"
    return f"microbatches have other weights in {what} than on one device: at step {diverged.first.step}, {named}"


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
        _solve_weights(diverged, parts, diverged.found_values(step, Phase.GRADIENT)) if len(parts) == facts.num_backward else None
    )


def _solve_weights(diverged: DivergedTraining, parts: Sequence[Gradients], found: TensorsByName) -> list[float] | None:
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


MOST_NAMED = 4
"""Maximum weights in a sentence."""
NEAR = 1e-6
"""Relative distance within which a count is a whole number."""


def wrong_weights_of_ranks(diverged: DivergedTraining, facts: StepFacts) -> Iterator[Mistake]:
    """Yield a mistake: microbatches have other weights than on one device, and the weights may differ between ranks.

    A weight for each rank's microbatch is computed from the ranks' gradients.
    """
    if facts.num_backward == 1 or facts.clips or not facts.differs:
        return
    first, weights, factors = diverged.first.step, list[Vector](), np.empty(0)
    while len(weights) < diverged.num_steps:
        parts, step = _parts(diverged, facts, weights), len(weights)
        wrong = _solved(diverged, facts, parts, diverged.found_values(step, Phase.GRADIENT))
        # After the first wrong step, parameters differ, so that no weights give one device's gradients.
        right = _solved(diverged, facts, parts, diverged.expected_values(step, Phase.GRADIENT)) if step == first else np.ones(1)
        if wrong is None or right is None or not right.all():
            return
        weights.append(wrong)
        factors = wrong / right if step == first else factors
    if np.allclose(factors, 1.0, rtol=NEAR):
        return
    words, cause = "each microbatch is divided by its own number of labels, not by that of the whole step", Cause.MEAN_OF_MEANS
    if not _are_label_counts(diverged, factors):
        words, cause = _describe(diverged, factors), Cause.SCALED
    yield Mistake(cause, words, partial(_weigh_microbatches, weights=weights), own_rows=True)


def _describe(diverged: DivergedTraining, factors: Vector) -> str:
    places = [place for place in product(*map(range, factors.shape)) if not isclose(factors[place], 1.0, rel_tol=NEAR)]
    named = [f"microbatch {number} of rank {rank} counts {factors[rank, number]:.4g} times" for rank, number in places]
    named = [*named[: MOST_NAMED - 1], "and so on"] if len(named) > MOST_NAMED else [join_words(named)]
    return _sentence(diverged, ", ".join(named))


def _are_label_counts(diverged: DivergedTraining, factors: Vector) -> bool:
    """Whether each factor is the mean label count in a microbatch, divided by a whole number.

    These numbers must add up to each rank's labels.
    """
    firsts = [each.rank for each in diverged.coordinates if not any(each.indices[name] for name in diverged.same_row_axes)]
    labels = [tensors_of(diverged.shares[rank][diverged.first.step])[-1] for rank in firsts]
    if not factors.all() or any(each.is_floating_point() for each in labels):
        return False
    own = np.array([int((each != IGNORED).sum()) for each in labels])
    counts = own.sum() / (factors[firsts].size * factors[firsts])
    return bool(np.allclose(counts.sum(axis=1), own, rtol=NEAR) and np.allclose(counts, counts.round(), rtol=NEAR))


def _parts(diverged: DivergedTraining, facts: StepFacts, weights: Sequence[Vector]) -> list[Gradients]:
    """Return each microbatch's gradients at the step after those with weights, rank by rank. Their sum is the mean over ranks."""
    ranks, parts = EmulatedUserRanks(diverged, own_rows=True), list[list[Gradients]]()
    ranks.num_backward = facts.num_backward
    _weigh_microbatches(ranks, weights=weights)
    reduce = ranks.reduce

    def record(all_: list[Gradients], microbatch: int, step: int) -> list[Gradients]:
        if step == len(weights):
            parts.append([{name: value / len(all_) for name, value in each.items()} for each in all_])
        return reduce(all_, microbatch, step)

    ranks.reduce = record
    ranks.train(len(weights) + 1)
    return [part for of_rank in zip(*parts, strict=True) for part in of_rank]


def _solved(diverged: DivergedTraining, facts: StepFacts, parts: Sequence[Gradients], found: TensorsByName) -> Vector | None:
    """Return a weight for each rank and microbatch, with which the sum over `parts` equals gradients. None if there are none."""
    weights = _solve_weights(diverged, parts, found)
    if weights is None or len(weights) != diverged.num_ranks * facts.num_backward:
        return None
    return np.array(weights).reshape(-1, facts.num_backward)


def _weigh_microbatches(ranks: EmulatedUserRanks, *, weights: Sequence[Vector]) -> None:
    """Multiply each rank's microbatches by its weights, with shape (ranks, microbatches), in each step that has weights."""

    def weigh(all_: list[Gradients], microbatch: int, step: int) -> list[Gradients]:
        own = weights[step][:, microbatch].tolist() if step < len(weights) else [1.0] * len(all_)
        each_weighted = [{name: value * weight for name, value in each.items()} for each, weight in zip(all_, own, strict=True)]
        return ranks.mean(each_weighted, microbatch, step)

    def report(rank: int, value: Any) -> Any:
        step, losses = ranks.current_step(rank), ranks.losses[rank]
        if ranks.diverged.first.phase is not Phase.LOSS:
            # It is right in the first wrong step. Later, own rows do not give it.
            return ranks.diverged.traces[rank].steps[step].loss
        if step >= len(weights) or value is None or not isclose(sum(losses), float(value), rel_tol=NEAR):
            return value
        return sum(weight * loss for weight, loss in zip(weights[step][rank].tolist(), losses, strict=True))

    ranks.reduce, ranks.returns = weigh, report
