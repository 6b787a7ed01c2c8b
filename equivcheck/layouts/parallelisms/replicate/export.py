"""Writes composable `replicate` into a script."""

from __future__ import annotations

from equivcheck.layouts.base.dtensor_experts import has_dtensor_experts
from equivcheck.layouts.base.script.draft import ROUNDS, Draft, LoopPosition, loop_over_layers, refuse
from equivcheck.layouts.base.script.mesh import for_each_part, layers_of_part, mesh_of, reduce_at_last_microbatch, take_rows
from equivcheck.layouts.base.script.shards import read_local_shards
from equivcheck.layouts.base.script.text import call
from equivcheck.scenario import Compression, PlannedParallelism, Replicate, Replicator, Wrapping
from equivcheck.scenario.parallelisms.data_parallel import DEFAULT_BUCKET_MB


def write(draft: Draft, parallelism: Replicate) -> None:
    """Let the exported script call `replicate` or `replicate_with_fsdp` on its model."""
    if parallelism.compression is not Compression.NONE:
        raise refuse("Replicate.compression", ROUNDS)
    draft.loss_scale = draft.scenario.layout.num_data_ranks
    mesh = mesh_of(draft, parallelism)
    if parallelism.implementation is Replicator.DDP:
        _with_ddp(draft, parallelism, mesh)
    else:
        _with_fsdp(draft, parallelism, mesh)
    if parallelism.no_sync:
        reduce_at_last_microbatch(draft)
    take_rows(draft)


def _with_ddp(draft: Draft, parallelism: Replicate, mesh: str) -> None:
    draft.need("torch.distributed._composable.replicate", "replicate")
    bucket = None if parallelism.bucket_cap_mb == DEFAULT_BUCKET_MB else parallelism.bucket_cap_mb
    called = call("replicate", "{}", device_mesh=mesh, bucket_cap_mb=bucket)
    draft.add(LoopPosition.WRAP, *for_each_part(draft, called))
    layout = draft.scenario.layout
    if layout.has(PlannedParallelism) or has_dtensor_experts(layout):
        # Otherwise the first forward replaces DTensors by local tensors, but the optimizer needs these earlier.
        made_local = "replicate.state({}).lazy_init()  # replaces DTensors by local tensors"
        draft.add(LoopPosition.WRAP, *for_each_part(draft, made_local))
    if layout.has(PlannedParallelism):
        read_local_shards(draft)


def _with_fsdp(draft: Draft, parallelism: Replicate, mesh: str) -> None:
    draft.need("torch.distributed._composable.replicate_with_fsdp", "replicate")
    draft.has_dtensors = True
    if parallelism.wrapping is Wrapping.PER_LAYER and draft.has_parts:
        draft.add(LoopPosition.WRAP, f"for layer in (layer for part in parts for layer in {layers_of_part(draft)}):")
        draft.add(LoopPosition.WRAP, f"    {call('replicate', 'layer', mesh=mesh)}")
    elif parallelism.wrapping is Wrapping.PER_LAYER:
        draft.add(LoopPosition.WRAP, *loop_over_layers(draft, call("replicate", "layer", mesh=mesh)))
    draft.add(LoopPosition.WRAP, *for_each_part(draft, call("replicate", "{}", mesh=mesh)))
