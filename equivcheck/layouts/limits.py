"""Limits that several layouts have, and how a limit finds the parallelism that it is about."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from equivcheck.layouts.kind import LayoutLimit, Limit
from equivcheck.layouts.repairs import all_multiples, with_rows
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Compression,
    Implementation,
    Layout,
    Parallelism,
    Recompute,
    Replicate,
    Replicator,
    RMSprop,
    Rprop,
    TensorParallel,
    Training,
)

P = TypeVar("P", bound=Parallelism)


def parallelism_of(layout: Layout, kind: type[P]) -> P:
    """The parallelism of one kind in a layout that has it."""
    found = next(iter(layout.of(kind)), None)
    assert found is not None, "limits are asked only about layouts that have the parallelism"
    return found


def with_options(layout: Layout, kind: type[Parallelism] | tuple[type[Parallelism], ...], **changes: object) -> Layout:
    """The layout with other options of its parallelism of that kind, or of one of those kinds."""
    parallelisms = tuple(
        replace(parallelism, **changes) if isinstance(parallelism, kind) else parallelism for parallelism in layout.parallelisms
    )
    return replace(layout, parallelisms=parallelisms)


def with_execution(layout: Layout, **changes: object) -> Layout:
    """The layout run in another way."""
    return replace(layout, execution=replace(layout.execution, **changes))  # type: ignore[arg-type]


EVEN_ROWS = Limit(
    reason="data parallelism: a microbatch can be split evenly only if its rows are a multiple of the data-parallel ranks",
    applies=lambda training, layout: not all_multiples(training.data.microbatches, layout.num_data_ranks),
    repair=lambda training, layout: with_rows(training, layout.num_data_ranks),
)


def _localizes(parallelism: Parallelism) -> bool:
    """Whether it trains the local tensors of DTensors in their place, so that an optimizer sees plain tensors only."""
    if isinstance(parallelism, Replicate):
        return parallelism.implementation is Replicator.DDP
    return isinstance(parallelism, (DDP, FSDP1))


def keeps_dtensors(layout: Layout) -> bool:
    """Whether an optimizer sees the DTensors of a layout that has such."""
    return not any(map(_localizes, layout.parallelisms))


def _is_fused_sgd(training: Training, layout: Layout) -> bool:
    optimizer = training.optimizer
    is_fused = isinstance(optimizer, (SGD, Adagrad)) and optimizer.implementation is Implementation.FUSED
    return is_fused and keeps_dtensors(layout)


NO_RPROP = Limit(
    reason="DTensor: Rprop needs aten.index_put_ or aten._foreach_copy_, which have no sharding strategy that works in place",
    applies=lambda training, layout: isinstance(training.optimizer, Rprop) and keeps_dtensors(layout),
    repair=lambda training, _layout: replace(training, optimizer=SGD(lr=training.optimizer.lr)),
    upstream=True,
)

NO_FUSED_SGD = Limit(
    reason="DTensor: no sharding strategy is registered for aten._fused_sgd_ and aten._fused_adagrad_",
    applies=_is_fused_sgd,
    repair=lambda training, _layout: replace(
        training, optimizer=replace(training.optimizer, implementation=Implementation.FOREACH)
    ),
    upstream=True,
)

DTENSOR_OPTIMIZERS = (NO_RPROP, NO_FUSED_SGD)
"""What no layout can run whose parameters are DTensors."""


def _casts(layout: Layout) -> bool:
    """Whether the model or its reduction is in another element type by an option of its own."""
    policies = [fsdp.mixed_precision for fsdp in layout.of(FSDP1)] + [fsdp.mixed_precision for fsdp in layout.of(FSDP2)]
    return any(policies) or any(ddp.autocast for ddp in layout.of(DDP))


def _compresses(layout: Layout) -> bool:
    compressions = [ddp.compression for ddp in layout.of(DDP)] + [replicate.compression for replicate in layout.of(Replicate)]
    return any(compression is not Compression.NONE for compression in compressions)


def _without_casts(layout: Layout) -> Layout:
    return with_options(with_options(layout, DDP, autocast=None), (FSDP1, FSDP2), mixed_precision=None)


WHOLE_SUMS = LayoutLimit(
    reason="lower precision over tensor parallelism: each rank rounds its part of a sum, which no single device has",
    applies=lambda layout: (_casts(layout) or _compresses(layout)) and layout.has(TensorParallel),
    repair=lambda layout: with_options(_without_casts(layout), (DDP, Replicate), compression=Compression.NONE),
)

EAGER_ROUNDING = LayoutLimit(
    reason="lower precision with torch.compile: a compiled graph need not round where an eager model does",
    applies=lambda layout: layout.execution.is_compiled and _casts(layout),
    repair=_without_casts,
)

ROUNDING_LIMITS = (WHOLE_SUMS, EAGER_ROUNDING)
"""Where no single device can round as the ranks do."""


def _counts_in_python(training: Training, layout: Layout) -> bool:
    optimizer = training.optimizer
    if not layout.execution.whole_step or type(optimizer) in (SGD, RMSprop, Adadelta):
        return False
    return not (type(optimizer) in (Adam, AdamW) and optimizer.implementation is Implementation.FUSED)


def _with_graph_optimizer(training: Training, layout: Layout) -> Training:
    optimizer = training.optimizer
    # Over a tensor-parallel plan fused optimizers have a limit of their own; its repair is a loop, also where a training goes on.
    is_loop = optimizer.implementation is Implementation.FOR_LOOP
    if type(optimizer) in (Adam, AdamW) and not is_loop and not layout.has(TensorParallel):
        return replace(training, optimizer=replace(optimizer, implementation=Implementation.FUSED))
    return replace(training, optimizer=SGD(lr=optimizer.lr, weight_decay=optimizer.weight_decay, maximize=optimizer.maximize))


STEPS_OF_OPERATIONS = LayoutLimit(
    reason="a step as one graph: what hooks do outside of operations, as those of DDP and FSDP, no graph holds",
    applies=lambda layout: layout.execution.whole_step and not all(taken.traceable for taken in layout.parallelisms),
    repair=lambda layout: replace(layout, execution=replace(layout.execution, whole_step=False)),
)

NOTHING_TWICE_IN_GRAPHS = LayoutLimit(
    reason="a step as one graph: activation checkpointing runs a layer again on what it kept, which tracing takes for foreign",
    applies=lambda layout: layout.execution.whole_step and layout.execution.checkpointing is not Recompute.NONE,
    repair=lambda layout: replace(layout, execution=replace(layout.execution, checkpointing=Recompute.NONE)),
)

NO_COUNTS_IN_GRAPHS = Limit(
    reason="a step as one graph: the optimizer reads its step count as a number, which a graph does not hold (`capturable` "
    "computes it in float32); SGD, RMSprop, Adadelta and fused Adam and AdamW do not",
    applies=_counts_in_python,
    repair=_with_graph_optimizer,
)
