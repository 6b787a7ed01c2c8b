"""Limits for `parallelize_module`."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.limits.execution import NO_COUNTS_IN_GRAPHS, without_compilation
from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit, UpstreamLimit, parallelism_of
from equivcheck.layouts.base.limits.loss_parallel import LOSS_PARALLEL
from equivcheck.layouts.base.limits.optimizers import (
    DTENSOR_OPTIMIZERS,
    WHOLE_PARAMETERS,
    has_units_of_dtensors,
    keeps_dtensors,
    with_elementwise_optimizer,
)
from equivcheck.layouts.base.limits.plans import APPLIED_FIRST, ENDS_WHOLE, ONE_ENTRY_A_LAYER, TIES_CUT_ALIKE, limit_of
from equivcheck.layouts.base.limits.propagated_gradients import PropagatedGradients
from equivcheck.layouts.base.limits.repairs import (
    has_shares,
    is_tied,
    with_options,
    with_tokens,
    with_widths,
    without_shares,
    without_tied_head,
)
from equivcheck.layouts.base.partition import is_last_shard_empty, shard_dim
from equivcheck.layouts.base.plan.rules import (
    RULES,
    UNFREEZES,
    cuts,
    fits,
    frozen_shards,
    has_partial_gradients,
    is_outside,
    trained_shard_sizes,
)
from equivcheck.scenario import ASGD, Adafactor, Compile, Implementation, Layout, ParameterOwner, Split, TensorParallel, Training
from equivcheck.scenario.mesh import TP
from equivcheck.training.layers.parameters import parameters_of

NO_SHARED_WEIGHTS = UpstreamLimit(
    reason="parallelize_module: layers that share a weight are not supported: it creates a new parameter for each module, "
    "which unties shared weights",
    applies=lambda training, _layout: has_shares(training.model),
    repair=lambda training, _layout: without_shares(training),
)


def _mixes_tensors_in_one_call(training: Training, layout: Layout) -> bool:
    tp = parallelism_of(layout, TensorParallel)
    # A parameter of the model itself has no dims, which DTensors take for replicated.
    outside = {is_outside(tp, found) for found in parameters_of(training.model) if found.owner is not ParameterOwner.MODEL}
    if len(outside) == 1 or not keeps_dtensors(layout) or training.optimizer.implementation is Implementation.FOR_LOOP:
        return False
    # If another parallelism makes all of them DTensors, they are on two meshes. Only ASGD combines tensors of several parameters.
    return not has_units_of_dtensors(layout) or isinstance(training.optimizer, ASGD)


NO_MIXED_CALLS = UpstreamLimit(
    reason="parallelize_module: foreach and fused optimizers with layers outside the plan are not supported: they refuse plain "
    "parameters and DTensors in one call, and ASGD refuses DTensors of two meshes",
    applies=_mixes_tensors_in_one_call,
    repair=lambda training, _layout: replace(
        training, optimizer=replace(training.optimizer, implementation=Implementation.FOR_LOOP)
    ),
)


def _leaves_gradients(layout: Layout) -> bool:
    return not parallelism_of(layout, TensorParallel).redistribute_gradients


def _cuts_short(training: Training, layout: Layout) -> bool:
    tp, ranks = parallelism_of(layout, TensorParallel), layout.mesh.size(TP)
    return _leaves_gradients(layout) and any(size < ranks for size in trained_shard_sizes(training.model, tp))


def _leaves_pending(training: Training, layout: Layout) -> bool:
    tp = parallelism_of(layout, TensorParallel)
    return _leaves_gradients(layout) and fits(training.model, tp.plan) and has_partial_gradients(training.model, tp)


GRADIENTS_AS_PROPAGATED = PropagatedGradients(
    where="TensorParallel",
    ranks=lambda layout: layout.mesh.size(TP),
    cuts_short=_cuts_short,
    leaves_pending=_leaves_pending,
    cuts_parameters=lambda _layout: False,
).limits()

HOOKS_ON_OWN_PARAMETERS = LayoutLimit(
    reason="TensorParallel(redistribute_gradients=False): another parallelism around it is not supported: data parallelism "
    "replaces parameters and redistributes their gradients itself, and pipeline ranks add up the gradients of copied weights, "
    "which need equal placements",
    applies=lambda layout: _leaves_gradients(layout) and len(layout.parallelisms) > 1,
    repair=lambda layout: with_options(layout, TensorParallel, redistribute_gradients=True),
)


def _compiles_after_pending_sum(layout: Layout) -> bool:
    by_tokens = parallelism_of(layout, TensorParallel).source is Split.ROWWISE
    compiles_layers = layout.execution.compile is not Compile.NONE and layout.execution.per_layer
    return by_tokens and compiles_layers and layout.mesh.size(TP) > 1


NO_PENDING_SUM_BEFORE_COMPILED_LAYERS = LayoutLimit(
    reason="parallelize_module: compiling each layer after an embedding sharded by tokens is not supported: the embedding "
    "returns an asynchronous tensor, and a compiled layer unwraps it without its autograd graph, so the embedding gets no "
    "gradient, or backward raises (pytorch#179849)",
    applies=_compiles_after_pending_sum,
    repair=without_compilation,
)

LAYOUT_LIMITS: tuple[LayoutLimit, ...] = (APPLIED_FIRST, HOOKS_ON_OWN_PARAMETERS, NO_PENDING_SUM_BEFORE_COMPILED_LAYERS)

ADAFACTOR_OF_UNFROZEN_CUTS = UpstreamLimit(
    reason="parallelize_module: Adafactor with frozen linears is not supported: they become trainable (pytorch#171523), and "
    "Adafactor squares norms in place, which DTensor refuses while they are partial",
    applies=lambda training, layout: (
        isinstance(training.optimizer, Adafactor) and keeps_dtensors(layout) and bool(frozen_shards(training.model, layout))
    ),
    repair=with_elementwise_optimizer,
    torch=UNFREEZES,
)


def _ties_local_tensors(training: Training, layout: Layout) -> bool:
    is_shared_out = parallelism_of(layout, TensorParallel).source is not Split.NOT_IN_PLAN
    return is_tied(training.model) and is_shared_out and not keeps_dtensors(layout)


NO_TIES_OF_LOCAL_TENSORS = Limit(
    reason="parallelize_module inside DistributedDataParallel, replicate or FullyShardedDataParallel: a head tied to the "
    "embedding is not supported: the wrapper replaces the shared DTensor by a local tensor in one of the two modules only, so "
    "they no longer share it (FSDP1 then loses one gradient, and the others raise)",
    applies=_ties_local_tensors,
    repair=lambda training, _layout: without_tied_head(training),
)


def _cuts_sequences_short(training: Training, layout: Layout) -> bool:
    """Whether a sharded size is below the number of ranks, in a model over sequences.

    With one position, a single sharded feature is too short on any number of ranks, because DTensor confuses the two dims of size
    one.
    """
    model, tp = training.model, parallelism_of(layout, TensorParallel)
    found = [*cuts(model, tp)]
    is_one = model.length == 1 and any(size == 1 and shard_dim(tp, parameter) == 1 for parameter, size in found)
    return model.length is not None and (is_one or any(size < layout.mesh.size(TP) for _, size in found))


NO_SHORT_CUTS_OF_SEQUENCES = UpstreamLimit(
    reason="parallelize_module: sequences with a sharded size below the number of ranks, or below 2 with one position, are not "
    "supported: DTensor cannot view rows and positions as one dim ('would remove or reshape sharded dimension 2')",
    applies=_cuts_sequences_short,
    repair=lambda training, layout: with_widths(training, max(layout.mesh.size(TP), 2)),
)


def _lacks_tokens(training: Training, layout: Layout) -> bool:
    source = training.model.source
    by_tokens = parallelism_of(layout, TensorParallel).source is Split.ROWWISE
    return by_tokens and source is not None and is_last_shard_empty(source.vocabulary, layout.mesh.size(TP))


EVERY_RANK_HAS_TOKENS = Limit(
    reason="parallelize_module: an embedding sharded by tokens without rows on some rank is not supported: that rank "
    "cannot look anything up ('self indexing axis dim should be positive'), and the others wait for it",
    applies=_lacks_tokens,
    repair=lambda training, layout: with_tokens(training, layout.mesh.size(TP)),
)

LIMITS: tuple[Limit, ...] = (
    ONE_ENTRY_A_LAYER,
    NO_SHARED_WEIGHTS,
    ENDS_WHOLE,
    TIES_CUT_ALIKE,
    NO_TIES_OF_LOCAL_TENSORS,
    NO_SHORT_CUTS_OF_SEQUENCES,
    EVERY_RANK_HAS_TOKENS,
    *LOSS_PARALLEL,
    *map(limit_of, RULES),
    *DTENSOR_OPTIMIZERS,
    *WHOLE_PARAMETERS,
    ADAFACTOR_OF_UNFROZEN_CUTS,
    NO_MIXED_CALLS,
    *GRADIENTS_AS_PROPAGATED,
    NO_COUNTS_IN_GRAPHS,
)
