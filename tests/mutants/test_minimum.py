"""Generated catches shrink to nearly the known minimum, for mutants from some families.

The selftest does this for all of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from equivcheck import Outcome, check
from equivcheck.mutants.registry import mutant
from equivcheck.quality.selftest.examine import Effort, examine

pytestmark = pytest.mark.filterwarnings("ignore")

ONE_CATCH = Effort(reached_after_catch=0)
SHRINK_SECONDS = 20.0
REPRESENTATIVES = (
    "schedule_stuck",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("column_input_gradient_not_reduced", "gradients_summed", "not_clipped", "tied_weight_without_gradient")
    ),
)


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_a_catch_shrinks_to_at_most_one_more_than_it_takes(name: str) -> None:
    """Shrinking leaves at most one rank, layer and step more than the minimum, and takes less than 20 seconds."""
    chosen = mutant(name)
    row = examine(replace(chosen, layouts=chosen.layouts[:1]), ONE_CATCH)
    assert row.shrunk is not None
    assert row.shrunk.is_small, row.shrunk
    assert row.shrunk.seconds < SHRINK_SECONDS
    assert row.shrunk.outcome.is_finding
    assert check(row.shrunk.scenario).outcome is Outcome.EQUIVALENT
