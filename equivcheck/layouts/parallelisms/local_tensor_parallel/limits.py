"""Limits for explicit tensor parallelism on plain tensors."""

from __future__ import annotations

from importlib.util import find_spec

from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit, UpstreamLimit, parallelism_of
from equivcheck.layouts.base.limits.loss_parallel import CROSS_ENTROPY_ALONE, ENDS_IN_HEAD
from equivcheck.layouts.base.limits.optimizers import has_units_of_dtensors, with_elementwise_optimizer
from equivcheck.layouts.base.limits.plans import APPLIED_FIRST, ENDS_WHOLE, ONE_ENTRY_A_LAYER, TIES_CUT_ALIKE, limit_of
from equivcheck.layouts.base.limits.repairs import each_layer, has_routing, with_model, with_options, with_tokens, without_routing
from equivcheck.layouts.base.partition import is_last_shard_empty
from equivcheck.layouts.base.plan.rules import RULES, cuts
from equivcheck.scenario import Collectives, Layout, LocalTensorParallel, Split, Training
from equivcheck.scenario.mesh import TP

_CUT_DIMS = {Split.COLWISE: 0, Split.ROWWISE: 1}


def _shares_otherwise(training: Training, layout: Layout, index: int) -> bool:
    """Whether a layer needs another shard of a shared weight than the owning layer."""
    shares, plan = training.model.layers[index].shares, parallelism_of(layout, LocalTensorParallel).plan
    return shares is not None and _CUT_DIMS.get(plan[index].split) != _CUT_DIMS.get(plan[shares].split)


def _with_shares_alike(training: Training, layout: Layout) -> Training:
    return each_layer(
        training, lambda index, layer: layer.with_fields(shares=None) if _shares_otherwise(training, layout, index) else layer
    )


SHARES_CUT_ALIKE = Limit(
    reason="local_tensor_parallel: layers that share a weight and need different shards of it are not supported: all of them "
    "must use the same shard of the weight, or the full weight",
    applies=lambda training, layout: any(
        _shares_otherwise(training, layout, index) for index in range(len(training.model.layers))
    ),
    repair=_with_shares_alike,
)


def _updates_parts(training: Training, layout: Layout) -> bool:
    is_cut = any(parameter.trained for parameter, _ in cuts(training.model, parallelism_of(layout, LocalTensorParallel)))
    return not training.optimizer.elementwise and layout.mesh.size(TP) > 1 and is_cut


WHOLE_PARAMETERS = Limit(
    reason="local_tensor_parallel: an optimizer that is not elementwise is not supported: it sees shards of parameters, never "
    "a full one",
    applies=_updates_parts,
    repair=with_elementwise_optimizer,
)


def _lacks_tokens(training: Training, layout: Layout) -> bool:
    source = training.model.source
    by_tokens = parallelism_of(layout, LocalTensorParallel).source is Split.ROWWISE
    return (
        has_units_of_dtensors(layout)
        and by_tokens
        and source is not None
        and is_last_shard_empty(source.vocabulary, layout.mesh.size(TP))
    )


EVERY_RANK_HAS_TOKENS = UpstreamLimit(
    reason="fully_shard or replicate_with_fsdp over local_tensor_parallel: an embedding sharded by tokens without rows on some "
    "rank is not supported: a tensor without elements cannot be sharded",
    applies=_lacks_tokens,
    repair=lambda training, layout: with_tokens(training, layout.mesh.size(TP)),
)

ONLY_OF_LINEARS = Limit(
    reason="local_tensor_parallel with loss_parallel: a scale or an offset of the model itself is not supported: it is "
    "replicated, but each rank has only its part of the logits",
    applies=lambda training, layout: (
        parallelism_of(layout, LocalTensorParallel).loss_parallel and (training.model.scale or training.model.offset)
    ),
    repair=lambda training, _layout: with_model(training, scale=False, offset=False),
)

TYPES_PACKAGE = "spmd_types"


def _is_typed(layout: Layout) -> bool:
    return parallelism_of(layout, LocalTensorParallel).collectives is Collectives.TYPED


NO_TYPED_GRAPHS_OF_EXPERTS = Limit(
    reason=f"local_tensor_parallel with Collectives.TYPED: torch.compile of experts is not supported: {TYPES_PACKAGE} reads "
    "grad_fn, which breaks the graph at each redistribution; Dynamo then reuses the compiled code of a redistribution with "
    "another gradient, because it has no guard for enum members (pytorch#196173)",
    applies=lambda training, layout: _is_typed(layout) and layout.execution.is_compiled and has_routing(training.model),
    repair=lambda training, _layout: without_routing(training),
    torch=">=2.12",
)

LIMITS: tuple[Limit, ...] = (
    NO_TYPED_GRAPHS_OF_EXPERTS,
    ONE_ENTRY_A_LAYER,
    SHARES_CUT_ALIKE,
    ENDS_WHOLE,
    TIES_CUT_ALIKE,
    *(limit_of(rule) for rule in RULES if not rule.of_dtensors),
    ENDS_IN_HEAD,
    CROSS_ENTROPY_ALONE,
    ONLY_OF_LINEARS,
    WHOLE_PARAMETERS,
    EVERY_RANK_HAS_TOKENS,
)


def _untyped(layout: Layout) -> Layout:
    return with_options(layout, LocalTensorParallel, collectives=Collectives.FUNCTIONAL)


WITH_ITS_PACKAGE = LayoutLimit(
    reason=f"local_tensor_parallel with Collectives.TYPED: running without {TYPES_PACKAGE} is not supported: it is not "
    f"installed (pip install {TYPES_PACKAGE})",
    applies=lambda layout: _is_typed(layout) and find_spec(TYPES_PACKAGE) is None,
    repair=_untyped,
)

WITH_ITS_TORCH = LayoutLimit(
    reason=f"local_tensor_parallel with Collectives.TYPED: this version of torch is not supported: {TYPES_PACKAGE} cannot be "
    "imported because it needs torch.distributed._local_tensor",
    applies=_is_typed,
    repair=_untyped,
    torch="<2.10",
)

LAYOUT_LIMITS: tuple[LayoutLimit, ...] = (APPLIED_FIRST, WITH_ITS_PACKAGE, WITH_ITS_TORCH)
