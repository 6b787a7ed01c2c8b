"""Data parallelism by DTensor propagation: the rows are followed through every detour, whatever updates the parameters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from equivcheck import Outcome, Scenario, check
from equivcheck.layouts.composition.limits import repair_training
from equivcheck.layouts.composition.program import rank_program
from equivcheck.oracle.comparison.compare import compare
from equivcheck.oracle.reference.reference import Reference, ReferenceRun
from equivcheck.scenario import (
    DDP,
    SGD,
    SPMD,
    Activation,
    Adam,
    Axis,
    Data,
    Distribution,
    Execution,
    Implementation,
    Layer,
    Layout,
    Loss,
    Mesh,
    Model,
    Optimizer,
    Parallelism,
    ShapeOp,
    Training,
    ZeroGrad,
)
from equivcheck.strategies import models, scenarios, trainings
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.trace.moments import moments
from equivcheck.worlds.trace.tensors import full_vector
from equivcheck.worlds.trace.trace import Trace

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(lr=0.1),
    "momentum": SGD(lr=0.1, momentum=0.9),
    "momentum, foreach": SGD(lr=0.1, momentum=0.9, implementation=Implementation.FOREACH),
    "adam, fused": Adam(lr=0.1, implementation=Implementation.FUSED),
}
LOSSES = st.sampled_from((Loss.LINEAR_SUM, Loss.LINEAR_MEAN, Loss.MSE_SUM))
"""Every loss that DTensor gets right; what becomes of the other is on file."""
SIZES = st.integers(1, 12)
NUM_RANKS = st.sampled_from((2, 1, 3, 4))
DISTRIBUTIONS = st.sampled_from(Distribution)
EXAMPLES = max(6, settings().max_examples // 16)

UNHURRIED = settings(
    deadline=None,
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)


@st.composite
def perceptrons(draw: st.DrawFn) -> Model:
    """Two linears, the first with a ReLU, the second with a sigmoid."""
    hidden = Layer(width=draw(SIZES), activation=Activation.RELU)
    return Model(features=draw(SIZES), layers=(hidden, Layer(width=draw(SIZES), activation=Activation.SIGMOID)))


def layout(parallelism: Parallelism, num_ranks: int, *, whole_step: bool = False) -> Layout:
    """One parallelism over a number of data ranks."""
    mesh = Mesh(axes=(Axis(name="dp", size=num_ranks),))
    return Layout(mesh=mesh, parallelisms=(parallelism,), execution=Execution(whole_step=whole_step))


def run(scenario: Scenario) -> tuple[Trace, ...]:
    """What the ranks of a scenario leave."""
    return ranks("sim", scenario.layout.mesh.num_ranks).run(rank_program, scenario, None, deadline=60.0).values


def taken_as_reference(training: Training, traces: tuple[Trace, ...]) -> Reference:
    """What ranks that each hold everything have left, with the tolerances of the training on one device."""
    losses = np.mean([[step.loss for step in trace.steps] for trace in traces], axis=0)
    steps = tuple(replace(step, loss=float(loss)) for step, loss in zip(traces[0].steps, losses, strict=True))
    reference = ReferenceRun(training, num_parts=len(traces)).confirming_reference()
    rows = zip(reference.moments, moments(replace(traces[0], steps=steps)), strict=True)
    found = tuple(
        replace(expected, values=full_vector(expected.table, moment.snapshot.present, moment.snapshot.values))
        for expected, moment in rows
    )
    return replace(reference, moments=found, doubt=None)


def with_shape_op(model: Model, shape_op: ShapeOp) -> Model:
    """The model with every layer ending in a shape operation."""
    return replace(model, layers=tuple(replace(layer, shape_op=shape_op) for layer in model.layers))


@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        pytest.param(name, distribution, marks=pytest.mark.slow if (at + number) % 2 else ())
        for at, name in enumerate(OPTIMIZERS)
        for number, distribution in enumerate(Distribution)
    ],
)
def test_every_optimizer_trains_as_on_one_device_and_as_under_ddp(name: str, distribution: Distribution) -> None:
    """A perceptron's every step agrees with both, the later ones from the state that the first has left."""

    @UNHURRIED
    @given(
        model=perceptrons(),
        loss=LOSSES,
        num_ranks=NUM_RANKS,
        rows=st.integers(1, 3),
        steps=st.sampled_from((2, 3)),
        zero_grad=st.sampled_from(ZeroGrad),
        seed=st.integers(0, 999),
    )
    def agrees(  # noqa: PLR0913, PLR0917 - a generated value each
        model: Model, loss: Loss, num_ranks: int, rows: int, steps: int, zero_grad: ZeroGrad, seed: int
    ) -> None:
        training = Training(
            model=model,
            data=Data(microbatches=(rows * num_ranks,)),
            optimizer=OPTIMIZERS[name],
            loss=loss,
            zero_grad=zero_grad,
            steps=steps,
            seed=seed,
        )
        scenario = Scenario(training=training, layout=layout(SPMD(distribution=distribution), num_ranks))
        verdict = check(scenario)
        verdict.assert_no_finding()
        assume(verdict.is_clear)
        replicated = run(replace(scenario, layout=layout(DDP(), num_ranks)))
        assert not compare(taken_as_reference(training, replicated), run(scenario)).divergences

    agrees()


@pytest.mark.parametrize("shape_op", ShapeOp)
def test_rows_are_followed_through_every_detour(shape_op: ShapeOp) -> None:
    """A model whose layers flatten, squeeze, view, repeat or add what factories make trains as on one device."""

    @UNHURRIED
    @given(
        training=trainings(models=models().map(lambda model: with_shape_op(model, shape_op)), losses=LOSSES),
        num_ranks=NUM_RANKS,
        distribution=DISTRIBUTIONS,
        batch_dim=st.sampled_from((0, 1)),
    )
    def followed(training: Training, num_ranks: int, distribution: Distribution, batch_dim: int) -> None:
        data = Data(microbatches=tuple(rows * num_ranks for rows in training.data.microbatches), batch_dim=batch_dim)
        chosen = layout(SPMD(distribution=distribution), num_ranks)
        check(Scenario(training=repair_training(replace(training, data=data), chosen), layout=chosen)).assert_no_finding()

    followed()


def traced(scenario: Scenario) -> Scenario:
    """The scenario with its steps traced."""
    chosen = replace(scenario.layout, execution=Execution(whole_step=True))
    return replace(scenario, training=repair_training(scenario.training, chosen), layout=chosen)


@pytest.mark.torch(">=2.10", "traced graphs of torch 2.9 decompose the backward of SiLU, which rounds otherwise")
@settings(UNHURRIED, max_examples=EXAMPLES // 3)
@given(scenario=scenarios(layouts=("spmd",), max_ranks=4).map(traced))
def test_a_step_traced_as_one_graph_equals_the_eager_one(scenario: Scenario) -> None:
    """Ranks that run each step as a graph leave the bits that they leave without, and those of one device within the floor."""
    eager = replace(scenario, layout=replace(scenario.layout, execution=Execution()))
    verdict = check(scenario)
    verdict.assert_no_finding()
    assume(verdict.outcome in (Outcome.EQUIVALENT, Outcome.INCONCLUSIVE))
    for found, expected in zip(run(scenario), run(eager), strict=True):
        for one, other in zip(moments(found), moments(expected), strict=True):
            for name in ("pieces", "present", "fits", "dtypes"):
                assert getattr(one.snapshot, name) == getattr(other.snapshot, name)
            np.testing.assert_array_equal(one.snapshot.values, other.snapshot.values, f"step {one.step} {one.phase.value}")
