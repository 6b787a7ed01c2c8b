"""Pipelines that lose a chunk, count chunks wrongly, or have stages in another order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from equivcheck.layouts.limits.limit import parallelism_of
from equivcheck.mutants.mutant import Family, Minimum, Mutant
from equivcheck.mutants.places import within
from equivcheck.parallelisms.pipeline.stages import layers_of_stages, stages_of_rank
from equivcheck.scenario import Layout, Model, Pipeline, Scenario
from equivcheck.scenario.mesh import PP
from equivcheck.verdict.cause import Cause

if TYPE_CHECKING:
    from equivcheck.parallelisms.pipeline.schedules import Pipe
    from equivcheck.train.setup import Setup


def lose_chunk(setup: Setup) -> None:
    """Leave the last chunk of each microbatch out of the loss."""
    from equivcheck.mutants.pipes import LosesChunk

    _run_as(setup, LosesChunk)


def count_chunks_as_microbatches(setup: Setup) -> None:
    """Weigh the loss of each chunk as if it were a whole microbatch."""
    from equivcheck.mutants.pipes import CountsChunks

    _run_as(setup, CountsChunks)


def _run_as(setup: Setup, kind: type[Pipe]) -> None:
    """Let another kind of pipe have the stages, where there are any."""
    from equivcheck.mutants.pipes import pipe_of

    pipe = pipe_of(setup)
    if pipe is not None:
        other = kind(setup=pipe.setup, parallelism=pipe.parallelism, group=pipe.group, modules=pipe.modules)
        setup.compute = other.compute


def swap_stages(setup: Setup) -> None:
    """Let two stages of a rank that take and leave as many features change places."""
    from equivcheck.mutants.pipes import pipe_of

    pipe = pipe_of(setup)
    if pipe is None:
        return
    assert setup.layout is not None, "a mutant is planted into a rank"
    pairs = dict(_pairs_by_rank(setup.training.model, setup.layout))
    for one, other in pairs.values():
        if one in pipe.modules:
            pipe.modules[one], pipe.modules[other] = pipe.modules[other], pipe.modules[one]


def _pairs_by_rank(model: Model, layout: Layout) -> Iterator[tuple[int, tuple[int, int]]]:
    """Of each rank that has some, the first two stages that can change places, by rank."""
    pipeline, ranks = parallelism_of(layout, Pipeline), layout.mesh.size(PP)
    spans = layers_of_stages(pipeline, ranks, len(model.layers))
    for rank in range(ranks):
        shapes: dict[tuple[int, int], int] = {}
        for stage in stages_of_rank(pipeline, rank, ranks):
            shape = model.inputs(spans[stage][0]), model.layers[spans[stage][-1]].width
            if shape in shapes:
                yield rank, (shapes[shape], stage)
                break
            shapes[shape] = stage


def _chunks(scenario: Scenario) -> bool:
    return parallelism_of(scenario.layout, Pipeline).num_chunks > 1


def _averages_chunks(scenario: Scenario) -> bool:
    """Whether a chunk's loss is weighed by its rows; torch divides by the chunks itself under `scale_grads`."""
    pipeline = parallelism_of(scenario.layout, Pipeline)
    return pipeline.num_chunks > 1 and not pipeline.scale_grads and scenario.training.loss.is_mean


def _can_swap(scenario: Scenario) -> bool:
    """Whether some rank has two stages that fit each other's place, and of which torch expects gradients alike."""
    trained = not any(layer.frozen for layer in scenario.training.model.layers)
    return trained and any(True for _ in _pairs_by_rank(scenario.training.model, scenario.layout))


PIPELINES: tuple[Mutant, ...] = (
    Mutant(
        name="pipeline_chunk_lost",
        wrong="The last chunk of each microbatch is left out of the loss.",
        family=Family.TENSOR_PARALLEL,
        layouts=within(Pipeline.tag),
        applies=_chunks,
        plant=lose_chunk,
        causes=(Cause.MICROBATCH_LOST, Cause.ROWS_LOST),
        minimum=Minimum(ranks=1, because="a pipeline of one stage has chunks as well"),
    ),
    Mutant(
        name="pipeline_chunks_summed",
        wrong="The losses of chunks are summed where they should be averaged.",
        family=Family.TENSOR_PARALLEL,
        layouts=within(Pipeline.tag),
        applies=_averages_chunks,
        plant=count_chunks_as_microbatches,
        causes=(Cause.MICROBATCHES_SUMMED, Cause.SCALED),
        minimum=Minimum(ranks=1, because="a pipeline of one stage has chunks as well"),
    ),
    Mutant(
        name="pipeline_stages_swapped",
        wrong="Two stages of one rank have changed places.",
        family=Family.TENSOR_PARALLEL,
        layouts=within(Pipeline.tag),
        applies=_can_swap,
        plant=swap_stages,
        causes=(Cause.PERMUTED,),
        minimum=Minimum(ranks=1, layers=2, because="a layer for each of two stages, which one rank may have"),
    ),
)
"""Every such mutant."""
