"""Each known issue is recognised in the smallest scenario that shows it, and in no similar scenario."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from equivcheck import Outcome, Scenario, Verdict, check
from equivcheck.layouts.base.limits.repairs import with_options
from equivcheck.mutants.registry import mutant
from equivcheck.oracle.known_issues.known import IssueKind, KnownIssue, all_known_issues, known_issue, known_issues
from equivcheck.oracle.known_issues.predicates import NEEDS
from equivcheck.scenario import DDP, FSDP1, Layer, Pipeline, Wrapping
from equivcheck.worlds.failure import Failure, FailureKind, RankReport, RankState
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase
from support.supported import require_mended, require_supported
from unit.oracle.known.builders import FROZEN, FUSED, ONE_WEIGHT, ZB, over_tp, scenario, traced
from unit.oracle.known.examples import SHOWN as SHOWN_ANYWHERE
from unit.oracle.known.others import ALSO_SHOWN

pytestmark = pytest.mark.filterwarnings("ignore:.*NO_SHARD", "ignore:Called FSDP.clip_grad_norm_")

ISSUES = {issue.id: issue for issue in known_issues() if issue.layouts}
"""Known issues of the installed torch that a scenario can show."""
SMALLEST = [(name, shown) for name, (shown, _) in SHOWN_ANYWHERE.items()]
SHOWN = {name: examples for name, examples in SHOWN_ANYWHERE.items() if name in ISSUES}


def _marks(example: Scenario) -> list[pytest.MarkDecorator]:
    """Compiled examples take seconds and only change with torch, so they run with the corpus."""
    return [pytest.mark.corpus] if example.layout.execution.is_compiled else []


def _examples(*pairs: tuple[str, Scenario]) -> list[Any]:
    return [
        pytest.param(name, example, marks=_marks(example), id=f"{name}-{number}")
        for number, (name, example) in enumerate(pairs)
        if name in ISSUES
    ]


@cache
def checked(example: Scenario) -> Verdict:
    """Check an example once, because several tests use it and some examples are compiled."""
    require_supported(example)
    return check(example, beyond=True)


def test_each_issue_has_a_scenario() -> None:
    """Each issue with layouts has a scenario that shows it."""
    assert sorted(SHOWN_ANYWHERE) == sorted(issue.id for issue in all_known_issues() if issue.layouts)


@pytest.mark.parametrize(
    ("name", "example"),
    [
        *(pytest.param(*pair, marks=_marks(pair[1]), id=pair[0]) for pair in SMALLEST if pair[0] in ISSUES),
        *_examples(*ALSO_SHOWN),
    ],
)
def test_an_issue_on_file_is_known_when_it_shows(name: str, example: Scenario) -> None:
    """A check that runs into a known issue names it."""
    verdict = checked(example)
    assert (verdict.outcome, verdict.known) == (Outcome.KNOWN, name), verdict.describe()


@pytest.mark.parametrize(
    ("name", "example"), _examples(*((name, each) for name, (_, healthy) in SHOWN.items() for each in healthy))
)
def test_what_is_near_an_issue_is_healthy(name: str, example: Scenario) -> None:
    """If one of an issue's needs is missing, nothing is wrong, so each need is necessary."""
    verdict = checked(example)
    require_mended(verdict)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()


@pytest.mark.parametrize("issue", ISSUES.values(), ids=ISSUES)
def test_an_issue_needs_something_that_what_is_near_it_lacks(issue: KnownIssue) -> None:
    """An issue explains no failure in a scenario that cannot show it."""
    shown, healthy = SHOWN[issue.id]
    healthy = [example for example in healthy if example.resume is not None or not issue.on_resume]
    tags = [{parallelism.tag for parallelism in example.layout.parallelisms} for example in healthy]
    met = [all(NEEDS[name](example) for name in issue.needs) for example in (shown, *healthy)]
    assert met[0]
    assert not any(fits and not tag.isdisjoint(issue.layouts) for fits, tag in zip(met[1:], tags, strict=True))


@pytest.mark.parametrize("name", SHOWN)
def test_an_issue_explains_nothing_else_that_goes_wrong_in_its_scenario(name: str) -> None:
    """If a scenario can show an issue, another wrong number or error is still a finding."""
    example, _ = SHOWN[name]
    # What is avoided is checked without, so that any wrong loss there may be taken for it at first.
    phase = Phase.UPDATE if ISSUES[name].without and Phase.LOSS in ISSUES[name].phases else Phase.LOSS
    wrong = Divergence(step=0, phase=phase, tensor="loss", difference=Difference.VALUE, rank=-1, expected="1.0", actual="2.0")
    missing = replace(wrong, phase=Phase.GRADIENT, tensor="layers.0.linear.weight", difference=Difference.MISSING)
    for divergence in (wrong, missing):
        assert known_issue(_diverged(example, divergence)) is None
    assert known_issue(_crashed(example, "RuntimeError: something else")) is None


@pytest.mark.parametrize(
    "name", [pytest.param(issue.id, marks=_marks(SHOWN[issue.id][0])) for issue in ISSUES.values() if issue.error]
)
def test_an_error_on_file_is_a_finding_where_the_issue_cannot_show(name: str) -> None:
    """An error text is not enough: the scenario must meet the issue's needs."""
    shown, healthy = SHOWN[name]
    outcome = Outcome.HUNG if ISSUES[name].kind is IssueKind.HANG else Outcome.CRASHED
    failure = checked(shown).failure
    assert failure is not None
    errors = [report.error for report in failure.reports if report.error] or [failure.summary]
    failed = [replace(_crashed(example, *errors), outcome=outcome) for example in (shown, *healthy)]
    assert known_issue(failed[0]) is not None
    assert [known_issue(verdict) for verdict in failed[1:]] == [None] * len(healthy)


def test_the_error_of_any_rank_is_looked_at() -> None:
    """If a rank raises and the others hang, its error explains the hang."""
    example, _ = SHOWN["inf_norm_of_empty_shard"]
    verdict = _crashed(example, "RuntimeError: Connection closed by peer", "RuntimeError: " + checked(example).reason)
    issue = known_issue(replace(verdict, outcome=Outcome.HUNG))
    assert issue is not None
    assert issue.id == "inf_norm_of_empty_shard"


@pytest.mark.torch(">=2.11", "earlier versions have no mse_loss of DTensors")
def test_gradients_too_large_by_another_factor_are_a_finding() -> None:
    """The issue explains gradients that are multiplied by the number of data ranks, and no other factor."""
    example, _ = SHOWN["dtensor_mse_loss_mean"]
    right = Divergence(
        step=0,
        phase=Phase.GRADIENT,
        tensor="layers.0.linear.weight",
        difference=Difference.VALUE,
        rank=0,
        expected="-1.5",
        actual="-3.0",
    )
    assert known_issue(_diverged(example, right)) is not None
    for actual in ("-1.6", "-4.5", "3.0", "0.0"):
        assert known_issue(_diverged(example, replace(right, actual=actual))) is None


@pytest.mark.parametrize("changes", [{"step": 0}, {"actual": "0.5"}, {"tensor": "layers.0.linear.weight"}])
def test_only_a_norm_that_is_too_large_at_a_later_step_is_an_earlier_one(changes: dict[str, object]) -> None:
    """A norm that is wrong at step 0 or too small, and wrongly clipped gradients, are findings."""
    example, _ = SHOWN["fsdp1_inf_norm_of_nothing"]
    earlier = Divergence(
        step=1, phase=Phase.CLIPPING, tensor="norm", difference=Difference.VALUE, rank=0, expected="1.0", actual="4.0"
    )
    assert known_issue(_diverged(example, earlier)) is not None
    assert known_issue(_diverged(example, replace(earlier, **changes))) is None  # type: ignore[arg-type]


@pytest.mark.torch(">=2.12", "earlier versions drop no gradient")
def test_gradients_dropped_after_the_first_step_are_a_finding() -> None:
    """Each size has its schedule from the first training step on, so later steps drop nothing."""
    example, _ = SHOWN["pipeline_drops_sharded_gradients"]
    dropped = Divergence(step=0, phase=Phase.GRADIENT, tensor="layers.0.linear.weight", difference=Difference.VALUE, rank=0)
    assert known_issue(_diverged(example, dropped)) is not None
    assert known_issue(_diverged(example, replace(dropped, step=1))) is None


@pytest.mark.parametrize("tensor", ["layers.0.norm.weight", "layers.1.linear.weight", "layers.2.norm.weight"])
def test_an_extra_gradient_elsewhere_is_a_finding(tensor: str) -> None:
    """The issue explains gradients on frozen sequence-parallel norms, and on no other parameter."""
    example, _ = SHOWN["sequence_parallel_unfreezes"]
    extra = Divergence(step=0, phase=Phase.GRADIENT, tensor="layers.1.norm.bias", difference=Difference.EXTRA, rank=0)
    assert known_issue(_diverged(example, extra)) is not None
    assert known_issue(_diverged(example, replace(extra, tensor=tensor))) is None


@pytest.mark.torch(">=2.13", "earlier versions lose no gradient of a stage behind frozen layers")
@pytest.mark.parametrize(
    ("shares", "difference", "is_known"),
    [
        (None, Difference.MISSING, True),
        (None, Difference.VALUE, False),
        (1, Difference.VALUE, True),
        (1, Difference.RANKS_DISAGREE, False),
    ],
)
def test_a_lost_gradient_has_a_wrong_value_only_if_another_stage_adds_to_it(
    shares: int | None, difference: Difference, is_known: bool
) -> None:
    """The sum over the stages that share a weight then lacks the gradient of the stage behind frozen layers."""
    layers = FROZEN, ONE_WEIGHT, replace(ONE_WEIGHT, shares=shares)
    lost = Divergence(step=0, phase=Phase.GRADIENT, tensor="layers.1.linear.weight", difference=difference, rank=1)
    assert (known_issue(_diverged(scenario(Pipeline(schedule=ZB), *layers, sizes=(3,)), lost)) is not None) is is_known


@pytest.mark.torch(">=2.12", "earlier versions lose no gradient")
@pytest.mark.parametrize(
    ("wrapping", "changes", "is_known"),
    [
        (Wrapping.ROOT_ONLY, {}, True),
        (Wrapping.ROOT_ONLY, {"tensor": "layers.1.linear.weight"}, True),
        (Wrapping.ROOT_ONLY, {"tensor": "layers.2.linear.weight"}, False),
        (Wrapping.ROOT_ONLY, {"tensor": "head.linear.weight"}, False),
        (Wrapping.ROOT_ONLY, {"difference": Difference.MISSING}, False),
        (Wrapping.PER_LAYER, {"difference": Difference.MISSING}, True),
        (Wrapping.PER_LAYER, {"tensor": "layers.2.linear.weight", "difference": Difference.MISSING}, False),
    ],
)
def test_a_lost_gradient_is_known_up_to_the_layer_whose_sum_is_awaited(
    wrapping: Wrapping, changes: dict[str, object], is_known: bool
) -> None:
    """Later layers keep their graph. With one unit for all layers, the gradient exists even if it is zero."""
    example, _ = SHOWN["compiled_hook_after_pending_checkpoint"]
    example = replace(example, layout=with_options(example.layout, FSDP1, wrapping=wrapping))
    lost = Divergence(step=0, phase=Phase.GRADIENT, tensor="layers.0.linear.weight", difference=Difference.VALUE, rank=0)
    assert (known_issue(_diverged(example, replace(lost, **changes))) is not None) is is_known  # type: ignore[arg-type]


@pytest.mark.parametrize(("index", "is_known"), [((0, 1), True), ((0, 5, 1), True), ((1,), False)])
def test_fused_adam_is_wrong_for_tensors_of_several_dims(index: tuple[int, ...], is_known: bool) -> None:
    """Gradients of matrices and of stacked experts may have other strides than their parameters. A vector has one stride."""
    example, _ = SHOWN["fused_adam_strided_gradient"]
    wrong = Divergence(
        step=0, phase=Phase.UPDATE, tensor="layers.0.linear.weight", difference=Difference.VALUE, rank=0, index=index
    )
    assert (known_issue(_diverged(example, wrong)) is not None) is is_known


def test_what_is_wrong_without_an_issue_as_well_is_a_finding() -> None:
    """A wrong update under fused Adam is the known issue only if plain Adam is right."""
    shown, _ = SHOWN["fused_adam_strided_gradient"]
    healthy = over_tp(DDP(), Layer(width=2), Layer(width=2), optimizer=FUSED["optimizer"])

    assert check(healthy).outcome is Outcome.EQUIVALENT
    assert check(healthy, alter=mutant("masters_in_bfloat16").plant).outcome is Outcome.DIVERGED
    assert check(shown, alter=mutant("masters_in_bfloat16").plant).outcome is Outcome.DIVERGED
    assert check(traced(shown), alter=mutant("masters_in_bfloat16").plant).outcome is Outcome.DIVERGED


def _diverged(example: Scenario, divergence: Divergence) -> Verdict:
    return Verdict(outcome=Outcome.DIVERGED, scenario=example, world="sim", reason="differs", divergence=divergence)


def _crashed(example: Scenario, *errors: str) -> Verdict:
    reports = tuple(RankReport(rank=rank, state=RankState.RAISED, error=error) for rank, error in enumerate(errors))
    failure = Failure(kind=FailureKind.RAISED, summary=f"rank 0 raised {errors[0]}", reports=reports)
    return Verdict(outcome=Outcome.CRASHED, scenario=example, world="sim", reason=failure.summary, failure=failure)
