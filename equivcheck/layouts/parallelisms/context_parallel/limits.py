"""What context parallelism cannot run."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit, parallelism_of
from equivcheck.layouts.base.limits.repairs import each_layer, with_model
from equivcheck.scenario import (
    DDP,
    FSDP2,
    AnyLayer,
    ContextParallel,
    Layer,
    Layout,
    LocalDataParallel,
    LocalTensorParallel,
    Replicate,
    Training,
)
from equivcheck.scenario.mesh import CP
from equivcheck.training.layers.registry import kind_of

USUAL_LENGTH = 4
"""Positions of a row that is made a sequence."""


def _of_sequences(training: Training, _layout: Layout) -> Training:
    plain = each_layer(training, lambda _index, layer: layer.having(shape_op=None))
    return with_model(plain, length=USUAL_LENGTH)


SEQUENCES_ALONE = Limit(
    reason="context parallel: what is cut is the positions of sequences, and a model over single rows has none",
    applies=lambda training, _layout: training.model.length is None,
    repair=_of_sequences,
)


def _keeps_sequences_whole(layer: AnyLayer) -> bool:
    return layer.needs_length and kind_of(layer).looking(layer) is None


def _without_them(training: Training, _layout: Layout) -> Training:
    model = training.model
    return each_layer(
        training, lambda index, layer: Layer(width=layer.outputs(model.inputs(index))) if _keeps_sequences_whole(layer) else layer
    )


LOOKING_BY_SEQUENCE = Limit(
    reason="context parallel: a kind of layer that mixes positions must say how they look at those of other ranks "
    "(`LayerKind.looking`)",
    applies=lambda training, _layout: any(map(_keeps_sequences_whole, training.model.layers)),
    repair=_without_them,
)

LIMITS: tuple[Limit, ...] = (SEQUENCES_ALONE, LOOKING_BY_SEQUENCE)


def _alone(layout: Layout) -> Layout:
    mesh = replace(layout.mesh, axes=tuple(axis for axis in layout.mesh.axes if axis.name == CP))
    return replace(layout, mesh=mesh, parallelisms=(parallelism_of(layout, ContextParallel),))


_AROUND = (ContextParallel, DDP, Replicate, FSDP2, LocalDataParallel, LocalTensorParallel)

WITHIN_DATA_PARALLELISM = LayoutLimit(
    reason="context parallel: gradients are summed over its ranks apart from what others do, which is written for what DDP, "
    "replicate, fully_shard, data parallelism by hand and local tensor parallelism leave in `grad`",
    applies=lambda layout: not all(isinstance(each, _AROUND) for each in layout.parallelisms),
    repair=_alone,
)

LAYOUT_LIMITS: tuple[LayoutLimit, ...] = (WITHIN_DATA_PARALLELISM,)
