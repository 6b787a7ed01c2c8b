"""Data parallelism by DTensor propagation with wrong placements."""

from __future__ import annotations

from torch import nn

from equivcheck.layouts.base.distribute import distribute_batch
from equivcheck.mutants.mutant import fault
from equivcheck.mutants.needs import all_of, has_ranks, is_eager, layouts_with
from equivcheck.mutants.parameter_use import keep_partial_gradient, use_through
from equivcheck.mutants.rank import layout_of, mesh_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import SPMD, Scenario
from equivcheck.training.setup import Setup


def _is_propagated(setup: Setup) -> bool:
    """Whether this part of the training runs under `SPMD`; steps before a checkpoint may run under another layout."""
    return layout_of(setup).has(SPMD)


def _sums(scenario: Scenario) -> bool:
    """Whether repeated rows change the loss; a mean over repeated rows is the same mean."""
    return has_ranks(scenario) and not scenario.training.loss.is_mean


@fault(layouts=layouts_with(SPMD.tag), applies=_sums, causes=(Cause.SAME_ROWS, Cause.SUMMED, Cause.SCALED))
def full_batch_on_every_rank(setup: Setup) -> None:
    """Bug: every rank gets the full batch as if it were the rank's own rows."""
    if _is_propagated(setup):
        setup.take = lambda batch: distribute_batch(batch, mesh_of(setup))


@fault(layouts=layouts_with(SPMD.tag), applies=all_of(is_eager, has_ranks), causes=(Cause.NOT_REDUCED, Cause.RANKS_DISAGREE))
def partial_gradients_taken_as_reduced(setup: Setup) -> None:
    """Bug: partial gradients are used as if they had been summed over ranks."""
    if _is_propagated(setup):
        for module in setup.model.modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm, nn.RMSNorm)):
                use_through(module, keep_partial_gradient)
