"""Mistakes in expert parallelism: rows mixed up in the all-to-all, and gradients reduced over other experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from equivcheck.diagnosis.catalogue.counterfactual import (
    all_then_each,
    changing_gradients,
    changing_layers,
    multiplying_gradients,
    on_one_device,
)
from equivcheck.diagnosis.catalogue.experts.groups import NOT_CUMULATIVE, experts_by_sizes, is_grouped
from equivcheck.diagnosis.catalogue.experts.routing import layers_of_experts
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.diagnosis.words import layers_by_name
from equivcheck.layouts.base.partition import chunk_size
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import ExpertParallel
from equivcheck.scenario.mesh import EP
from equivcheck.training.layers.experts.module import ExpertsModule
from equivcheck.training.layers.parameters import parameters_of


def wrong_exchanges(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes in the all-to-all that sends rows to experts, and in the reduction of experts' gradients."""
    ranks, layers = diverged.mesh.size(EP), layers_of_experts(diverged)
    if ranks == 1 or not layers or not diverged.layout.has(ExpertParallel) or diverged.rounding is not None:
        return
    yield from _mixed_up(diverged, ranks)
    yield from _divided_otherwise(diverged, ranks)
    if all(layer.num_experts % ranks == 0 for layer in layers.values()):
        yield from _of_others(diverged, ranks)


def _mixed_up(diverged: DivergedRun, ranks: int) -> Iterator[Mistake]:
    if diverged.data_axes[-1:] != (EP,):
        return
    blocks, where = diverged.mesh.size(*diverged.data_axes), diverged.ranks_text((EP,))
    layers = layers_of_experts(diverged)
    for mixed, words in (
        (_sent_as_computed, "expert outputs are returned in expert order, but read in the order of source ranks"),
        (_split_in_reverse, "received rows are split by the counts per expert in reverse order"),
        (_split_as_sent, "rows received from a rank are split by the counts of rows sent to it"),
    ):
        exchange = _Exchange(mixed=mixed, blocks=blocks, ranks=ranks)
        change = changing_layers(tuple(layers), ExpertsModule, partial(_computing, exchange=exchange))
        yield on_one_device(Cause.EXPERT_ROWS, f"in the all-to-all over {where} {words}", change)
    exchange = _Exchange(mixed=_grouped_by_sizes, blocks=blocks, ranks=ranks)
    grouped = [index for index, layer in layers.items() if is_grouped(layer)]
    for indices in all_then_each(grouped):
        change = changing_layers(indices, ExpertsModule, partial(_computing, exchange=exchange))
        yield on_one_device(Cause.EXPERT_ROWS, f"in {layers_by_name(indices)} {NOT_CUMULATIVE}", change)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Sent:
    """Rows routed to experts, sorted by expert, then by position."""

    experts: torch.Tensor
    """Expert per row."""
    block: torch.Tensor
    """Source rank per row."""
    target: torch.Tensor
    """Destination rank per row."""
    num_experts: int
    """Experts in total."""
    own: int
    """Maximum number of experts on a rank."""

    @property
    def by_expert(self) -> torch.Tensor:
        """Indices that sort rows by destination rank, then by expert: the order in which destination ranks compute rows."""
        return self.target.argsort(stable=True)

    @property
    def by_source(self) -> torch.Tensor:
        """Indices that sort rows by destination rank, then by the rank that sends them: the order in which rows arrive."""
        order = self.block.argsort(stable=True)
        return order[self.target[order].argsort(stable=True)]


Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function to compute the expert outputs from rows and their experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """A fault in the all-to-all."""

    mixed: Callable[[Compute, torch.Tensor, _Sent], torch.Tensor]
    """Function to compute the experts' outputs with the fault."""
    blocks: int
    """Ranks with different rows."""
    ranks: int
    """Ranks among which the experts are sharded."""


def _sent_as_computed(compute: Compute, rows: torch.Tensor, sent: _Sent) -> torch.Tensor:
    made = compute(rows, sent.experts)
    return torch.zeros_like(made).index_copy(0, sent.by_source, made[sent.by_expert])


def _split_in_reverse(compute: Compute, rows: torch.Tensor, sent: _Sent) -> torch.Tensor:
    used = torch.empty_like(sent.experts)
    for target in range(int(sent.target.max()) + 1 if len(rows) else 0):
        order = sent.by_expert[sent.target[sent.by_expert] == target]
        if len(order):
            first = int(sent.experts[order[0]]) // sent.own * sent.own
            experts = torch.arange(first, min(first + sent.own, sent.num_experts))
            counts = (sent.experts[order] == experts[:, None]).sum(1)
            used[order] = experts.repeat_interleave(counts.flip(0))
    return compute(rows, used)


def _grouped_by_sizes(compute: Compute, rows: torch.Tensor, sent: _Sent) -> torch.Tensor:
    used = torch.empty_like(sent.experts)
    for target in range(int(sent.target.max()) + 1 if len(rows) else 0):
        order = sent.by_expert[sent.target[sent.by_expert] == target]
        if len(order):
            first = int(sent.experts[order[0]]) // sent.own * sent.own
            own = experts_by_sizes((sent.experts[order] - first).bincount(minlength=sent.own))
            used[order] = torch.where(own < 0, -1, own + first)
    return compute(rows, used)


def _split_as_sent(compute: Compute, rows: torch.Tensor, sent: _Sent) -> torch.Tensor:
    """Bug: each rank splits received rows by the numbers that it sent. Torch refuses unequal numbers of rows."""
    used = torch.empty_like(sent.experts)
    ranks, own = -(-sent.num_experts // sent.own), torch.arange(sent.own)
    for target in range(int(sent.target.max()) + 1 if len(rows) else 0):
        index, counted = target % ranks, sent.experts[sent.block == target]
        counts = (counted == torch.arange(sent.num_experts)[:, None]).sum(1).view(ranks, sent.own)
        order = sent.by_source[sent.target[sent.by_source] == target]
        used[order] = torch.cat([(own + index * sent.own).repeat_interleave(each) for each in counts])
    return compute(rows, used)


def _computing(module: ExpertsModule, *, exchange: _Exchange) -> None:
    module.routed = module.dispatched = partial(_dispatched, module, exchange)  # type: ignore[method-assign]


def _dispatched(
    module: ExpertsModule, exchange: _Exchange, values: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    flat, chosen, weights = (each.flatten(0, -2) for each in (values, chosen, weights))
    experts, places = chosen.T.nonzero(as_tuple=True)
    block, own = places // (len(flat) // exchange.blocks), chunk_size(module.layer.num_experts, exchange.ranks)
    target = block // exchange.ranks * exchange.ranks + experts // own
    sent = _Sent(experts=experts, block=block, target=target, num_experts=module.layer.num_experts, own=own)
    weight, before = weights[places, experts, None], module.layer.weighs_input
    rows = flat[places] * weight if before else flat[places]
    made = exchange.mixed(partial(_computed, module), rows, sent)
    return torch.zeros_like(flat).index_add(0, places, made if before else made * weight).view(values.shape)


def _computed(module: ExpertsModule, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(rows)
    for expert in range(module.layer.num_experts):
        chosen = (experts == expert).nonzero().squeeze(-1)
        made = made.index_add(0, chosen, module.experts(rows[chosen], expert))
    return made


def _names_of_experts(diverged: DivergedRun) -> set[str]:
    return {each.full_name for each in parameters_of(diverged.training.model) if each.expert_dim == 0}


def _divided_otherwise(diverged: DivergedRun, ranks: int) -> Iterator[Mistake]:
    """Yield divisors for expert gradients only, because experts have a divisor of their own."""
    where = diverged.ranks_text((EP,))
    for cause, factor, words in (
        (Cause.SUMMED, ranks, f"expert gradients are the sum over {where}, not the mean"),
        (Cause.AVERAGED_TWICE, 1 / ranks, f"expert gradients are averaged twice over {where}"),
    ):
        yield on_one_device(cause, words, multiplying_gradients(factor, _names_of_experts(diverged)))


def _of_others(diverged: DivergedRun, ranks: int) -> Iterator[Mistake]:
    names, where = _names_of_experts(diverged), diverged.ranks_text((EP,))
    for factor, how in ((1.0, "summed"), (1 / ranks, "averaged")):
        words = f"expert gradients are {how} over {where}, although each rank holds different experts"
        change = changing_gradients(partial(_mix, ranks=ranks, factor=factor), names)
        yield on_one_device(Cause.REDUCED_OVER_OTHERS, words, change)


def _mix(_name: str, gradient: torch.Tensor, *, ranks: int, factor: float) -> None:
    parts = gradient.view(ranks, -1, *gradient.shape[1:])
    parts.copy_(parts.sum(0, keepdim=True).mul(factor).expand_as(parts))
