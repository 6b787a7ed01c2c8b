"""Mistakes in gradients: lost, scaled, not reduced, not zeroed, or from an earlier step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from equivcheck.diagnosis.words import join_words, name_ranks
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.recording.assemble import Assembled, Part
from equivcheck.recording.causes.candidate import Candidate, fit, make_candidate
from equivcheck.recording.causes.clipping import clipped_early
from equivcheck.recording.causes.evidence import (
    Evidence,
    accumulated_gradients,
    full_tensors,
    linear_combination,
    mean_of_replicas,
    num_data_ranks,
    num_microbatches,
    rms,
    steps_of,
    sum_of_replicas,
)
from equivcheck.recording.compare.runs import RecordedRun
from equivcheck.recording.sketch import Sketch
from equivcheck.recording.trace import Moment

LEAST_SCALE = 16.0
"""Smallest power of two that counts as a loss scaler's factor."""
NEAR = 1e-3
"""Relative tolerance for ratios of losses."""


def wrong_gradients(evidence: Evidence) -> Iterator[Candidate]:
    """Yield possible mistakes in gradients, such as gradients that are lost, scaled or not reduced."""
    yield lost_gradients(evidence)
    yield from _scaled_by_counts(evidence)
    yield from _unreduced(evidence)
    yield from _stale(evidence)
    yield from _not_zeroed(evidence)
    yield from scaled_gradients(evidence)


def lost_gradients(evidence: Evidence) -> Candidate:
    """Return the mistake that the second run's gradients are zero, at this step or at each step.

    If the right gradients come one step later, the mistake is a delay instead.
    """
    zero = {name: np.zeros_like(sums) for name, sums in evidence.expected_sums.items()}
    later = evidence.sums(evidence.second, evidence.step + 1, evidence.moment)
    wrong = [name for name in evidence.wrong if name in later and later[name].any()]
    cause, words = Cause.GRADIENT_LOST, f"zero at step {evidence.step}" if wrong else "zero"
    if wrong and all(rms(later[name] - evidence.expected_sums[name]) <= evidence.limits[name] for name in wrong):
        cause, words = Cause.STALE, "from the previous step, and zero at the first step"
    return make_candidate(evidence, cause, f"{{gradients}} {words}", zero)


def _scaled_by_counts(evidence: Evidence) -> Iterator[Candidate]:
    """Yield gradients that are multiplied by how many ranks or microbatches there are.

    Ways with the same factor share a sentence. Some gradients may be twice as large for many reasons.
    """
    others = {*evidence.names} - {*evidence.wrong}
    if evidence.is_one_rank or any(rms(evidence.expected_sums[name]) > evidence.limits[name] for name in others):
        return
    data, parts = num_data_ranks(evidence.second, evidence.step), num_microbatches(evidence.second, evidence.step)
    copies = len(evidence.second.ranks) // data
    product = (data * parts, "the number of ranks times microbatches")
    ways = (
        (data, Cause.SUMMED, f"the sum over the {data} ranks, not the mean"),
        (copies, Cause.SUMMED, f"multiplied by {copies}, the number of ranks with the same samples"),
        (parts, Cause.MICROBATCHES_SUMMED, f"the sum over the {parts} microbatches, not the mean"),
        (product[0], Cause.SCALED, f"multiplied by {product[0]}, {product[1]}"),
        (1 / data, Cause.AVERAGED_TWICE, f"averaged twice over the {data} ranks"),
        (1 / copies, Cause.AVERAGED_TWICE, f"divided by {copies}, the number of ranks with the same samples"),
        (1 / parts, Cause.RESCALED_EACH_MICROBATCH, "divided by the number of microbatches twice"),
        (1 / product[0], Cause.SCALED, f"divided by {product[0]}, {product[1]}"),
    )
    for factor in dict.fromkeys(float(factor) for factor, _, _ in ways if factor != 1):
        own = {cause: words for each, cause, words in reversed(ways) if each == factor}
        if len(own) > 1:
            own.pop(Cause.SCALED, None)
        cause, words = next(reversed(own)), ", or ".join(reversed(own.values()))
        if _is_loss_scaled(evidence, factor):
            # A division by the number of microbatches is part of the loss; reductions over ranks are not. Means over labels
            # in each microbatch have the same values if a microbatch has no labels.
            parts_of_loss = () if _has_zero_loss(evidence) else (Cause.MICROBATCHES_SUMMED, Cause.RESCALED_EACH_MICROBATCH)
            of_loss = [each for each in own if each in parts_of_loss]
            cause = of_loss[0] if of_loss else Cause.SCALED
            words = words if of_loss else f"{factor:g} times as large as in A, and so is the loss"
        yield _multiplied(evidence, cause, f"{{gradients}} {words}", factor)


def _is_loss_scaled(evidence: Evidence, factor: float) -> bool:
    one, other = (_loss(run, evidence.step) for run in (evidence.first, evidence.second))
    return math.isclose(other, factor * one, rel_tol=NEAR) and one != 0.0


def _has_zero_loss(evidence: Evidence) -> bool:
    return any(0.0 in record.losses for _, record in steps_of(evidence.first, evidence.step))


def _loss(run: RecordedRun, step: int) -> float:
    """Add up the scalars on which `backward` was called, and average over the ranks with such a scalar."""
    own = [math.fsum(record.losses) for _, record in steps_of(run, step) if record.losses]
    return math.fsum(own) / len(own) if own else 0.0


def _multiplied(evidence: Evidence, cause: Cause, words: str, factor: float, *, fitted: int = 0) -> Candidate:
    return make_candidate(
        evidence, cause, words, linear_combination((factor, evidence.expected_sums)), size=abs(factor), fitted=fitted
    )


def scaled_gradients(evidence: Evidence) -> Iterator[Candidate]:
    """Yield the mistake that all wrong gradients are multiplied by one factor. The factor is fitted."""
    found = fit(evidence, [evidence.expected_sums])
    if found is None or not found[0]:
        return
    factor = float(found[0])
    words = f"{{gradients}} {factor:.6g} times as large as in A"
    power = round(math.log2(abs(factor)))
    if 2.0**power >= LEAST_SCALE and math.isclose(abs(factor), 2.0**power, rel_tol=NEAR):
        when = "clipped before they are unscaled" if _are_unscaled_later(evidence, 2.0**power) else "never unscaled"
        words = f"{words}, as if the loss had been scaled and gradients {when}"
        yield _multiplied(evidence, Cause.NOT_UNSCALED, words, math.copysign(2.0**power, factor))
    else:
        yield _multiplied(evidence, Cause.SCALED, words, factor, fitted=1)


def _are_unscaled_later(evidence: Evidence, factor: float) -> bool:
    """Whether the second run's gradients are divided by a factor after clipping."""
    run, step = evidence.second, evidence.step
    after, limits = (
        evidence.sums(run, step, Moment.GRADIENT),
        {clip.max_norm for _, own in steps_of(run, step) for clip in own.clips},
    )
    if evidence.moment is not Moment.UNCLIPPED or len(limits) != 1 or {*after} != {*evidence.found_sums}:
        return False
    before = math.hypot(*(rms(sums) for sums in evidence.found_sums.values()))
    clipped = min(before, limits.pop())
    return math.isclose(math.hypot(*map(rms, after.values())), clipped / factor, rel_tol=0.5)


def _unreduced(evidence: Evidence) -> Iterator[Candidate]:
    """Yield candidates if replicas differ but their mean or sum is right."""
    replicas = {name: evidence.second_tensor(name) for name in evidence.names if evidence.spreads[name] > evidence.limits[name]}
    if not replicas or all(_are_multiples(evidence, name) for name in evidence.wrong):
        return
    if evidence.moment is Moment.UNCLIPPED and (early := clipped_early(evidence)) is not None:
        yield early
        return
    words = f"{{gradients}} left unreduced{_unreduced_microbatches(evidence)}: each rank keeps its own part"
    cause, groups = Cause.NOT_REDUCED, _groups_that_agree(evidence, list(replicas))
    if _have_own_samples(evidence, groups):
        cause = Cause.REDUCED_OVER_PART
        words = f"{{gradients}} reduced within {' and within '.join(map(name_ranks, groups))}, but not between these groups"
    for way, total in (("mean", mean_of_replicas), ("sum", sum_of_replicas)):
        found = full_tensors(replicas, total)
        yield make_candidate(evidence, cause, f"{words} (the {way} over ranks is right)", evidence.expected_sums, found=found)


def _are_multiples(evidence: Evidence, name: str) -> bool:
    """Whether each replica is the right gradient times a factor, so that no replica is a gradient over the rank's own samples."""
    right = evidence.expected_sums[name]
    own = [part.value.sums for group in evidence.second_tensor(name).replicas for part in group]
    square = float(right @ right)
    return bool(square) and all(rms(sums - right * (sums @ right) / square) <= evidence.limits[name] for sums in own)


def _groups_that_agree(evidence: Evidence, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return groups of ranks whose replicas agree; empty if the groups are not the same for all tensors."""
    found: set[tuple[tuple[int, ...], ...]] = set()
    for name in names:
        for replicas in evidence.second_tensor(name).replicas:
            groups: list[list[Part[Sketch]]] = []
            for part in replicas:
                own = [group for group in groups if part.value.distance(group[0].value) <= evidence.limits[name]]
                own[0].append(part) if own else groups.append([part])
            found.add(tuple(tuple(part.rank for part in group) for group in groups))
    return found.pop() if len(found) == 1 else ()


def _have_own_samples(evidence: Evidence, groups: Sequence[Sequence[int]]) -> bool:
    """Whether ranks in one group have different samples. Tensor-parallel ranks have the same samples."""
    samples = {rank: step.samples for rank, step in steps_of(evidence.second, evidence.step)}
    return any(len({samples[rank] for rank in group}) > 1 for group in groups)


def _unreduced_microbatches(evidence: Evidence) -> str:
    """Return words for the microbatches whose gradients differ between ranks; empty if all do, or if it is unknown."""
    count = num_microbatches(evidence.second, evidence.step)
    states = [accumulated_gradients(evidence.second, evidence.step, number) for number in range(1, count)]
    if not states or not all(states):
        return ""
    states = [{}, *states, {name: evidence.second_tensor(name) for name in evidence.wrong if name in evidence.names}]
    own = [number for number in range(count) if _is_own(evidence, states[number], states[number + 1])]
    if not own or len(own) == count:
        return ""
    return f" for microbatch{'es' if len(own) > 1 else ''} {join_words([str(number) for number in own])}"


def _is_own(evidence: Evidence, before: Mapping[str, Assembled[Sketch]], after: Mapping[str, Assembled[Sketch]]) -> bool:
    """Whether a microbatch adds other values on each rank."""
    for name in evidence.wrong:
        earlier = {part.rank: part.value.sums for group in before[name].replicas for part in group} if name in before else {}
        for group in after[name].replicas if name in after else ():
            added = [part.value.sums - earlier.get(part.rank, 0.0) for part in group]
            if any(rms(each - added[0]) > evidence.limits[name] for each in added):
                return True
    return False


def _stale(evidence: Evidence) -> Iterator[Candidate]:
    """Yield the previous step's gradients.

    If the first step had no gradients, ranks may use gradients one step late from the beginning.
    """
    step, moment = evidence.step, evidence.moment
    if step:
        before = evidence.sums(evidence.first, step - 1, moment)
        yield make_candidate(evidence, Cause.STALE, "{gradients} from the previous step", before)


def _not_zeroed(evidence: Evidence) -> Iterator[Candidate]:
    """Yield the sum with the previous step's gradients. If the step clips, the clipped gradients are added."""
    left = evidence.sums(evidence.second, evidence.step - 1, Moment.GRADIENT)
    words = "{gradients} not zeroed between steps: each step adds to those of earlier steps"
    if not left:
        found = accumulated_gradients(evidence.second, evidence.step, 0)
        left = full_tensors(found, mean_of_replicas)
        words = "{gradients} not zeroed before the first recorded step: it adds to those of earlier backward passes"
    if left:
        yield make_candidate(
            evidence, Cause.NOT_ZEROED, words, linear_combination((1.0, evidence.expected_sums), (1.0, left)), size=2.0
        )
