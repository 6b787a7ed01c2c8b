"""Limits for context parallelism."""

from __future__ import annotations

from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit
from equivcheck.layouts.base.limits.repairs import each_layer, only_one, with_model
from equivcheck.scenario import (
    DDP,
    FSDP2,
    AnyLayer,
    ContextParallel,
    Layer,
    Layout,
    LocalDataParallel,
    LocalTensorParallel,
    Pipeline,
    Replicate,
    Training,
)
from equivcheck.scenario.mesh import CP
from equivcheck.training.layers.registry import layer_kind

USUAL_LENGTH = 4
"""Sequence length that a repair gives to a model whose rows were single vectors."""


def _of_sequences(training: Training, _layout: Layout) -> Training:
    plain = each_layer(training, lambda _index, layer: layer.with_fields(shape_op=None))
    return with_model(plain, length=USUAL_LENGTH)


SEQUENCES_ALONE = Limit(
    reason="context parallelism: a model over single rows is not supported: it has no sequence positions to shard",
    applies=lambda training, _layout: training.model.length is None,
    repair=_of_sequences,
)


def _keeps_sequences_whole(layer: AnyLayer) -> bool:
    return layer.needs_length and layer_kind(layer).attention_shape(layer) is None


def _without_them(training: Training, _layout: Layout) -> Training:
    model = training.model
    return each_layer(
        training,
        lambda index, layer: (
            Layer(width=layer.out_features(model.in_features(index))) if _keeps_sequences_whole(layer) else layer
        ),
    )


LOOKING_BY_SEQUENCE = Limit(
    reason="context parallelism: a layer that mixes positions is not supported unless its kind defines "
    "`LayerKind.attention_shape`: its attention must reach the positions on other ranks",
    applies=lambda training, _layout: any(map(_keeps_sequences_whole, training.model.layers)),
    repair=_without_them,
)

LIMITS: tuple[Limit, ...] = (SEQUENCES_ALONE, LOOKING_BY_SEQUENCE)


_AROUND = (ContextParallel, DDP, Replicate, FSDP2, LocalDataParallel, LocalTensorParallel, Pipeline)

WITHIN_DATA_PARALLELISM = LayoutLimit(
    reason="context parallelism: other parallelisms than DDP, replicate, fully_shard, local_data_parallel, "
    "local_tensor_parallel and pipelines are not supported together with it: "
    "its sum is only right for the gradients that these produce",
    applies=lambda layout: not all(isinstance(each, _AROUND) for each in layout.parallelisms),
    repair=lambda layout: only_one(layout, ContextParallel, CP),
)

LAYOUT_LIMITS: tuple[LayoutLimit, ...] = (WITHIN_DATA_PARALLELISM,)
