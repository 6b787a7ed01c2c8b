"""Faults in pipelines whose schedule runs several times in a step: a microbatch is one `schedule.step()` call."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from equivcheck.layouts.base.gradients_by_hand import sum_gradients
from equivcheck.layouts.base.limits.limit import parallelism_of
from equivcheck.layouts.parallelisms.pipeline.balance import add_balance
from equivcheck.layouts.parallelisms.pipeline.schedules import Pipe, pipe_of
from equivcheck.layouts.parallelisms.pipeline.stages import defers_reduction, has_weight_of_two_stages
from equivcheck.mutants.mutant import ONE_RANK, Minimum, fault
from equivcheck.mutants.needs import all_of, has_data_ranks, has_microbatches, layouts_with
from equivcheck.mutants.pipeline.stages import Loss, use_pipe
from equivcheck.mutants.rank import mesh_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Pipeline, Scenario
from equivcheck.scenario.mesh import DP
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup

AVERAGED_EXPLICITLY = ("local_data_parallel x pipeline",)
"""Layouts whose ranks average their gradients explicitly after the schedule's last run in a step."""
TWO_PIPELINES = Minimum(because="two pipelines have one stage each")


class _BetweenCalls(Pipe):
    """Does something before each run of the schedule in a step, except the first one."""

    has_run: bool = False

    def between_calls(self) -> None:
        """Change the gradients from earlier runs in the step."""
        raise NotImplementedError

    def _run(self, part: Batch, rows: int, index: int) -> list[torch.Tensor]:
        if self.has_run:
            self.between_calls()
        self.has_run = True
        return super()._run(part, rows, index)

    def exchange(self) -> None:
        """Sum gradients over copies as usual, and mark the step as finished."""
        super().exchange()
        self.has_run = False


@fault(layouts=layouts_with(Pipeline.tag), applies=has_microbatches, causes=(Cause.MICROBATCH_LOST,), minimum=ONE_RANK)
def pipeline_zeroed_between_calls(setup: Setup) -> None:
    """Bug: gradients are zeroed before each `step()` of the schedule, so only the last one in a training step counts."""
    use_pipe(setup, _ZeroesGradients)


class _ZeroesGradients(_BetweenCalls):
    """Bug: gradients from earlier runs are zeroed."""

    def between_calls(self) -> None:
        """Zero all gradients."""
        for parameter in self.setup.module.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()


@fault(
    layouts=AVERAGED_EXPLICITLY,
    applies=all_of(has_data_ranks, has_microbatches),
    causes=(Cause.RESCALED_EACH_MICROBATCH,),
    minimum=TWO_PIPELINES,
)
def pipeline_summed_after_each_call(setup: Setup) -> None:
    """Bug: accumulated gradients are summed over data-parallel ranks after each `step()`, but divided by their number once."""
    use_pipe(setup, _SumsOverRanks)


class _SumsOverRanks(_BetweenCalls):
    """Bug: gradients from earlier runs are summed over data-parallel ranks, and summed again with the later ones."""

    def between_calls(self) -> None:
        """Sum the gradients over data-parallel ranks."""
        sum_gradients(self.setup.module.parameters(), mesh_of(self.setup).get_group(DP))


@fault(
    layouts=AVERAGED_EXPLICITLY,
    applies=all_of(has_data_ranks, has_microbatches),
    causes=(Cause.NOT_REDUCED,),
    minimum=TWO_PIPELINES,
)
def pipeline_reduced_before_last_call(setup: Setup) -> None:
    """Bug: gradients are averaged before the schedule's last `step()`, so those of the last microbatch are not reduced."""
    inner, (average,), optimizers = setup.accumulation, setup.before_update, list[torch.optim.Optimizer]()
    setup.before_update.clear()
    setup.before_step.append(lambda optimizer, _index: optimizers.append(optimizer))

    def accumulation(last: bool) -> AbstractContextManager[object]:
        if last:
            average(optimizers[-1], 0)
        return inner(last)

    setup.accumulation = accumulation


def _averages_calls(scenario: Scenario) -> bool:
    return has_microbatches(scenario) and scenario.training.loss.is_mean


def _can_scale(scenario: Scenario) -> bool:
    """Whether `scale_grads` is off, and would divide each gradient once after each of several runs."""
    pipeline = parallelism_of(scenario.layout, Pipeline)
    scales = pipeline.num_chunks > 1 and not pipeline.scale_grads and not defers_reduction(scenario.training, scenario.layout)
    return scales and _averages_calls(scenario) and not has_weight_of_two_stages(scenario.training.model, scenario.layout)


@fault(
    layouts=layouts_with(Pipeline.tag),
    applies=_can_scale,
    causes=(Cause.RESCALED_EACH_MICROBATCH,),
    minimum=ONE_RANK,
)
def pipeline_scales_each_call(setup: Setup) -> None:
    """Bug: `scale_grads` divides accumulated gradients by the chunks after each of several `step()` calls."""
    pipe = pipe_of(setup)
    if pipe is not None:
        pipe.parallelism = replace(pipe.parallelism, scale_grads=True)
        add_balance(setup, pipe.parallelism, [*pipe.modules.values()])


class _SumsCalls(Pipe):
    """Bug: each microbatch is weighted as if it had all rows in the step."""

    def loss_of_chunk(self, rows: int) -> Loss:
        """Return a loss that is not divided by the microbatches."""
        inner, weight = super().loss_of_chunk(rows), self.setup.training.data.batch / rows
        return lambda outputs, targets: inner(outputs, targets) * weight


@fault(
    layouts=layouts_with(Pipeline.tag),
    applies=_averages_calls,
    causes=(Cause.MICROBATCHES_SUMMED, Cause.SCALED),
    minimum=ONE_RANK,
)
def pipeline_calls_summed(setup: Setup) -> None:
    """Bug: losses in several `step()` calls are divided by the chunks, but not by the calls."""
    use_pipe(setup, _SumsCalls)


def _has_uneven_calls(scenario: Scenario) -> bool:
    return _averages_calls(scenario) and len(set(scenario.training.data.microbatches)) > 1


class _AveragesCalls(Pipe):
    """Bug: microbatches have equal weights, although their sizes differ."""

    def loss_of_chunk(self, rows: int) -> Loss:
        """Return a loss that is divided by the microbatches."""
        data = self.setup.training.data
        inner, weight = super().loss_of_chunk(rows), data.batch / rows / len(data.microbatches)
        return lambda outputs, targets: inner(outputs, targets) * weight


@fault(layouts=layouts_with(Pipeline.tag), applies=_has_uneven_calls, causes=(Cause.MEAN_OF_MEANS,), minimum=ONE_RANK)
def pipeline_calls_averaged_equally(setup: Setup) -> None:
    """Bug: means in several `step()` calls are averaged with equal weights, although microbatches have different sizes."""
    use_pipe(setup, _AveragesCalls)
