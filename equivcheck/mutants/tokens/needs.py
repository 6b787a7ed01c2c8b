"""Conditions on token models, their layers, and helpers to change batches and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from equivcheck.layouts.base.plan.layers import PlannedLayer, plan_over_ranks, planned_layers
from equivcheck.mutants.needs import is_eager
from equivcheck.mutants.rank import layout_of
from equivcheck.scenario import Attention, CrossEntropy, PlannedParallelism, Scenario, Split, Training
from equivcheck.training.layers.module import LayerModule
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup


def loss_of_labels(scenario: Scenario) -> CrossEntropy | None:
    """Return the scenario's cross-entropy loss. None for another loss, or if anything is compiled or traced."""
    loss = scenario.training.loss
    return loss if isinstance(loss, CrossEntropy) and is_eager(scenario) else None


def has_loss(condition: Callable[[CrossEntropy], bool] = lambda _loss: True) -> Callable[[Scenario], bool]:
    """Return a condition for scenarios: nothing is compiled or traced, and the cross-entropy loss meets `condition`."""

    def applies(scenario: Scenario) -> bool:
        loss = loss_of_labels(scenario)
        return loss is not None and condition(loss)

    return applies


def cross_entropy_of(setup: Setup) -> CrossEntropy:
    """Return the rank's loss, which must be a cross-entropy."""
    assert isinstance(setup.training.loss, CrossEntropy), "the mutant applies to cross-entropy only"
    return setup.training.loss


is_divided = has_loss(lambda loss: not loss.summed)
"""Returns whether nothing is compiled or traced, and the loss is divided by the number of labels."""


def learns_positions(scenario: Scenario) -> bool:
    """Whether the model has learned positions."""
    source = scenario.training.model.source
    return source is not None and source.learned_positions


def counts_labels(scenario: Scenario) -> bool:
    """Whether a rank or microbatch may have a larger fraction of the counted labels than of the rows."""
    weighs = has_loss(lambda loss: loss.class_weights or loss.row_weights)(scenario)
    return is_divided(scenario) and (ignores_labels(scenario) or weighs)


def ignores_labels(scenario: Scenario) -> bool:
    """Whether some labels may be ignored."""
    return has_loss(lambda loss: loss.ignored is not loss.ignored.NONE)(scenario)


def ignores_single_labels(scenario: Scenario) -> bool:
    """Whether some labels in a row may be ignored, so that rows and documents have different numbers of counted labels."""
    return has_loss(lambda loss: loss.ignored is loss.ignored.SOME)(scenario)


def attentions(scenario: Scenario) -> tuple[Attention, ...]:
    """Return the attention layers. Returns an empty tuple if anything is compiled or traced."""
    layers = scenario.training.model.layers if is_eager(scenario) else ()
    return tuple(layer for layer in layers if isinstance(layer, Attention))


def length_of(scenario: Scenario) -> int:
    """Return the sequence length. Returns 1 if rows are not sequences."""
    return scenario.training.model.length or 1


def plan_of(scenario: Scenario) -> PlannedParallelism | None:
    """Return the tensor parallelism if it has several ranks and nothing is compiled or traced. Otherwise return None."""
    return plan_over_ranks(scenario.layout) if is_eager(scenario) else None


def shards_vocabulary(scenario: Scenario) -> bool:
    """Whether the embedding is vocabulary-parallel."""
    plan = plan_of(scenario)
    return plan is not None and scenario.training.model.source is not None and plan.source is Split.ROWWISE


def head_split(scenario: Scenario) -> Split | None:
    """Return how the plan splits the head over several ranks.

    None if there is no head or no plan, or if anything is compiled or traced.
    """
    plan = plan_of(scenario)
    return None if plan is None or scenario.training.model.head is None else plan.head


Chosen = Callable[[PlannedLayer], bool]


def has_layer(chosen: Chosen) -> Callable[[Scenario], bool]:
    """Return a condition for scenarios: nothing is compiled or traced, and `chosen` accepts some layer."""
    return lambda scenario: is_eager(scenario) and any(map(chosen, planned_layers(scenario.training.model, scenario.layout)))


def layers_of(setup: Setup, chosen: Chosen) -> Iterator[tuple[LayerModule, PlannedLayer]]:
    """Yield this rank's layer modules, each with its layer's entry in the plan. `chosen` selects layers by this entry."""
    planned = planned_layers(setup.training.model, layout_of(setup))
    for layer, place in zip(setup.model.get_submodule("layers").children(), planned, strict=True):
        for module in layer.modules():
            if isinstance(module, LayerModule) and chosen(place):
                yield module, place


def held_modules(setup: Setup, name: str) -> Iterator[nn.Module]:
    """Yield the module with this name in the full model. Yields nothing if a pipeline gives it to another rank."""
    first, _, rest = name.partition(".")
    module = getattr(setup.model, first, None)
    # A rank that has the tied head but not the embedding has the shared weight in a plain `Module`, which it never calls.
    if isinstance(module, nn.Module) and type(module) is not nn.Module:
        yield module.get_submodule(rest)


def change_batches(setup: Setup, change: Callable[[Sequence[Batch]], Sequence[Batch]]) -> None:
    """Apply `change` to each step's microbatches, before ranks take their rows."""
    inner = setup.compute
    setup.compute = lambda setup, batches, index: inner(setup, change(batches), index)


def change_loss(setup: Setup, **changes: float | bool) -> None:
    """Change fields of the cross-entropy loss, but keep its divisor."""
    inner = setup.loss

    def loss(training: Training, outputs: torch.Tensor, targets: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
        other = replace(cross_entropy_of(setup), **changes)  # type: ignore[arg-type]
        return inner(replace(training, loss=other), outputs, targets, divisor)

    setup.loss = loss
