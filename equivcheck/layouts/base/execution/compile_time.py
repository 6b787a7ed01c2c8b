"""How long ranks compile or trace, and how long they may compile before that is called a hang."""

from __future__ import annotations

from functools import singledispatch

from equivcheck.scenario import (
    SPMD,
    AuxiliaryLinear,
    Compile,
    Execution,
    Layout,
    Model,
    Recompute,
    Scenario,
    TensorParallel,
    Training,
)
from equivcheck.scenario.case import Case
from equivcheck.training.layers.registry import kind_of

COMPILE_SECONDS = 150.0
"""For all that one pass compiles; it is often done in a thirtieth of that, but not where other work runs beside it."""
_TIMES_EXPECTED = 4
"""What a pass may take at least, beside what it is expected to."""
START_SECONDS = 6.0
"""What ranks take beside to compile for the first time in their lives."""
_PASS_SECONDS, _INDUCTOR_SECONDS = 1.0, 40.0
"""What one pass takes on two cores, whatever there is in it; Inductor calls a C++ compiler."""
_LINEAR_SECONDS, _BACKWARD_SECONDS, _RECOMPUTED_SECONDS = 0.1, 0.4, 1.2
"""What a pass takes for each linear on each rank: where the forward is compiled, where compiled autograd compiles the backward,
and where it does so and layers are recomputed in it, which breaks its graph. Fitted to 93 scenarios of 2 to 4 ranks."""
_BROKEN_SECONDS = 0.7
"""What compiled autograd takes on each rank for one linear whose gradients are DTensors, and for more by the square of their
number: the graph of one backward breaks at each conversion (https://github.com/pytorch/pytorch/issues/127797), and what comes
after a break is compiled as one. Measured on 1 to 4 ranks: 1.1 s for one linear, 10 for four, 13 to 26 for one attention."""
_SYMBOLIC_SECONDS = 0.7
"""What compiled autograd takes on each rank for one linear over sequences, and for more by the square of their number: it traces
sizes as symbols, and reasons about all that it knows of them at each change of a shape. Measured on 1 rank: 13 s for one
attention, 42 for two (100 where they are rotary and fused), 88 to 120 for three, 160 to 185 for four; of rows alone eight
linears take 4 s."""
_TRACE_SECONDS = 0.1
"""What one rank takes to trace a layer with a microbatch of one step; of 0.05 to 0.2 that were measured."""


def num_graphs(training: Training, execution: Execution) -> int:
    """Passes that differ, each compiled anew: for every size of microbatch, and with and without what runs at even steps.

    A compiled backward is also another where it makes gradients and where it adds to those that there are.
    """
    changes = training.steps > 1 and any(layer.auxiliary is AuxiliaryLinear.EVEN_STEPS for layer in training.model.layers)
    adds = execution.compiled_autograd and len(training.data.microbatches) > 1
    return len(set(training.data.microbatches)) * (2 if changes else 1) * (2 if adds else 1)


def compile_seconds(training: Training, layout: Layout) -> float:
    """What the ranks of a layout have beyond their deadline; 0 where nothing is compiled."""
    if not layout.execution.is_compiled:
        return 0.0
    return num_graphs(training, layout.execution) * max(COMPILE_SECONDS, _TIMES_EXPECTED * _expected(training.model, layout))


@singledispatch
def all_compile_seconds(case: Case) -> float:  # noqa: ARG001
    """The same for all layouts of a scenario together; other cases compile nothing."""
    return 0.0


@all_compile_seconds.register
def _(scenario: Scenario) -> float:
    return sum(compile_seconds(scenario.training, layout) for layout in scenario.layouts)


def expected_compile_seconds(scenario: Scenario) -> float:
    """What compiling is expected to take, of all layouts; 0 where nothing is compiled."""
    training, layouts = scenario.training, [layout for layout in scenario.layouts if layout.execution.is_compiled]
    return sum((num_graphs(training, layout.execution) * _expected(training.model, layout) for layout in layouts), start=0.0)


def expected_trace_seconds(scenario: Scenario) -> float:
    """What tracing whole steps is expected to take, of all layouts; 0 where none is traced."""
    training, num_ranks = scenario.training, sum(each.mesh.num_ranks for each in scenario.layouts if each.execution.whole_step)
    return _TRACE_SECONDS * num_ranks * _num_traces(training) * len(training.model.layers) * len(training.data.microbatches)


def _num_traces(training: Training) -> int:
    """Steps that a rank traces: with another learning rate each anew, else the first, and the first that has optimizer state."""
    return training.steps if training.schedule is not None else min(training.steps, 2)


def _expected(model: Model, layout: Layout) -> float:
    execution = layout.execution
    num_ranks, num_linears = layout.mesh.num_ranks, _num_linears(model)
    seconds = _INDUCTOR_SECONDS if execution.compile is Compile.INDUCTOR else _PASS_SECONDS
    seconds += _linear_seconds(execution) * num_ranks * num_linears
    if execution.compiled_autograd and layout.has(TensorParallel, SPMD):
        seconds += _BROKEN_SECONDS * num_ranks * num_linears**2
    if execution.compiled_autograd and model.length is not None:
        seconds += _SYMBOLIC_SECONDS * num_ranks * num_linears**2
    return seconds


def _linear_seconds(execution: Execution) -> float:
    if not execution.compiled_autograd:
        return _LINEAR_SECONDS
    return _BACKWARD_SECONDS if execution.checkpointing is Recompute.NONE else _RECOMPUTED_SECONDS


def _num_linears(model: Model) -> int:
    """Those of all layers, and an embedding and a head as one each."""
    within = sum(kind_of(layer).num_linears(layer) for layer in model.layers)
    return within + (model.source is not None) + (model.head is not None)
