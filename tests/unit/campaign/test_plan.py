"""What a campaign may be asked to do."""

from __future__ import annotations

import pytest

from equivcheck.campaign.plan import Plan
from equivcheck.errors import UsageError


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": 0.0},
        {"seconds": float("nan")},
        {"seed": -1},
        {"num_workers": 0},
        {"num_checks": 0},
        {"max_ranks": 0},
        {"max_ranks": 9},
        {"deadline": 0.0},
        {"deadline": 200.0},
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_carried_out_is_refused(change: dict[str, float]) -> None:
    """The error is one line that names the field and what is allowed."""
    with pytest.raises(UsageError, match=r"^Plan\.\w+ .* is not valid: .*\. Expected .*$"):
        Plan(**({"seconds": 1.0, "seed": 0} | change))  # type: ignore[arg-type]


def test_a_plan_without_an_end_is_refused() -> None:
    """Neither a time nor a number of checks leaves nothing that ends it."""
    with pytest.raises(UsageError, match="num_checks"):
        Plan(seed=0)
