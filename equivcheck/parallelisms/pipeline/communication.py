"""What a pipeline communicates is not modelled."""

from __future__ import annotations

from equivcheck.layouts.expected_calls.model import Foresight, Gap

PIPELINE_FORESIGHT = Foresight(
    gaps=(
        Gap(
            reason="pipeline: what stages send and receive depends on the schedule, which is not modelled",
            applies=lambda _training, _layout: True,
        ),
    ),
)
