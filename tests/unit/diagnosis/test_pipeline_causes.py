"""Faults of pipelines are explained with shared weights, load-balancing losses, and several wrong ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from equivcheck import Scenario, check
from equivcheck.diagnosis.explain import explained
from equivcheck.mutants.registry import mutant
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import (
    DDP,
    SGD,
    Activation,
    AnyLayer,
    Axis,
    ClipNorm,
    Data,
    Experts,
    Layer,
    Layout,
    LocalDataParallel,
    Loss,
    Mesh,
    Model,
    Parallelism,
    Pipeline,
    PipelineSchedule,
    Training,
)
from support.supported import require_supported

LINEAR, SHARING = Layer(width=4, activation=Activation.TANH), Layer(width=4, shares=0)
BALANCED = Experts(hidden=4, num_experts=3, balance=0.5, balance_per_sequence=True)
BIASED = Experts(hidden=4, num_experts=6, top_k=2, router_bias_rate=0.25)
TWO_CHUNKS = Pipeline(num_chunks=2)


def staged(
    *layers: AnyLayer, parts: tuple[Parallelism, ...] = (TWO_CHUNKS,), clipping: ClipNorm | None = None, **axes: int
) -> Scenario:
    """Two steps of two microbatches."""
    model = Model(features=4, length=None if all(isinstance(layer, Layer) for layer in layers) else 3, layers=layers)
    data, optimizer = Data(microbatches=(8, 8)), SGD(lr=0.1, momentum=0.9)
    training = Training(model=model, data=data, optimizer=optimizer, loss=Loss.MSE_MEAN, clipping=clipping, steps=2)
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in axes.items()))
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=parts))


def replace_optimizer(scenario: Scenario, optimizer: SGD) -> Scenario:
    """The same training with another optimizer."""
    return replace(scenario, training=replace(scenario.training, optimizer=optimizer))


SPLIT_UPDATES = (Pipeline(num_chunks=2, static_shapes=True), DDP(zero_redundancy=True))
STATIC = Pipeline(schedule=PipelineSchedule.DUAL_PIPE_V, stages_per_rank=2, num_chunks=4, static_shapes=True)
LOOPED = Pipeline(schedule=PipelineSchedule.INTERLEAVED, stages_per_rank=2, num_chunks=2)
DROPPING = Layer(width=4, activation=Activation.TANH, dropout=0.5)
CASES = {
    "stages swapped on two ranks": (
        "pipeline_stages_swapped",
        staged(LINEAR, DROPPING, LINEAR, LINEAR, parts=(LOOPED,), pp=2),
        Cause.PERMUTED,
        "stages 0 and 2, 1 and 3 of the pipeline are swapped",
    ),
    "stages swapped with static shapes": (
        "pipeline_stages_swapped",
        staged(LINEAR, LINEAR, LINEAR, LINEAR, parts=(STATIC,), pp=2),
        Cause.PERMUTED,
        "stages 1 and 2 of the pipeline are swapped",
    ),
    "norm of stages with a shared weight": (
        "pipeline_norm_of_own_stages",
        staged(LINEAR, SHARING, parts=(TWO_CHUNKS, LocalDataParallel()), clipping=ClipNorm(max_norm=0.01), dp=2, pp=2),
        Cause.LOCAL_NORM,
        "clips by the norm over its own stages, and only the first rank with a shared weight counts it",
    ),
    "shared weight reduced on one stage": (
        "pipeline_last_stage_reduces_only",
        staged(LINEAR, SHARING, parts=(TWO_CHUNKS, LocalDataParallel()), dp=2, pp=2),
        Cause.NOT_REDUCED,
        "left unreduced over the 2 dp ranks on ranks 0 and 2 only",
    ),
    "updates of plain SGD split over ranks": (
        "inner_module_called",
        replace_optimizer(staged(LINEAR, LINEAR, parts=SPLIT_UPDATES, dp=2, pp=2), SGD(lr=0.1)),
        Cause.NOT_REDUCED,
        "left unreduced over the 2 dp ranks",
    ),
    "updates of a shared weight split over ranks": (
        "inner_module_called",
        staged(LINEAR, SHARING, parts=SPLIT_UPDATES, dp=2, pp=2),
        Cause.NOT_REDUCED,
        "left unreduced over the 2 dp ranks",
    ),
    "chunk lost, but not its load-balancing loss": (
        "pipeline_chunk_lost",
        staged(BALANCED, LINEAR, pp=2),
        Cause.MICROBATCH_LOST,
        "of each microbatch, but load-balancing losses are right",
    ),
    "chunk lost, but not its choices of experts": (
        "pipeline_chunk_lost",
        staged(BIASED, LINEAR, pp=2),
        Cause.MICROBATCH_LOST,
        "of each microbatch, but router biases are right",
    ),
    "as many chunks summed as there are data-parallel ranks": (
        "pipeline_chunks_summed",
        staged(LINEAR, LINEAR, parts=(TWO_CHUNKS, LocalDataParallel()), dp=2, pp=2),
        Cause.MICROBATCHES_SUMMED,
        "the pipeline sums the 2 chunks of each microbatch, rather than averaging them",
    ),
    "chunks summed, but not their load-balancing losses": (
        "pipeline_chunks_summed",
        staged(BALANCED, LINEAR, pp=2),
        Cause.MICROBATCHES_SUMMED,
        "sums the losses of the 2 chunks of each microbatch, rather than averaging them, but load-balancing losses are right",
    ),
    "gradients of load-balancing losses divided again": (
        "pipeline_scales_each_call",
        staged(BALANCED, LINEAR, pp=2),
        Cause.RESCALED_EACH_MICROBATCH,
        "divided by the 2 chunks of a microbatch again after each microbatch",
    ),
}


@pytest.mark.torch(">=2.10", "earlier versions have no stages on several ranks over gloo")
@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_explained(case: str) -> None:
    """The diagnosis has the right cause, and names the right stages, chunks or ranks."""
    name, scenario, cause, words = CASES[case]
    require_supported(scenario)
    chosen = mutant(name)
    assert chosen.applies(scenario)
    found = explained(check(scenario, alter=chosen.plant), alter=chosen.plant).diagnosis
    assert found is not None
    assert found.cause is cause, found.sentence
    assert words in found.sentence
