"""Writes expert parallelism into a script: the script contains the same exchange as the ranks here."""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.layouts.base import gradients_by_hand
from equivcheck.layouts.base.dtensor_experts import dtensor_experts, has_expert_units, shards_over_ep
from equivcheck.layouts.base.limits.optimizers import keeps_dtensors
from equivcheck.layouts.base.partition import chunk_size, chunk_sizes
from equivcheck.layouts.base.script.draft import Draft, LoopPosition, refuse
from equivcheck.layouts.base.script.mesh import mesh_of, take_rows
from equivcheck.layouts.base.script.shards import read_local_shards
from equivcheck.layouts.base.script.text import source_of
from equivcheck.scenario import ExpertParallel, ExpertStorage
from equivcheck.scenario.mesh import EP
from equivcheck.training.layers.registry import layer_kind


def write(draft: Draft, parallelism: ExpertParallel) -> None:
    """Distribute the script's experts over ranks, average gradients, and gather experts before they are compared."""
    layout = draft.scenario.layout
    if layout.mesh.names[-1] != EP and layout.mesh.size(EP) > 1:
        raise refuse(f"mesh {layout.mesh.names}", "scripts need expert parallelism on the last axis")
    # A layer kind may not say how a script distributes its experts.
    model = draft.scenario.training.model
    for layer, inputs in zip(model.layers, model.widths, strict=False):
        script = layer_kind(layer).script(layer, inputs) if layer_kind(layer).dispatch(layer) is not None else None
        if script is not None and script.for_expert_parallel is None:
            raise refuse(f"the layer {type(layer).__name__}", "its `LayerKind.script` does not set `for_expert_parallel`")
    keep = exchange_keeping(parallelism.storage)
    _define(draft, keep)
    draft.add(LoopPosition.WRAP, f"ranks = {mesh_of(draft, parallelism)}", f"shard_units(model, ranks, {keep.__name__})")
    if not shards_over_ep(layout):
        _define_reductions(draft)
        draft.add(LoopPosition.AFTER_OPTIMIZER, "own, others = split_parameters(model)")
        divided = "[]" if has_expert_units(layout) else "own"
        draft.add(LoopPosition.BEFORE_READING, f"reduce_gradients({divided}, others, ranks)")
    if parallelism.storage is ExpertStorage.DTENSOR and keeps_dtensors(layout):
        draft.has_dtensors, draft.mixes_tensors = True, bool(dtensor_experts(draft.scenario.training.model, layout))
    elif layout.mesh.size(EP) > 1:
        read_local_shards(draft)
    if len(layout.parallelisms) == 1:
        draft.loss_scale = layout.num_data_ranks
        take_rows(draft)


def exchange_keeping(storage: ExpertStorage) -> Callable[..., object]:
    """Return the script's function for keeping this rank's experts: as plain tensors or as DTensors."""
    from equivcheck.layouts.parallelisms.expert_parallel import exchange

    return exchange.own_tensor if storage is ExpertStorage.PLAIN else exchange.dtensor_of_all


def _define(draft: Draft, keep: Callable[..., object]) -> None:
    from equivcheck.layouts.parallelisms.expert_parallel import exchange

    draft.need("collections.abc", "Callable")
    draft.need("collections.abc", "Iterable")
    draft.need("collections.abc", "Iterator")
    draft.need("dataclasses", "dataclass")
    draft.need("typing", "Any")
    draft.need("torch.distributed", "ProcessGroup")
    draft.need("torch.distributed._functional_collectives", "as collectives")
    draft.need("torch.distributed.device_mesh", "DeviceMesh")
    draft.need("operator", "attrgetter")
    draft.need("torch.distributed.tensor", "DTensor")
    if keep is exchange.dtensor_of_all:
        draft.need("torch.distributed.tensor", "Shard")
        draft.need("torch.distributed.tensor", "distribute_tensor")
    draft.definitions += map(_source, (chunk_size, chunk_sizes, exchange.Exchange, exchange.shard_units, keep))


def _define_reductions(draft: Draft) -> None:
    from equivcheck.layouts.parallelisms.expert_parallel import exchange

    by_hand = (gradients_by_hand.held_gradients, gradients_by_hand.sum_gradients, gradients_by_hand.divide_gradients)
    draft.definitions += map(_source, (*by_hand, exchange.split_parameters, exchange.reduce_gradients))


def _source(found: object) -> list[str]:
    """Return source without equivcheck's types."""
    text = "\n".join(source_of(found))
    for here, there in (
        ("isinstance(layer, RoutedModule)", 'hasattr(layer, "by_units")'),
        (": RoutedModule", ": Any"),
        (": Keep", ": Callable[[torch.Tensor, DeviceMesh], torch.Tensor]"),
        ("gradients_by_hand.", ""),
        ("  # type: ignore[assignment]", ""),
    ):
        text = text.replace(here, there)
    return text.splitlines()
