"""Known-issue predicates for `DistributedDataParallel` and composable `replicate`."""

from __future__ import annotations

from equivcheck.layouts.base.known_predicates import need
from equivcheck.layouts.base.limits.repairs import may_skip_parameters
from equivcheck.layouts.parallelisms.ddp.limits import as_reduced
from equivcheck.scenario import DDP, Compression, Replicate, Replicator, Scenario


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


def _looks_for_none(parallelism: object) -> bool:
    if isinstance(parallelism, Replicate):
        return parallelism.implementation is Replicator.DDP
    return isinstance(parallelism, DDP) and not (parallelism.find_unused_parameters or parallelism.static_graph)
