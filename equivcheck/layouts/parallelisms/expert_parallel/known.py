"""Known-issue predicates for experts that are DTensors."""

from __future__ import annotations

from equivcheck.layouts.base.dtensor_experts import dtensor_experts
from equivcheck.layouts.base.known_predicates import need
from equivcheck.layouts.base.limits.optimizers import keeps_dtensors
from equivcheck.layouts.base.partition import is_last_shard_empty
from equivcheck.scenario import Scenario
from equivcheck.scenario.mesh import EP


@need
def trains_dtensor_experts_of_nothing(scenario: Scenario) -> bool:
    """Whether some rank has no expert, so its trained DTensor shards are empty."""
    layout = scenario.layout
    return keeps_dtensors(layout) and any(
        parameter.trained and is_last_shard_empty(parameter.shape[0], layout.mesh.size(EP))
        for parameter in dtensor_experts(scenario.training.model, layout)
    )
