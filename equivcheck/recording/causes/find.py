"""`find_cause`: find the mistake that explains the second run's values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from equivcheck.diagnosis.words import name_ranks
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.recording.causes.candidate import Candidate, choose, subject
from equivcheck.recording.causes.clipping import limited_elements, wrong_clipping
from equivcheck.recording.causes.evidence import Evidence, only_rank, ranks_with_other_values
from equivcheck.recording.causes.gradients import lost_gradients, scaled_gradients, wrong_gradients
from equivcheck.recording.causes.microbatches import wrong_microbatches
from equivcheck.recording.causes.missing import missing_gradients, untied_weights, updated_copies
from equivcheck.recording.causes.moved import moved_elements
from equivcheck.recording.causes.samples import wrong_samples
from equivcheck.recording.causes.settings import differing_settings
from equivcheck.recording.causes.start import wrong_start
from equivcheck.recording.causes.update import update_of
from equivcheck.recording.causes.updates import wrong_updates
from equivcheck.recording.causes.values import rounded_values, shards_with_equal_values
from equivcheck.recording.compare.runs import Key, RecordedRun
from equivcheck.recording.compare.tensors import GRADIENTS
from equivcheck.recording.compare.verdict import TensorDifference
from equivcheck.recording.trace import Moment
from equivcheck.worlds.trace.differences import Difference

SHOWN_LATER = (Moment.OUTPUT, Moment.LOSS, Moment.NORM)
"""Points in a step whose differences no cause explains. A mistake also shows later, in gradients or updates."""


def find_cause(
    first: RecordedRun,
    second: RecordedRun,
    differences: Sequence[TensorDifference],
    tolerance: Callable[[Key], float],
) -> Diagnosis | None:
    """Find the mistake that explains the second run's values, or return None.

    A mistake is a linear relation between both runs. The relation must hold for each tensor at the first point with a difference.
    It must fit far better than the assumption that there is no mistake, and no other relation may fit. `tolerance` returns the
    distance allowed for a tensor in the first run. `differences` are in training order.
    """
    found = [each for each in differences if each.moment not in SHOWN_LATER]
    if not found:
        return None
    step, moment = found[0].step, found[0].moment
    if moment is Moment.SAMPLES:
        return wrong_samples(first, second, step)
    own = [each for each in found if (each.step, each.moment) == (step, moment)]
    wrong = tuple(each.tensor for each in own)
    evidence = Evidence(first=first, second=second, tolerance=tolerance, step=step, moment=moment, wrong=wrong)
    return _explain(evidence, {each.difference for each in own}, found)


def _explain(evidence: Evidence, kinds: set[Difference], differences: Sequence[TensorDifference]) -> Diagnosis | None:
    if evidence.moment is Moment.STATE:
        return differing_settings(evidence)
    if kinds == {Difference.MISSING}:
        if evidence.moment in GRADIENTS:
            return missing_gradients(evidence)
        return untied_weights(evidence, differences) or updated_copies(evidence)
    if not kinds <= {Difference.VALUE, Difference.RANKS_DISAGREE} or not set(evidence.wrong) <= set(evidence.names):
        return None
    if evidence.moment is Moment.START:
        return wrong_start(evidence)
    return _diagnosis(evidence) or _on_some_ranks(evidence) or differing_settings(evidence)


def _diagnosis(evidence: Evidence) -> Diagnosis | None:
    found = choose(evidence, _candidates(evidence))
    if found is None:
        return None
    return Diagnosis(cause=found.cause, sentence=found.words.format(**subject(evidence, found)), exact=found.is_exact)


def _candidates(evidence: Evidence) -> Iterator[Candidate]:
    if evidence.moment is Moment.UPDATE:
        update = update_of(evidence)
        yield from wrong_updates(update) if update is not None else ()
        yield from moved_elements(evidence, "values")
        yield from rounded_values(evidence, Cause.MASTERS_IN_LOWER_PRECISION, "values")
    elif evidence.moment is Moment.GRADIENT and _has_right_gradients_before_clipping(evidence):
        yield from wrong_clipping(evidence)
        yield lost_gradients(evidence)
        yield from scaled_gradients(evidence)
    elif evidence.moment in GRADIENTS:
        yield from limited_elements(evidence)
        yield from wrong_gradients(evidence)
        yield from wrong_microbatches(evidence)
        yield from moved_elements(evidence, "gradients")
        yield from rounded_values(evidence, Cause.REDUCED_IN_LOWER_PRECISION, "gradients")
        yield from shards_with_equal_values(evidence)
        yield from wrong_clipping(evidence)


def _has_right_gradients_before_clipping(evidence: Evidence) -> bool:
    return (evidence.step, Moment.UNCLIPPED) in evidence.first.moments & evidence.second.moments


def _on_some_ranks(evidence: Evidence) -> Diagnosis | None:
    """Return a mistake that ranks make in their replicas: some ranks only, or each rank in other tensors."""
    wrong = {name: ranks_with_other_values(evidence, name) for name in evidence.wrong}
    words: dict[str, list[int]] = {}
    causes = set[Cause]()
    for rank in sorted({rank for ranks in wrong.values() for rank in ranks}):
        names = tuple(name for name, ranks in wrong.items() if rank in ranks)
        own = replace(evidence, second=only_rank(evidence.second, rank, evidence.step), wrong=names, is_one_rank=True)
        found = _diagnosis(own) if set(names) <= set(own.names) else None
        if found is None:
            return None
        words.setdefault(found.sentence, []).append(rank)
        causes.add(found.cause)
    if len(causes) != 1 or len(evidence.second.ranks) == 1:
        return None
    sentence = ", and ".join(f"{sentence} on {name_ranks(ranks)}" for sentence, ranks in words.items())
    return Diagnosis(cause=causes.pop(), sentence=sentence, exact=True)
