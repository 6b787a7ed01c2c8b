"""What a pipeline communicates is not modelled."""

from __future__ import annotations

from equivcheck.layouts.expected_calls.model import CommunicationModel, Unmodelled

PIPELINE_COMMUNICATION = CommunicationModel(
    unmodelled=(
        Unmodelled(
            reason="pipeline: what stages send and receive depends on the schedule, which is not modelled",
            applies=lambda _training, _layout: True,
        ),
    ),
)
