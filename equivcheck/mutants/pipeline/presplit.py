"""Faults with chunks that ranks split themselves, if their sizes differ."""

from __future__ import annotations

from dataclasses import replace

import torch

from equivcheck.layouts.base.data_rows import with_equal_chunks
from equivcheck.layouts.base.limits.limit import parallelism_of
from equivcheck.layouts.parallelisms.pipeline.schedules import Pipe
from equivcheck.mutants.mutant import Minimum, fault
from equivcheck.mutants.needs import layouts_with
from equivcheck.mutants.pipeline.stages import Loss, use_pipe
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Pipeline, Scenario
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup

UNEVEN = Minimum(ranks=1, because="three rows are split into two chunks")


def _pads(scenario: Scenario) -> bool:
    """Whether a chunk has fewer rows than the first one."""
    is_presplit = parallelism_of(scenario.layout, Pipeline).presplit
    return is_presplit and not scenario.layout.has_equal_chunks(scenario.training.data.microbatches)


def _averages_uneven_chunks(scenario: Scenario) -> bool:
    return _pads(scenario) and scenario.training.loss.is_mean


class _WeighsEqually(Pipe):
    """Bug: chunks have equal weights, although their sizes differ."""

    def loss_of_chunk(self, rows: int) -> Loss:
        """Return the mean over a chunk, divided by the chunks, or the sum."""
        averages = self.setup.training.loss.is_mean and not self.parallelism.scale_grads
        count = self.parallelism.num_chunks if averages else 1
        return lambda outputs, targets: self.loss(outputs, targets, rows) / count


@fault(layouts=layouts_with(Pipeline.tag), applies=_averages_uneven_chunks, causes=(Cause.MEAN_OF_MEANS,), minimum=UNEVEN)
def pipeline_chunks_averaged_equally(setup: Setup) -> None:
    """Bug: means over presplit chunks are averaged with equal weights, although their sizes differ."""
    use_pipe(setup, _WeighsEqually)


class _CountsPadding(_WeighsEqually):
    """Bug: rows that pad a chunk have targets, so they count in the loss."""

    def _run(self, part: Batch, rows: int, index: int) -> list[torch.Tensor]:
        padded = with_equal_chunks(replace(part, inputs=part.targets, masks=()), self.parallelism.num_chunks)
        return super()._run(replace(part, targets=padded.inputs), rows, index)


@fault(
    layouts=layouts_with(Pipeline.tag),
    applies=_pads,
    # A mean over copies of one row is this row's, so the chunks only have equal weights.
    causes=(Cause.ROWS_REPEATED, Cause.MEAN_OF_MEANS),
    minimum=UNEVEN,
)
def pipeline_padding_counted(setup: Setup) -> None:
    """Bug: rows that pad presplit chunks count in the loss."""
    use_pipe(setup, _CountsPadding)
