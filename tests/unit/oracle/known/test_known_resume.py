"""Known issues in one of two layouts, if a scenario resumes from a checkpoint."""

from dataclasses import replace

import pytest

from equivcheck.oracle.known_issues.known import known_issue
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.scenario import DDP, SPMD, Axis, Data, Layer, Layout, Mesh, Model, Parallelism, Resume, Scenario, Training
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase

TRAINING = Training(model=Model(features=2, layers=(Layer(width=2),)), data=Data(microbatches=(2,)), steps=3)


def layout(parallelism: Parallelism) -> Layout:
    """A layout on two ranks."""
    return Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(parallelism,))


def too_large(first: Parallelism, second: Parallelism, step: int) -> Verdict:
    """A doubled gradient at some step, such as SPMD's for the mean squared error. The checkpoint is after step 1."""
    found = Divergence(
        step=step,
        phase=Phase.GRADIENT,
        tensor="layers.0.linear.weight",
        difference=Difference.VALUE,
        rank=0,
        index=(0, 0),
        expected="1.0",
        actual="2.0",
    )
    scenario = Scenario(training=TRAINING, layout=layout(second), resume=Resume(layout=layout(first), steps=2))
    return Verdict(outcome=Outcome.DIVERGED, scenario=scenario, world="sim", divergence=found)


@pytest.mark.torch(">=2.11", "earlier versions have no mse_loss of DTensors")
@pytest.mark.parametrize(
    ("first", "second", "step", "known"),
    [
        (SPMD(), DDP(), 0, True),
        (SPMD(), DDP(), 1, True),
        (SPMD(), DDP(), 2, False),
        (DDP(), SPMD(), 0, False),
        (DDP(), SPMD(), 2, True),
    ],
)
def test_an_issue_explains_what_its_layout_ran(first: Parallelism, second: Parallelism, step: int, known: bool) -> None:
    """A wrong number is known only if the issue belongs to the layout that ran the step."""
    issue = known_issue(too_large(first, second, step))
    assert (issue.id if issue else "") == ("dtensor_mse_loss_mean" if known else "")


def test_a_crash_is_explained_by_either_layout() -> None:
    """An error does not say which layout ran, so issues from both are considered."""
    reason = "rank 0 raised RuntimeError: expect_autograd_hooks_ INTERNAL ASSERT FAILED"
    two = replace(TRAINING, data=Data(microbatches=(2, 2)))
    static = DDP(static_graph=True, no_sync=True)
    for first, second in ((static, SPMD()), (SPMD(), static)):
        scenario = Scenario(training=two, layout=layout(second), resume=Resume(layout=layout(first)))
        issue = known_issue(Verdict(outcome=Outcome.CRASHED, scenario=scenario, world="sim", reason=reason))
        assert issue is not None
        assert issue.id == "ddp_static_graph_no_sync"
