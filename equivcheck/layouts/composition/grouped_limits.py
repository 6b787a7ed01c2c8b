"""Limits for experts whose products ranks compute by `torch.nn.functional.grouped_mm`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from equivcheck.layouts.base.limits.limit import Limit
from equivcheck.layouts.base.limits.repairs import all_multiples, each_layer
from equivcheck.layouts.base.partition import chunk_sizes
from equivcheck.layouts.base.rounding import ITEM_BYTES
from equivcheck.layouts.composition.registry import rounding_of
from equivcheck.scenario import (
    DDP,
    FSDP1,
    AnyLayer,
    ElementType,
    Experts,
    Layout,
    PlannedParallelism,
    Precision,
    Split,
    Training,
)
from equivcheck.scenario.mesh import TP

STRIDE_BYTES = 16
"""`grouped_mm` requires strides that are multiples of this size."""


def _groups(layer: AnyLayer) -> bool:
    return isinstance(layer, Experts) and layer.grouped


def _any_grouped(training: Training, _layout: Layout) -> bool:
    return any(map(_groups, training.model.layers))


def _computed_in(training: Training, layout: Layout) -> ElementType:
    rounding = rounding_of(layout, training.precision)
    return (rounding and rounding.compute) or ElementType(training.precision.value)


def _in_float32(training: Training, layout: Layout) -> Training:
    narrow = replace(training, precision=Precision.FLOAT32)
    return _without_groups(training, layout) if _computed_in(narrow, layout) is ElementType.FLOAT64 else narrow


def _where_grouped(applies: Callable[[Training, Layout], bool]) -> Callable[[Training, Layout], bool]:
    return lambda training, layout: _any_grouped(training, layout) and applies(training, layout)


def _without_groups(training: Training, _layout: Layout) -> Training:
    return each_layer(training, lambda _index, layer: layer.with_fields(grouped=False))


def _is_misaligned(training: Training, layout: Layout, index: int) -> bool:
    """Whether some rank has a number of features in the layer, or of hidden features, that `grouped_mm` refuses."""
    layer, multiple = training.model.layers[index], STRIDE_BYTES // ITEM_BYTES[_computed_in(training, layout).value]
    if not isinstance(layer, Experts) or not layer.grouped:
        return False
    entries = (entry for each in layout.of(PlannedParallelism) for entry in each.plan[index : index + 1])
    is_split = any(entry.split is Split.HEADS_OR_HIDDEN for entry in entries)
    hidden = chunk_sizes(layer.hidden, layout.mesh.size(TP) if is_split else 1)
    return 0 in hidden or not all_multiples((training.model.in_features(index), *hidden), multiple)


def _views_flat_parameters(layout: Layout) -> bool:
    return layout.has(FSDP1) or any(each.parameters_as_bucket_view for each in layout.of(DDP))


GROUPED_LIMITS = (
    Limit(
        reason="torch.nn.functional.grouped_mm: this version has no such function",
        applies=_any_grouped,
        repair=_without_groups,
        torch="<2.10",
    ),
    Limit(
        reason="torch.nn.functional.grouped_mm: a number of features, or of a rank's hidden features, that does not fill a "
        "multiple of 16 bytes is not supported: torch refuses such strides, and those of a rank without hidden features",
        applies=lambda training, layout: any(
            _is_misaligned(training, layout, index) for index in range(len(training.model.layers))
        ),
        repair=_without_groups,
    ),
    Limit(
        reason="torch.nn.functional.grouped_mm: parameters that are views into a flat parameter or a bucket are not supported: "
        "torch refuses data whose address is not a multiple of 16 bytes",
        applies=_where_grouped(lambda _training, layout: _views_flat_parameters(layout)),
        repair=_without_groups,
        torch="<2.11",
    ),
    Limit(
        reason="torch.nn.functional.grouped_mm: float64 is not supported: torch accepts float32, bfloat16 and float16 only",
        applies=_where_grouped(lambda training, layout: _computed_in(training, layout) is ElementType.FLOAT64),
        repair=_in_float32,
    ),
    Limit(
        reason="torch.nn.functional.grouped_mm: torch.autocast is not supported: it does not cast the operands, and torch "
        "refuses operands with different dtypes",
        applies=_where_grouped(lambda _training, layout: any(ddp.autocast for ddp in layout.of(DDP))),
        repair=_without_groups,
    ),
)
"""Limits in the order in which they are checked."""
