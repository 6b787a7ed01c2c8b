"""What a check is expected to cost, in comparison with others."""

from __future__ import annotations

import math

from equivcheck.scenario import FSDP2, SPMD, Layout, Muon, Scenario, TensorParallel, Training

_DTENSOR_COST = {FSDP2: 1.8, TensorParallel: 2.4, SPMD: 3.3}
"""Of one rank over DTensors, where it is 1 for a rank without."""
_MUON_COST = 2.0
"""Of an optimizer that multiplies matrices, where it is 1 for others."""


def expected_cost(scenario: Scenario) -> float:
    """CPU time of a check without what it compiles or traces, in units of one rank, step, microbatch and layer of DDP.

    Fitted to the CPU times of 200 drawn scenarios, of whose logarithms it explains two thirds. It is not learnt while a campaign
    runs: a seed would not decide any more what is checked.
    """
    return sum(_of_layout(layout) for layout in scenario.layouts) * _of_training(scenario.training)


def _of_layout(layout: Layout) -> float:
    return layout.mesh.num_ranks * math.prod(cost for kind, cost in _DTENSOR_COST.items() if layout.has(kind))


def _of_training(training: Training) -> float:
    """Less than in proportion to the work of a rank, as each has much to set up."""
    work = training.steps * len(training.data.microbatches) * len(training.model.layers)
    return math.sqrt(work) * (_MUON_COST if isinstance(training.optimizer, Muon) else 1.0)
