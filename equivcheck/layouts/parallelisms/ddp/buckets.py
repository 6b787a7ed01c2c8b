"""Predicts the buckets in which `DistributedDataParallel` reduces gradients, from sizes only.

The gradient that reaches the cap closes its bucket, so a bucket may exceed the cap. In the first backward, DDP reduces all
gradients in one bucket. After this backward, the order in which gradients become ready is known, and DDP rebuilds the buckets
once. With find_unused_parameters DDP follows the parameters' order from the start and never rebuilds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from equivcheck.scenario import AuxiliaryLinear, Model
from equivcheck.scenario.parallelisms.data_parallel import DEFAULT_BUCKET_MB
from equivcheck.training.layers.parameters import SCALE, parameters_of
from equivcheck.training.layers.registry import layer_kind
from equivcheck.training.layers.token_facts import EMBEDDING, POSITIONS

MEBIBYTE = 2**20
FIRST_BUCKET_BYTES = MEBIBYTE
"""Default cap for the first bucket. It is small so that the first gradients are sent early."""
USED_MAP_ITEM_BYTES = 4
"""Bytes for each parameter in the used-parameter map (int32)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketing:
    """Sizes and options for predicting DDP's buckets. All gradients have the same dtype."""

    num_bytes: tuple[int, ...]
    """Bytes in each gradient, in the trainable parameters' order."""
    ready: tuple[int, ...]
    """Indices into `num_bytes` in the order in which gradients become ready; unused parameters come last."""
    cap_mb: float | None = None
    """`bucket_cap_mb` in MiB; None for torch's default."""
    find_unused_parameters: bool = False
    """Argument `find_unused_parameters` of `DistributedDataParallel`."""
    static_graph: bool = False
    """Argument `static_graph` of `DistributedDataParallel`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reductions:
    """The all-reduces in one backward pass with gradient reduction."""

    buckets: tuple[int, ...]
    """Bytes in each bucket, in call order."""
    used_map: int = 0
    """Bytes in the used-parameter map, a flag for each parameter. 0 if it is not exchanged."""
    used_map_first: bool = False
    """Whether the map is reduced before the buckets."""


def fill_buckets(num_bytes: Sequence[int], limits: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Fill buckets with tensors in order, and return the indices of the tensors in each bucket.

    A bucket is closed when it reaches its limit in `limits`, in bytes. The last limit applies to all further buckets.
    """
    buckets: list[tuple[int, ...]] = []
    start, held = 0, 0
    for index, size in enumerate(num_bytes):
        held += size
        if held >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(tuple(range(start, index + 1)))
            start, held = index + 1, 0
    if start < len(num_bytes):
        buckets.append(tuple(range(start, len(num_bytes))))
    return tuple(buckets)


def initial_buckets(bucketing: Bucketing) -> tuple[tuple[int, ...], ...]:
    """Return the gradients in each bucket for the first backward, as indices. Buckets are in all-reduce order."""
    settles = bucketing.static_graph or not bucketing.find_unused_parameters
    return fill_buckets(bucketing.num_bytes, (sys.maxsize,) if settles else _limits(bucketing.cap_mb))[::-1]


def rebuilt_buckets(bucketing: Bucketing) -> tuple[tuple[int, ...], ...]:
    """Return the gradients in each bucket after DDP has rebuilt them, as indices. Buckets are in all-reduce order."""
    sizes = [bucketing.num_bytes[index] for index in bucketing.ready]
    return tuple(tuple(bucketing.ready[at] for at in bucket) for bucket in fill_buckets(sizes, _limits(bucketing.cap_mb)))


def reductions(bucketing: Bucketing) -> Iterator[Reductions]:
    """Yield the all-reduces in each backward pass with gradient reduction. The iterator never ends."""
    used_map = USED_MAP_ITEM_BYTES * len(bucketing.num_bytes)
    initial = _bytes(bucketing, initial_buckets(bucketing))
    if bucketing.static_graph:
        yield Reductions(buckets=initial, used_map=used_map, used_map_first=True)
    elif bucketing.find_unused_parameters:
        while True:
            yield Reductions(buckets=initial, used_map=used_map)
    yield Reductions(buckets=initial)
    while True:
        yield Reductions(buckets=_bytes(bucketing, rebuilt_buckets(bucketing)))


def _limits(cap_mb: float | None) -> tuple[int, ...]:
    if cap_mb is None:
        return FIRST_BUCKET_BYTES, int(DEFAULT_BUCKET_MB * MEBIBYTE)
    return (int(cap_mb * MEBIBYTE),)


def _bytes(bucketing: Bucketing, buckets: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(sum(bucketing.num_bytes[index] for index in bucket) for bucket in buckets)


def trained_parameters(model: Model) -> tuple[str, ...]:
    """Names of the trainable parameters, in the model's order."""
    return tuple(parameter.full_name for parameter in parameters_of(model) if parameter.trained)


def ready_parameters(model: Model, *, autocast: bool = False) -> tuple[str, ...]:
    """Trainable parameters in the order in which gradients are ready in the first eager backward. Unused parameters come last.

    With autocast, gradients of cast weights are also cast back, so the head's weight comes before its bias.
    """
    used = (name for index in reversed(range(len(model.layers))) for name in _ready_names(model, index, autocast))
    own = {parameter.full_name for parameter in parameters_of(model) if parameter.layer is None and parameter.trained}
    head = ("head.linear.weight", "head.linear.bias") if autocast else ("head.linear.bias", "head.linear.weight")
    first = (SCALE.full_name, *head, "head.norm.weight", "head.norm.bias")
    # An embedding comes last, whatever else its weight is used for.
    last = (POSITIONS, EMBEDDING)
    return (*(name for name in first if name in own), *used, *(name for name in last if name in own), *unused_parameters(model))


def unused_parameters(model: Model) -> tuple[str, ...]:
    """Names of trainable parameters that never get a gradient, in the model's order."""
    return tuple(
        parameter.full_name for parameter in parameters_of(model) if parameter.runs is AuxiliaryLinear.NEVER and parameter.trained
    )


def _ready_names(model: Model, index: int, autocast: bool) -> Iterator[str]:
    layer = model.layers[index]
    ready = layer_kind(layer).gradient_order(layer, model.in_features(index), autocast=autocast)
    assert ready is not None, "nothing is predicted of a kind that does not know"
    if not layer.frozen:
        yield from (f"layers.{index}.{name}" for name in ready)
