"""Mistakes in the load-balancing loss: wrong counts, a wrong weight, or no gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from equivcheck.diagnosis.catalogue.context_parallel.shards import sequence_shards
from equivcheck.diagnosis.catalogue.counterfactual import changing_layers, on_one_device
from equivcheck.diagnosis.catalogue.experts.routing import choices, layers_of_experts
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.evidence import axis_combinations
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.diagnosis.words import layers_by_name
from equivcheck.layouts.parallelisms.pipeline.stages import balanced_before_last_stage
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Experts
from equivcheck.scenario.mesh import CP
from equivcheck.training.balance import Counts, is_per_sequence
from equivcheck.training.layers.experts.module import ExpertsModule
from equivcheck.training.layers.module import RoutingLoad
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup

LoadOf = Callable[[torch.Tensor, torch.Tensor], RoutingLoad]
"""Function to compute a layer's load from scores and choices, (rows, ..., experts)."""
Wrong = Callable[[LoadOf, torch.Tensor, torch.Tensor], RoutingLoad]
"""Function to compute a wrong load. Its first argument computes the right load."""


def wrong_balances(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes in the load-balancing loss. Each is tried in all layers with such a loss, then in each layer alone."""
    if diverged.rounding is not None or not diverged.training.model.balances:
        return
    yield from _of_earlier_stages(diverged)
    yield from _of_own_counts(diverged)
    for layers in choices(diverged, _balances):
        for words, wrong in _ways(diverged):
            sentence = f"the load-balancing loss of {layers_by_name(layers)} {words}"
            change = changing_layers(layers, ExpertsModule, partial(_changed, wrong=wrong))
            yield on_one_device(Cause.EXPERT_BALANCE, sentence, change)
    yield from _of_sequences(diverged)
    if diverged.training.model.balances_microbatches and len(diverged.training.data.microbatches) > 1:
        words = "load-balancing losses use expert counts since the step began, not of one microbatch"
        yield on_one_device(Cause.EXPERT_BALANCE, words, _counting_on)


def _balances(layer: Experts) -> bool:
    return layer.balance > 0


def _balances_sequences(layer: Experts) -> bool:
    return layer.balance_per_sequence


def _balances_microbatches(layer: Experts) -> bool:
    return layer.balance > 0 and not layer.balance_per_sequence


def _of_own_counts(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes: some ranks do not sum counts. Only context-parallel ranks sum counts in single sequences."""
    for axes in axis_combinations((*diverged.data_axes, *((CP,) if sequence_shards(diverged) else ()))):
        words = f"uses each rank's own expert counts, not their sum over {diverged.ranks_text(axes)}"
        wrong = partial(_by_parts, parts_of=_parts(diverged, axes))
        for layers in choices(diverged, _balances if CP in axes else _balances_microbatches):
            if axes != (CP,) and all(diverged.training.model.layers[layer].balance_per_sequence for layer in layers):
                continue
            sentence = f"the load-balancing loss of {layers_by_name(layers)} {words}"
            yield on_one_device(
                Cause.EXPERT_BALANCE, sentence, changing_layers(layers, ExpertsModule, partial(_changed, wrong=wrong))
            )


def _of_earlier_stages(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield a mistake in a pipeline: only the last stage, which computes the main loss, adds load-balancing losses."""
    earlier = balanced_before_last_stage(diverged.training.model, diverged.layout)
    if layers := tuple(layer for layer in layers_of_experts(diverged) if layer in earlier):
        sentence = (
            f"the load-balancing loss of {layers_by_name(layers)} is not added, as if only the last stage added such losses"
        )
        change = changing_layers(layers, ExpertsModule, partial(_changed, wrong=partial(_times, factor=0)))
        yield on_one_device(Cause.EXPERT_BALANCE, sentence, change)


def _of_sequences(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes in losses that are computed for each sequence."""
    for layers in choices(diverged, _balances_sequences):
        sentence = f"the load-balancing loss of {layers_by_name(layers)} is computed over a microbatch, not for each sequence"
        change = changing_layers(layers, ExpertsModule, partial(_changed, wrong=_over_microbatch))
        yield on_one_device(Cause.EXPERT_BALANCE, sentence, change)


def _over_microbatch(load_of: LoadOf, scores: torch.Tensor, chosen: torch.Tensor) -> RoutingLoad:
    load = load_of(scores, chosen)
    return load._replace(counts=load.counts.sum(0), shares=load.shares.sum(0))


def _ways(diverged: DivergedRun) -> Iterator[tuple[str, Wrong]]:
    yield "has no gradient", _detached
    yield "is added twice", partial(_times, factor=2)
    for number, words in ((number, words) for number, words in diverged.counts.items() if number > 1):
        yield f"is multiplied by {number}, the number of {words}", partial(_times, factor=number)
        yield f"is divided by {number}, the number of {words}", partial(_times, factor=1 / number)
    yield "is not added", partial(_times, factor=0)
    if (chunks := diverged.layout.num_chunks) > 1:
        yield f"has a gradient multiplied by {chunks}, the number of chunks", partial(_times_in_backward, factor=chunks)


def _changed(module: ExpertsModule, *, wrong: Wrong) -> None:
    module.router.load_of = partial(wrong, module.router.load_of)  # type: ignore[method-assign]


def _detached(load_of: LoadOf, scores: torch.Tensor, chosen: torch.Tensor) -> RoutingLoad:
    load = load_of(scores, chosen)
    return load._replace(shares=load.shares.detach())


def _times(load_of: LoadOf, scores: torch.Tensor, chosen: torch.Tensor, *, factor: float) -> RoutingLoad:
    load = load_of(scores, chosen)
    return load._replace(balance=load.balance * factor)


def _times_in_backward(load_of: LoadOf, scores: torch.Tensor, chosen: torch.Tensor, *, factor: float) -> RoutingLoad:
    load = load_of(scores, chosen)
    fixed = load.shares.detach()
    return load._replace(shares=fixed + factor * (load.shares - fixed))


def _by_parts(
    load_of: LoadOf, scores: torch.Tensor, chosen: torch.Tensor, *, parts_of: Callable[[torch.Tensor], torch.Tensor]
) -> RoutingLoad:
    """Return each part's load, so that all parts' losses are added up.

    If each sequence has its own loss, the parts belong to single sequences.
    """
    of_position, rows = parts_of(scores), len(scores)
    if is_per_sequence(load_of(scores, chosen).counts):
        of_position = of_position * rows + torch.arange(rows).view(-1, *(1,) * (of_position.ndim - 1))
    masks = (of_position == part for part in sorted(set(of_position.flatten().tolist())))
    loads = [load_of(scores[mask], chosen[mask]) for mask in masks]
    counts, shares = ([_over_positions(load.counts) for load in loads], [_over_positions(load.shares) for load in loads])
    return loads[0]._replace(counts=torch.stack(counts), shares=torch.stack(shares))


def _over_positions(values: torch.Tensor) -> torch.Tensor:
    """Sum values (..., experts) over all dims except the last."""
    return values.reshape(-1, values.shape[-1]).sum(0)


def _parts(diverged: DivergedRun, axes: tuple[str, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that gives each position's part along some axes, for scores (rows, ..., experts)."""
    sizes = {name: diverged.mesh.size(name) for name in diverged.data_axes}
    shards = sequence_shards(diverged)

    def parts_of(scores: torch.Tensor) -> torch.Tensor:
        rows = scores.shape[0]
        block = torch.arange(rows) // (rows // diverged.mesh.size(*diverged.data_axes))
        found = torch.zeros(scores.shape[:-1], dtype=torch.int64)
        for name, index in zip(sizes, torch.unravel_index(block, tuple(sizes.values())) if sizes else (), strict=True):
            if name in axes:
                found = found * sizes[name] + index.view(-1, *(1,) * (found.ndim - 1))
        return found * shards.size + shards.owner if shards is not None and CP in axes else found

    return parts_of


def _counting_on(setup: Setup) -> None:
    inner, kept = setup.full_counts, list[torch.Tensor]()

    def full_counts(model: nn.Module, counts: Counts, batch: Batch, index: int) -> Counts:
        found = inner(model, counts, batch, index)
        before = kept or [torch.zeros_like(each) for each in found]
        kept[:] = [each if is_per_sequence(each) else old + each for old, each in zip(before, found, strict=True)]
        return list(kept)

    setup.full_counts = full_counts
    setup.before_step.append(lambda _optimizer, _index: kept.clear())
