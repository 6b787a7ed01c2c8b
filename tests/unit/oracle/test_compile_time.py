"""Tests for the time that ranks may take to compile."""

from dataclasses import replace
from typing import Any

import pytest

from equivcheck.layouts.base.execution.compile_time import (
    COMPILE_SECONDS,
    all_compile_seconds,
    compile_seconds,
    expected_compile_seconds,
    num_graphs,
)
from equivcheck.scenario import (
    DDP,
    SPMD,
    Attention,
    AuxiliaryLinear,
    Axis,
    Checkpointing,
    Compile,
    Data,
    Execution,
    Experts,
    Layer,
    Layout,
    Mesh,
    Model,
    Resume,
    Scenario,
    Training,
)

LAYOUT = Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(DDP(),))
COMPILED = replace(LAYOUT, execution=Execution(compile=Compile.AOT_EAGER))


def training(*microbatches: int, steps: int = 2, auxiliary: AuxiliaryLinear | None = None) -> Training:
    """A small training."""
    model = Model(features=1, layers=(Layer(width=1, auxiliary=auxiliary),))
    return Training(model=model, data=Data(microbatches=microbatches), steps=steps)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (training(4, 4), 1),
        (training(4, 2, 4), 2),
        (training(4, auxiliary=AuxiliaryLinear.EVEN_STEPS), 2),
        (training(4, steps=1, auxiliary=AuxiliaryLinear.EVEN_STEPS), 1),
        (training(4, auxiliary=AuxiliaryLinear.NEVER), 1),
        (training(4, 2, auxiliary=AuxiliaryLinear.EVEN_STEPS), 4),
    ],
    ids=["one size", "two sizes", "even steps", "one step", "never", "both"],
)
def test_every_pass_that_differs_is_compiled(given: Training, expected: int) -> None:
    """Another microbatch size, or another set of layers in a step, needs another graph. Repeated passes do not."""
    assert num_graphs(given, COMPILED.execution) == expected


@pytest.mark.parametrize(("given", "expected"), [(training(4), 1), (training(4, 4), 2), (training(4, 2, 4), 4)], ids=repr)
def test_a_backward_that_adds_to_gradients_is_compiled_as_another(given: Training, expected: int) -> None:
    """Compiled autograd compiles one graph that makes gradients and one that adds to them, for each size."""
    assert num_graphs(given, Execution(compiled_autograd=True)) == expected


def test_time_is_given_to_each_layout_that_compiles() -> None:
    """Layouts without a compiler get no extra time."""
    compiled = Scenario(training=training(4, 2), layout=COMPILED)

    assert all_compile_seconds(replace(compiled, layout=LAYOUT)) == 0.0
    assert all_compile_seconds(compiled) == 2 * COMPILE_SECONDS
    assert all_compile_seconds(replace(compiled, resume=Resume(layout=LAYOUT, steps=1))) == 2 * COMPILE_SECONDS
    assert all_compile_seconds(replace(compiled, resume=Resume(layout=COMPILED, steps=1))) == 4 * COMPILE_SECONDS


def test_each_expert_takes_as_long_to_compile_as_its_linears() -> None:
    """Ranks that compile many experts do not count as hanging."""
    execution = Execution(compiled_autograd=True, checkpointing=Checkpointing.EVERY_LAYER)
    few, many = (
        expected_compile_seconds(
            Scenario(
                training=replace(training(4), model=Model(features=1, length=2, layers=(Experts(hidden=1, num_experts=number),))),
                layout=replace(LAYOUT, execution=execution),
            )
        )
        for number in (2, 8)
    )
    assert many > 3 * few


def test_slow_compilers_are_expected_to_take_longer() -> None:
    """Inductor takes several times longer, each further graph as long again, and eager execution no time."""
    usual = Scenario(training=training(4), layout=COMPILED)
    slow = replace(usual, layout=replace(LAYOUT, execution=Execution(compile=Compile.INDUCTOR)))

    assert expected_compile_seconds(replace(usual, layout=LAYOUT)) == 0.0
    assert expected_compile_seconds(slow) > 5 * expected_compile_seconds(usual) > 0.0
    assert expected_compile_seconds(replace(slow, training=training(4, 2))) == 2 * expected_compile_seconds(slow)


def test_compiled_backward_over_dtensors_is_slow() -> None:
    """Compiled autograd is fast, except if DTensor gradients break its graph: each one adds time.

    A campaign may wait for it, so a check that takes the expected time is no hang.
    """
    backward = replace(COMPILED, execution=Execution(compiled_autograd=True))
    attended = Training(model=Model(features=1, length=2, layers=(Attention(), Layer(width=1))), data=Data(microbatches=(4,)))
    four_ranks = replace(backward, parallelisms=(SPMD(),), mesh=Mesh(axes=(Axis(name="dp", size=4),)))
    expected = [
        expected_compile_seconds(Scenario(training=given, layout=layout))
        for given, layout in (
            (training(4), backward),
            (training(4), replace(backward, parallelisms=(SPMD(),))),
            (attended, replace(backward, parallelisms=(SPMD(),))),
            (attended, four_ranks),
        )
    ]

    assert expected == sorted(set(expected))
    assert expected[-1] > 10 * expected[0]
    assert compile_seconds(training(4), backward) == COMPILE_SECONDS
    assert compile_seconds(attended, four_ranks) > 2 * expected[-1]


def test_recomputed_layers_break_the_graph_of_a_compiled_backward() -> None:
    """Recomputation makes compiled autograd slower, but not a forward that is compiled ahead of time."""

    def expected(**how: Any) -> float:
        return expected_compile_seconds(Scenario(training=training(4), layout=replace(LAYOUT, execution=Execution(**how))))

    recomputed = {"checkpointing": Checkpointing.EVERY_LAYER}
    assert expected(compiled_autograd=True, **recomputed) > expected(compiled_autograd=True)
    assert expected(compile=Compile.AOT_EAGER, **recomputed) == expected(compile=Compile.AOT_EAGER)


def test_a_compiled_backward_over_sequences_takes_the_square_of_its_linears() -> None:
    """Ranks that compile several attention layers do not count as hanging. Layers on rows are fast."""

    def backward(num_layers: int, length: int | None) -> float:
        layers = (Layer(width=1),) * num_layers
        given = replace(training(4), model=Model(features=1, length=length, layers=layers))
        layout = replace(LAYOUT, execution=Execution(compiled_autograd=True))
        return expected_compile_seconds(Scenario(training=given, layout=layout))

    assert backward(8, 2) > 3 * backward(4, 2)
    assert backward(8, None) < 2 * backward(4, None) < backward(4, 2)
