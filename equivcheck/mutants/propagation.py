"""Data parallelism by DTensor propagation, told something wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivcheck.mutants.mutant import Family, Minimum, Mutant
from equivcheck.mutants.needs import is_eager
from equivcheck.mutants.places import both, within
from equivcheck.scenario import SPMD, Scenario
from equivcheck.verdict.cause import Cause

if TYPE_CHECKING:
    from equivcheck.train.setup import Setup


def give_whole_batch(setup: Setup) -> None:
    """Give every rank the whole batch as if it were its own part."""
    from equivcheck.layouts.distribute import distribute_batch

    mesh = setup.mesh
    if _is_propagated(setup) and mesh is not None:
        setup.take = lambda batch: distribute_batch(batch, mesh)


def leave_gradients_partial(setup: Setup) -> None:
    """Leave every gradient what this rank's rows contribute."""
    from torch import nn

    from equivcheck.mutants.parameters import unreduced, use_through

    if _is_propagated(setup):
        for module in setup.model.modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm, nn.RMSNorm)):
                use_through(module, unreduced)


def _is_propagated(setup: Setup) -> bool:
    """Whether the layout of this part of the training is what the mutant is about; a hand-over may start with another."""
    assert setup.layout is not None, "a mutant is planted into a rank"
    return setup.layout.has(SPMD)


def _has_ranks(scenario: Scenario) -> bool:
    return scenario.layout.mesh.num_ranks > 1


def _sums(scenario: Scenario) -> bool:
    """Whether rows count as often as they are given; a mean over rows that are all there several times is the mean."""
    return _has_ranks(scenario) and not scenario.training.loss.is_mean


PROPAGATION: tuple[Mutant, ...] = (
    Mutant(
        name="whole_batch_on_every_rank",
        wrong="Every rank is given the whole batch as if it were its own rows.",
        family=Family.TENSOR_PARALLEL,
        layouts=within(SPMD.tag),
        applies=_sums,
        plant=give_whole_batch,
        causes=(Cause.SAME_ROWS, Cause.SUMMED, Cause.SCALED),
        minimum=Minimum(because="the rows of one rank are the whole batch"),
    ),
    Mutant(
        name="partial_gradients_taken_for_whole",
        wrong="Gradients that are pending a sum over ranks are taken for the sum.",
        family=Family.TENSOR_PARALLEL,
        layouts=within(SPMD.tag),
        applies=both(is_eager, _has_ranks),
        plant=leave_gradients_partial,
        causes=(Cause.NOT_REDUCED, Cause.RANKS_DISAGREE),
        minimum=Minimum(because="over one rank there is nothing to sum"),
    ),
)
"""Every such mutant."""
