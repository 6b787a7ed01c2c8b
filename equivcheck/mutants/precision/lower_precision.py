"""Rounding to bfloat16, and scaled losses whose gradients are not unscaled."""

from __future__ import annotations

from functools import partial

import torch
from torch.optim import Optimizer

from equivcheck.layouts.composition.registry import rounding_of
from equivcheck.mutants.comm_hooks import averaged_in, reduce_by
from equivcheck.mutants.mutant import ONE_RANK, TWO_RANKS, fault
from equivcheck.mutants.needs import EVERYWHERE, all_of, is_eager, is_wrapped, reduces_by_hooks
from equivcheck.mutants.rank import around_update, scale, stepped
from equivcheck.mutants.torch_private import ReduceInBfloat16, scatter_by
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import FSDP2, ElementType, Layout, Scenario
from equivcheck.scenario.mesh import DP, SHARD
from equivcheck.training.setup import Setup

LOSS_FACTOR = 1024.0
"""Loss scale for float16 gradients. A power of two does not round."""
_NARROW = (ElementType.BFLOAT16, ElementType.FLOAT16)


def _reduces_wide(scenario: Scenario) -> bool:
    """Whether gradients are reduced in more digits than bfloat16 has, through a replaceable hook."""
    layout = scenario.layout
    rounding = rounding_of(layout, scenario.training.precision)
    is_wide = rounding is None or rounding.reduce not in _NARROW
    return is_wide and (_scatters(layout) or (is_wrapped(layout) and reduces_by_hooks(scenario)))


def _scatters(layout: Layout) -> bool:
    return layout.has(FSDP2) and layout.mesh.size(DP, SHARD) > 1


def _clips(scenario: Scenario) -> bool:
    return scenario.training.clipping is not None


@fault(
    layouts=("fsdp2", "ddp", "replicate", "fsdp2 x tensor_parallel", "ddp x tensor_parallel", "replicate x tensor_parallel"),
    applies=all_of(is_eager, _reduces_wide),
    causes=(Cause.REDUCED_IN_LOWER_PRECISION,),
    minimum=TWO_RANKS,
)
def reduced_in_bfloat16(setup: Setup) -> None:
    """Gradients are reduced in bfloat16 instead of the configured type."""
    reduce_by(setup, partial(averaged_in, torch.bfloat16))
    scatter_by(setup, ReduceInBfloat16)


@fault(layouts=EVERYWHERE, causes=(Cause.MASTERS_IN_LOWER_PRECISION,), minimum=ONE_RANK)
def masters_in_bfloat16(setup: Setup) -> None:
    """Parameters are rounded to bfloat16 between steps."""

    def round_parameters(optimizer: Optimizer) -> None:
        with torch.no_grad():
            for parameter in stepped(optimizer):
                parameter.copy_(parameter.to(torch.bfloat16))

    around_update(setup, after=round_parameters)


@fault(layouts=EVERYWHERE, causes=(Cause.NOT_UNSCALED, Cause.SCALED), minimum=ONE_RANK)
def never_unscaled(setup: Setup) -> None:
    """Gradients are never divided by the loss scale."""
    setup.before_update.append(lambda optimizer, _step: scale(optimizer, LOSS_FACTOR))


@fault(layouts=EVERYWHERE, applies=_clips, causes=(Cause.NOT_UNSCALED, Cause.SCALED), minimum=ONE_RANK)
def unscaled_after_clipping(setup: Setup) -> None:
    """Gradients are unscaled after clipping, so clipping sees scaled gradients."""
    never_unscaled(setup)
    around_update(setup, before=lambda optimizer: scale(optimizer, 1.0 / LOSS_FACTOR))
