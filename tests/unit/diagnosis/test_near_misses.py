"""Similar faults are distinguished, and double or partial fits are reported."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from equivcheck import Scenario, check
from equivcheck.diagnosis.explain import explained
from equivcheck.mutants.registry import mutant
from equivcheck.oracle.reference.reference import ReferenceRun
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.scenario import DDP, FSDP2, SGD, Adam, AuxiliaryLinear, ClipNorm, Data, Implementation, Layer, Model, Training
from equivcheck.training.setup import Setup
from unit.diagnosis import faults
from unit.diagnosis.causes import CLIPPED, MOMENTUM, on_2, one_more_call, over
from unit.diagnosis.faults import Fault

pytestmark = pytest.mark.filterwarnings("ignore")


def diagnosis_of(scenario: Scenario, fault: Fault) -> Diagnosis | None:
    """Diagnosis for ranks with a fault."""
    verdict = check(scenario, alter=fault)
    assert verdict.outcome.is_finding, verdict.describe()
    return explained(verdict, alter=fault).diagnosis


def times(factor: float) -> Fault:
    """Multiply all gradients."""
    return faults.gradients(lambda values: values.mul_(factor))


def at_step(step: int, change: Callable[[torch.Tensor], Any]) -> Fault:
    """Change all gradients at one step only."""

    def apply(setup: Setup) -> None:
        def change_all(_optimizer: torch.optim.Optimizer, now: int) -> None:
            for parameter in setup.model.parameters():
                if now == step and parameter.grad is not None:
                    change(parameter.grad)

        setup.before_update.append(change_all)

    return apply


def one_count_only(setup: Setup) -> None:
    """Reset the optimizer's step counts, not its moments."""

    def reset(optimizer: torch.optim.Optimizer, _step: int) -> None:
        for state in optimizer.state.values():
            state["step"].zero_()

    setup.before_step.append(reset)


DECAYED = on_2(optimizer=SGD(weight_decay=0.25))
NEAR_MISSES: dict[str, tuple[Scenario, Fault, Cause | None]] = {
    "a factor that is no number of ranks is no sum over ranks": (on_2(), times(3.0), Cause.SCALED),
    "over 3 ranks a factor of 2 is no sum over ranks": (over({"dp": 3}, rows=(3,)), times(2.0), Cause.SCALED),
    "3 microbatches on 2 ranks: times 3 is a sum over microbatches": (
        on_2(rows=(2, 2, 2)),
        times(3.0),
        Cause.MICROBATCHES_SUMMED,
    ),
    "3 microbatches on 2 ranks: times 2 is a sum over ranks": (on_2(rows=(2, 2, 2)), times(2.0), Cause.SUMMED),
    "8 is too small for a loss scaler": (on_2(), times(8.0), Cause.SCALED),
    "1000 is no power of two, so no loss scaler's": (on_2(), times(1000.0), Cause.SCALED),
    "step counts that are reset are no lost state": (on_2(optimizer=Adam(), steps=2), one_count_only, Cause.STEP_COUNT),
    "lost state is no momentum of 0 at once": (on_2(optimizer=MOMENTUM, steps=3), faults.lose_state, Cause.STATE_LOST),
    "decay of another factor than 2 is not decay applied twice": (
        DECAYED,
        faults.settings(weight_decay=0.625),
        Cause.HYPERPARAMETER,
    ),
    "parameters in bfloat16 are no gradients in bfloat16": (on_2(), faults.round_parameters, Cause.MASTERS_IN_LOWER_PRECISION),
    "a norm of vectors left out is no local norm": (
        on_2(clipping=CLIPPED),
        mutant("vectors_not_in_norm").plant,
        Cause.PART_OF_NORM,
    ),
    "clipping to another norm is no missing clipping": (
        on_2(clipping=ClipNorm(max_norm=0.01)),
        mutant("another_norm_type").plant,
        Cause.ANOTHER_NORM,
    ),
    "gradients of another step are not gradients of several": (
        on_2(steps=2),
        mutant("gradients_of_last_step").plant,
        Cause.STALE,
    ),
    "noise is no known fault": (on_2(), faults.spoil, None),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_fault_that_resembles_another_is_not_taken_for_it(name: str) -> None:
    """Exactly one cause is named."""
    scenario, fault, cause = NEAR_MISSES[name]
    found = diagnosis_of(scenario, fault)

    if cause is None:
        assert found is None, found
        return
    assert found is not None
    assert (found.cause, found.exact) == (cause, True), found.sentence
    assert "fit another cause" not in found.sentence


@pytest.mark.parametrize(
    ("scenario", "factor", "first", "second"),
    [
        (on_2(rows=(2, 2)), 2.0, "the sum over the 2 dp ranks", "the sum over the 2 microbatches"),
        (over({"dp": 3}, rows=(3, 3, 3)), 3.0, "the sum over the 3 dp ranks", "the sum over the 3 microbatches"),
    ],
    ids=["2", "3"],
)
def test_a_second_cause_that_fits_as_well_is_named(scenario: Scenario, factor: float, first: str, second: str) -> None:
    """If there are as many microbatches as ranks, both sums fit."""
    found = diagnosis_of(scenario, times(factor))

    assert found is not None
    assert found.exact
    named, _, also = found.sentence.partition("(the results fit another cause as well: ")
    assert first in named
    assert second in also


def test_a_fault_of_the_first_step_alone_explains_that_step_alone() -> None:
    """If another fault follows, the sentence says that later differences have more causes."""
    once, another = at_step(0, lambda values: values.mul_(2.0)), at_step(1, lambda values: values.mul_(5.0))

    def both(setup: Setup) -> None:
        once(setup)
        another(setup)

    alone, found = diagnosis_of(on_2(steps=2), once), diagnosis_of(on_2(steps=2), both)

    assert alone is not None
    assert (alone.cause, alone.exact) == (Cause.SUMMED, True)
    assert alone.sentence.endswith(", at step 0 only")
    assert found is not None
    assert (found.cause, found.exact) == (Cause.SUMMED, False)
    assert found.sentence.endswith("at step 0; later differences have more causes")


def test_a_fault_without_effect_explains_no_state() -> None:
    """All values but the final state are right, so a fault without effect agrees with all others."""

    def spoil_state(setup: Setup) -> None:
        update = setup.update

        def change(optimizer: torch.optim.Optimizer) -> None:
            update(optimizer)
            for state in optimizer.state.values():
                state["momentum_buffer"].copy_(torch.cos(1e3 * state["momentum_buffer"]))

        setup.update = change

    assert diagnosis_of(on_2(optimizer=MOMENTUM), spoil_state) is None


def test_a_fault_within_tolerance_explains_no_difference_beyond_it() -> None:
    """Each of four shards is within the tensor's tolerance, so they also agree with a fault of the fifth rank, which is empty."""
    scenario = over({"dp": 5}, FSDP2(), Layer(width=4), rows=(5,))
    name = "layers.0.linear.weight"
    expected = ReferenceRun.of(scenario).confirming_reference().moments[1]
    row = expected.table.rows[name]
    error = math.sqrt(2) * float(expected.tolerances[row]) / math.sqrt(math.prod(expected.table.shapes[row]))

    def err(setup: Setup) -> None:
        setup.before_update.append(lambda _optimizer, _step: local_gradient(setup.model.get_parameter(name)).add_(error))

    assert diagnosis_of(scenario, err) is None


def local_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A rank's shard of a gradient."""
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.to_local()


def test_a_fault_that_comes_later_is_no_fault_of_all_steps() -> None:
    """If gradients are doubled from the second step on, the sentence says so."""
    found = diagnosis_of(on_2(steps=2, optimizer=SGD(lr=0.125)), at_step(1, lambda values: values.mul_(2.0)))

    assert found is not None
    assert found.sentence == "all gradients are the sum over the 2 dp ranks, not the mean, from step 1 on"


def test_a_pattern_says_that_it_is_no_proof() -> None:
    """All values are representable in bfloat16, but no fault reproduces them."""

    def garble(values: torch.Tensor) -> None:
        values.copy_(torch.cos(1e3 * values).bfloat16())

    fault = faults.gradients(garble)
    verdict = explained(check(on_2(), alter=fault), alter=fault)

    assert verdict.diagnosis is not None
    assert (verdict.diagnosis.cause, verdict.diagnosis.exact) == (Cause.REDUCED_IN_LOWER_PRECISION, False)
    assert "every element is representable in it (a pattern in the values, not a proof" in verdict.diagnosis.sentence


@pytest.mark.parametrize(("width", "cause"), [(1, None), (2, Cause.SCALED)], ids=["one element", "two elements"])
def test_a_single_number_shows_no_factor(width: int, cause: Cause | None) -> None:
    """A single element always has a ratio. Two elements with one ratio are evidence."""
    training = Training(model=Model(features=1, layers=(Layer(width=width),)), data=Data(microbatches=(2,)))

    def multiply_weight(setup: Setup) -> None:
        def change(_optimizer: torch.optim.Optimizer, _step: int) -> None:
            weight = next(parameter for name, parameter in setup.model.named_parameters() if name.endswith("weight"))
            assert weight.grad is not None
            weight.grad.mul_(6.73)

        setup.before_update.append(change)

    found = diagnosis_of(faults.spread(DDP(), training), multiply_weight)

    assert (None if found is None else found.cause) is cause


def test_what_nothing_explains_is_marked_as_unexplained() -> None:
    """The report says that no known fault fits, and where the run goes wrong."""
    verdict = explained(check(on_2(), alter=faults.spoil), alter=faults.spoil)

    assert verdict.diagnosis is None
    assert "  why:   unexplained: no known fault reproduces this\n  where: in the only step" in verdict.describe()


def test_calls_in_the_first_wrong_step_are_named_behind_many_wrong_values() -> None:
    """More tensors differ than a verdict names, but the calls keep a place."""
    scenario = on_2(DDP(), *(Layer(width=2),) * 8)

    def spoil_and_call(setup: Setup) -> None:
        faults.spoil(setup)
        one_more_call(setup)

    verdict = explained(check(scenario, alter=spoil_and_call), alter=spoil_and_call)

    assert verdict.diagnosis is None
    assert verdict.num_unnamed
    assert "why:   unexplained: no known fault reproduces this; calls differ in the same" in verdict.describe()


def test_a_shared_weight_that_nothing_explains_is_blamed_by_ablation() -> None:
    """Ranks that match without sharing get a hint, because nothing is proven."""
    scenario = on_2(DDP(), Layer(width=2), Layer(width=2, shares=0))

    def spoil_shared(setup: Setup) -> None:
        if any(layer.shares is not None for layer in setup.training.model.layers):
            faults.spoil(setup)

    found = diagnosis_of(scenario, spoil_shared)

    assert found is not None
    assert (found.cause, found.exact) == (Cause.UNTIED, False)
    assert "with a separate weight for each use they match one device" in found.sentence


def test_an_explanation_that_cannot_be_trained_is_none() -> None:
    """A candidate that divides by step count zero is skipped."""
    alternating = Layer(width=2, auxiliary=AuxiliaryLinear.EVEN_STEPS)
    adam = Adam(implementation=Implementation.FOREACH)
    scenario = on_2(DDP(find_unused_parameters=True), alternating, optimizer=adam, steps=3)
    found = diagnosis_of(scenario, mutant("step_not_counted").plant)
    assert found is not None
    assert found.cause is Cause.STEP_COUNT
