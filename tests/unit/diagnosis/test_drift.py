"""Ranks that start each step from the reference's values show where a run goes wrong."""

import pytest

from equivcheck import Scenario, check
from equivcheck.comparison.compare import compare
from equivcheck.composition.running import Runner
from equivcheck.diagnosis.drift import FROM_REFERENCE
from equivcheck.diagnosis.explain import explained
from equivcheck.diagnosis.reference_values import starting_from, values_at_steps
from equivcheck.reference.reference import ReferenceRun
from unit.diagnosis import faults
from unit.diagnosis.faults import ON_DDP, ON_FSDP2, Fault


@pytest.mark.parametrize("scenario", faults.LAYOUTS, ids=[f"{number} {at.name}" for number, at in enumerate(faults.LAYOUTS)])
def test_what_is_lost_between_steps_is_given_back_under_every_layout(scenario: Scenario) -> None:
    """Ranks that start elsewhere and lose their state leave the reference's values, if these are given to them at each step."""

    def lose_everything(setup: faults.Setup) -> None:
        if setup.state_of.__name__ == "own_state":
            faults.lose_state(setup)
        faults.another_start(setup)

    forced = starting_from(values_at_steps(scenario), lose_everything, state=True)
    left = Runner(world="sim", deadline=60.0, alter=forced).run(scenario)

    assert compare(ReferenceRun(scenario.training, num_parts=2).confirming_reference(), left.run.values).divergences == ()


@pytest.mark.parametrize(
    ("scenario", "alter", "drift"),
    [
        (ON_DDP, faults.gradients(lambda values: values.mul_(3.0)), f"in every step, also {FROM_REFERENCE}"),
        (
            ON_FSDP2,
            faults.lose_state,
            f"between steps: each is right {FROM_REFERENCE}, so the optimizer state carried over is wrong",
        ),
        (
            ON_DDP,
            faults.another_start,
            f"between steps: each is right {FROM_REFERENCE}, so the parameters carried over are wrong",
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
    """Whether a step goes wrong, or what it begins with."""
    assert explained(check(scenario, alter=alter), alter=alter).drift == drift
