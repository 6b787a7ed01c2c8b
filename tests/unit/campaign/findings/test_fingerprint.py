"""When two verdicts are the same finding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from equivcheck.campaign.findings.fingerprint import blur, fingerprint, kind_of_tensor
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.scenario import Resume
from equivcheck.worlds.failure import Failure, FailureKind, RankReport, RankState
from equivcheck.worlds.trace.differences import Difference, Phase
from unit.campaign.fakes import diverged, scenario

TWO_STEPS = replace(scenario().training, steps=2)


def crashed(*errors: str, world: str = "sim") -> Verdict:
    """A verdict of ranks that raised; an empty error is a rank that waited."""
    reports = tuple(
        RankReport(rank=rank, state=RankState.RAISED if error else RankState.WAITING, error=error)
        for rank, error in enumerate(errors)
    )
    failure = Failure(kind=FailureKind.RAISED, summary="", reports=reports)
    return Verdict(outcome=Outcome.CRASHED, scenario=scenario(), world=world, failure=failure)


def hung(kind: FailureKind, *pending: str, world: str = "sim") -> Verdict:
    """A verdict of ranks that waited in vain."""
    reports = tuple(RankReport(rank=rank, state=RankState.WAITING, pending=call) for rank, call in enumerate(pending))
    failure = Failure(kind=kind, summary="", reports=reports)
    return Verdict(outcome=Outcome.HUNG, scenario=scenario(), world=world, failure=failure)


def test_the_same_fault_elsewhere_is_the_same_finding() -> None:
    """World, size, step and layer index do not count."""
    here = diverged(scenario(), tensor="layers.0.linear.weight")
    there = diverged(scenario(width=9, layers=4, ranks=4), world="gloo", tensor="layers.3.linear.weight", step=2)
    assert fingerprint(here) == fingerprint(there)


@pytest.mark.parametrize(
    "other",
    [
        diverged(scenario(), tensor="layers.0.linear.bias"),
        diverged(scenario(), tensor="layers.0.norm.weight"),
        replace(diverged(scenario()), divergence=replace(diverged(scenario()).divergence, phase=Phase.UPDATE)),
        replace(diverged(scenario()), divergence=replace(diverged(scenario()).divergence, difference=Difference.NAN)),
        crashed("RuntimeError: x"),
        diverged(replace(scenario(), training=TWO_STEPS, resume=Resume(layout=scenario().layout))),
    ],
    ids=["bias", "norm", "phase", "difference", "outcome", "resume"],
)
def test_another_fault_is_another_finding(other: Verdict) -> None:
    """Kind of tensor, phase, difference and outcome count."""
    assert fingerprint(diverged(scenario())) != fingerprint(other)


def test_the_message_of_a_crash_counts_without_its_numbers() -> None:
    """Shapes, ranks, addresses and paths in a message do not count; the words and the type do."""
    one = crashed("", "RuntimeError: shape [2, 3] at 0x7f001 in /a/b.py:3 does not fit")
    other = crashed("RuntimeError: shape [4] at 0xabc in /usr/c.py:99 does not fit", world="gloo")
    assert fingerprint(one) == fingerprint(other)
    assert fingerprint(one) != fingerprint(crashed("ValueError: shape [2, 3] at 0x7f001 in /a/b.py:3 does not fit"))
    assert fingerprint(one) != fingerprint(crashed("RuntimeError: shape [2, 3] does fit"))


def test_a_hang_counts_by_what_is_waited_for() -> None:
    """The operations waited for count, not their shapes, nor whether the world saw a deadlock or a timeout."""
    deadlock = hung(FailureKind.DEADLOCK, "all_reduce.sum float64[3] on ranks (0, 1), call 7", "")
    timeout = hung(FailureKind.TIMEOUT, "all_reduce.sum float64[9] on ranks (0, 1), call 1", world="gloo")
    assert fingerprint(deadlock) == fingerprint(timeout)
    assert fingerprint(deadlock) != fingerprint(hung(FailureKind.MISMATCH, "all_reduce.sum float64[3] on ranks (0, 1), call 7"))
    assert fingerprint(deadlock) != fingerprint(hung(FailureKind.DEADLOCK, "barrier on ranks (0, 1), call 7"))


def test_where_the_others_waited_for_a_rank_that_works_does_not_count() -> None:
    """How far they had come by the time when the world gave up is chance."""
    early, late = (
        hung(FailureKind.TIMEOUT, "", call) for call in ("all_reduce.sum float64[3] on ranks (0, 1), call 7", "barrier")
    )
    working = RankReport(rank=0, state=RankState.RUNNING)
    verdicts = [
        replace(each, failure=replace(each.failure, reports=(working, each.failure.reports[1]))) for each in (early, late)
    ]
    assert fingerprint(early) != fingerprint(late)
    assert fingerprint(verdicts[0]) == fingerprint(verdicts[1])


def test_a_crash_counts_by_what_failed_first() -> None:
    """What other ranks raise for it, as connections close, comes at times and at times not."""
    reset, wrong = (RankReport(rank=rank, state=RankState.RAISED, error=error) for rank, error in enumerate(("reset", "wrong")))
    waits = RankReport(rank=0, state=RankState.WAITING, pending="barrier")
    one, other = (
        replace(crashed(""), failure=Failure(kind=FailureKind.RAISED, summary="", reports=(rank_0, wrong), first=1))
        for rank_0 in (reset, waits)
    )
    assert fingerprint(one) == fingerprint(other)


def test_state_counts_by_its_key() -> None:
    """Of optimizer state the key counts, whichever parameter it belongs to."""
    assert kind_of_tensor("layers.0.linear.weight/exp_avg") == kind_of_tensor("layers.1.linear.bias/exp_avg") == "exp_avg"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1e-05 of 3.5", "N of N"), ("[1, 2, 3]", "[N]"), ("a\n  b", "a b"), ("torch.Size([2, 3])", "torch.Size([N])")],
)
def test_blur_leaves_words(text: str, expected: str) -> None:
    """Numbers, lists of them, and line breaks are levelled."""
    assert blur(text) == expected
