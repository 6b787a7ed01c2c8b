"""Losses in chunks that are combined wrongly."""

from __future__ import annotations

import torch

from equivcheck.mutants.mutant import ONE_RANK, fault
from equivcheck.mutants.needs import is_eager
from equivcheck.mutants.rank import layout_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import FSDP2, Scenario, Training
from equivcheck.training.setup import Setup


def _has_chunks(scenario: Scenario) -> bool:
    """Whether a sum over several chunks is the loss."""
    several = any(fsdp.loss_chunks > 1 for fsdp in scenario.layout.of(FSDP2))
    return several and is_eager(scenario) and scenario.training.model.head is not None


@fault(layouts=("fsdp2",), applies=_has_chunks, causes=(Cause.SCALED,), minimum=ONE_RANK)
def chunks_averaged(setup: Setup) -> None:
    """Bug: the losses of chunks are averaged, although each one is already divided by the tokens of all chunks."""
    inner = setup.loss
    num_chunks = max((fsdp.loss_chunks for fsdp in layout_of(setup).of(FSDP2)), default=1)

    def loss(training: Training, hidden: torch.Tensor, targets: torch.Tensor, divisor: float) -> torch.Tensor:
        return inner(training, hidden, targets, divisor) / num_chunks

    setup.loss = loss
