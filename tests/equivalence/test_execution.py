"""The property: however a rank runs its part, compiled or with layers run again, it computes what one device computes."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equivcheck import Scenario, check
from equivcheck.scenario import Execution, Recompute
from equivcheck.strategies import scenarios

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
RECOMPUTING = st.sampled_from((Execution(checkpointing=Recompute.EVERY_LAYER), Execution(checkpointing=Recompute.ODD_LAYERS)))


@settings(UNHURRIED, max_examples=settings().max_examples)
@given(scenarios(executions=RECOMPUTING, max_ranks=4))
def test_recomputed_layers_leave_what_kept_activations_leave(scenario: Scenario) -> None:
    """Under every layout, with dropout and without, checkpointed layers change nothing."""
    check(scenario).assert_equivalent()
