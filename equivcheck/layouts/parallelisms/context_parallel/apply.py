"""Applies context parallelism to a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivcheck.layouts.base.kind import LayoutKind
from equivcheck.layouts.parallelisms.context_parallel.communication import CONTEXT_PARALLEL_COMMUNICATION
from equivcheck.layouts.parallelisms.context_parallel.limits import LAYOUT_LIMITS, LIMITS
from equivcheck.scenario import ContextParallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.layouts.base.script.draft import Draft
    from equivcheck.training.setup import Setup


class ContextParallelKind(LayoutKind[ContextParallel]):
    """Shards sequences over ranks.

    Each rank computes its own positions, attends to positions of other ranks, and sums gradients.
    """

    parallelism = ContextParallel
    limits = LIMITS
    layout_limits = LAYOUT_LIMITS
    communication = CONTEXT_PARALLEL_COMMUNICATION

    def apply(self, setup: Setup, parallelism: ContextParallel, mesh: DeviceMesh) -> None:
        """Shard inputs, targets and loss by positions, and sum gradients over ranks."""
        import torch

        from equivcheck.layouts.base.data_rows import sum_counts
        from equivcheck.layouts.base.positions import positions_of_ranks
        from equivcheck.layouts.parallelisms.context_parallel.parts import (
            set_sequence,
            shard_loss,
            sum_gradients_over_ranks,
            take_positions,
        )
        from equivcheck.layouts.parallelisms.context_parallel.ranks import PositionRanks
        from equivcheck.layouts.parallelisms.context_parallel.sequences import SEQUENCES

        size, length = mesh.size(), setup.training.model.length
        assert length is not None, "a limit leaves sequences only"
        if size == 1:
            return
        parts = tuple(torch.tensor(part, dtype=torch.int64) for part in positions_of_ranks(parallelism, length, size))
        ranks = PositionRanks(group=mesh.get_group(), index=mesh.get_local_rank(), parts=parts)
        set_sequence(setup, SEQUENCES[parallelism.exchange](ranks))
        take_positions(setup, ranks)
        shard_loss(setup, ranks)
        sum_gradients_over_ranks(setup, ranks)
        sum_counts(setup, ranks.group, splits_sequences=True)

    def write_script(self, draft: Draft, parallelism: ContextParallel) -> None:
        """Shard the script's sequences over ranks."""
        from equivcheck.layouts.parallelisms.context_parallel.export import write

        write(draft, parallelism)
