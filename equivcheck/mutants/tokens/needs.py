"""What mutants of token models need of a scenario."""

from __future__ import annotations

from equivcheck.mutants.needs import is_eager
from equivcheck.scenario import ActivationSharding, Attention, CrossEntropy, Scenario, Split, TensorParallel
from equivcheck.scenario.mesh import TP


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


def plan_of(scenario: Scenario) -> TensorParallel | None:
    """How tensor parallelism shares out a model over several ranks; None where it does not, or hooks are not called."""
    plans = scenario.layout.of(TensorParallel)
    return plans[0] if plans and scenario.layout.mesh.size(TP) > 1 and is_eager(scenario) else None


def shares_out_vocabulary(scenario: Scenario) -> bool:
    """Whether each rank has some rows of the embedding."""
    plan = plan_of(scenario)
    return plan is not None and scenario.training.model.source is not None and plan.source is Split.ROW


def has_parts(scenario: Scenario) -> bool:
    """Whether ranks have parts of each sequence between some layers, all of one length, of several positions together."""
    plan, ranks = plan_of(scenario), scenario.layout.mesh.size(TP)
    if plan is None or length_of(scenario) % ranks:
        return False
    outputs = [entry.output for entry in plan.plan]
    has_source = scenario.training.model.source is not None
    return ActivationSharding.ROWS in (*outputs, *((plan.source_output,) if has_source else ()))
