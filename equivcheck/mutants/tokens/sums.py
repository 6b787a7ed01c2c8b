"""Reductions missing or done twice around attention, gated MLPs, norms and heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from equivcheck.layouts.base.plan.layers import PlannedLayer, plan_over_ranks
from equivcheck.layouts.base.plan.rules import inputs_of
from equivcheck.mutants.mutant import fault
from equivcheck.mutants.parameter_use import (
    TensorFunction,
    change_input_gradient,
    keep_partial_gradient,
    reduce_twice,
    transform,
    treat_as_reduced,
    use_through,
)
from equivcheck.mutants.rank import size_of
from equivcheck.mutants.tensor_parallel.plan import TENSOR_PARALLEL
from equivcheck.mutants.tensor_parallel.shards import overwrite_initial_values
from equivcheck.mutants.tokens.needs import has_layer, head_split, held_modules, layers_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import ActivationSharding, GatedMLP, Layout, Model, Scenario, Split
from equivcheck.scenario.mesh import TP
from equivcheck.training.layers.registry import layer_kind
from equivcheck.training.material import material
from equivcheck.training.setup import Setup


def _is_within_after_something(place: PlannedLayer) -> bool:
    """Whether the layer is split by heads or hidden features, and earlier parameters need its input gradient."""
    model = place.site.model
    learns = model.source is not None and not model.source.frozen
    return place.plan.split is Split.HEADS_OR_HIDDEN and (place.site.index > 0 or place.site.layer.norm is not None or learns)


def _is_norm_of_positions(place: PlannedLayer) -> bool:
    layer = place.site.layer
    return layer.norm is not None and not layer.frozen and place.num_parts > 1 and place.plan.split is not Split.NOT_IN_PLAN


def _has_head_of_positions(model: Model, layout: Layout) -> bool:
    """Whether the head's norm runs on sequence shards."""
    plan = plan_over_ranks(layout)
    if plan is None or model.head is None or model.head.norm is None or model.length is None:
        return False
    return plan.head is not Split.NOT_IN_PLAN and inputs_of(model, plan)[-1] is ActivationSharding.ROWS


def _norms_positions(scenario: Scenario) -> bool:
    of_layers = has_layer(_is_norm_of_positions)(scenario)
    is_eager = head_split(scenario) is not None
    return of_layers or (is_eager and _has_head_of_positions(scenario.training.model, scenario.layout))


def _is_gated_within(place: PlannedLayer) -> bool:
    return isinstance(place.site.layer, GatedMLP) and place.plan.split is Split.HEADS_OR_HIDDEN


@fault(
    layouts=TENSOR_PARALLEL,
    applies=lambda scenario: head_split(scenario) is Split.COLWISE,
    causes=(Cause.PARTIAL_INPUT_GRADIENT, Cause.RANKS_DISAGREE),
)
def head_input_gradient_not_reduced(setup: Setup) -> None:
    """Bug: the input gradient for a vocabulary-parallel head is not summed over ranks."""
    _change_head_input(setup, treat_as_reduced)


@fault(
    layouts=TENSOR_PARALLEL,
    applies=lambda scenario: head_split(scenario) is Split.COLWISE,
    causes=(Cause.INPUT_GRADIENT_SUMMED_TWICE, Cause.SCALED),
)
def head_input_gradient_reduced_twice(setup: Setup) -> None:
    """Bug: the input gradient for a vocabulary-parallel head is summed over ranks twice."""
    _change_head_input(setup, reduce_twice)


def _change_head_input(setup: Setup, gradients: TensorFunction) -> None:
    if size_of(setup, TP) > 1:
        for linear in held_modules(setup, "head.linear"):
            change_input_gradient(linear, gradients)


@fault(
    layouts=TENSOR_PARALLEL,
    applies=has_layer(_is_within_after_something),
    causes=(Cause.PARTIAL_INPUT_GRADIENT, Cause.RANKS_DISAGREE),
)
def sharded_heads_input_gradient_not_reduced(setup: Setup) -> None:
    """Bug: the input gradient is not summed over ranks in layers with sharded heads or hidden features."""
    for module, place in layers_of(setup, _is_within_after_something):
        for part in layer_kind(place.site.layer).linears(place.site.layer):
            if part.reads_input:
                change_input_gradient(module.get_submodule(part.name), treat_as_reduced)


@fault(layouts=TENSOR_PARALLEL, applies=_norms_positions, causes=(Cause.NOT_REDUCED, Cause.RANKS_DISAGREE))
def norm_gradient_of_part(setup: Setup) -> None:
    """Bug: under sequence parallelism, a token model's norm gradients are not summed over ranks."""
    for norm in _norms(setup):
        use_through(norm, keep_partial_gradient)


def _norms(setup: Setup) -> Iterator[nn.Module]:
    for module, _ in layers_of(setup, _is_norm_of_positions):
        yield module.get_submodule("norm")
    if setup.layout is not None and _has_head_of_positions(setup.training.model, setup.layout):
        yield from held_modules(setup, "head.norm")


@fault(
    layouts=TENSOR_PARALLEL,
    applies=lambda scenario: head_split(scenario) not in (None, Split.NOT_IN_PLAN),
    causes=(Cause.SUMMED, Cause.SCALED),
)
def logits_gradient_summed(setup: Setup) -> None:
    """Bug: the logits' gradient is summed over tensor-parallel ranks, although they all compute the same gradient."""
    ranks = size_of(setup, TP)
    for head in held_modules(setup, "head") if ranks > 1 else ():
        head.register_forward_hook(
            lambda _module, _inputs, logits: transform(logits, gradients=lambda gradient: gradient * ranks)
        )


@fault(layouts=TENSOR_PARALLEL, applies=has_layer(_is_gated_within), causes=(Cause.PERMUTED, Cause.UNEQUAL_START))
def gate_and_up_split_as_one(setup: Setup) -> None:
    """Bug: gate and up projections are fused before they are split over ranks, so each rank gets wrong halves."""
    initial, found = material(setup.training).parameters, dict[str, torch.Tensor]()
    for _, place in layers_of(setup, _is_gated_within):
        for name in ("weight", "bias"):
            gate, up = (f"layers.{place.site.index}.{part}.{name}" for part in ("gate", "up"))
            if gate in initial:
                shards = torch.cat((initial[gate], initial[up])).chunk(place.site.tp)
                halves = [shard.chunk(2) for shard in shards]
                found[gate], found[up] = (torch.cat([half[at] for half in halves]) for at in (0, 1))
    overwrite_initial_values(setup, found)
