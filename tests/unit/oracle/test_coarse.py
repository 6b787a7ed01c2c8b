"""The coarse judgement finds large differences cheaply, and leaves all others to the full one."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from equivcheck import Outcome, Scenario, check
from equivcheck.oracle.reference import reference
from equivcheck.scenario import DDP, SGD, Axis, Data, Layer, Layout, Mesh, Model, Training
from equivcheck.strategies import scenarios
from support.verdicts import first_divergence
from unit.oracle.alterations import double_the_gradients, nudge_the_gradients

TRAINING = Training(model=Model(features=2, layers=(Layer(width=2), Layer(width=1))), data=Data(microbatches=(4, 2)), steps=2)
SCENARIO = Scenario(
    training=TRAINING, layout=Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(DDP(),)), schedule_seed=3
)


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let perturbed runs fail, and clear cached ones."""

    def fail(*_arguments: object) -> None:
        raise AssertionError("a perturbed run")

    monkeypatch.setattr(reference, "perturbed_copies", fail)
    for kept in (reference._reference, reference._confirming_reference):
        kept.cache_clear()


@pytest.mark.usefixtures("no_copies")
def test_a_large_difference_needs_no_perturbed_run() -> None:
    """The verdict equals the full judgement's, except for the error's unit."""
    first = first_divergence(check(SCENARIO, alter=double_the_gradients, coarse=True))
    assert (first.step, first.phase.value) == (0, "gradient")
    with pytest.raises(AssertionError, match="a perturbed run"):
        check(SCENARIO, alter=double_the_gradients)


def test_a_small_difference_is_judged_in_full() -> None:
    """A wrong tenth digit is found, although the coarse judgement cannot see it."""
    verdict = check(SCENARIO, alter=nudge_the_gradients, coarse=True)

    assert verdict.outcome is Outcome.DIVERGED
    assert check(SCENARIO, coarse=True).outcome is Outcome.EQUIVALENT


def test_a_reference_in_doubt_stays_in_doubt() -> None:
    """Infinite or NaN values exceed no tolerance."""
    overflowing = replace(SCENARIO, training=replace(TRAINING, optimizer=SGD(lr=1e300)))

    assert check(overflowing, coarse=True).outcome is check(overflowing).outcome is Outcome.INCONCLUSIVE


@settings(max_examples=max(8, settings().max_examples // 12), suppress_health_check=list(HealthCheck), deadline=None)
@given(scenarios(layouts=("ddp", "fsdp1", "tensor_parallel"), max_ranks=2))
def test_the_full_judgement_passes_nothing_that_the_coarse_one_finds(scenario: Scenario) -> None:
    """If the coarse judgement finds a divergence, the full one finds it too, or the reference is in doubt."""
    for alter in (None, double_the_gradients):
        coarse = check(scenario, alter=alter, coarse=True)
        full = check(scenario, alter=alter)
        in_doubt = full.outcome is Outcome.INCONCLUSIVE or bool(full.undecided)
        assert coarse.outcome is full.outcome or (coarse.outcome.is_finding and in_doubt)
