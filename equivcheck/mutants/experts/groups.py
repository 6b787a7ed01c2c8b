"""Wrong offsets for `grouped_mm`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from equivcheck.mutants.experts.sites import PLAIN_ROUTERS, experts_of, has_experts
from equivcheck.mutants.mutant import ONE_RANK, fault
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Experts
from equivcheck.training.setup import Setup


def _is_grouped(layer: Experts) -> bool:
    return layer.grouped


@fault(layouts=PLAIN_ROUTERS, applies=has_experts(_is_grouped), causes=(Cause.EXPERT_ROWS,), minimum=ONE_RANK)
def offsets_not_cumulative(setup: Setup) -> None:
    """Bug: `grouped_mm` gets the number of rows of each expert instead of the running total.

    It then leaves the memory of other rows as it was. Here they are zeros, so that the bug gives the same values in each run.
    """
    for module in experts_of(setup, _is_grouped):
        module.compute_units = partial(_with_sizes_as_offsets, module.compute_units)  # type: ignore[method-assign]


def _with_sizes_as_offsets(
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], rows: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    experts, start = torch.full((len(rows),), -1), 0
    for expert, end in enumerate(counts.tolist()):
        experts[start:end], start = expert, end
    order = experts.argsort(stable=True)[int((experts < 0).sum()) :]
    made = compute(rows[order], experts[order].bincount(minlength=len(counts)))
    return torch.zeros_like(rows).index_copy(0, order, made)
