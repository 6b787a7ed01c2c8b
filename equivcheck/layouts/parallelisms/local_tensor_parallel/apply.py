"""Applies tensor parallelism on plain tensors to a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivcheck.layouts.base.kind import LayoutKind
from equivcheck.layouts.parallelisms.local_tensor_parallel.communication import LOCAL_TENSOR_PARALLEL_COMMUNICATION
from equivcheck.layouts.parallelisms.local_tensor_parallel.limits import LAYOUT_LIMITS, LIMITS
from equivcheck.scenario import LocalTensorParallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.layouts.base.script.draft import Draft
    from equivcheck.training.setup import Setup


class LocalTensorParallelKind(LayoutKind[LocalTensorParallel]):
    """Keeps only this rank's parameter shards, and adds collectives around sharded modules."""

    parallelism = LocalTensorParallel
    limits = LIMITS
    layout_limits = LAYOUT_LIMITS
    communication = LOCAL_TENSOR_PARALLEL_COMMUNICATION

    def apply(self, setup: Setup, parallelism: LocalTensorParallel, mesh: DeviceMesh) -> None:
        """Replace each module in the plan by a module with this rank's shard, and shard dropout masks."""
        from equivcheck.layouts.base.data_rows import local_masks, with_equal_chunks
        from equivcheck.layouts.parallelisms.local_tensor_parallel.loss import compute_sharded_loss
        from equivcheck.layouts.parallelisms.local_tensor_parallel.modules import replace_modules
        from equivcheck.training.material import Batch

        ranks = replace_modules(setup, parallelism, mesh)
        if parallelism.loss_parallel:
            compute_sharded_loss(setup, ranks)
        inner, is_sequence = setup.take, setup.training.model.length is not None

        def take(batch: Batch) -> Batch:
            taken = with_equal_chunks(inner(batch), setup.num_chunks)
            ranks.rows = taken.inputs.shape[1 - taken.batch_dim] if is_sequence else taken.rows // setup.num_chunks
            return local_masks(taken, parallelism.plan, ranks.index, ranks.size, setup.num_chunks)

        setup.take = take

    def finish(self, setup: Setup, parallelism: LocalTensorParallel, mesh: DeviceMesh) -> None:
        """Make the setup read each plain tensor as a shard of its full parameter, and clip by the norm over all shards."""
        from equivcheck.layouts.base.local_tensors import read_plain_shards

        read_plain_shards(setup, parallelism, mesh)

    def write_script(self, draft: Draft, parallelism: LocalTensorParallel) -> None:
        """Let the exported script replace its model's modules by sharded modules, like the ranks of a check."""
        from equivcheck.layouts.parallelisms.local_tensor_parallel.export import write

        write(draft, parallelism)
