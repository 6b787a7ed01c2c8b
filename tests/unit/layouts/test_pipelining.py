"""Setup of a pipeline rank: parameters, loss and norm."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from equivcheck.layouts.composition.program import rank_program, rank_setup
from equivcheck.layouts.parallelisms.pipeline.stages import weights_of_several_ranks
from equivcheck.scenario import (
    Axis,
    ClipNorm,
    Data,
    Layer,
    Layout,
    Mesh,
    Model,
    NormType,
    Pipeline,
    PipelineSchedule,
    Scenario,
    Training,
)
from equivcheck.strategies import scenarios
from equivcheck.training.material import material
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.world import World
from support.supported import require_supported

UNHURRIED = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
LAYERS = tuple(Layer(width=width) for width in (3, 2, 4, 2))
TRAINING = Training(model=Model(features=2, layers=LAYERS), data=Data(microbatches=(4, 8)), steps=2)


def _scenario(pipeline: Pipeline, size: int = 2) -> Scenario:
    layout = Layout(mesh=Mesh(axes=(Axis(name="pp", size=size),)), parallelisms=(pipeline,))
    return Scenario(training=TRAINING, layout=layout)


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    """World with two ranks."""
    with World("sim", size=2) as world:
        yield world


def _held(scenario: Scenario) -> dict[str, torch.Tensor]:
    setup = rank_setup(scenario)
    return {slot.pieces[0].name: slot.parameter.detach().clone() for slot in setup.find_slots(setup.model)}


@UNHURRIED
@given(scenarios(layouts=("pipeline",), max_ranks=4))
def test_each_parameter_is_where_it_has_uses_under_its_own_name(scenario: Scenario) -> None:
    """Ranks hold the full model's parameters under the same names and values, and copies of shared weights are equal."""
    num_ranks = scenario.layout.mesh.num_ranks
    held = ranks("sim", num_ranks).run(_held, scenario).values
    (pipeline,) = scenario.layout.of(Pipeline)
    copies = {weight.name: len(weight.ranks) for weight in weights_of_several_ranks(scenario.training.model, pipeline, num_ranks)}
    counts = Counter(name for names in held for name in names)
    assert counts == {name: copies.get(name, 1) for name in counts}
    assert all(
        torch.equal(values, next(each[name] for each in held if name in each)) for names in held for name, values in names.items()
    )
    together = {name: values for names in held for name, values in names.items()}
    expected = material(scenario.training).parameters
    assert together.keys() == expected.keys()
    assert all(torch.equal(values, expected[name]) for name, values in together.items())


@pytest.mark.parametrize(
    ("pipeline", "loser"),
    [
        (Pipeline(num_chunks=2), 1),
        (Pipeline(schedule=PipelineSchedule.INTERLEAVED, stages_per_rank=2), 1),
        (Pipeline(schedule=PipelineSchedule.ZBV, stages_per_rank=2), 0),
    ],
)
def test_the_rank_of_the_last_stage_knows_the_loss(pipeline: Pipeline, loser: int, two: World) -> None:
    """Only the rank with the last stage returns a loss."""
    require_supported(_scenario(pipeline))
    losses = [[step.loss for step in trace.steps] for trace in two.run(rank_program, _scenario(pipeline)).values]
    assert None not in losses[loser]
    assert losses[1 - loser] == [None, None]


def _schedules_built(scenario: Scenario) -> int:
    setup = rank_setup(scenario)
    for index, microbatches in enumerate(material(scenario.training).steps):
        setup.compute(setup, microbatches, index)
    return len(setup.compute.__self__.schedules)  # type: ignore[attr-defined]


def test_a_schedule_is_built_once_for_each_number_of_rows(two: World) -> None:
    """Later steps use the schedules that the first step built."""
    require_supported(_scenario(Pipeline(num_chunks=2)))
    assert two.run(_schedules_built, _scenario(Pipeline(num_chunks=2))).values == (2, 2)


def _clipped(gradients: list[list[float]], clipping: ClipNorm) -> tuple[float, list[float]]:
    own = gradients[dist.get_rank()]
    parameters = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(1 + len(own))]
    for parameter, value in zip(parameters, own, strict=False):
        parameter.grad = torch.tensor([value], dtype=torch.float64)
    setup = rank_setup(_scenario(Pipeline(num_chunks=2)))
    norm = setup.clip_norm(setup.module, list(parameters), clipping)
    return float(norm), [float(parameter.grad) for parameter in parameters if parameter.grad is not None]


NUMBERS = st.lists(st.floats(-4, 4).filter(lambda number: abs(number) > 1e-3), max_size=3)


@UNHURRIED
@given(gradients=st.tuples(NUMBERS, NUMBERS), order=st.sampled_from(NormType))
def test_the_norm_goes_across_stages(gradients: tuple[list[float], list[float]], order: NormType) -> None:
    """Every rank clips by the norm over all gradients, even a rank without gradients."""
    everything = [abs(number) for own in gradients for number in own]
    expected = {
        NormType.ONE: sum(everything),
        NormType.TWO: math.hypot(*everything),
        NormType.INF: max(everything, default=0.0),
    }[order]
    clipping = ClipNorm(max_norm=1.0, norm_type=order)
    found = ranks("sim", 2).run(_clipped, gradients, clipping).values
    for own, (norm, clipped) in zip(gradients, found, strict=True):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert clipped == pytest.approx([number * min(1.0, 1.0 / (expected + 1e-6)) for number in own], rel=1e-12)
