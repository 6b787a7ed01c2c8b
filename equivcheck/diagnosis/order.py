"""Parts that lie in another order than they should: shards of an activation, stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations

import torch
from torch import nn

from equivcheck.diagnosis.case import Case
from equivcheck.diagnosis.counterfactual import Counterfactual, alone, side_by_side
from equivcheck.diagnosis.side_by_side import SideBySide
from equivcheck.diagnosis.words import over
from equivcheck.parallelisms.pipeline.stages import layers_of_stages
from equivcheck.scenario import Layout, Pipeline, TensorParallel
from equivcheck.scenario.mesh import PP, TP
from equivcheck.train.setup import Setup
from equivcheck.verdict.cause import Cause

Reorder = Callable[[torch.Tensor], torch.Tensor]
"""The same parts of an activation in another order."""


def wrong_orders(case: Case) -> Iterator[Counterfactual]:
    """Shards of what goes into or comes out of a linear, and stages."""
    layout = case.scenario.layout
    if case.rounding is not None or case.scenario.start is not None:
        return
    if layout.mesh.size(TP) > 1 and layout.has(TensorParallel):
        yield from _shards(case, layout)
    for pipeline in layout.parallelisms:
        if isinstance(pipeline, Pipeline):
            yield from _stages(case, pipeline)


def _shards(case: Case, layout: Layout) -> Iterator[Counterfactual]:
    ranks, count = layout.mesh.size(TP), len(case.scenario.training.model.layers)
    choices = [tuple(range(count)), *((layer,) for layer in range(count))] if count > 1 else [(0,)]
    for layers in choices:
        who = "each layer" if len(layers) > 1 else f"`layers.{layers[0]}.linear`"
        for outputs in (True, False):
            for dim in (-1, 0):
                parts = "features" if dim else "rows"
                words = f"the {parts} of the {'output' if outputs else 'input'} of {who} are put together in another order"
                for reorder in _orders(ranks, dim):
                    words_of_ranks = f"{words} of {over(layout.mesh, (TP,))}"
                    yield _everywhere(case, words_of_ranks, _reordering(layers, reorder, outputs=outputs))


def _orders(ranks: int, dim: int) -> Iterator[Reorder]:
    """Shards moved on by one rank or back by one, or last first."""
    for shift in dict.fromkeys((1, ranks - 1)):
        yield partial(_rolled, ranks=ranks, dim=dim, shift=shift)
    yield lambda values: torch.cat(values.chunk(ranks, dim)[::-1], dim)


def _rolled(values: torch.Tensor, *, ranks: int, dim: int, shift: int) -> torch.Tensor:
    return values.roll(shift * -(-values.shape[dim] // ranks), dim)


def _everywhere(case: Case, words: str, change: Callable[[Setup], None]) -> Counterfactual:
    """The change on one device, or for each rank where these have rows of their own."""
    if case.scenario.layout.num_data_ranks == 1:
        return alone(case, Cause.PERMUTED, words, change)

    def change_all(trainings: SideBySide) -> None:
        for setup in trainings.setups:
            change(setup)

    return side_by_side(case, Cause.PERMUTED, words, change_all)


def _reordering(layers: tuple[int, ...], reorder: Reorder, *, outputs: bool) -> Callable[[Setup], None]:
    def change(setup: Setup) -> None:
        for layer in layers:
            linear = setup.model.get_submodule(f"layers.{layer}.linear")
            if outputs:
                linear.register_forward_hook(lambda _module, _inputs, values: reorder(values))
            else:
                linear.register_forward_pre_hook(lambda _module, inputs: (reorder(inputs[0]), *inputs[1:]))

    return change


def _stages(case: Case, pipeline: Pipeline) -> Iterator[Counterfactual]:
    layers = layers_of_stages(pipeline, case.scenario.layout.mesh.size(PP), len(case.scenario.training.model.layers))
    for one, other in combinations(range(len(layers)), 2):
        order = list(layers)
        order[one], order[other] = order[other], order[one]
        words = f"stages {one} and {other} of the pipeline have changed places"
        yield _everywhere(case, words, partial(_reorder_layers, order=[layer for stage in order for layer in stage]))


def _reorder_layers(setup: Setup, order: list[int]) -> None:
    """Let each layer compute what another does; names stay."""
    blocks: list[nn.Module] = list(setup.model.get_submodule("layers").children())
    forwards = [block.forward for block in blocks]
    for block, source in zip(blocks, order, strict=True):
        block.forward = forwards[source]
