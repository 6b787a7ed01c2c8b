"""What expert parallelism communicates: of the rows that are sent nothing is known beforehand."""

from __future__ import annotations

from equivcheck.layouts.expected_calls.model import CommunicationModel, Unmodelled

EXPERT_PARALLEL_COMMUNICATION = CommunicationModel(
    unmodelled=(
        Unmodelled(
            reason="expert parallelism: how many rows choose the experts of a rank depends on values",
            applies=lambda _training, _layout: True,
        ),
    ),
)
