"""Faults in the all-to-all that sends rows to experts and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial

import torch

from equivcheck.layouts.base.partition import chunk_sizes
from equivcheck.layouts.parallelisms.expert_parallel.exchange import Exchange
from equivcheck.mutants.experts.sites import experts_in, experts_of, has_experts
from equivcheck.mutants.experts.weights import Routed, reroute
from equivcheck.mutants.mutant import Minimum, fault
from equivcheck.mutants.needs import all_of, layouts_with
from equivcheck.mutants.rank import size_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import ExpertParallel, Experts, Scenario
from equivcheck.scenario.mesh import EP
from equivcheck.training.setup import Setup

EXPERT_PARALLEL = layouts_with(ExpertParallel.tag)


def _sends(chosen: Callable[[Experts, int], bool]) -> Callable[[Scenario], bool]:
    """Whether several expert-parallel ranks exchange rows for a layer that `chosen` accepts."""

    def applies(scenario: Scenario) -> bool:
        ranks = scenario.layout.mesh.size(EP)
        return ranks > 1 and any(chosen(layer, ranks) for layer in experts_in(scenario))

    return all_of(has_experts(), applies)


def has_equal_experts(scenario: Scenario) -> bool:
    """Whether all ranks hold equally many experts."""
    return all(layer.num_experts % scenario.layout.mesh.size(EP) == 0 for layer in experts_in(scenario))


def _is_any(_layer: Experts, _ranks: int) -> bool:
    return True


def _are_several(layer: Experts, ranks: int) -> bool:
    """Whether a rank holds several experts."""
    return layer.num_experts > ranks


def _leaves_one_out(layer: Experts, ranks: int) -> bool:
    return 0 in chunk_sizes(layer.num_experts, ranks)


def _exchange_by(setup: Setup, kind: type[Exchange]) -> None:
    for module in experts_of(setup):
        honest = module.by_units
        if isinstance(honest, Exchange):
            module.by_units = kind(**{field.name: getattr(honest, field.name) for field in fields(honest)})


class _AsComputed(Exchange):
    def put_back(self, made: torch.Tensor, order: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - of the base class
        return made


@fault(layouts=EXPERT_PARALLEL, applies=_sends(_are_several), causes=(Cause.EXPERT_ROWS,))
def rows_not_put_back_in_order(setup: Setup) -> None:
    """Bug: expert outputs are sent back in expert order instead of arrival order."""
    _exchange_by(setup, _AsComputed)


@fault(layouts=EXPERT_PARALLEL, applies=_sends(_are_several), causes=(Cause.EXPERT_ROWS,))
def rows_split_by_counts_in_another_order(setup: Setup) -> None:
    """Bug: each rank reads its row counts per expert in reverse order, so it splits rows wrongly."""
    for module in experts_of(setup):
        if module.by_units is not None:
            module.compute_units = partial(_reversed, module.compute_units)  # type: ignore[method-assign]


def _reversed(
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], rows: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    return compute(rows, counts.flip(0))


class _OfSent(Exchange):
    def counts_of_arrivals(self, counts: torch.Tensor) -> torch.Tensor:
        return counts.view(len(self.num_units), -1)


@fault(
    layouts=EXPERT_PARALLEL,
    applies=all_of(_sends(_is_any), has_equal_experts),
    causes=(Cause.CALLS_DIFFER, Cause.EXPERT_ROWS),
)
def counts_sent_taken_for_counts_received(setup: Setup) -> None:
    """Bug: each rank expects as many rows as it sends, because counts are not exchanged."""
    _exchange_by(setup, _OfSent)


class _Skipping(Exchange):
    def __call__(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return super().__call__(rows, counts) if self.num_units[self.rank] else rows * 0


@fault(
    layouts=EXPERT_PARALLEL,
    applies=_sends(_leaves_one_out),
    causes=(Cause.CALLS_DIFFER,),
    minimum=Minimum(ranks=3, because="there are at least two experts, and one rank must have none"),
)
def rank_without_experts_skips_exchange(setup: Setup) -> None:
    """Bug: a rank without experts skips the all-to-all."""
    _exchange_by(setup, _Skipping)


@fault(layouts=EXPERT_PARALLEL, applies=all_of(_sends(_is_any), has_equal_experts), causes=(Cause.EXPERT_CHOICE,))
def rows_sent_to_next_rank(setup: Setup) -> None:
    """Bug: rows are sent to the rank after the one with the chosen expert."""
    ranks = size_of(setup, EP)
    reroute(
        setup,
        lambda router, _inputs, routed: _rolled(routed, router.layer.num_experts // ranks),
    )


def _rolled(routed: Routed, shift: int) -> Routed:
    return routed[0].roll(shift, -1), routed[1].roll(shift, -1)
