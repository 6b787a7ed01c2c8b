"""Wrong labels, and losses with a missing term."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from equivcheck.layouts.base.plan.rules import inputs_of
from equivcheck.mutants.mutant import ONE_RANK, fault
from equivcheck.mutants.needs import DATA_PARALLEL, EVERYWHERE, all_of, has_data_ranks
from equivcheck.mutants.rank import data_ranks, size_of
from equivcheck.mutants.tensor_parallel.plan import TENSOR_PARALLEL
from equivcheck.mutants.tokens.needs import (
    change_batches,
    change_loss,
    cross_entropy_of,
    has_loss,
    ignores_labels,
    length_of,
    plan_of,
)
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import ActivationSharding, Scenario
from equivcheck.scenario.mesh import TP
from equivcheck.training.labels import IGNORED, change_labels
from equivcheck.training.setup import Setup

Move = Callable[[torch.Tensor], torch.Tensor]


_has_z_loss = has_loss(lambda loss: loss.z_loss > 0.0)


def _labels_parts(scenario: Scenario) -> bool:
    """Whether sequences are sharded over ranks and each position has a label."""
    plan, model = plan_of(scenario), scenario.training.model
    by_rows = plan is not None and ActivationSharding.ROWS in inputs_of(model, plan)
    return by_rows and has_loss()(scenario) and length_of(scenario) > 1


def _labels_long_parts(scenario: Scenario) -> bool:
    return _labels_parts(scenario) and length_of(scenario) > scenario.layout.mesh.size(TP)


def _relabel(setup: Setup, change: Move) -> None:
    change_batches(
        setup,
        lambda batches: [replace(batch, targets=change_labels(batch.targets, change)) for batch in batches],
    )


def _relabel_parts(setup: Setup, change: Move) -> None:
    """Change labels separately in each rank's sequence shard."""
    ranks, dim = size_of(setup, TP), 1 - setup.training.data.batch_dim
    if ranks > 1:
        _relabel(
            setup,
            lambda labels: torch.cat([change(part.movedim(dim, -1)) for part in labels.chunk(ranks, dim)], -1).movedim(-1, dim),
        )


@fault(layouts=EVERYWHERE, applies=ignores_labels, causes=(Cause.ANOTHER_LABEL,), minimum=ONE_RANK)
def ignored_label_replaced(setup: Setup) -> None:
    """Bug: ignored labels count as token 0."""
    _relabel(setup, lambda labels: labels.masked_fill(labels == IGNORED, 0))


@fault(layouts=TENSOR_PARALLEL, applies=_labels_long_parts, causes=(Cause.ANOTHER_LABEL,))
def labels_shifted_within_parts(setup: Setup) -> None:
    """Bug: labels are shifted within each sequence shard, so they wrap around at its end."""
    _relabel_parts(setup, lambda labels: labels.roll(-1, -1))


@fault(layouts=TENSOR_PARALLEL, applies=_labels_parts, causes=(Cause.ANOTHER_LABEL,))
def label_lost_at_boundaries(setup: Setup) -> None:
    """Bug: the last label in each sequence shard is ignored."""
    _relabel_parts(setup, _without_last)


def _without_last(labels: torch.Tensor) -> torch.Tensor:
    return torch.cat((labels[..., :-1], torch.full_like(labels[..., -1:], IGNORED)), -1)


@fault(layouts=DATA_PARALLEL, applies=all_of(has_data_ranks, _has_z_loss), causes=(Cause.ANOTHER_LOSS,))
def z_loss_summed_over_ranks(setup: Setup) -> None:
    """Bug: the z-loss is summed over data-parallel ranks, although the cross-entropy is averaged."""
    change_loss(setup, z_loss=cross_entropy_of(setup).z_loss * data_ranks(setup))


@fault(layouts=EVERYWHERE, applies=_has_z_loss, causes=(Cause.ANOTHER_LOSS,), minimum=ONE_RANK)
def z_loss_lost(setup: Setup) -> None:
    """Bug: the loss has no z-loss."""
    change_loss(setup, z_loss=0.0)


@fault(
    layouts=EVERYWHERE, applies=has_loss(lambda loss: loss.label_smoothing > 0.0), causes=(Cause.ANOTHER_LOSS,), minimum=ONE_RANK
)
def label_smoothing_lost(setup: Setup) -> None:
    """Bug: labels are not smoothed, as if a vocabulary-parallel loss lacked `label_smoothing`."""
    change_loss(setup, label_smoothing=0.0)


@fault(layouts=EVERYWHERE, applies=has_loss(lambda loss: loss.class_weights), causes=(Cause.ANOTHER_LOSS,), minimum=ONE_RANK)
def class_weights_lost(setup: Setup) -> None:
    """Bug: the loss has no class weights."""
    change_loss(setup, class_weights=False)
