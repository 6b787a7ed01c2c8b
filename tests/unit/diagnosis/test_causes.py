"""Each fault is diagnosed with its cause and a sentence."""

from dataclasses import replace

import pytest

from equivcheck import Scenario, check
from equivcheck.diagnosis.catalogue.candidates import candidates
from equivcheck.diagnosis.diverged_run import run_again
from equivcheck.diagnosis.explain import explained
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import (
    Adafactor,
    Adam,
    AdamW,
    ClipNorm,
    Data,
    Layer,
    Loss,
    Model,
    ParameterGroup,
    ParameterSelection,
    Split,
    StepLR,
)
from equivcheck.worlds.trace.differences import Phase
from unit.diagnosis import faults
from unit.diagnosis.faults import ON_DDP, ON_FSDP2, TRAINING, Fault

CLIPPED = replace(ON_FSDP2, training=replace(TRAINING, clipping=ClipNorm(max_norm=0.125)))
DECAYED = replace(
    ON_DDP,
    training=replace(TRAINING, optimizer=AdamW(weight_decay=0.25), groups=(ParameterGroup(select=ParameterSelection.VECTORS),)),
)
SUMMED = replace(ON_DDP, training=replace(TRAINING, loss=Loss.MSE_SUM))
SCHEDULED = replace(ON_DDP, training=replace(TRAINING, schedule=StepLR(), steps=3))
ROW = faults.tensor_parallel(Split.COLWISE, Split.ROWWISE)

CASES: tuple[tuple[Scenario, Fault, Cause, str], ...] = (
    (ON_DDP, faults.rows_of_first, Cause.SAME_ROWS, "the 2 dp ranks compute on the same rows: those of the first"),
    (SUMMED, faults.all_rows, Cause.SAME_ROWS, "each of the 2 dp ranks computes on all rows, not only on its own part"),
    (ON_DDP, faults.keep_gradients, Cause.NOT_ZEROED, "gradients are not zeroed between steps"),
    (ON_FSDP2, faults.lose_state, Cause.STATE_LOST, "the optimizer state is lost before each step"),
    (ON_DDP, faults.nothing_is_updated, Cause.NOT_UPDATED, "the optimizer does not update any parameter"),
    (ON_DDP, faults.another_start, Cause.UNEQUAL_START, "rank 1 starts with other values of"),
    (CLIPPED, faults.clip_nothing, Cause.NOT_CLIPPED, "gradients are not clipped"),
    (CLIPPED, faults.clip_by_own_shard, Cause.LOCAL_NORM, "each rank clips by its local norm, over"),
    (ON_DDP, faults.settings(eps=1e-3), Cause.HYPERPARAMETER, "wrong settings: eps is 0.001, not 1e-08"),
    (ON_DDP, faults.settings(betas=(0.9, 0.99)), Cause.HYPERPARAMETER, "betas[1] is 0.99, not 0.999"),
    (
        DECAYED,
        faults.settings(weight_decay=0.25),
        Cause.DECAY_EVERYWHERE,
        "weight_decay is 0.25, not 0 for `layers.0",
    ),
    (ROW, faults.bias_everywhere, Cause.BIAS_ON_EVERY_RANK, "the bias of `layers.1.linear` is added on each of the 2 tp ranks"),
    (ON_DDP, faults.round_parameters, Cause.MASTERS_IN_LOWER_PRECISION, "parameters are kept in bfloat16 between steps"),
    (
        ON_DDP,
        faults.gradients(lambda values: values.mul_(1024.0)),
        Cause.NOT_UNSCALED,
        "1024 times as large as on one device, as if",
    ),
    (ON_DDP, faults.gradients(lambda values: values.mul_(3.0)), Cause.SCALED, "3 times as large as on one device"),
)


@pytest.mark.parametrize(("scenario", "alter", "cause", "words"), CASES, ids=[case[2].value for case in CASES])
def test_a_fault_is_named_by_its_cause(scenario: Scenario, alter: Fault, cause: Cause, words: str) -> None:
    """A single-device training with this fault leaves the ranks' values in all steps."""
    verdict = explained(check(scenario, alter=alter), alter=alter)

    assert verdict.diagnosis is not None, verdict.describe()
    assert (verdict.diagnosis.cause, verdict.diagnosis.exact) == (cause, True), verdict.diagnosis.sentence
    assert words in verdict.diagnosis.sentence


@pytest.mark.parametrize("optimizer", [Adam(lr=0.125), Adafactor()], ids=["elementwise", "not elementwise"])
def test_statistics_of_shards_are_tried_only_for_optimizers_that_have_any(optimizer: Adam | Adafactor) -> None:
    """An elementwise optimizer updates a shard as it updates the full tensor."""
    scenario = replace(ON_FSDP2, training=replace(TRAINING, optimizer=optimizer))
    diverged = run_again(scenario, faults.nothing_is_updated, "sim", 60.0)
    assert diverged is not None
    assert diverged.first.phase is Phase.UPDATE

    tried = {each.cause for each in candidates(diverged)}
    assert (Cause.LOCAL_STATISTICS in tried) is not optimizer.elementwise


def test_nothing_explains_what_is_not_known() -> None:
    """The report says that no known fault fits."""
    verdict = explained(check(ON_DDP, alter=faults.spoil), alter=faults.spoil)

    assert verdict.diagnosis is None, verdict.diagnosis
    assert "why:   unexplained: no known fault reproduces this" in verdict.describe()


def test_values_that_have_not_arrived_are_named_by_their_pattern() -> None:
    """NaN suggests an asynchronous result that was read too early, but proves nothing."""
    verdict = explained(check(ON_DDP, alter=faults.unread), alter=faults.unread)

    assert verdict.diagnosis is not None
    assert (verdict.diagnosis.cause, verdict.diagnosis.exact) == (Cause.READ_BEFORE_DONE, False)


def test_what_looks_the_same_is_named_beside_it() -> None:
    """With two ranks and two equal microbatches, a factor of two has two explanations."""
    double = faults.gradients(lambda values: values.mul_(2.0))
    training = replace(
        TRAINING, data=Data(microbatches=(2, 2)), model=Model(features=1, layers=(Layer(width=1),)), optimizer=Adam()
    )
    scenario = replace(ON_FSDP2, training=training)
    verdict = explained(check(scenario, alter=double), alter=double)

    assert verdict.diagnosis is not None
    assert verdict.diagnosis.cause is Cause.SUMMED
    assert "(the results fit another cause as well: the gradient is the sum over the 2 microbatches" in verdict.diagnosis.sentence


def test_verdicts_that_are_no_findings_stay_as_they_are() -> None:
    """Correct ranks are not diagnosed, and do not run again."""
    verdict = check(ON_DDP)

    assert explained(verdict, alter=faults.spoil) is verdict


def test_ranks_that_do_not_diverge_again_are_not_diagnosed() -> None:
    """If the fault is no longer planted, the verdict says that it was not reproduced."""
    verdict = explained(check(ON_DDP, alter=faults.spoil))

    assert verdict.diagnosis is None
    assert verdict.drift == "not reproduced: a second run matched"
