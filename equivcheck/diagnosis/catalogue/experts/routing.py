"""Mistakes in routers, expert capacity, shared experts and expert gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from equivcheck.diagnosis.catalogue.counterfactual import (
    all_then_each,
    changing_layers,
    on_emulated_ranks,
    on_one_device,
    submodule,
)
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.scenario_ranks import ScenarioRanks
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.diagnosis.words import layers_by_name
from equivcheck.layouts.base.partition import chunk_size
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Experts, ScoreFunction
from equivcheck.scenario.mesh import EP
from equivcheck.training.layers.experts.module import ExpertsModule
from equivcheck.training.setup import Setup

Routed = tuple[torch.Tensor, torch.Tensor]
"""Chosen experts and their weights, both (..., experts)."""
Route = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Routed]
"""Function to change a router's output, given scores, chosen experts and weights, all (..., experts)."""
Alter = Callable[[ExpertsModule], None]
Applies = Callable[[Experts], bool]


def _any(_layer: Experts) -> bool:
    return True


def _choose_two(layer: Experts) -> bool:
    return layer.top_k > 1


def _normalise(layer: Experts) -> bool:
    return layer.normalised


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExpertFault:
    """A fault in expert layers."""

    cause: Cause
    """Cause of a divergence with this fault."""
    words: str
    """Sentence for the user, without the layers' names."""
    alter: Alter
    """Function to plant the fault in a layer."""
    applies: Applies = _any
    """Whether a layer can have the fault."""


def wrong_experts(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes in expert layers. Each is tried in all layers that can have it, then in each layer alone."""
    for way in _faults(diverged.mesh.size(EP)) if diverged.rounding is None else ():
        for layers in choices(diverged, way.applies):
            change = changing_layers(layers, ExpertsModule, way.alter)
            yield on_one_device(way.cause, f"in {layers_by_name(layers)} {way.words}", change)


def layers_of_experts(diverged: DivergedRun) -> dict[int, Experts]:
    """Return the scenario's expert layers by index."""
    return {index: layer for index, layer in enumerate(diverged.training.model.layers) if isinstance(layer, Experts)}


def choices(diverged: DivergedRun, applies: Applies = _any) -> Iterator[tuple[int, ...]]:
    """Yield the expert layers for which `applies` returns True: all together, then each alone."""
    return all_then_each([index for index, layer in layers_of_experts(diverged).items() if applies(layer)])


def module_of(setup: Setup, layer: int) -> ExpertsModule:
    """Return the module of the expert layer with this index."""
    return submodule(setup, f"layers.{layer}", ExpertsModule)


def _faults(ranks: int) -> Iterator[_ExpertFault]:
    yield from _weights()
    yield from _chosen(ranks)
    words = "routing weights multiply the experts' input instead of their output, or vice versa"
    yield _ExpertFault(cause=Cause.ROUTER_WEIGHTS, words=words, alter=_weighing_other_side)
    yield from _shared()
    yield from _unlearning()


def _routed(cause: Cause, words: str, route: Route, applies: Applies = _any) -> _ExpertFault:
    return _ExpertFault(cause=cause, words=words, alter=partial(routing, route=route), applies=applies)


def _weights() -> Iterator[_ExpertFault]:
    cause = Cause.ROUTER_WEIGHTS
    words = "routing weights are applied twice"
    yield _routed(cause, words, lambda _scores, chosen, weights: (chosen, weights * weights))
    words = "routing weights are not applied"
    yield _routed(cause, words, lambda scores, chosen, _weights: (chosen, chosen.to(scores)))
    words = f"{words}, and their gradient is zero"
    yield _routed(cause, words, lambda scores, chosen, _weights: (chosen, chosen.to(scores) + 0 * scores))
    yield _routed(cause, "the routing weights of the two chosen experts are swapped", _exchanged, _choose_two)
    words = "routing weights are not normalised"
    yield _routed(cause, words, lambda scores, chosen, _weights: (chosen, scores * chosen), _normalise)
    words = "routing weights are normalised over all experts, not over the chosen ones"
    yield _routed(cause, words, _normalised_over_all, _normalise)
    words = "routing weights are normalised, although this is not configured"
    yield _routed(cause, words, lambda _scores, chosen, weights: (chosen, weights / weights.sum(-1, keepdim=True)), _choose_two)


def _normalised_over_all(scores: torch.Tensor, chosen: torch.Tensor, _weights: torch.Tensor) -> Routed:
    return chosen, chosen * (scores / scores.sum(-1, keepdim=True))


def _exchanged(_scores: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Routed:
    best = weights.topk(2, -1)
    return chosen, torch.zeros_like(weights).scatter(-1, best.indices, best.values.flip(-1))


def _chosen(ranks: int) -> Iterator[_ExpertFault]:
    cause = Cause.EXPERT_CHOICE
    for sign, where in ((1, "after"), (-1, "before")):
        words = f"rows are computed by the expert {where} the chosen one"
        yield _routed(cause, words, partial(_moved, shift=sign, ranks=None))
        if ranks > 1:
            words = f"rows are computed by the rank {where} the one with the chosen expert"
            yield _routed(cause, words, partial(_moved, shift=sign, ranks=ranks))
    for best, score in ((True, "lower"), (False, "higher")):
        words = f"the chosen expert with the {score} score computes nothing"
        yield _routed(cause, words, partial(_one_alone, best=best), _choose_two)


def _moved(_scores: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *, shift: int, ranks: int | None) -> Routed:
    """Shift choices by one expert, or with `ranks` by one rank's experts."""
    count = chosen.shape[-1]
    source = (torch.arange(count) - shift * (1 if ranks is None else chunk_size(count, ranks))) % count
    return chosen[..., source], weights[..., source]


def _one_alone(_scores: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *, best: bool) -> Routed:
    first = weights == weights.amax(-1, keepdim=True)
    kept = chosen & (first if best else ~first)
    return kept, weights * kept


def _shared() -> Iterator[_ExpertFault]:
    cause = Cause.SHARED_EXPERT
    words = "the shared expert is weighted by the router"
    yield _ExpertFault(
        cause=cause, words=words, alter=_weighing_shared, applies=lambda layer: layer.shared and not layer.normalised
    )
    words = "the shared expert is added once per chosen expert"
    applies = partial(_shares_beside, count=2)
    yield _ExpertFault(cause=cause, words=words, alter=partial(_multiplying_shared, factor=None), applies=applies)
    words, applies = "the shared expert is not added", partial(_shares_beside, count=1)
    yield _ExpertFault(cause=cause, words=words, alter=partial(_multiplying_shared, factor=0), applies=applies)


def _shares_beside(layer: Experts, *, count: int) -> bool:
    return layer.shared and layer.top_k >= count


def _unlearning() -> Iterator[_ExpertFault]:
    cause = Cause.EXPERT_GRADIENT
    words = "routing weights are detached: the router gets no gradient from them"
    yield _routed(cause, words, lambda _scores, chosen, weights: (chosen, weights.detach()))
    words = "routing weights are detached: the router gets a zero gradient from them"
    yield _routed(cause, words, lambda _scores, chosen, weights: (chosen, weights.detach() + 0 * weights))
    words = "the experts' input is detached: earlier layers get no gradient through the experts"
    yield _ExpertFault(cause=cause, words=words, alter=_detaching_input)
    words = "the experts' input is detached after weighting: the router and earlier layers get no gradient through the experts"
    yield _ExpertFault(cause=cause, words=words, alter=_detaching_rows, applies=lambda layer: layer.weighs_input)


def routing(module: ExpertsModule, *, route: Route) -> None:
    """Replace an expert layer's routing.

    `route` gets scores, chosen experts and routing weights, and returns the router's output.
    """
    layer, router = module.layer, module.router

    def forward(inputs: torch.Tensor) -> Routed:
        logits = inputs @ router.weight.T
        scores = logits.softmax(-1) if layer.scores is ScoreFunction.SOFTMAX else logits.sigmoid()
        chosen = router.select(scores)
        weights = scores * chosen
        return route(scores, chosen, weights / weights.sum(-1, keepdim=True) if layer.normalised else weights)

    router.forward = forward  # type: ignore[method-assign]


def _weighing_other_side(module: ExpertsModule) -> None:
    module.layer = module.layer.with_fields(weighs_input=not module.layer.weighs_input)


def _weighing_shared(module: ExpertsModule) -> None:
    last: list[torch.Tensor] = []

    def route(_scores: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Routed:
        last[:] = [weights.sum(-1, keepdim=True)]
        return chosen, weights

    routing(module, route=route)
    if module.shared is not None:
        module.shared.register_forward_hook(lambda _module, _inputs, made: last[0] * made)


def _multiplying_shared(module: ExpertsModule, *, factor: int | None) -> None:
    """Multiply the shared expert's output by `factor`, or by `top_k` if `factor` is None."""
    if module.shared is not None:
        times = module.layer.top_k if factor is None else factor
        module.shared.register_forward_hook(lambda _module, _inputs, made: times * made)


def _detaching_input(module: ExpertsModule) -> None:
    for name in ("routed", "dispatched"):
        inner = getattr(module, name)
        setattr(module, name, lambda values, *routed, inner=inner: inner(values.detach(), *routed))


def _detaching_rows(module: ExpertsModule) -> None:
    module.experts.register_forward_pre_hook(lambda _module, inputs: (inputs[0].detach(), *inputs[1:]))


CAPACITY_FACTORS = (1.0, 1.25, 1.5, 2.0)
"""Usual capacity factors."""


def dropped_rows(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield a mistake for each common capacity factor: each expert drops a rank's rows that exceed its capacity.

    It is tried in all layers, then in each layer alone.
    """
    for layers in choices(diverged) if diverged.can_be_emulated else ():
        for factor in CAPACITY_FACTORS:
            words = f"in {layers_by_name(layers)} each expert drops a rank's rows beyond capacity factor {factor:g}"
            change = partial(_dropping, layers=layers, factor=factor)
            yield on_emulated_ranks(Cause.EXPERT_CHOICE, words, change)


def _dropping(ranks: ScenarioRanks, *, layers: tuple[int, ...], factor: float) -> None:
    for setup in ranks.setups:
        for layer in layers:
            module = module_of(setup, layer)
            routing(module, route=partial(_first_rows, share=factor * module.layer.top_k / module.layer.num_experts))


def _first_rows(_scores: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *, share: float) -> Routed:
    """Keep each expert's first rows, up to its capacity."""
    flat = chosen.reshape(-1, chosen.shape[-1])
    kept = chosen & (flat.cumsum(0) <= math.ceil(share * len(flat))).reshape(chosen.shape)
    return kept, weights * kept
