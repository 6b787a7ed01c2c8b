"""Tensors in one run only: gradients that are None, and shared weights that are no longer shared."""

from __future__ import annotations

from collections.abc import Sequence

from equivcheck.diagnosis.words import tensors
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.recording.causes.evidence import Evidence, rms
from equivcheck.recording.compare.runs import RecordedRun
from equivcheck.recording.compare.tensors import GRADIENTS
from equivcheck.recording.compare.verdict import TensorDifference
from equivcheck.recording.trace import Moment


def missing_gradients(evidence: Evidence) -> Diagnosis | None:
    """Return a diagnosis with the parameters that are not updated, because their gradients are None in the second run.

    If only the norm for clipping leaves out gradients, the diagnosis names their parameters instead. Returns None if there are no
    such parameters.
    """
    names, step, second = evidence.wrong, evidence.step, evidence.second
    kept = second.tensors_at(step, Moment.GRADIENT)
    if evidence.moment is Moment.UNCLIPPED and all(name in kept for name in names):
        words = f"the norm leaves out {tensors(names)}, because clipping gets other parameters only"
        return Diagnosis(cause=Cause.PART_OF_NORM, sentence=words, exact=True)
    if any((step, evidence.moment, name) in second.tensors for name in names):
        return None
    before = evidence.sums(second, step - 1, Moment.UPDATE) or evidence.sums(second, step, Moment.START)
    after = evidence.sums(second, step, Moment.UPDATE)
    if not all(name in before and name in after and not (after[name] != before[name]).any() for name in names):
        return None
    subject = f"the gradient of {tensors(names)} is" if len(names) == 1 else f"the gradients of {tensors(names)} are"
    words = f"{subject} None when the optimizer steps, so it does not update {'it' if len(names) == 1 else 'them'}"
    return Diagnosis(cause=Cause.GRADIENT_LOST, sentence=words, exact=True)


def updated_copies(evidence: Evidence) -> Diagnosis | None:
    """Return a diagnosis if the second run's optimizer updates copies of the parameters, and the model does not change.

    The diagnosis names the copies. Returns None if the optimizer updates the model.
    """
    first, second, step = evidence.first, evidence.second, evidence.step
    originals = {copy: _original(first, second, step, copy) for copy in evidence.wrong}
    start, after = evidence.sums(second, step, Moment.START), evidence.sums(second, step, Moment.UPDATE)
    gradients = [evidence.sums(second, step, moment) for moment in GRADIENTS]
    for copy, original in originals.items():
        if original is None or original not in start or original not in after or any(copy in own for own in gradients):
            return None
        if (start[original] != after[original]).any():
            return None
    words = f"the optimizer updates copies of the parameters ({tensors(evidence.wrong)}) without gradients, and not the model"
    return Diagnosis(cause=Cause.NOT_UPDATED, sentence=words, exact=True)


def untied_weights(evidence: Evidence, differences: Sequence[TensorDifference]) -> Diagnosis | None:
    """Name a weight that two modules share in the first run, but not in the second run; None if there is none.

    In the second run, the gradients of the two parameters must add up to the shared weight's gradient.
    """
    first, second, step = evidence.first, evidence.second, evidence.step
    moment = next((each for each in GRADIENTS if (step, each) in first.moments & second.moments), None)
    if moment is None:
        return None
    right, found = (evidence.sums(run, step, moment) for run in (first, second))
    originals = {copy: _original(first, second, step, copy) for copy in evidence.wrong}
    for original in originals.values():
        copies = [copy for copy, name in originals.items() if name == original]
        if original is None or any(name not in found for name in (original, *copies)) or original not in right:
            return None
        total = found[original] + sum(found[copy] for copy in copies)
        if rms(total - right[original]) > evidence.tolerance((step, moment, original)) * (1 + len(copies)):
            return None
    differing = {each.tensor for each in differences if (each.step, each.moment) == (step, moment)}
    if differing - {*originals, *originals.values()}:
        return None
    original, copy = next((name, copy) for copy, name in originals.items() if name is not None)
    words = f"`{original}` and `{copy}` are no longer one parameter: `{copy}` is a copy that is updated on its own"
    return Diagnosis(cause=Cause.UNTIED, sentence=words, exact=True)


def _original(first: RecordedRun, second: RecordedRun, step: int, copy: str) -> str | None:
    """Return the first run's parameter that has the same initial values as a parameter that only the second run has."""
    key = (step, Moment.START, copy)
    own = second.tensors.get(key)
    if own is None or own.exact is None or key in first.tensors:
        return None
    start = first.tensors_at(step, Moment.START)
    return next((name for name, each in start.items() if each.shapes == own.shapes and each.exact == own.exact), None)
