"""What a check is expected to cost, in comparison with others."""

from __future__ import annotations

import math

from equivcheck.scenario import FSDP1, FSDP2, SPMD, Layout, LocalTensorParallel, Replicate, Scenario, TensorParallel, Training

_COST = {FSDP1: 1.4, Replicate: 1.5, FSDP2: 2.3, LocalTensorParallel: 1.25, TensorParallel: 2.5, SPMD: 5.0}
"""Of a rank under them, where it is 1 under others."""
_COST_OF_SEQUENCES = 2.0
"""Of a model over sequences, where it is 1 for others."""
_GROWTH = 0.6
"""By which power it grows with work: less than in proportion, as much has to be set up."""


def expected_cost(scenario: Scenario) -> float:
    """CPU time of a check without what it compiles or traces, in units of one rank, step, microbatch and layer of DDP: some 6 ms.

    Fitted to the CPU times of 4,000 drawn scenarios, of whose logarithms it explains 78 percent. It is not learnt while a
    campaign runs: a seed would not decide any more what is checked.
    """
    return sum(map(_of_layout, scenario.layouts)) * _of_training(scenario.training)


def _of_layout(layout: Layout) -> float:
    return float(layout.mesh.num_ranks**_GROWTH * math.prod(cost for kind, cost in _COST.items() if layout.has(kind)))


def _of_training(training: Training) -> float:
    work = training.steps * len(training.data.microbatches) * len(training.model.layers)
    return float(work**_GROWTH) * (1.0 if training.model.length is None else _COST_OF_SEQUENCES)
