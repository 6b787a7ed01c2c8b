"""Mistakes in the order of activation shards or pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations, islice, product

import torch

from equivcheck.diagnosis.catalogue.counterfactual import Change, all_then_each, on_emulated_ranks, on_one_device
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.layouts.parallelisms.pipeline.stages import layers_of_stages, stages_of_rank
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Layer, Layout, Pipeline, PlannedParallelism
from equivcheck.scenario.mesh import PP, TP
from equivcheck.training.model import MLP
from equivcheck.training.setup import Setup

Reorder = Callable[[torch.Tensor], torch.Tensor]
"""Function to reorder an activation's shards."""
Pair = tuple[int, int]
"""Two pipeline stages."""
MOST_SWAPS = 64
"""Number of candidates with swapped stages on several ranks. Many stages on many ranks would have thousands."""


def wrong_orders(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes: shards of inputs or outputs are gathered in the wrong order, or pipeline stages are swapped."""
    layout = diverged.layout
    if not diverged.can_be_emulated:
        return
    if layout.mesh.size(TP) > 1 and layout.has(PlannedParallelism):
        yield from _shards(diverged, layout)
    for pipeline in layout.of(Pipeline):
        yield from _stages(diverged, pipeline)


def _shards(diverged: DivergedRun, layout: Layout) -> Iterator[Mistake]:
    ranks = layout.mesh.size(TP)
    linears = [index for index, layer in enumerate(diverged.training.model.layers) if isinstance(layer, Layer)]
    for layers in all_then_each(linears):
        who = "every layer" if len(layers) > 1 else f"`layers.{layers[0]}.linear`"
        for outputs in (True, False):
            for dim in (-1, 0):
                what = f"the {'features' if dim else 'rows'} of the {'output' if outputs else 'input'} of {who}"
                words = f"{what} are gathered from {diverged.ranks_text((TP,))} in the wrong order"
                for reorder in _orders(ranks, dim):
                    yield _everywhere(diverged, words, partial(_reordering, layers=layers, reorder=reorder, outputs=outputs))


def _orders(ranks: int, dim: int) -> Iterator[Reorder]:
    """Yield functions to shift shards by one rank in either direction, or to reverse them."""
    for shift in dict.fromkeys((1, ranks - 1)):
        yield partial(_rolled, ranks=ranks, dim=dim, shift=shift)
    yield lambda values: torch.cat(values.chunk(ranks, dim)[::-1], dim)


def _rolled(values: torch.Tensor, *, ranks: int, dim: int, shift: int) -> torch.Tensor:
    return values.roll(shift * -(-values.shape[dim] // ranks), dim)


def _everywhere(diverged: DivergedRun, words: str, change: Change) -> Mistake:
    """Build a mistake for all ranks. One device is enough unless ranks have different rows."""
    quick = on_one_device(Cause.PERMUTED, words, change)
    return quick if diverged.layout.num_data_ranks == 1 else on_emulated_ranks(Cause.PERMUTED, words, quick.change)


def _reordering(setup: Setup, layers: tuple[int, ...], reorder: Reorder, *, outputs: bool) -> None:
    for layer in layers:
        linear = setup.model.get_submodule(f"layers.{layer}.linear")
        if outputs:
            linear.register_forward_hook(lambda _module, _inputs, values: reorder(values))
        else:
            linear.register_forward_pre_hook(lambda _module, inputs: (reorder(inputs[0]), *inputs[1:]))


def _stages(diverged: DivergedRun, pipeline: Pipeline) -> Iterator[Mistake]:
    layers = layers_of_stages(pipeline, diverged.layout.mesh.size(PP), len(diverged.training.model.layers))
    pairs = [(pair,) for pair in combinations(range(len(layers)), 2)]
    for swapped in (*pairs, *islice(_pairs_on_several_ranks(diverged, pipeline, layers), MOST_SWAPS)):
        order = list(layers)
        for one, other in swapped:
            order[one], order[other] = order[other], order[one]
        named = ", ".join(f"{one} and {other}" for one, other in swapped)
        words = f"stages {named} of the pipeline are swapped"
        yield _everywhere(diverged, words, partial(_reorder_layers, order=[layer for stage in order for layer in stage]))


def _pairs_on_several_ranks(diverged: DivergedRun, pipeline: Pipeline, layers: Sequence[range]) -> Iterator[Sequence[Pair]]:
    """Yield pairs of stages that get and return equally many features: one pair on each of several ranks."""
    model, ranks = diverged.training.model, diverged.layout.mesh.size(PP)

    def features(stage: int) -> tuple[int, int]:
        return model.in_features(layers[stage].start), model.in_features(layers[stage].stop)

    choices: list[list[Pair | None]] = []
    for rank in range(ranks):
        pairs = combinations(stages_of_rank(pipeline, rank, ranks), 2)
        choices.append([*(pair for pair in pairs if features(pair[0]) == features(pair[1])), None])
    for chosen in product(*choices):
        swapped = [pair for pair in chosen if pair is not None]
        if len(swapped) > 1:
            yield swapped


def _reorder_layers(setup: Setup, order: list[int]) -> None:
    """Let each layer compute another layer's forward, with this layer's dropout mask; parameter names stay."""
    model = setup.model
    assert isinstance(model, MLP), "the model is a stack"
    blocks, through = list(model.layers), model.through_layers
    forwards = [block.forward for block in blocks]
    for block, source in zip(blocks, order, strict=True):
        block.forward = forwards[source]

    def through_layers(inputs: torch.Tensor, masks: tuple[torch.Tensor | None, ...], step: int) -> torch.Tensor:
        return through(inputs, tuple(masks[source] for source in order), step)

    model.through_layers = through_layers  # type: ignore[method-assign]
