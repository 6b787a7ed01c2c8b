"""What mutants of token models need of a scenario."""

from __future__ import annotations

from equivcheck.layouts.base.plan.layers import plan_over_ranks
from equivcheck.mutants.needs import is_eager
from equivcheck.scenario import Attention, CrossEntropy, PlannedParallelism, Scenario, Split


def loss_of_labels(scenario: Scenario) -> CrossEntropy | None:
    """The loss of a scenario in which hooks are called, if it is one of labels."""
    loss = scenario.training.loss
    return loss if isinstance(loss, CrossEntropy) and is_eager(scenario) else None


def counts_labels(scenario: Scenario) -> bool:
    """Whether parts of a step may have other shares of the labels that count than of the rows."""
    loss = loss_of_labels(scenario)
    return loss is not None and not loss.summed and (ignores_labels(scenario) or loss.class_weights)


def ignores_labels(scenario: Scenario) -> bool:
    """Whether some labels may not count."""
    loss = loss_of_labels(scenario)
    return loss is not None and loss.ignored is not loss.ignored.NONE


def attentions(scenario: Scenario) -> tuple[Attention, ...]:
    """The trained or frozen attention layers of a scenario in which hooks are called."""
    layers = scenario.training.model.layers if is_eager(scenario) else ()
    return tuple(layer for layer in layers if isinstance(layer, Attention))


def length_of(scenario: Scenario) -> int:
    """Positions of a sequence; 1 where rows are no sequences."""
    return scenario.training.model.length or 1


def plan_of(scenario: Scenario) -> PlannedParallelism | None:
    """How tensor parallelism shares out a model over several ranks; None where it does not, or hooks are not called."""
    return plan_over_ranks(scenario.layout) if is_eager(scenario) else None


def shares_out_vocabulary(scenario: Scenario) -> bool:
    """Whether each rank has some rows of the embedding."""
    plan = plan_of(scenario)
    return plan is not None and scenario.training.model.source is not None and plan.source is Split.ROW


def head_split(scenario: Scenario) -> Split | None:
    """How several ranks share out the head, where hooks are called; None where there is none to share out."""
    plan = plan_of(scenario)
    return None if plan is None or scenario.training.model.head is None else plan.head
