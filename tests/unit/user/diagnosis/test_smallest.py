"""`smallest` keeps only the parts of a training that the verdict needs."""

from __future__ import annotations

from typing import Any

import pytest

from equivcheck import Outcome, smallest
from equivcheck.oracle.verdict.cause import Cause
from unit.user.diagnosis.wrong_gradients import GRADIENTS, Stale
from unit.user.diagnosis.wrong_trainings import averaged, step_of
from unit.user.programs import batches, brought


def by_hand(**changes: Any) -> dict[str, Any]:
    """Arguments for explicit data parallelism."""
    return brought(parallelize=lambda model, _mesh: model, **changes)


def test_steps_rows_and_ranks_are_left_out() -> None:
    """A missing reduction shrinks to one step on two ranks with one row each."""
    found = smallest(**by_hand(mesh={"dp": 4}, batches=batches(8), rank_step=step_of(reduce=lambda _parameters: None)))
    assert found.verdict.kinds == (Cause.NOT_REDUCED,)
    assert found.arguments["mesh"] == {"dp": 2}
    assert [tuple(map(len, batch)) for batch in found.arguments["batches"]] == [(2, 2)]


@pytest.mark.slow
def test_the_cause_stays() -> None:
    """Steps and microbatches stay if the cause would change without them."""
    found = smallest(**GRADIENTS["first_microbatch_synced"].brought)
    assert found.verdict.kinds == (Cause.NOT_REDUCED,)
    assert [len(batch) for batch in found.arguments["batches"]] == [2]


def test_a_training_that_is_right_stays_as_it_is() -> None:
    """A training without a finding stays unchanged."""
    given = by_hand(rank_step=step_of(reduce=averaged))
    found = smallest(**given)
    assert found.verdict.outcome is Outcome.EQUIVALENT
    assert len(found.arguments["batches"]) == len(given["batches"])
    assert found.num_tried == 1


@pytest.mark.slow
def test_state_that_the_users_functions_keep_is_theirs() -> None:
    """A user's function that counts its calls may change the verdict, but each result is consistent."""
    found = smallest(**by_hand(rank_step=step_of(reduce=Stale())))
    assert found.verdict.outcome is Outcome.DIVERGED
