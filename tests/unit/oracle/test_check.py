"""Tests for `check`: each outcome, from the simplest scenario with that outcome."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from equivcheck import NotEquivalent, Outcome, Scenario, UsageError, check
from equivcheck.layouts.composition.program import rank_program
from equivcheck.oracle.verdict.verdict import Verdict
from equivcheck.scenario import DDP, SGD, Axis, Data, Layer, Layout, Mesh, Model, Resume, Training
from equivcheck.system.tally import IN_PART, take_counts
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.failure import FailureKind, RankState
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.trace import Trace
from support.verdicts import first_divergence
from unit.oracle.alterations import double_the_gradients, kill_rank_one, nudge_the_gradients, raise_on_rank_one, spin_on_rank_one

TRAINING = Training(model=Model(features=2, layers=(Layer(width=2), Layer(width=1))), data=Data(microbatches=(4, 2)), steps=2)
LAYOUT = Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(DDP(),))
SCENARIO = Scenario(training=TRAINING, layout=LAYOUT)
LOST_AT_STEP_ONE = replace(
    SCENARIO,
    training=replace(TRAINING, model=Model(features=2, layers=(Layer(width=2),) * 3), optimizer=SGD(lr=1e100)),
)
"""The first update is large, so the second forward overflows."""


def test_a_right_training_is_equivalent() -> None:
    """The verdict has the largest error and the duration."""
    verdict = check(SCENARIO)

    assert verdict.outcome is Outcome.EQUIVALENT
    assert 0 <= verdict.worst_error < 1
    assert verdict.seconds > 0
    verdict.assert_equivalent()


@pytest.mark.parametrize("outcome", Outcome)
def test_two_assertions_say_what_they_pass(outcome: Outcome) -> None:
    """`assert_equivalent` passes EQUIVALENT only, `assert_no_finding` everything but findings.

    Verdicts on users' trainings behave the same way.
    """
    for verdict in (
        Verdict(outcome=outcome, scenario=SCENARIO, world="sim"),
        UserVerdict(outcome=outcome, mesh=(("dp", 2),), world="sim", precision="float64"),
    ):
        for assertion, passes in (
            (verdict.assert_equivalent, outcome is Outcome.EQUIVALENT),
            (verdict.assert_no_finding, not outcome.is_finding),
        ):
            with nullcontext() if passes else pytest.raises(NotEquivalent):
                assertion()


def test_a_wrong_training_has_diverged() -> None:
    """The first divergence has both values, and `assert_equivalent` raises it with a scenario to paste."""
    verdict = check(SCENARIO, alter=double_the_gradients)

    first = first_divergence(verdict)
    assert (first.step, first.phase) == (0, Phase.GRADIENT)
    assert float(first.actual) == pytest.approx(2 * float(first.expected))
    assert verdict.followers
    with pytest.raises(NotEquivalent, match=r"Scenario\(\s*training="):
        verdict.assert_equivalent()


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_rank_that_raises_is_a_crash(world: str) -> None:
    """The verdict has the rank's error, and the same ranks work in the next check."""
    verdict = check(SCENARIO, world=world, alter=raise_on_rank_one)

    assert verdict.outcome is Outcome.CRASHED
    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.RAISED
    assert verdict.failure.reports[1].error == "RuntimeError: out of cheese"
    assert check(SCENARIO, world=world).outcome is Outcome.EQUIVALENT


def test_a_killed_rank_costs_one_verdict() -> None:
    """A process killed during a check is a crash that names the signal. The next check has fresh ranks."""
    assert check(SCENARIO, world="gloo").outcome is Outcome.EQUIVALENT

    verdict = check(SCENARIO, world="gloo", alter=kill_rank_one)

    assert verdict.outcome is Outcome.CRASHED
    assert verdict.failure is not None
    assert verdict.failure.reports[1].state is RankState.DIED
    assert "SIGKILL" in verdict.failure.reports[1].error
    assert check(SCENARIO, world="gloo").outcome is Outcome.EQUIVALENT


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_ranks_that_wait_for_each_other_are_a_hang(world: str) -> None:
    """A collective that other ranks never enter is a hang: at once in sim, at the deadline in other worlds."""
    verdict = check(SCENARIO, world=world, alter=spin_on_rank_one, deadline=2.0)

    assert verdict.outcome is Outcome.HUNG
    assert verdict.failure is not None
    assert "spin_on_rank_one" in verdict.failure.reports[1].stack
    assert check(SCENARIO, world=world).outcome is Outcome.EQUIVALENT


def test_what_a_layout_cannot_run_is_unsupported() -> None:
    """A scenario beyond a declared limit does not run, and the verdict has the reason."""
    odd = replace(SCENARIO, training=replace(TRAINING, data=Data(microbatches=(3,))))

    verdict = check(odd)

    assert verdict.outcome is Outcome.UNSUPPORTED
    assert "rows are not a multiple of the data-parallel ranks" in verdict.reason


def test_a_reference_in_doubt_is_inconclusive() -> None:
    """Agreement with a reference that proves nothing does not pass."""
    overflowing = replace(SCENARIO, training=replace(TRAINING, optimizer=SGD(lr=1e300)))

    assert check(overflowing).outcome is Outcome.INCONCLUSIVE


def test_steps_before_a_doubt_are_decided() -> None:
    """A reference that fails later decides the steps before, and the verdict names the first undecided step."""
    verdict = check(LOST_AT_STEP_ONE)

    assert verdict.outcome is Outcome.EQUIVALENT
    assert not verdict.is_clear
    assert verdict.undecided.startswith("not decided from step 1 on: the single-device run has values that are not finite")
    assert verdict.undecided in " ".join(verdict.describe().split())
    assert check(SCENARIO).is_clear


def test_a_small_fault_before_a_doubt_is_found() -> None:
    """A later doubt does not hide a small fault in an earlier step."""
    assert first_divergence(check(LOST_AT_STEP_ONE, alter=nudge_the_gradients)).step == 0


def test_a_doubt_before_a_checkpoint_leaves_nothing_of_what_follows() -> None:
    """If only the first layout's steps are decided, the second layout is not."""
    resume = Resume(layout=LAYOUT, steps=1)

    assert check(replace(LOST_AT_STEP_ONE, resume=resume)).outcome is Outcome.INCONCLUSIVE
    assert check(replace(SCENARIO, resume=resume)).outcome is Outcome.EQUIVALENT


def test_a_world_that_does_not_exist_is_refused() -> None:
    """The error lists the worlds."""
    with pytest.raises(UsageError, match=r"'moon' is not valid: it does not exist\. Expected one of sim, gloo"):
        check(SCENARIO, world="moon")


def test_verdicts_are_tallied() -> None:
    """Each check counts under its layout, world and outcome in a test run's summary."""
    before = take_counts()
    check(SCENARIO)
    after = take_counts()

    assert sum(after.values()) == 1
    assert sum(before.values()) >= 0


def test_what_is_decided_in_part_is_tallied_as_such() -> None:
    """A test run's summary counts it separately from equivalence at every step."""
    take_counts()
    check(LOST_AT_STEP_ONE)

    assert take_counts() == {("ddp", "sim", IN_PART): 1}


def test_sim_repeats_itself_bit_for_bit() -> None:
    """A scenario leaves the same bits on every rank, in each run and with each schedule seed."""

    def bits(seed: int) -> list[bytes]:
        traces: tuple[Trace, ...] = ranks("sim", 2).run(rank_program, SCENARIO, schedule_seed=seed).values
        return [step.parameters.values.tobytes() + step.gradients.values.tobytes() for trace in traces for step in trace.steps]

    first = bits(0)

    assert bits(0) == first
    assert bits(5) == first
