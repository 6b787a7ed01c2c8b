"""Faults with chunks, stages and copies of shared weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import count

import torch
from torch import nn

from equivcheck.layouts.base.limits.limit import parallelism_of
from equivcheck.layouts.base.plan.rules import inputs_of
from equivcheck.layouts.parallelisms.pipeline.schedules import Pipe, pipe_of
from equivcheck.layouts.parallelisms.pipeline.stages import layers_of_stages, stages_of_rank, weights_of_several_ranks
from equivcheck.mutants.mutant import ONE_RANK, Minimum, fault
from equivcheck.mutants.needs import all_of, has_chunks, has_data_ranks, has_microbatches, layouts_with
from equivcheck.mutants.rank import layout_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import ClipNorm, Layout, Model, NormType, Pipeline, PlannedParallelism, Scenario
from equivcheck.scenario.mesh import PP
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup
from equivcheck.training.update.clipping import clip_to_norm

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _averages_chunks(scenario: Scenario) -> bool:
    """Whether chunk losses are weighted by rows; with `scale_grads` torch divides them itself."""
    pipeline = parallelism_of(scenario.layout, Pipeline)
    return pipeline.num_chunks > 1 and not pipeline.scale_grads and scenario.training.loss.is_mean


def _can_swap(scenario: Scenario) -> bool:
    """Whether a rank has two interchangeable stages. False with frozen layers, because torch expects equal gradients."""
    trained = not any(layer.frozen for layer in scenario.training.model.layers)
    return trained and any(True for _ in _pairs_by_rank(scenario.training.model, scenario.layout))


def _pairs_by_rank(model: Model, layout: Layout) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the first two interchangeable stages, for each rank with such stages."""
    pipeline, ranks = parallelism_of(layout, Pipeline), layout.mesh.size(PP)
    spans = layers_of_stages(pipeline, ranks, len(model.layers))
    placements = next((inputs_of(model, plan) for plan in layout.of(PlannedParallelism)), None)

    def activation(layer: int) -> tuple[object, ...]:
        is_tokens = layer == 0 and model.source is not None
        is_logits = layer == len(model.layers) and model.head is not None
        # The first stage gets a plain tensor, and the last one returns one. All other activations may be sent as DTensors.
        is_plain = pipeline.sends_dtensors and layer in (0, len(model.layers))
        # Static shapes say that only the first stage's input needs no gradient, so another stage there would never get one.
        is_first = pipeline.static_shapes and layer == 0
        return model.in_features(layer), placements and placements[layer], is_tokens or is_logits or is_plain or is_first

    for rank in range(ranks):
        shapes: dict[tuple[object, ...], int] = {}
        for stage in stages_of_rank(pipeline, rank, ranks):
            shape = activation(spans[stage][0]), activation(spans[stage][-1] + 1)
            if shape in shapes:
                yield rank, (shapes[shape], stage)
                break
            shapes[shape] = stage


@fault(layouts=layouts_with(Pipeline.tag), applies=has_chunks, causes=(Cause.MICROBATCH_LOST, Cause.ROWS_LOST), minimum=ONE_RANK)
def pipeline_chunk_lost(setup: Setup) -> None:
    """Bug: the last chunk in each microbatch is left out."""
    use_pipe(setup, _LosesChunk)


class _LosesChunk(Pipe):
    """Bug: the last chunk in each microbatch is left out."""

    def loss_of_chunk(self, rows: int) -> Loss:
        """Return a loss that is zero for the last of several chunks. The schedule computes chunks in order."""
        inner, chunks, numbers = super().loss_of_chunk(rows), self.parallelism.num_chunks, count(1)
        if chunks == 1:  # before a checkpoint: losing it would leave no gradients at all
            return inner
        return lambda outputs, targets: inner(outputs, targets) * (0.0 if next(numbers) % chunks == 0 else 1.0)


@fault(
    layouts=layouts_with(Pipeline.tag),
    applies=_averages_chunks,
    causes=(Cause.MICROBATCHES_SUMMED, Cause.SCALED),
    minimum=ONE_RANK,
)
def pipeline_chunks_summed(setup: Setup) -> None:
    """Bug: chunk losses are summed instead of averaged."""
    use_pipe(setup, _CountsChunks)


class _CountsChunks(Pipe):
    """Bug: each chunk is weighted as if it had all rows in the microbatch."""

    def loss_of_chunk(self, rows: int) -> Loss:
        """Return a loss that is multiplied by the number of chunks."""
        return lambda outputs, targets: self.loss(outputs, targets, rows)


def use_pipe(setup: Setup, kind: type[Pipe]) -> None:
    """Replace a rank's `Pipe` by one of class `kind`, which has a bug. Does nothing if the layout has no stages."""
    pipe = pipe_of(setup)
    if pipe is not None:
        other = kind(**{field.name: getattr(pipe, field.name) for field in fields(pipe)})
        setup.compute, setup.clip_norm = other.compute, other.clip


@fault(
    layouts=layouts_with(Pipeline.tag),
    applies=_can_swap,
    causes=(Cause.PERMUTED,),
    minimum=Minimum(ranks=1, layers=2, because="two stages on one rank have one layer each"),
)
def pipeline_stages_swapped(setup: Setup) -> None:
    """Bug: two stages on one rank are swapped."""
    pipe = pipe_of(setup)
    if pipe is None:
        return
    numbers = [*pipe.modules]
    pairs = dict(_pairs_by_rank(setup.training.model, layout_of(setup)))
    for one, other in pairs.values():
        if one in pipe.modules:
            pipe.modules[one], pipe.modules[other] = pipe.modules[other], pipe.modules[one]
            first, second = numbers.index(one), numbers.index(other)
            setup.parts[first], setup.parts[second] = setup.parts[second], setup.parts[first]


def _has_copies(scenario: Scenario) -> bool:
    layout = scenario.layout
    found = weights_of_several_ranks(scenario.training.model, parallelism_of(layout, Pipeline), layout.mesh.size(PP))
    return any(weight.trained for weight in found)


def _adds_up_norms(scenario: Scenario) -> bool:
    clipping = scenario.training.clipping
    return isinstance(clipping, ClipNorm) and clipping.norm_type is not NormType.INF


@fault(
    layouts=layouts_with(Pipeline.tag),
    applies=_has_copies,
    causes=(Cause.UNTIED,),
    minimum=Minimum(layers=2, because="two ranks have one stage each, with one layer each"),
)
def pipeline_copies_not_summed(setup: Setup) -> None:
    """Bug: copies of a shared weight on several pipeline ranks keep separate gradients, which are not summed."""
    use_pipe(setup, _KeepsGradients)


class _KeepsGradients(Pipe):
    """Bug: each copy of a shared weight keeps its own gradient."""

    def exchange(self) -> None:
        """Do nothing, so that the gradients of copies are not summed."""


@fault(
    layouts=layouts_with(Pipeline.tag),
    applies=all_of(_has_copies, has_microbatches),
    causes=(Cause.RESCALED_EACH_MICROBATCH,),
    minimum=Minimum(layers=2, because="two ranks have one stage each, with one layer each"),
)
def pipeline_copies_summed_each_microbatch(setup: Setup) -> None:
    """Bug: gradients for copies of a shared weight are summed after each microbatch, so earlier microbatches count repeatedly."""
    use_pipe(setup, _SumsAgain)


class _SumsAgain(Pipe):
    """Bug: accumulated gradients are summed over copies again before each further microbatch."""

    is_begun: bool = False

    def _run(self, part: Batch, rows: int, index: int) -> list[torch.Tensor]:
        if self.is_begun:
            self.exchange()
        self.is_begun = True
        return super()._run(part, rows, index)

    def exchange(self) -> None:
        """Sum gradients over copies as usual, and mark the step as finished. The next microbatch then starts a new step."""
        super().exchange()
        self.is_begun = False


@fault(
    layouts=layouts_with(Pipeline.tag),
    applies=all_of(_has_copies, _adds_up_norms),
    causes=(Cause.REPLICAS_IN_NORM,),
    minimum=Minimum(layers=2, because="two ranks have one stage each, with one layer each"),
)
def pipeline_copies_in_norm(setup: Setup) -> None:
    """Bug: the clipping norm counts a shared weight once per copy."""
    use_pipe(setup, _CountsCopies)


class _CountsCopies(Pipe):
    """Bug: the clipping norm counts every parameter on every rank."""

    def clip(self, _module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
        """Clip by a norm over all ranks' parameters. This norm counts a shared weight once per copy."""
        norm = self.total_norm(parameters, clipping)
        clip_to_norm(parameters, clipping, norm)
        return norm


def _clips_stages(scenario: Scenario) -> bool:
    """Whether gradients are clipped by the norm over several ranks' stages."""
    return isinstance(scenario.training.clipping, ClipNorm) and scenario.layout.mesh.size(PP) > 1


@fault(
    layouts=layouts_with(Pipeline.tag),
    applies=_clips_stages,
    causes=(Cause.LOCAL_NORM,),
    minimum=Minimum(layers=2, because="two ranks have one stage each, with one layer each"),
)
def pipeline_norm_of_own_stages(setup: Setup) -> None:
    """Bug: each rank clips by the norm over its own stages."""
    use_pipe(setup, _ClipsOwnStages)


class _ClipsOwnStages(Pipe):
    """Does not combine norms over stages."""

    def total_norm(self, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
        """Return the norm over this rank's stages only. It includes shards of these stages on other ranks."""
        return self.setup.total_norm(parameters, clipping)


def _reduces_stages(scenario: Scenario) -> bool:
    """Whether several ranks of a pipeline average gradients over several data-parallel ranks."""
    return has_data_ranks(scenario) and scenario.layout.mesh.size(PP) > 1


@fault(
    layouts=("local_data_parallel x pipeline",),
    applies=_reduces_stages,
    causes=(Cause.NOT_REDUCED,),
    minimum=Minimum(ranks=4, layers=2, because="each of two pipelines has two stages of one layer"),
)
def pipeline_last_stage_reduces_only(setup: Setup) -> None:
    """Bug: only ranks with the last stage average their gradients over data-parallel ranks."""
    pipe = pipe_of(setup)
    if pipe is not None and pipe.num_stages - 1 not in pipe.modules:
        setup.before_update.clear()
