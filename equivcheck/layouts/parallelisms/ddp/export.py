"""Writes `DistributedDataParallel` into a script."""

from __future__ import annotations

from equivcheck.layouts.base.script.draft import ROUNDS, Draft, LoopPosition, refuse
from equivcheck.layouts.base.script.mesh import add_no_sync, mesh_of, take_rows
from equivcheck.layouts.base.script.shards import read_local_shards
from equivcheck.layouts.base.script.text import call, indent_lines
from equivcheck.scenario import DDP, Compression, PlannedParallelism
from equivcheck.scenario.parallelisms.data_parallel import DEFAULT_BUCKET_MB


def write(draft: Draft, parallelism: DDP) -> None:
    """Wrap the script's model in `DistributedDataParallel`."""
    if parallelism.autocast is not None:
        raise refuse("DDP.autocast", ROUNDS)
    if parallelism.compression is not Compression.NONE:
        raise refuse("DDP.compression", ROUNDS)
    draft.need("torch.nn.parallel", "DistributedDataParallel")
    composed = len(draft.scenario.layout.parallelisms) > 1
    draft.loss_scale = draft.scenario.layout.num_data_ranks
    mesh = mesh_of(draft, parallelism) if composed else None
    if parallelism.unequal_start and draft.scenario.layout.num_data_ranks > 1:
        rank = f"{mesh}.get_local_rank()" if composed else "dist.get_rank()"
        draft.add(LoopPosition.WRAP, *_made_unequal(draft, rank))
    options = _options(parallelism)
    if draft.has_parts:
        draft.add(
            LoopPosition.WRAP,
            f"parts = [{call('DistributedDataParallel', 'part', device_mesh=mesh, **options)} for part in parts]",
        )
    else:
        draft.module = "module"
        draft.add(LoopPosition.WRAP, f"module = {call('DistributedDataParallel', 'model', device_mesh=mesh, **options)}")
    if draft.scenario.layout.has(PlannedParallelism):
        read_local_shards(draft)
    # A schedule reduces gradients in its last backward, also under `no_sync`.
    if parallelism.no_sync and not draft.has_parts:
        add_no_sync(draft)
    if parallelism.zero_redundancy:
        draft.need("torch.distributed.optim", "ZeroRedundancyOptimizer")
        draft.shared_updates = {"process_group": f"{mesh}.get_group()"} if composed else {}
        if parallelism.parameters_as_bucket_view:
            draft.shared_updates["parameters_as_bucket_view"] = "True"
    take_rows(draft)


def _made_unequal(draft: Draft, rank: str) -> list[str]:
    """Return lines to change the parameters and buffers that DDP wraps."""
    part = "part" if draft.has_parts else "model"
    lines = [
        f"for tensor in (*{part}.parameters(), *{part}.buffers()):",
        f"    tensor.data += {rank}  # to be made equal by wrapping",
    ]
    return ["for part in parts:", *indent_lines(lines)] if draft.has_parts else lines


def _options(parallelism: DDP) -> dict[str, object]:
    flags = ("gradient_as_bucket_view", "static_graph", "find_unused_parameters")
    options: dict[str, object] = {flag: True for flag in flags if getattr(parallelism, flag)}
    if parallelism.bucket_cap_mb != DEFAULT_BUCKET_MB:
        options["bucket_cap_mb"] = parallelism.bucket_cap_mb
    return options
