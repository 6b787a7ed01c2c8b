"""Expert parallelism: a script has the exchange that ranks run here, word for word."""

from __future__ import annotations

from equivcheck.layers.registry import kind_of
from equivcheck.layouts import gradients_by_hand
from equivcheck.layouts.partition import chunk_size, chunk_sizes
from equivcheck.layouts.script.draft import Draft, LoopPosition, refuse
from equivcheck.layouts.script.mesh import mesh_of, take_rows
from equivcheck.layouts.script.source import source_of
from equivcheck.parallelisms.tensor_parallel.export_shards import read_local_shards
from equivcheck.scenario import Parallelism
from equivcheck.scenario.mesh import EP


def write(draft: Draft, parallelism: Parallelism) -> None:
    """Share out experts, average gradients by hand, and read experts of all ranks together."""
    layout = draft.scenario.layout
    if layout.mesh.names[-1] != EP and layout.mesh.size(EP) > 1:
        raise refuse(f"mesh {layout.mesh.names}", "only with expert parallelism along the last axis")
    _require_written(draft)
    _define(draft)
    draft.add(LoopPosition.WRAP, f"ranks = {mesh_of(draft, parallelism)}", "share_out_units(model, ranks)")
    draft.add(LoopPosition.BEFORE_READING, "reduce_gradients(model, ranks)")
    if layout.mesh.size(EP) > 1:
        read_local_shards(draft)
    if len(layout.parallelisms) == 1:
        draft.loss_scale = layout.num_data_ranks
        take_rows(draft)


def _require_written(draft: Draft) -> None:
    """Refuse a layer whose units would stay whole in a script."""
    model = draft.scenario.training.model
    for layer, inputs in zip(model.layers, model.widths, strict=False):
        script = kind_of(layer).script(layer, inputs) if kind_of(layer).dispatch(layer) is not None else None
        if script is not None and script.of_units is None:
            raise refuse(f"the layer {type(layer).__name__}", "its kind does not say how scripts share out its units")


def _define(draft: Draft) -> None:
    from equivcheck.parallelisms.expert_parallel import exchange

    draft.need("collections.abc", "Iterable")
    draft.need("collections.abc", "Iterator")
    draft.need("dataclasses", "dataclass")
    draft.need("typing", "Any")
    draft.need("torch.distributed", "ProcessGroup")
    draft.need("torch.distributed._functional_collectives", "as collectives")
    draft.need("torch.distributed.device_mesh", "DeviceMesh")
    draft.need("torch.distributed.tensor", "DTensor")
    found = (exchange.Exchange, exchange.share_out_units, exchange.keep_own, exchange.reduce_gradients)
    by_hand = (gradients_by_hand.held_gradients, gradients_by_hand.sum_gradients, gradients_by_hand.divide_gradients)
    draft.definitions += map(_source, (chunk_size, chunk_sizes, *by_hand, *found))


def _source(found: object) -> list[str]:
    """As it is written here, but of any layer."""
    text = "\n".join(source_of(found))
    for here, there in (
        ("isinstance(layer, DispatchingModule)", 'hasattr(layer, "by_units")'),
        (": DispatchingModule", ": Any"),
        ("gradients_by_hand.", ""),
        ("  # type: ignore[assignment]", ""),
    ):
        text = text.replace(here, there)
    return text.splitlines()
