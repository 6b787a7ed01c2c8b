"""Heads that are tied to the embedding in the reference, but not on ranks."""

from __future__ import annotations

import torch

from equivcheck.mutants.mutant import ONE_RANK, TWO_STEPS, fault
from equivcheck.mutants.needs import EVERYWHERE, all_of, is_eager, runs_steps
from equivcheck.mutants.parameter_use import FirstValues, Through, use_through, use_weight_through
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Scenario
from equivcheck.training.setup import Setup


def _ties_trained(scenario: Scenario) -> bool:
    model = scenario.training.model
    return model.head is not None and model.head.tied and model.source is not None and not model.source.frozen


@fault(layouts=EVERYWHERE, applies=all_of(is_eager, _ties_trained), causes=(Cause.UNTIED,), minimum=ONE_RANK)
def tied_head_without_gradient(setup: Setup) -> None:
    """A tied head adds nothing to the embedding's gradient."""
    _use_head_through(setup, torch.Tensor.detach)


@fault(layouts=EVERYWHERE, applies=all_of(is_eager, _ties_trained), causes=(Cause.UNTIED,), minimum=ONE_RANK)
def tied_embedding_without_gradient(setup: Setup) -> None:
    """A tied embedding gets its gradient from the head only."""
    embedding = getattr(setup.model, "embedding", None)
    if embedding is not None:
        use_through(embedding, torch.Tensor.detach)


@fault(
    layouts=EVERYWHERE, applies=all_of(is_eager, _ties_trained, runs_steps), causes=(Cause.UNTIED, Cause.STALE), minimum=TWO_STEPS
)
def tied_head_left_behind(setup: Setup) -> None:
    """A tied head keeps the embedding's initial weight; gradients still go to the embedding."""
    _use_head_through(setup, FirstValues())


def _use_head_through(setup: Setup, through: Through) -> None:
    head = getattr(setup.model, "head", None)
    if head is not None:
        use_weight_through(head.linear, through)
