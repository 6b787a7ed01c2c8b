"""What `ZeroRedundancyOptimizer` communicates: each parameter from the rank that updates it, or all of a rank's at once."""

from __future__ import annotations

from equivcheck.layouts.expected_calls.communication import Totals
from equivcheck.layouts.expected_calls.rank_view import Held, Ledger, RankView
from equivcheck.scenario import DDP
from equivcheck.trace.stage import Stage

EMPTY_BUCKET_BYTES = 4
"""What a rank sends all the same that has nothing to send: one float32."""


def update_totals(seat: RankView, ddp: DDP) -> Totals:
    """The calls of all steps."""
    ledger, names = Ledger(Stage.UPDATE), seat.layout.axes_of(ddp)
    if ddp.parameters_as_bucket_view:
        trained = [sum(held.numel for held in part if held.trained) for part in _parts(seat, seat.layout.mesh.size(*names))]
        sent = [number * seat.item_bytes or EMPTY_BUCKET_BYTES for number in trained]
    else:
        sent = [held.numel * seat.item_bytes for held in seat.held]
    for step in range(seat.training.steps):
        ledger.note(step, "broadcast", seat.axes(*names), sum(sent), len(sent))
    return ledger.totals


def _parts(seat: RankView, num_ranks: int) -> list[list[Held]]:
    """Which parameters each rank updates: group after group, the largest first, each to the rank with least so far."""
    parts: list[list[Held]] = [[] for _ in range(num_ranks)]
    sizes = [0] * num_ranks
    for group in _groups(seat):
        for held in sorted(group, key=lambda found: found.numel, reverse=True):
            rank = sizes.index(min(sizes))
            parts[rank].append(held)
            sizes[rank] += held.numel
    return parts


def _groups(seat: RankView) -> list[list[Held]]:
    from equivcheck.train.optimizer import group_of

    training = seat.training
    order = {group: number for number, group in enumerate((None, *dict.fromkeys(training.groups)))}
    groups: list[list[Held]] = [[] for _ in order]
    for held in seat.held:
        groups[order[group_of(training, f"layers.{held.layer}.{held.name}")]].append(held)
    return groups
