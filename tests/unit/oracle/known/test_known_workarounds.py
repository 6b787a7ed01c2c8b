"""Tests for workarounds, which lead to scenarios that cannot show an issue."""

from dataclasses import replace

import pytest
from hypothesis import given

from equivcheck import Scenario
from equivcheck.layouts.base.limits.repairs import with_execution
from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.oracle.known_issues.known import KnownIssue, all_known_issues, could_show, known_issues, without_known_issues
from equivcheck.oracle.known_issues.workarounds import no_inductor_cache, plain_implementation, summed_outputs
from equivcheck.scenario import Adam, Compile, Implementation, Loss, Pipeline, Resume
from equivcheck.strategies import scenarios
from unit.campaign import fakes
from unit.oracle.known.builders import ONE_WEIGHT, RETURNED, SENT, V_SHAPED, VIEWED, ZB, scenario, with_experts_on_ranks
from unit.oracle.known.examples import SHOWN

EAGER = fakes.scenario(steps=2)
WITHIN_LIMITS = [issue for issue in all_known_issues() if issue.layouts and why_unsupported(SHOWN[issue.id][0]) is None]
"""Issues that campaigns can draw, with a scenario."""


@pytest.mark.parametrize("issue", WITHIN_LIMITS, ids=lambda issue: issue.id)
def test_what_could_show_an_issue_has_one_next_to_it_that_cannot(issue: KnownIssue) -> None:
    """The workaround's scenario can run on the same number of ranks and does not meet the issue's needs."""
    shown, _ = SHOWN[issue.id]
    avoided = issue.avoid(shown)
    assert issue.could_show(shown)
    assert avoided is not None
    assert why_unsupported(avoided) is None
    assert not issue.could_show(avoided)
    assert [layout.mesh.num_ranks for layout in avoided.layouts] == [layout.mesh.num_ranks for layout in shown.layouts]


@pytest.mark.parametrize("issue", [issue for issue in known_issues() if issue in WITHIN_LIMITS], ids=lambda issue: issue.id)
def test_one_that_avoids_all_issues_is_found(issue: KnownIssue) -> None:
    """A scenario without any issue is found even if one workaround leads to another issue."""
    avoided = without_known_issues(SHOWN[issue.id][0])
    assert avoided is not None
    assert not could_show(avoided)


@given(scenarios())
def test_whatever_is_drawn_avoids_issues_only_if_some_could_show(scenario: Scenario) -> None:
    """The result can run with the same parallelisms. A scenario that can show no issue stays unchanged."""
    avoided = without_known_issues(scenario)
    if avoided is not None:
        assert not could_show(avoided)
        assert why_unsupported(avoided) is None
        assert avoided.name == scenario.name
        assert (avoided == scenario) is not bool(could_show(scenario))


def both(*, whole_step: bool = False, compiler: Compile = Compile.NONE) -> Scenario:
    """A scenario with the same execution before and after a checkpoint."""
    layout = with_execution(EAGER.layout, whole_step=whole_step, compile=compiler)
    return replace(EAGER, layout=layout, resume=Resume(layout=layout))


def test_inductor_is_left_out_of_every_layout() -> None:
    """The workaround changes the layout before a checkpoint as well, and keeps other compilers."""
    eager = both(compiler=Compile.AOT_EAGER)

    assert no_inductor_cache(both(compiler=Compile.INDUCTOR)) == eager
    assert no_inductor_cache(eager) == eager
    assert no_inductor_cache(EAGER) == EAGER


def test_outputs_are_summed_and_all_else_stays() -> None:
    """The workaround replaces any loss and changes nothing else."""
    mean = replace(EAGER, training=replace(EAGER.training, loss=Loss.LINEAR_MEAN))

    assert summed_outputs(mean) == replace(EAGER, training=replace(EAGER.training, loss=Loss.LINEAR_SUM))


def test_a_plain_implementation_is_in_no_graph() -> None:
    """A traced step cannot contain a loop over parameters, so the workaround turns tracing off in both layouts."""
    training = replace(EAGER.training, optimizer=Adam(implementation=Implementation.FUSED))

    found = plain_implementation(replace(both(whole_step=True), training=training))

    assert found == replace(both(), training=replace(training, optimizer=Adam()))


@pytest.mark.torch(">=2.10", "stages of torch 2.9 cannot exchange messages over gloo")
@pytest.mark.parametrize(
    "shown",
    [
        scenario(V_SHAPED, ONE_WEIGHT, RETURNED, ONE_WEIGHT, ONE_WEIGHT),
        with_experts_on_ranks(scenario(V_SHAPED, ONE_WEIGHT, SENT, ONE_WEIGHT, ONE_WEIGHT)),
    ],
    ids=["dispatched", "expert_parallel"],
)
def test_experts_add_their_input_and_return_no_view(shown: Scenario) -> None:
    """Experts always send rows under expert parallelism, so a sum is the only way without a view."""
    issue = next(issue for issue in all_known_issues() if issue.id == "split_backward_of_view")
    avoided = issue.avoid(shown)
    assert issue.could_show(shown)
    assert avoided is not None
    assert not issue.could_show(avoided)
    assert avoided.layout == shown.layout
    assert avoided.training.model.layers[1] == replace(shown.training.model.layers[1], residual=True)


@pytest.mark.torch(">=2.10", "stages of torch 2.9 cannot exchange messages over gloo")
def test_only_middle_stages_stop_returning_views() -> None:
    """The first and the last stage may return views, so generated scenarios keep them there."""
    issue = next(issue for issue in all_known_issues() if issue.id == "split_backward_of_view")
    avoided = issue.avoid(scenario(Pipeline(schedule=ZB), VIEWED, VIEWED, VIEWED, sizes=(3,)))
    assert avoided is not None
    assert avoided.training.model.layers == (VIEWED, replace(VIEWED, shape_op=None, dropout=0.25), VIEWED)
