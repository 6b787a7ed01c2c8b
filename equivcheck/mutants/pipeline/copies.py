"""Weights that several pipeline ranks hold a copy of, with copies that drift apart."""

from __future__ import annotations

import torch
from torch import nn

from equivcheck.layouts.base.limits.limit import parallelism_of
from equivcheck.layouts.parallelisms.pipeline.schedules import Pipe, clip_across
from equivcheck.layouts.parallelisms.pipeline.stages import weights_of_several_ranks
from equivcheck.mutants.mutant import Minimum, fault
from equivcheck.mutants.needs import all_of, has_microbatches, within
from equivcheck.mutants.pipeline.stages import run_as
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import ClipNorm, NormType, Pipeline, Scenario
from equivcheck.scenario.mesh import PP
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup


def _has_copies(scenario: Scenario) -> bool:
    layout = scenario.layout
    found = weights_of_several_ranks(scenario.training.model, parallelism_of(layout, Pipeline), layout.mesh.size(PP))
    return any(weight.trained for weight in found)


def _adds_up_norms(scenario: Scenario) -> bool:
    clipping = scenario.training.clipping
    return isinstance(clipping, ClipNorm) and clipping.norm_type is not NormType.INF


@fault(
    layouts=within(Pipeline.tag),
    applies=_has_copies,
    causes=(Cause.UNTIED,),
    minimum=Minimum(layers=2, because="two ranks have one stage each, with one layer each"),
)
def pipeline_copies_not_summed(setup: Setup) -> None:
    """Copies of a shared weight on several pipeline ranks keep separate gradients, which are not summed."""
    run_as(setup, _KeepsGradients)


class _KeepsGradients(Pipe):
    """Leaves each copy its own gradient."""

    def exchange(self) -> None:
        """Do nothing."""


@fault(
    layouts=within(Pipeline.tag),
    applies=all_of(_has_copies, has_microbatches),
    causes=(Cause.RESCALED_EACH_MICROBATCH,),
    minimum=Minimum(layers=2, because="two ranks have one stage each, with one layer each"),
)
def pipeline_copies_summed_each_microbatch(setup: Setup) -> None:
    """Gradients for copies of a shared weight are summed after each microbatch, so earlier microbatches count repeatedly."""
    run_as(setup, _SumsAgain)


class _SumsAgain(Pipe):
    """Sums accumulated gradients before each further microbatch."""

    is_begun: bool = False

    def _run(self, part: Batch, rows: int, index: int) -> list[torch.Tensor]:
        if self.is_begun:
            self.exchange()
        self.is_begun = True
        return super()._run(part, rows, index)

    def exchange(self) -> None:
        """Exchange as usual. The next microbatch starts a step."""
        super().exchange()
        self.is_begun = False


@fault(
    layouts=within(Pipeline.tag),
    applies=all_of(_has_copies, _adds_up_norms),
    causes=(Cause.REPLICAS_IN_NORM,),
    minimum=Minimum(layers=2, because="two ranks have one stage each, with one layer each"),
)
def pipeline_copies_in_norm(setup: Setup) -> None:
    """The clipping norm counts a shared weight once per copy."""
    run_as(setup, _CountsCopies)


class _CountsCopies(Pipe):
    """Counts every parameter on every rank."""

    def clip(self, _module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
        """Clip by the norm over all ranks' parameters."""
        return clip_across(self.group, parameters, clipping)
