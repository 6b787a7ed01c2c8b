"""Known-issue predicates for `DistributedDataParallel` and composable `replicate`."""

from __future__ import annotations

import math

from equivcheck.layouts.base.known_predicates import need
from equivcheck.layouts.base.limits.repairs import may_skip_parameters, without_shares
from equivcheck.layouts.base.partition import shard_dim
from equivcheck.layouts.parallelisms.ddp.limits import as_reduced
from equivcheck.layouts.parallelisms.pipeline.stages import num_stages, stage_of_layers
from equivcheck.scenario import DDP, Compression, Layout, Model, Pipeline, PlannedParallelism, Replicate, Replicator, Scenario
from equivcheck.scenario.mesh import TP
from equivcheck.training.layers.parameters import Parameter, parameters_of


@need
def static_graph_without_sync(scenario: Scenario) -> bool:
    """Whether DDP with static_graph runs its first backward under `no_sync`."""
    return len(scenario.training.data.microbatches) > 1 and any(
        parallelism.static_graph and parallelism.no_sync for parallelism in scenario.layout.of(DDP)
    )


@need
def reduction_changes_gradients(scenario: Scenario) -> bool:
    """Whether reduced gradients differ from local ones: there are several ranks, or gradients are compressed."""
    compressions = [each.compression for each in scenario.layout.parallelisms if isinstance(each, DDP | Replicate)]
    return scenario.layout.num_data_ranks > 1 or any(each is not Compression.NONE for each in compressions)


@need
def unused_parameters_not_looked_for(scenario: Scenario) -> bool:
    """Whether a step does not use some parameters, although neither `find_unused_parameters` nor `static_graph` is set."""
    trained = as_reduced(scenario.training, scenario.layout)
    return may_skip_parameters(trained) and any(map(_looks_for_none, scenario.layout.parallelisms))


@need
def ddp_searches_for_unused_parameters(scenario: Scenario) -> bool:
    """Whether `DistributedDataParallel` has `find_unused_parameters`."""
    return any(ddp.find_unused_parameters for ddp in scenario.layout.of(DDP))


def _looks_for_none(parallelism: object) -> bool:
    if isinstance(parallelism, DDP):
        return not (parallelism.find_unused_parameters or parallelism.static_graph)
    return _is_ddp(parallelism)


def _is_ddp(parallelism: object) -> bool:
    return isinstance(parallelism, DDP) or (isinstance(parallelism, Replicate) and parallelism.implementation is Replicator.DDP)


@need
def broadcasts_one_strided_weight(scenario: Scenario) -> bool:
    """Whether DDP wraps a model or pipeline stage with one tensor only: some columns of a weight with one row.

    These columns keep the full weight's stride along the row, which a broadcast copy does not have.
    """
    layout, model = scenario.layout, without_shares(scenario.training).model
    wraps = any(map(_is_ddp, layout.parallelisms))
    return wraps and any(_keeps_strides(layout, parameter) for parameter in _only_tensors(model, layout))


def _only_tensors(model: Model, layout: Layout) -> list[Parameter]:
    """Return the parameters that are a wrapped module's only floating-point tensor."""
    stages = stage_of_layers(layout, len(model.layers)) if layout.has(Pipeline) else (0,) * len(model.layers)
    parameters, last = parameters_of(model), num_stages(layout) - 1 if layout.has(Pipeline) else 0
    also = {0} if model.source is not None else set()
    also |= {last} if model.head is not None or model.scale or model.offset else set()
    parts = [[each for each in parameters if each.layer is not None and stages[each.layer] == part] for part in range(last + 1)]
    return [part[0] for index, part in enumerate(parts) if len(part) == 1 and index not in also]


def _keeps_strides(layout: Layout, parameter: Parameter) -> bool:
    dims = [shard_dim(plan, parameter) or 0 for plan in layout.of(PlannedParallelism)]
    parts = layout.mesh.size(TP)
    return any(dim > 0 and math.prod(parameter.shape[:dim]) == 1 and min(parts, parameter.shape[dim]) > 1 for dim in dims)
