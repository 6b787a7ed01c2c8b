"""`find_cause`: name the mistake in the second run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from equivcheck.oracle.verdict.cause import Diagnosis
from equivcheck.recording.causes.candidate import Candidate, choose, subject
from equivcheck.recording.causes.clipping import wrong_clipping
from equivcheck.recording.causes.evidence import Evidence
from equivcheck.recording.causes.gradients import scaled_gradients, wrong_gradients
from equivcheck.recording.causes.microbatches import wrong_microbatches
from equivcheck.recording.compare.runs import Key, RecordedRun
from equivcheck.recording.compare.verdict import TensorDifference
from equivcheck.recording.trace import Moment
from equivcheck.worlds.trace.differences import Difference

GRADIENTS = (Moment.UNCLIPPED, Moment.GRADIENT)


def find_cause(
    first: RecordedRun,
    second: RecordedRun,
    differences: Sequence[TensorDifference],
    tolerance: Callable[[Key], float],
) -> Diagnosis | None:
    """Name the mistake in the second run, or return None.

    A mistake is a linear relation between both runs. It must hold for each tensor at the first moment with a difference, fit
    far better than no mistake, and be the only one. `tolerance` gives the allowed distance for a tensor in the first run;
    `differences` are in training order.
    """
    if not differences:
        return None
    step, moment = differences[0].step, differences[0].moment
    own = [each for each in differences if (each.step, each.moment) == (step, moment)]
    if any(each.difference not in (Difference.VALUE, Difference.RANKS_DISAGREE) for each in own):
        return None
    wrong = tuple(each.tensor for each in own)
    evidence = Evidence(first=first, second=second, tolerance=tolerance, step=step, moment=moment, wrong=wrong)
    found = choose(evidence, _candidates(evidence))
    if found is None:
        return None
    return Diagnosis(cause=found.cause, sentence=found.words.format(**subject(evidence, found)), exact=True)


def _candidates(evidence: Evidence) -> Iterator[Candidate]:
    at = (evidence.step, Moment.UNCLIPPED)
    if evidence.moment is Moment.GRADIENT and at in evidence.first.moments & evidence.second.moments:
        yield from wrong_clipping(evidence)
        yield from scaled_gradients(evidence)
    elif evidence.moment in GRADIENTS:
        yield from wrong_gradients(evidence)
        yield from wrong_microbatches(evidence)
        yield from wrong_clipping(evidence)
