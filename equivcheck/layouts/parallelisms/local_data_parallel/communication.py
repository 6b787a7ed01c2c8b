"""Expected calls for explicit data parallelism: one all-reduce for each gradient, or one all-reduce for all gradients."""

from __future__ import annotations

from equivcheck.layouts.base.expected_calls.model import CommunicationModel
from equivcheck.layouts.base.expected_calls.shared import gradient_reductions
from equivcheck.scenario.mesh import DP

LOCAL_DATA_PARALLEL_COMMUNICATION = CommunicationModel(
    calls=lambda view, parallelism: gradient_reductions(view, DP, view.held, flat=parallelism.flat_buffer),
    sends_shards=True,
)
