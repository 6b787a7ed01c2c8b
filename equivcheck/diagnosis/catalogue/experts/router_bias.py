"""Mistakes in the bias with which routers choose experts: wrong counts, a wrong time, or use in weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from equivcheck.diagnosis.catalogue.counterfactual import (
    Change,
    changing_layers,
    on_emulated_ranks,
    on_one_device,
)
from equivcheck.diagnosis.catalogue.experts.routing import Routed, choices, routing
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.scenario_ranks import ScenarioRanks
from equivcheck.diagnosis.evidence import axis_combinations
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.diagnosis.words import layers_by_name
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import DDP, Experts
from equivcheck.training.layers.experts.module import ExpertsModule, Router
from equivcheck.training.setup import Setup
from equivcheck.training.update.router_bias import biased_routers, update_router_biases


def wrong_router_biases(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes in routers' biases.

    A bias added to routing weights is tried in all layers with a bias, then in each layer alone.
    """
    if not diverged.training.model.has_router_bias:
        return
    for layers in choices(diverged, _has_bias):
        sentence = (
            f"the router's bias in {layers_by_name(layers)} is added to the weights too, although it may only choose experts"
        )
        yield on_one_device(Cause.ROUTER_BIAS, sentence, changing_layers(layers, ExpertsModule, _weighing))
    if len(diverged.training.data.microbatches) > 1:
        words = "routers' biases are updated after each microbatch, not once a step"
        yield _between_microbatches(words, _updating_each_microbatch)
        words = "routers' biases are updated by the expert counts of the last microbatch, not of the step"
        yield _between_microbatches(words, _forgetting_counts)
    if (chunks := diverged.layout.num_chunks) > 1:
        words = "routers' biases are updated by the expert counts of the last chunk, not of the step"
        yield on_emulated_ranks(Cause.ROUTER_BIAS, words, partial(_counting_last_chunk, num_chunks=chunks))
    if diverged.has_own_rows:
        yield from _own_counts(diverged)


def _has_bias(layer: Experts) -> bool:
    """Whether the router's bias can change. If all experts are chosen, all counts are equal."""
    return layer.router_bias_rate > 0 and layer.num_experts > layer.top_k


def _own_counts(diverged: DivergedRun) -> Iterator[Mistake]:
    copied = tuple(name for ddp in diverged.layout.of(DDP) for name in diverged.layout.axes_of(ddp))
    for axes in axis_combinations(diverged.data_axes):
        words = f"each rank updates routers' biases by its own expert counts, not by their sum over {diverged.ranks_text(axes)}"
        yield on_emulated_ranks(Cause.ROUTER_BIAS, words, partial(_counting_own, axes=axes, copied=copied))


def _weighing(module: ExpertsModule) -> None:
    def route(scores: torch.Tensor, chosen: torch.Tensor, _weights: torch.Tensor) -> Routed:
        weights = module.router.add_bias(scores) * chosen
        return chosen, weights / weights.sum(-1, keepdim=True) if module.layer.normalised else weights

    routing(module, route=route)


def _updating_each_microbatch(setup: Setup) -> None:
    update_router_biases(setup.model, setup.sum_counts)


def _forgetting_counts(setup: Setup) -> None:
    for router in biased_routers(setup.model):
        router.counts_of_step = None


def _counting_last_chunk(ranks: ScenarioRanks, *, num_chunks: int) -> None:
    """Let each rank count its last chunk of rows in the last microbatch only."""

    def count_last(router: Router, _inputs: object, routed: Routed) -> None:
        chosen, router.counts_of_step = routed[0], None
        router.counts = chosen.chunk(num_chunks)[-1].to(torch.float32).flatten(0, -2).sum(0)

    for model in ranks.models:
        for router in biased_routers(model):
            router.register_forward_hook(count_last)


def _between_microbatches(sentence: str, change: Change) -> Mistake:
    """Return a mistake, the same on all ranks: `change` is called after each microbatch of a step except the last."""

    def change_all(ranks: ScenarioRanks) -> None:
        ranks.between_microbatches.append(lambda rank, _step: change(ranks.setups[rank]))

    return Mistake(Cause.ROUTER_BIAS, sentence, change_all, is_quick=True)


def _counting_own(ranks: ScenarioRanks, *, axes: tuple[str, ...], copied: tuple[str, ...]) -> None:
    """Let ranks along `axes` use their own counts. Along `copied`, DDP gives all ranks the first rank's bias before forward."""
    ranks.counted_over = tuple(name for name in ranks.mesh.names if name not in axes)

    def copy_bias(rank: int, _step: int) -> None:
        biases = [router.expert_bias for router in biased_routers(ranks.models[rank])]
        every = ranks.exchange(rank, [bias.clone() for bias in biases], lambda given: [given] * len(given))
        for bias, first in zip(biases, every[ranks.peers(rank, copied)[0]], strict=True):
            bias.copy_(first)

    if copied:
        ranks.before_step.append(copy_bias)
