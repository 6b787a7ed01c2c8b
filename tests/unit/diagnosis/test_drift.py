"""Starting each step from the reference's values shows where a run goes wrong."""

from dataclasses import replace

import pytest

from equivcheck import Scenario, check
from equivcheck.diagnosis.diverged_run import run_again
from equivcheck.diagnosis.drift import FROM_REFERENCE, drift_of, start_steps_from, values_at_steps
from equivcheck.diagnosis.explain import explained
from equivcheck.layouts.composition.running import Runner
from equivcheck.oracle.comparison.compare import compare
from equivcheck.oracle.reference.reference import ReferenceRun
from equivcheck.scenario import Resume
from equivcheck.worlds.trace.trace import Slot
from support.supported import require_supported
from unit.diagnosis import faults
from unit.diagnosis.faults import ON_DDP, ON_FSDP2, Fault


@pytest.mark.parametrize("scenario", faults.LAYOUTS, ids=[f"{number} {at.name}" for number, at in enumerate(faults.LAYOUTS)])
def test_what_is_lost_between_steps_is_given_back_under_every_layout(scenario: Scenario) -> None:
    """Ranks with a wrong start and lost state match the reference if each step starts from its values."""
    require_supported(scenario)

    def lose_everything(setup: faults.Setup) -> None:
        if setup.state_of.__name__ == "own_state":
            faults.lose_state(setup)
        faults.another_start(setup)

    forced = start_steps_from(values_at_steps(scenario), lose_everything, state=True)
    result = Runner(world="sim", deadline=60.0, alter=forced).run(scenario)

    assert compare(ReferenceRun(scenario.training, num_parts=2).confirming_reference(), result.run.values).divergences == ()


@pytest.mark.parametrize(
    ("scenario", "alter", "drift"),
    [
        (ON_DDP, faults.gradients(lambda values: values.mul_(3.0)), f"in every step, also {FROM_REFERENCE}"),
        (
            ON_FSDP2,
            faults.lose_state,
            f"between steps: each step is right {FROM_REFERENCE}, so the optimizer state carried over is wrong",
        ),
        (
            ON_DDP,
            faults.another_start,
            f"between steps: each step is right {FROM_REFERENCE}, so the parameters carried over are wrong",
        ),
        (
            ON_DDP,
            faults.keep_gradients,
            f"in step 1 (gradient of layers.0.linear.weight), also {FROM_REFERENCE}; step 0 is right",
        ),
    ],
    ids=["every step", "state", "parameters", "from the second on"],
)
def test_a_verdict_says_where_the_run_goes_wrong(scenario: Scenario, alter: Fault, drift: str) -> None:
    """Either some steps are wrong, or the values carried over between them."""
    assert explained(check(scenario, alter=alter), alter=alter).drift == drift


@pytest.mark.parametrize(
    ("world", "change", "drift"),
    [
        ("sim", {"steps": 1}, "in the only step"),
        ("gloo", {"steps": 2}, "not examined: only the sim world can give ranks the reference's values"),
    ],
    ids=["one step", "processes"],
)
def test_where_there_is_nothing_to_examine_the_reason_is_given(world: str, change: dict[str, int], drift: str) -> None:
    """No rank runs again."""
    fault = faults.gradients(lambda values: values.mul_(3.0))
    diverged = run_again(replace(ON_DDP, training=replace(ON_DDP.training, **change)), fault, "sim")  # type: ignore[arg-type]
    assert diverged is not None

    assert drift_of(diverged, fault, world, 60.0) == drift


def test_a_run_that_resumes_is_not_examined() -> None:
    """Another layout ran the first steps."""
    fault = faults.gradients(lambda values: values.mul_(3.0))
    diverged = run_again(replace(ON_DDP, resume=Resume(layout=ON_FSDP2.layout, steps=1)), fault, "sim")
    assert diverged is not None

    assert drift_of(diverged, fault, "sim", 60.0) == "not examined: the first steps run under another layout"


def test_why_ranks_cannot_be_given_values_is_said() -> None:
    """A parameter has another size than its layout says."""

    def shrink(setup: faults.Setup) -> None:
        inner = setup.find_slots
        setup.before_step.append(
            lambda _optimizer, step: setattr(setup, "find_slots", lambda model: inner(model) if step else _halved(inner(model)))
        )

    run = run_again(ON_DDP, faults.gradients(lambda values: values.mul_(3.0)), "sim")
    assert run is not None

    assert "has 16 elements on a rank, but its placements need 32" in drift_of(run, shrink, "sim", 60.0)


def _halved(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """Slots that list each parameter twice."""
    return tuple(replace(slot, pieces=slot.pieces * 2) for slot in slots)
