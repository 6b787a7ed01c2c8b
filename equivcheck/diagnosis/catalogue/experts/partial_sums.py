"""Mistakes in experts whose hidden features are sharded, so that their outputs are partial sums.

Gradients are not summed, or biases are added repeatedly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from equivcheck.diagnosis.catalogue.counterfactual import all_then_each, changing_layers, on_emulated_ranks, on_one_device
from equivcheck.diagnosis.catalogue.experts.routing import layers_of_experts, module_of
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.scenario_ranks import ScenarioRanks
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.diagnosis.words import layers_by_name
from equivcheck.layouts.base.partition import chunk_size
from equivcheck.layouts.base.plan.layers import planned_layers
from equivcheck.layouts.base.plan.rules import num_routing_weights
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario.mesh import TP
from equivcheck.training.layers.experts.module import ExpertsModule, GatedExperts
from equivcheck.training.layers.region import Region

Routed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function to compute the experts' output from values, chosen experts and weights."""


def wrong_partial_sums(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes in experts with partial sums: a bias added on each rank, or gradients not summed over ranks.

    Each is tried in all layers with such sums, then in each layer alone.
    """
    planned = planned_layers(diverged.training.model, diverged.layout)
    found = {index: num_routing_weights(each.site.layer, each.plan.split) for index, each in enumerate(planned)}
    split = [index for index in layers_of_experts(diverged) if found[index] is not None]
    where = diverged.ranks_text((TP,)) if split else ""
    for layers in all_then_each(split) if diverged.rounding is None else ():
        who = f"the experts in {layers_by_name(layers)}"
        words = f"the output bias of {who} is added on each of {where}, not once"
        for counted in (True, False):
            region = _AddedOften(diverged.mesh.size(TP), counted=counted)
            change = changing_layers(layers, ExpertsModule, partial(_moving_by, region=region))
            yield on_one_device(Cause.BIAS_ON_EVERY_RANK, words, change)
        # Routing weights alone come first, because both are equal if nothing else learns through the experts.
        for rows, learns in (
            (False, f"of the routing weights of {who}"),
            (True, f"of the input and the routing weights of {who}"),
        ):
            words = f"the gradient {learns} is not summed over {where}: each rank continues with its partial sum"
            learning = partial(_learning_from_own_terms, layers=layers, rows=rows)
            yield on_emulated_ranks(Cause.PARTIAL_INPUT_GRADIENT, words, learning)


class _AddedOften(Region):
    """Bug: a bias is added `times` times; with `counted`, its gradient is multiplied too."""

    def __init__(self, times: int, *, counted: bool) -> None:
        self.times, self.counted = times, counted

    def bias_on_first_rank(self, bias: torch.Tensor) -> torch.Tensor:
        """Return the bias multiplied by `times`, as if each rank added it."""
        return bias + (self.times - 1) * (bias if self.counted else bias.detach())


def _moving_by(module: ExpertsModule, *, region: Region) -> None:
    for owner in _owners(module):
        owner.region = region


def _owners(module: ExpertsModule) -> list[GatedExperts]:
    return [module.experts] if module.shared is None else [module.experts, module.shared]


def _learning_from_own_terms(emulated: ScenarioRanks, *, layers: tuple[int, ...], rows: bool) -> None:
    """Let earlier layers learn through one rank's hidden features only; with `rows`, also through the experts' input."""
    ranks = emulated.mesh.size(TP)
    for rank, setup in zip(emulated.coordinates, emulated.setups, strict=True):
        for layer in layers:
            module = module_of(setup, layer)
            own = _own_features(module, rank.indices[TP], ranks)
            for name in ("routed", "dispatched"):
                setattr(module, name, partial(_routed_apart, module, getattr(module, name), own, rows=rows))
            if module.shared is not None and rows:
                module.shared.forward = partial(_shared_apart, module, module.shared.forward, own)  # type: ignore[method-assign]


Own = list[dict[str, torch.Tensor]]
"""One rank's slice of each parameter, for the routed experts and for the shared expert if there is one."""


def _own_features(module: ExpertsModule, place: int, ranks: int) -> Callable[[], Own]:
    """Return a function giving one rank's features. It is a function because updates change the parameters."""
    size = chunk_size(module.layer.hidden, ranks)
    own = slice(place * size, (place + 1) * size)

    def part(name: str, parameter: torch.Tensor) -> torch.Tensor:
        if name == "down_bias":
            return parameter if place == 0 else torch.zeros_like(parameter)
        return parameter[..., own, :] if name in ("gate", "up") else parameter[..., own]

    return lambda: [{name: part(name, each.detach()) for name, each in one.named_parameters()} for one in _owners(module)]


@contextmanager
def _computing_with(module: ExpertsModule, own: Own) -> Iterator[None]:
    """Let a module compute with other values: instance attributes hide parameters with the same name."""
    for one, tensors in zip(_owners(module), own, strict=True):
        vars(one).update(tensors)
    yield
    for one, tensors in zip(_owners(module), own, strict=True):
        for name in tensors:
            del vars(one)[name]


def _routed_apart(
    module: ExpertsModule, routed: Routed, own: Callable[[], Own], values: torch.Tensor, *rest: torch.Tensor, rows: bool
) -> torch.Tensor:
    chosen, weights = rest
    whole = routed(values.detach() if rows else values, chosen, weights.detach())
    with _computing_with(module, own()):
        partial_sum = routed(values if rows else values.detach(), chosen, weights)
    return whole + (partial_sum - partial_sum.detach())


def _shared_apart(
    module: ExpertsModule, shared: Callable[[torch.Tensor], torch.Tensor], own: Callable[[], Own], values: torch.Tensor
) -> torch.Tensor:
    whole = shared(values.detach())
    with _computing_with(module, own()):
        partial_sum = shared(values)
    return whole + (partial_sum - partial_sum.detach())
