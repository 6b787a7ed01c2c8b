"""Distribution of layers and stages in a pipeline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equivcheck.layouts.parallelisms.pipeline.communication import _num_rounds
from equivcheck.layouts.parallelisms.pipeline.stages import layers_of_stages, stages_of_rank, trained_layers
from equivcheck.scenario import AuxiliaryLinear, Layer, Model, Norm, Pipeline, PipelineSchedule, Scenario
from equivcheck.strategies import models, scenarios


@given(num_layers=st.integers(1, 8), data=st.data())
def test_even_stages_share_out_the_layers_in_order(num_layers: int, data: st.DataObject) -> None:
    """Every layer is in one stage, in order, and the first stages are at most one layer longer than the last."""
    ranks = data.draw(st.integers(1, num_layers))
    per_rank = data.draw(st.integers(1, num_layers // ranks))
    pipeline = Pipeline(schedule=PipelineSchedule.LOOPED_BFS, stages_per_rank=per_rank)
    spans = layers_of_stages(pipeline, ranks, num_layers)
    assert [layer for span in spans for layer in span] == list(range(num_layers))
    lengths = [len(span) for span in spans]
    assert len(lengths) == ranks * per_rank
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_boundaries_are_the_first_layers_of_stages() -> None:
    """A stage begins where a boundary says and ends before the next."""
    assert layers_of_stages(Pipeline(boundaries=(1, 4)), 3, 6) == (range(1), range(1, 4), range(4, 6))


@pytest.mark.parametrize(
    ("schedule", "per_rank", "expected"),
    [
        (PipelineSchedule.GPIPE, 1, [(0,), (1,), (2,)]),
        (PipelineSchedule.INTERLEAVED, 2, [(0, 3), (1, 4), (2, 5)]),
        (PipelineSchedule.ZBV, 2, [(0, 5), (1, 4), (2, 3)]),
    ],
)
def test_stages_go_round_the_ranks_or_down_and_up_again(
    schedule: PipelineSchedule, per_rank: int, expected: list[tuple[int, ...]]
) -> None:
    """Each stage is on the rank that torch's schedule expects."""
    pipeline = Pipeline(schedule=schedule, stages_per_rank=per_rank)
    assert [stages_of_rank(pipeline, rank, 3) for rank in range(3)] == expected


@pytest.mark.parametrize(
    ("schedule", "per_rank", "ranks", "expected"),
    [
        (PipelineSchedule.GPIPE, 1, 2, 1),
        (PipelineSchedule.GPIPE, 1, 5, 2),
        (PipelineSchedule.INTERLEAVED, 2, 2, 1),
        (PipelineSchedule.INTERLEAVED, 2, 3, 3),
        (PipelineSchedule.INTERLEAVED, 2, 4, 2),
        (PipelineSchedule.ZBV, 2, 4, 2),
    ],
)
def test_ranks_of_neighbouring_stages_meet_in_as_few_rounds_as_torch_takes(
    schedule: PipelineSchedule, per_rank: int, ranks: int, expected: int
) -> None:
    """Connecting takes one round for a pair, two for a line, V or even ring, three for an odd ring (as on torch 2.15)."""
    assert _num_rounds(Pipeline(schedule=schedule, stages_per_rank=per_rank), ranks) == expected


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (Layer(width=2), True),
        (Layer(width=2, frozen=True), False),
        (Layer(width=2, shares=0), True),
        (Layer(width=2, shares=0, bias=False), False),
        (Layer(width=2, shares=0, bias=False, norm=Norm.RMS), True),
        (Layer(width=2, shares=0, bias=False, auxiliary=AuxiliaryLinear.EVEN_STEPS), True),
        (Layer(width=2, shares=0, bias=False, auxiliary=AuxiliaryLinear.NEVER), False),
        (Layer(width=2, shares=0, norm=Norm.RMS, frozen=True), False),
    ],
)
def test_a_layer_is_trained_by_what_takes_part(layer: Layer, expected: bool) -> None:
    """A layer is trained if it owns a trained parameter that runs; here its shared weight is frozen."""
    model = Model(features=2, layers=(Layer(width=2, frozen=True), Layer(width=2), layer))
    assert trained_layers(model)[2] is expected


def test_a_frozen_layer_that_shares_a_trained_weight_is_trained() -> None:
    """A frozen layer is trained if it uses another layer's trained weight."""
    assert trained_layers(Model(features=2, layers=(Layer(width=2), Layer(width=2, frozen=True, shares=0)))) == (True, True)


@given(scenarios(layouts=("pipeline",)))
def test_generated_pipelines_have_a_layer_in_each_stage(scenario: Scenario) -> None:
    """Every generated stage has layers, and every layer has a stage."""
    (pipeline,) = scenario.layout.parallelisms
    ranks, num_layers = scenario.layout.mesh.num_ranks, len(scenario.training.model.layers)
    spans = layers_of_stages(pipeline, ranks, num_layers)
    assert all(spans)
    held = sorted(stage for rank in range(ranks) for stage in stages_of_rank(pipeline, rank, ranks))
    assert held == list(range(len(spans)))


@given(models())
def test_some_layer_is_trained(model: Model) -> None:
    """Every model has a trained layer."""
    assert any(trained_layers(model))
