"""Tests for the judge's rules, on artificial cases."""

from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest

from equivcheck.layouts.composition.running import RanksResult
from equivcheck.oracle.judge import MAX_FOLLOWERS, ExpectedRun, judge, judge_coarsely, judge_failure
from equivcheck.oracle.reference.doubt import Doubt
from equivcheck.oracle.reference.noise import Expected
from equivcheck.oracle.reference.reference import Reference, ReferenceRun
from equivcheck.oracle.verdict.verdict import Judgement, Outcome
from equivcheck.scenario import Data, Layer, Model, Training
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.threads import one_thread
from equivcheck.worlds.failure import Failure, FailureKind
from equivcheck.worlds.ranks import Run
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase
from equivcheck.worlds.trace.trace import Step, Trace

TRAINING = Training(model=Model(features=2, layers=(Layer(width=2), Layer(width=1))), data=Data(microbatches=(4,)), steps=3)
LAST = TRAINING.steps - 1
UNJUDGED = Judgement(outcome=Outcome.EQUIVALENT, world="sim")
SMALL, LARGE = 1 + 1e-12, 2.0
"""Factors beyond the tolerance: far below half the digits, and far above."""
LOST_AT_ONE = Doubt(reason="lost", step=1)


@pytest.fixture(scope="module")
def trace() -> Trace:
    """A single-device run's trace."""
    with one_thread():
        return train(single_device_setup(TRAINING))


@pytest.fixture(scope="module")
def sure() -> Reference:
    """A reference without doubt."""
    return ReferenceRun(TRAINING).reference()


def tolerant(reference: Reference) -> Reference:
    """A reference with so much noise that anything passes."""
    return replace(reference, moments=tuple(replace(one, tolerances=np.full_like(one.norms, 1e9)) for one in reference.moments))


def left(trace: Trace, step: int | None = None, factor: float = LARGE) -> RanksResult:
    """Results on two ranks that agree, with parameters multiplied at one step if given."""
    if step is not None:
        trace = replace(trace, steps=tuple(multiplied(one, factor) if at == step else one for at, one in enumerate(trace.steps)))
    return RanksResult(run=Run(values=(trace, trace)))


def multiplied(step: Step, factor: float) -> Step:
    """A step with other final parameters."""
    return replace(step, parameters=replace(step.parameters, values=step.parameters.values * factor))


def never() -> NoReturn:
    """A reference that must not be requested."""
    raise AssertionError("asked for a confirming reference")


def case(first: Reference, confirming: Reference | None = None, required_steps: int = 1) -> ExpectedRun:
    """A case with two references. Without the second, the judge must not request it."""
    return ExpectedRun(
        reference=lambda: first,
        confirming_reference=never if confirming is None else lambda: confirming,
        required_steps=required_steps,
    )


def call(step: int) -> Divergence:
    """An extra call."""
    return Divergence(step=step, phase=Phase.COMMUNICATION, tensor="all_reduce", difference=Difference.CALLS, rank=0)


def test_agreement_needs_no_confirmation(sure: Reference, trace: Trace) -> None:
    """Only a difference makes the judge request the confirming reference, which costs many runs."""
    verdict, doubt = judge(UNJUDGED, case(sure), left(trace))

    assert (verdict.outcome, doubt) == (Outcome.EQUIVALENT, None)


def test_what_the_confirming_reference_tolerates_is_equivalent(sure: Reference, trace: Trace) -> None:
    """A difference must exceed both noise floors. The error is relative to the second."""
    verdict, _ = judge(UNJUDGED, case(sure, tolerant(sure)), left(trace, LAST))
    confirmed, _ = judge(UNJUDGED, case(sure, sure), left(trace, LAST))

    assert (verdict.outcome, confirmed.outcome) == (Outcome.EQUIVALENT, Outcome.DIVERGED)
    assert verdict.worst_error < 1 < confirmed.worst_error


def test_a_divergence_has_its_first_tensor_and_those_that_follow(sure: Reference, trace: Trace) -> None:
    """The first tensor is in the reason, and a limited number of followers is named."""
    found, doubt = judge(UNJUDGED, replace(case(sure, sure), calls=tuple(map(call, range(50)))), left(trace, 0))

    assert doubt is None
    assert found.divergence is not None
    assert (found.divergence.step, found.divergence.phase) == (0, Phase.UPDATE)
    assert found.reason.startswith(f"step 0 update {found.divergence.tensor}")
    assert len(found.followers) == MAX_FOLLOWERS


@pytest.mark.parametrize(("at", "first"), [(LAST, Phase.COMMUNICATION), (0, Phase.UPDATE)])
def test_calls_come_by_step_and_after_all_values_of_a_step(sure: Reference, trace: Trace, at: int, first: Phase) -> None:
    """An extra call in step 0 comes before a wrong number in the last step, and after one in step 0."""
    found, _ = judge(UNJUDGED, replace(case(sure, sure), calls=(call(0),)), left(trace, at))

    assert found.divergence is not None
    assert found.divergence.phase is first


def test_calls_alone_need_no_confirmation(sure: Reference, trace: Trace) -> None:
    """Noise explains no call, so an extra call is a divergence even if all values agree."""
    found, _ = judge(UNJUDGED, replace(case(sure), calls=(call(1),)), left(trace))

    assert (found.outcome, found.divergence) == (Outcome.DIVERGED, call(1))


@pytest.mark.parametrize(
    ("required_steps", "outcome"), [(1, Outcome.EQUIVALENT), (2, Outcome.INCONCLUSIVE), (LAST + 1, Outcome.INCONCLUSIVE)]
)
def test_a_doubt_counts_before_the_required_steps(sure: Reference, trace: Trace, required_steps: int, outcome: Outcome) -> None:
    """A reference that fails at step 1 decides one step, enough if one is required."""
    lost = replace(sure, doubt=LOST_AT_ONE)

    verdict, doubt = judge(UNJUDGED, case(lost, required_steps=required_steps), left(trace))

    assert (verdict.outcome, verdict.reason) == (outcome, "" if outcome is Outcome.EQUIVALENT else "lost")
    assert doubt == LOST_AT_ONE


@pytest.mark.parametrize(
    ("step", "factor", "outcome"),
    [(0, SMALL, Outcome.DIVERGED), (LAST, SMALL, Outcome.EQUIVALENT), (LAST, LARGE, Outcome.DIVERGED)],
)
def test_a_small_difference_after_a_doubt_is_no_finding(
    sure: Reference, trace: Trace, step: int, factor: float, outcome: Outcome
) -> None:
    """If both references fail at a step, later differences must exceed any noise."""
    lost = replace(sure, doubt=LOST_AT_ONE)

    verdict, _ = judge(UNJUDGED, case(lost, lost), left(trace, step, factor))

    assert verdict.outcome is outcome


def test_a_doubt_of_the_confirming_reference_alone_excuses_nothing(sure: Reference, trace: Trace) -> None:
    """The confirming reference has more noise. If the first one has no doubt, a small difference beyond both is a finding."""
    verdict, doubt = judge(UNJUDGED, case(sure, replace(sure, doubt=LOST_AT_ONE)), left(trace, LAST, SMALL))

    assert (verdict.outcome, doubt) == (Outcome.DIVERGED, LOST_AT_ONE)


def noisy_from(reference: Reference, step: int) -> Reference:
    """The reference with noise ten times larger than all values from a step on, and in doubt there."""

    def noisy(moment: Expected) -> Expected:
        return replace(moment, tolerances=np.maximum(moment.tolerances, 10 * moment.scales))

    moments = tuple(moment if moment.step < step else noisy(moment) for moment in reference.moments)
    return replace(reference, moments=moments, doubt=Doubt(reason="lost", step=step))


def test_no_difference_counts_where_noise_is_larger_than_all_that_is_there(sure: Reference, trace: Trace) -> None:
    """In a training that explodes, no difference counts from that step on. Both references must agree on the step."""
    lost = noisy_from(sure, LAST)
    huge = 1e6
    outcomes = [
        judge(UNJUDGED, case(one, other), left(trace, step, huge))[0].outcome
        for one, other, step in ((lost, lost, LAST), (lost, lost, LAST - 1), (sure, lost, LAST), (lost, sure, LAST))
    ]

    assert outcomes == [Outcome.EQUIVALENT, Outcome.DIVERGED, Outcome.DIVERGED, Outcome.DIVERGED]


def turning(reference: Reference, step: int) -> Reference:
    """The reference for an optimizer that updates by signs, with uncertain signs in one step."""
    moments = tuple(
        replace(one, tolerances=one.norms) if (one.phase, one.step) == (Phase.GRADIENT, step) else one
        for one in reference.moments
    )
    return replace(reference, moments=moments, uses_signs=True)


@pytest.mark.parametrize(("step", "outcome"), [(LAST, Outcome.EQUIVALENT), (LAST - 1, Outcome.DIVERGED)])
def test_an_update_by_a_sign_that_rounding_may_turn_is_no_finding(
    sure: Reference, trace: Trace, step: int, outcome: Outcome
) -> None:
    """Both references must find it, in the first step that differs. For other optimizers it is a finding."""
    signs = turning(sure, LAST)
    verdict, doubt = judge(UNJUDGED, case(signs, signs), left(trace, step))
    others = [judge(UNJUDGED, case(*each), left(trace, LAST))[0].outcome for each in ((signs, sure), (sure, signs))]
    none = replace(signs, uses_signs=False)

    assert verdict.outcome is outcome
    assert outcome is Outcome.DIVERGED or (doubt is not None and doubt.step == LAST and verdict.worst_error <= 1.0)
    assert [*others, judge(UNJUDGED, case(none, none), left(trace, LAST))[0].outcome] == [Outcome.DIVERGED] * 3


def test_a_reference_without_moments_is_inconclusive(sure: Reference, trace: Trace) -> None:
    """If the reference's copies cannot be compared, ranks are not compared with them."""
    nothing = Reference((), Doubt(reason="no two runs alike", step=0), sure.noise_limit)

    verdict, _ = judge(UNJUDGED, case(nothing), left(trace, 0))

    assert (verdict.outcome, verdict.reason) == (Outcome.INCONCLUSIVE, "no two runs alike")


def test_a_confirming_reference_without_moments_takes_nothing_back(sure: Reference, trace: Trace) -> None:
    """A difference from a first reference without doubt stays a finding."""
    nothing = Reference((), Doubt(reason="no two runs alike", step=0), sure.noise_limit)

    verdict, _ = judge(UNJUDGED, case(sure, nothing), left(trace, 0))

    assert verdict.outcome is Outcome.DIVERGED


def test_a_coarse_judgement_leaves_a_loss_to_the_full_one(trace: Trace) -> None:
    """A loss has no other tensor of its kind to compare with. Any other large difference is a divergence at once."""
    coarse = ReferenceRun(TRAINING).coarse_reference()
    other_loss = replace(trace, steps=(replace(trace.steps[0], loss=1e6), *trace.steps[1:]))

    assert judge_coarsely(UNJUDGED, coarse, left(other_loss), ()) is None
    assert judge_coarsely(UNJUDGED, coarse, left(trace, 0, SMALL), ()) is None
    found = judge_coarsely(UNJUDGED, coarse, left(trace, 0), ())
    assert found is not None
    assert found.outcome is Outcome.DIVERGED


@pytest.mark.parametrize("kind", FailureKind)
def test_a_failure_is_a_crash_or_a_hang(kind: FailureKind) -> None:
    """Ranks that wait for each other hang. Any other end is a crash. The verdict has the evidence."""
    failure = Failure(kind=kind, summary="rank 1 is late", reports=())

    verdict = judge_failure(UNJUDGED, failure)

    assert verdict.outcome is (Outcome.HUNG if failure.hung else Outcome.CRASHED)
    assert (verdict.reason, verdict.failure) == ("rank 1 is late", failure)
