"""The verdict names the cause of known faults, and no other cause."""

from __future__ import annotations

import pytest
import torch

from equivcheck import Outcome, check_training
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.diagnosis.patterns import NO_PROOF
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis import explain
from equivcheck.user.lazy_diagnosis import UserDiagnosis
from equivcheck.worlds.trace.differences import Phase
from support.verdicts import first_divergence
from unit.user.diagnosis.unknown_faults import UNKNOWN
from unit.user.diagnosis.wrong_cross_entropies import CROSS_ENTROPIES
from unit.user.diagnosis.wrong_gradients import GRADIENTS
from unit.user.diagnosis.wrong_modules import MODULES
from unit.user.diagnosis.wrong_moments import MOMENTS
from unit.user.diagnosis.wrong_parts import PARTS
from unit.user.diagnosis.wrong_shards import SHARDS
from unit.user.diagnosis.wrong_trainings import Wrong, step_of, two_microbatches
from unit.user.diagnosis.wrong_updates import UPDATES
from unit.user.diagnosis.wrong_weights import WEIGHTS
from unit.user.programs import brought, said

ALL = GRADIENTS | PARTS | UPDATES | SHARDS | MOMENTS | MODULES | CROSS_ENTROPIES | WEIGHTS
IN_EACH_RUN = (
    "not_reduced",
    "summed",
    "zero_grad_forgotten",
    "one_gradient_not_zeroed",
    "same_rows",
    "unequal_start",
    "replicas_in_norm",
    "state_lost",
    "scheduler_forgotten",
    "inf_norm_rooted",
    "all_gather_stale",
    "row_bias",
    "buffers_of_one_rank",
    "batch_norm_in_ddp",
    "dropout_seed",
    "parts_kept",
    "loss_times_ranks",
    "overwritten",
    "penalty_scaled",
    "states_exchanged",
    "schedule_twice",
    "accumulated_in_bfloat16",
    "clipped_in_two_calls",
    "chunks_or_ranks",
    "rows_of_nobody",
    "microbatch_weights",
    "amsgrad_forgotten",
    "average_in_microbatches",
    "first_zero_grad_forgotten",
    "reported_norm_of_replicas",
    "rows_not_summed",
    "first_row",
    "norm_of_own_features",
    "heads_in_wrong_order",
    "counted_again",
    "smoothed_over_own_classes",
    "classes_counted_twice",
    "state_read_as_if_unsplit",
    "zeros_for_none",
    "zeros_for_one_none",
    "replicas_clipped_apart",
    "labels_of_each_microbatch",
    "weights_of_ranks",
    "weights_in_gradients_only",
    "no_gradient_zeroed_one_is_zero",
    "shared_weight_scattered_first",
)
"""A few mistakes per kind. The torch environments run all."""


@pytest.mark.parametrize(
    "wrong", [pytest.param(ALL[name], marks=() if name in IN_EACH_RUN else pytest.mark.slow, id=name) for name in ALL]
)
def test_the_cause_is_named(wrong: Wrong) -> None:
    """The cause is named if one device reproduces the mistake, else none."""
    verdict = check_training(**wrong.brought)
    assert wrong.step in (None, first_divergence(verdict).step)
    assert (wrong.says in verdict.cause and verdict.kinds) if wrong.says else not verdict.cause
    assert f"why: {verdict.cause}" in said(verdict) or not wrong.says


UNKNOWN_IN_EACH_RUN = ("two_faults", "permuted", "shared_gradient_permuted", "slightly_off", "whole_numbers_doubled")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [pytest.param(*UNKNOWN[name], marks=() if name in UNKNOWN_IN_EACH_RUN else pytest.mark.slow, id=name) for name in UNKNOWN],
)
def test_of_what_is_unknown_no_cause_is_named(wrong: Wrong, says: str) -> None:
    """A pattern is a hint and says that it proves nothing."""
    verdict = check_training(**wrong.brought)
    assert verdict.outcome is Outcome.DIVERGED
    assert (verdict.cause, verdict.kinds) == ("", ())
    assert (says in verdict.hint and NO_PROOF in verdict.hint) if says else not verdict.hint


def test_two_causes_that_fit_are_both_named() -> None:
    """With two ranks and two microbatches a factor of two has two possible causes."""
    halved = step_of(after_each=lambda parameters, number: number and [parameter.grad.div_(2) for parameter in parameters])
    verdict = check_training(**brought(parallelize=lambda model, _mesh: model, rank_step=halved, batches=two_microbatches()))
    assert verdict.kinds == (Cause.AVERAGED_TWICE, Cause.RESCALED_EACH_MICROBATCH)
    averaged_twice, divided_twice = verdict.cause.removeprefix("either ").split(", or ")
    assert averaged_twice == "all gradients are averaged twice over the 2 dp ranks"
    assert divided_twice == "the gradient is divided by the number of microbatches twice"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("summed_again", Cause.SUMMED),
        ("same_rows", Cause.SAME_ROWS),
        ("replicas_in_norm", Cause.REPLICAS_IN_NORM),
        ("lost_decay_group", Cause.DECAY_EVERYWHERE),
    ],
    ids=str,
)
def test_no_other_words_for_the_same_mistake_follow(name: str, kind: Cause) -> None:
    """A layer that is not split is not called row-wise, and equal rows are not wrong parts as well."""
    verdict = check_training(**ALL[name].brought)
    assert verdict.kinds == (kind,)
    assert ALL[name].says in verdict.cause


def test_a_second_update_is_no_other_rate() -> None:
    """Without state, two optimizer steps equal one at twice the rate, but the rate is right."""
    twice = step_of(after_update=lambda optimizer, _: optimizer.step())
    plain = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
    verdict = check_training(**brought(parallelize=lambda model, _mesh: model, rank_step=twice, **plain))
    assert verdict.kinds == (Cause.STEPPED_EACH_MICROBATCH,)


@pytest.mark.parametrize("asked", [True, False])
def test_nobody_looks_for_a_cause_unless_ranks_diverge(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A correct training, or `explain=False`, costs no search."""
    searched: list[object] = []

    def search(*given: object) -> UserDiagnosis:
        searched.append(given)
        return UserDiagnosis()

    monkeypatch.setattr("equivcheck.user.diagnosing.diagnosis_of", search)
    assert check_training(**brought(), explain=asked).describe().startswith("EQUIVALENT")
    assert not searched
    assert check_training(**GRADIENTS["not_reduced"].brought, explain=asked).describe().startswith("DIVERGED")
    assert bool(searched) == asked


def test_what_fails_on_the_way_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in the diagnosis becomes a note."""

    def failing(_diverged: object) -> None:
        raise ArithmeticError("no cause")

    monkeypatch.setattr("equivcheck.user.diagnosis.explain.explanation_of", failing)
    verdict = check_training(**GRADIENTS["not_reduced"].brought)
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.unfinished == "looking for the cause failed: ArithmeticError: no cause"
    assert f"note:  {verdict.unfinished}" in verdict.describe()


def test_what_one_device_leaves_anyway_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that changes nothing is not a cause, even if the ranks nearly agree."""
    nothing_wrong = Mistake(cause=Cause.SCALED, sentence="nothing is wrong", change=lambda _ranks: None)
    monkeypatch.setattr(explain, "CATALOGUE", ((lambda _diverged, _honest: iter([nothing_wrong]), tuple(Phase)),))
    monkeypatch.setattr(explain, "num_agreeing_moments", lambda _diverged, _traces: 10**6)
    assert not check_training(**GRADIENTS["summed"].brought).cause
