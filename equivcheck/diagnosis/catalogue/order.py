"""Mistakes in the order of activation shards or pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations

import torch
from torch import nn

from equivcheck.diagnosis.catalogue.counterfactual import Change, all_then_each, on_emulated_ranks, on_one_device
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.layouts.parallelisms.pipeline.stages import layers_of_stages
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Layer, Layout, Pipeline, PlannedParallelism
from equivcheck.scenario.mesh import PP, TP
from equivcheck.training.setup import Setup

Reorder = Callable[[torch.Tensor], torch.Tensor]
"""Function to reorder an activation's shards."""


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
    for one, other in combinations(range(len(layers)), 2):
        order = list(layers)
        order[one], order[other] = order[other], order[one]
        words = f"stages {one} and {other} of the pipeline are swapped"
        yield _everywhere(diverged, words, partial(_reorder_layers, order=[layer for stage in order for layer in stage]))


def _reorder_layers(setup: Setup, order: list[int]) -> None:
    """Let each layer compute another layer's forward; parameter names stay."""
    blocks: list[nn.Module] = list(setup.model.get_submodule("layers").children())
    forwards = [block.forward for block in blocks]
    for block, source in zip(blocks, order, strict=True):
        block.forward = forwards[source]
