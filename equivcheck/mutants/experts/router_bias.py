"""A router's bias with wrong counts, updated at a wrong time, or used in weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from equivcheck.layouts.base.data_rows import sum_counts
from equivcheck.layouts.parallelisms.pipeline.schedules import pipe_of
from equivcheck.mutants.experts.balance import COUNTED, is_counted, is_counted_elsewhere, last_axis
from equivcheck.mutants.experts.sites import PLAIN_ROUTERS, has_experts
from equivcheck.mutants.experts.weights import Routed, reroute, scores_of
from equivcheck.mutants.mutant import ONE_RANK, TWO_STEPS, Minimum, fault
from equivcheck.mutants.needs import all_of, has_chunks, has_microbatches, has_next_step, layouts_with
from equivcheck.mutants.rank import mesh_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Experts, Pipeline
from equivcheck.training.layers.experts.module import Router
from equivcheck.training.setup import Setup
from equivcheck.training.update.router_bias import biased_routers, update_router_biases

CAUSES = (Cause.ROUTER_BIAS,)


def _has_bias(layer: Experts) -> bool:
    """Whether the router's bias can change. If all experts are chosen, all counts are equal."""
    return layer.router_bias_rate > 0 and layer.num_experts > layer.top_k


@fault(layouts=COUNTED, applies=all_of(has_experts(_has_bias), is_counted), causes=CAUSES)
def router_bias_of_own_rows(setup: Setup) -> None:
    """Bug: each rank updates the router's bias by its own expert counts, which are not summed over ranks."""
    setup.sum_counts = lambda counts: counts


@fault(
    layouts=COUNTED,
    applies=all_of(has_experts(_has_bias), is_counted_elsewhere),
    causes=CAUSES,
    minimum=Minimum(ranks=4, because="it takes two axes with two ranks each"),
)
def router_bias_counted_along_last_axis(setup: Setup) -> None:
    """Bug: the router's bias is updated by expert counts summed over the last mesh axis only."""
    setup.sum_counts = lambda counts: counts
    sum_counts(setup, mesh_of(setup).get_group(last_axis(setup)))


@fault(layouts=PLAIN_ROUTERS, applies=all_of(has_experts(_has_bias), has_next_step), causes=CAUSES, minimum=TWO_STEPS)
def router_bias_in_weights(setup: Setup) -> None:
    """Bug: the router's bias is added to the weights as well, although it may only choose experts."""

    def weigh_by_biased_scores(router: Router, inputs: torch.Tensor, routed: Routed) -> Routed:
        weights = router.add_bias(scores_of(router, inputs)) * routed[0]
        return routed[0], weights / weights.sum(-1, keepdim=True) if router.layer.normalised else weights

    reroute(setup, weigh_by_biased_scores, _has_bias)


@fault(
    layouts=PLAIN_ROUTERS,
    applies=all_of(has_experts(_has_bias), has_microbatches),
    causes=CAUSES,
    minimum=ONE_RANK,
)
def router_bias_updated_each_microbatch(setup: Setup) -> None:
    """Bug: the router's bias is updated after each microbatch, not once a step."""
    inner = setup.accumulation

    @contextmanager
    def updated_afterwards(last: bool) -> Iterator[None]:
        with inner(last):
            yield
        if not last:
            update_router_biases(setup.model, setup.sum_counts)

    def accumulation(last: bool) -> AbstractContextManager[object]:
        return updated_afterwards(last)

    setup.accumulation = accumulation


@fault(
    layouts=PLAIN_ROUTERS,
    applies=all_of(has_experts(_has_bias), has_microbatches),
    causes=CAUSES,
    minimum=ONE_RANK,
)
def router_bias_counts_last_microbatch(setup: Setup) -> None:
    """Bug: the router's bias is updated by expert counts from the last microbatch only."""
    inner = setup.accumulation

    def forget_counts(last: bool) -> AbstractContextManager[object]:
        _forget_counts(setup.model)
        return inner(last)

    setup.accumulation = forget_counts


@fault(
    layouts=layouts_with(Pipeline.tag),
    applies=all_of(has_experts(_has_bias), has_chunks),
    causes=CAUSES,
    minimum=ONE_RANK,
)
def router_bias_counts_last_chunk(setup: Setup) -> None:
    """Bug: the router's bias is updated by expert counts from a pipeline's last chunk only."""
    pipe = pipe_of(setup)
    for stage in () if pipe is None else pipe.modules.values():
        stage.register_forward_pre_hook(lambda called, _inputs: _forget_counts(called))


def _forget_counts(model: nn.Module) -> None:
    for router in biased_routers(model):
        router.counts_of_step = None
