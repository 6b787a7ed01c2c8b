"""The diagnosis for hangs and crashes says what each rank was doing."""

import pytest

from equivcheck import check
from equivcheck.diagnosis.explain import explained
from equivcheck.diagnosis.failures import diagnosis_of_failure
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.worlds.failure import Failure, FailureKind, RankReport, RankState
from unit.diagnosis.faults import ON_DDP, skip_a_collective

WAITS = {"state": RankState.WAITING, "pending": "all_reduce.sum float64[2] on ranks (0, 1, 2), call 3"}


def test_a_rank_that_raises_is_named_with_those_that_wait_for_it() -> None:
    """The sentence has the error and the position of each waiting rank."""
    reports = (
        RankReport(rank=0, **WAITS),  # type: ignore[arg-type]
        RankReport(rank=1, state=RankState.RAISED, error="ValueError: no\nmore"),
        RankReport(rank=2, **WAITS),  # type: ignore[arg-type]
    )
    found = diagnosis_of_failure(Failure(kind=FailureKind.RAISED, summary="", reports=reports))

    assert found.cause is Cause.RANK_FAILED
    assert found.sentence == f"rank 1 raises ValueError: no; ranks 0 and 2 wait in {WAITS['pending']}"


@pytest.mark.parametrize(
    ("reports", "sentence"),
    [
        (
            (
                RankReport(rank=0, state=RankState.DIED),
                RankReport(rank=1, **WAITS),  # type: ignore[arg-type]
            ),
            f"rank 0 dies: without an error message; rank 1 waits in {WAITS['pending']}",
        ),
        (
            (
                RankReport(rank=0, state=RankState.RAISED, error="KeyError: 1"),
                RankReport(rank=1, state=RankState.RAISED, error="KeyError: 1"),
            ),
            "every rank raises KeyError: 1",
        ),
    ],
    ids=["dies", "all raise"],
)
def test_ranks_that_fail_are_named_with_what_they_say(reports: tuple[RankReport, ...], sentence: str) -> None:
    """A rank may die without a message."""
    found = diagnosis_of_failure(Failure(kind=FailureKind.RAISED, summary="", reports=reports))

    assert (found.cause, found.sentence, found.exact) == (Cause.RANK_FAILED, sentence, True)


def test_ranks_that_hang_are_grouped_by_what_they_do() -> None:
    """Finished and computing ranks are named too."""
    reports = (
        RankReport(rank=0, **WAITS),  # type: ignore[arg-type]
        RankReport(rank=1, state=RankState.FINISHED),
        RankReport(rank=2, state=RankState.FINISHED),
        RankReport(rank=3, state=RankState.RUNNING),
    )
    found = diagnosis_of_failure(Failure(kind=FailureKind.DEADLOCK, summary="", reports=reports))

    assert found.cause is Cause.CALLS_DIFFER
    assert found.sentence == (
        f"ranks issue different communication calls: rank 0 waits in {WAITS['pending']}; ranks 1 and 2 have finished; "
        "rank 3 is still computing"
    )


def test_ranks_that_call_differently_are_named_with_their_calls() -> None:
    """A rank that skips a reduction is named next to the waiting ones."""
    verdict = explained(check(ON_DDP, alter=skip_a_collective), alter=skip_a_collective)

    assert verdict.diagnosis is not None
    assert verdict.diagnosis.cause is Cause.CALLS_DIFFER
    assert "rank 0 waits in all_reduce.sum" in verdict.diagnosis.sentence
    assert "rank 1" in verdict.diagnosis.sentence
    assert 1 + len(verdict.evidence()) <= 10
