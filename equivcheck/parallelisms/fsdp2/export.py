"""`fully_shard`."""

from __future__ import annotations

from equivcheck.layouts.script.draft import Draft, LoopPosition, loop_over_units, refuse
from equivcheck.layouts.script.mesh import mesh_of, reduce_at_last_microbatch, take_rows
from equivcheck.layouts.script.text import call
from equivcheck.scenario import FSDP2, Parallelism, Wrapping


def write(draft: Draft, parallelism: Parallelism) -> None:
    """Shard the model in place."""
    assert isinstance(parallelism, FSDP2), parallelism
    if parallelism.mixed_precision is not None:
        raise refuse("FSDP2.mixed_precision", "one device has to round as the ranks do, which no short script shows")
    draft.need("torch.distributed.fsdp", "fully_shard")
    draft.has_dtensors, draft.loss_scale = True, draft.scenario.layout.num_data_ranks
    options: dict[str, object] = {"mesh": mesh_of(draft, parallelism)}
    if not parallelism.reshard_after_forward:
        options["reshard_after_forward"] = False
    if parallelism.cpu_offload:
        draft.need("torch.distributed.fsdp", "CPUOffloadPolicy")
        options["offload_policy"] = "CPUOffloadPolicy(pin_memory=False)"
    if parallelism.wrapping is Wrapping.PER_LAYER:
        draft.add(LoopPosition.WRAP, *loop_over_units(draft, call("fully_shard", "layer", **options)))
    draft.add(LoopPosition.WRAP, call("fully_shard", "model", **options))
    if parallelism.no_sync:
        reduce_at_last_microbatch(draft)
    take_rows(draft)
