"""Time limits and estimates for compiling and tracing on ranks."""

from __future__ import annotations

from functools import singledispatch

from equivcheck.scenario import (
    SPMD,
    AuxiliaryLinear,
    Checkpointing,
    Compile,
    Execution,
    Layout,
    Model,
    Scenario,
    TensorParallel,
    Training,
)
from equivcheck.scenario.case import Checkable
from equivcheck.training.layers.registry import layer_kind

COMPILE_SECONDS = 150.0
"""Minimum seconds allowed for compiling one pass. Most passes take 5 s, but they take longer on a busy machine."""
_TIMES_EXPECTED = 4
"""Allowed compile time, as a multiple of the expected time."""
START_SECONDS = 6.0
"""Extra seconds for the first compilation in a process."""
_PASS_SECONDS, _INDUCTOR_SECONDS = 1.0, 40.0
"""Base seconds for one pass on two cores. Inductor is slower because it calls a C++ compiler."""
_LINEAR_SECONDS, _BACKWARD_SECONDS, _RECOMPUTED_SECONDS = 0.1, 0.4, 1.2
"""Seconds for each linear and rank: with a compiled forward, with compiled autograd, and with compiled autograd that also
recomputes layers, which breaks its graph. Fitted to 93 scenarios on 2 to 4 ranks."""
_BROKEN_SECONDS = 0.7
"""Extra seconds for compiled autograd on each rank if gradients are DTensors, multiplied by the squared number of linears. Each
conversion breaks the backward graph (https://github.com/pytorch/pytorch/issues/127797), and the code after a break is compiled as
one graph. Measured on 1 to 4 ranks: 1.1 s for one linear, 10 s for four, 13 to 26 s for one attention."""
_SYMBOLIC_SECONDS = 0.7
"""Extra seconds for compiled autograd on each rank if rows are sequences, multiplied by the squared number of linears. It traces
sizes as symbols and simplifies all known facts about them at each shape change. Measured on 1 rank: 13 s for one attention, 42 s
for two (100 s if rotary and fused), 88 to 120 s for three, 160 to 185 s for four. Without sequences, eight linears take 4 s."""
_TRACE_SECONDS = 0.1
"""Seconds for tracing one layer with one microbatch on one rank. Measured: 0.05 to 0.2 s."""


def num_graphs(training: Training, execution: Execution) -> int:
    """Count the graphs to compile, at least one for each microbatch size.

    The number doubles if layers run only at even steps. It doubles again under compiled autograd with several microbatches,
    because the first microbatch creates gradients and later ones add to them, with different graphs.
    """
    changes = training.steps > 1 and any(layer.auxiliary is AuxiliaryLinear.EVEN_STEPS for layer in training.model.layers)
    adds = execution.compiled_autograd and len(training.data.microbatches) > 1
    return len(set(training.data.microbatches)) * (2 if changes else 1) * (2 if adds else 1)


def compile_seconds(training: Training, layout: Layout) -> float:
    """Seconds added to the ranks' deadline for the time that they spend on compiling. 0 if nothing is compiled."""
    if not layout.execution.is_compiled:
        return 0.0
    return num_graphs(training, layout.execution) * max(COMPILE_SECONDS, _TIMES_EXPECTED * _expected(training.model, layout))


@singledispatch
def all_compile_seconds(case: Checkable) -> float:  # noqa: ARG001
    """Sum `compile_seconds` over a scenario's layouts. 0 for tensor programs, because they compile nothing."""
    return 0.0


@all_compile_seconds.register
def _(scenario: Scenario) -> float:
    return sum(compile_seconds(scenario.training, layout) for layout in scenario.layouts)


def expected_compile_seconds(scenario: Scenario) -> float:
    """Expected seconds for compiling all layouts in a scenario."""
    training, layouts = scenario.training, [layout for layout in scenario.layouts if layout.execution.is_compiled]
    return sum((num_graphs(training, layout.execution) * _expected(training.model, layout) for layout in layouts), start=0.0)


def expected_trace_seconds(scenario: Scenario) -> float:
    """Expected seconds for tracing steps as one graph (`Execution.whole_step`), summed over all layouts and ranks."""
    training, num_ranks = scenario.training, sum(each.mesh.num_ranks for each in scenario.layouts if each.execution.whole_step)
    return _TRACE_SECONDS * num_ranks * _num_traces(training) * len(training.model.layers) * len(training.data.microbatches)


def _num_traces(training: Training) -> int:
    """Count the steps that a rank traces.

    With a schedule it traces every step, because the learning rate changes. Otherwise it traces only the first step and the
    first step with optimizer state, and a trailing accumulation window.
    """
    return training.steps if training.schedule is not None else min(training.steps, 2 + training.has_trailing_window)


def _expected(model: Model, layout: Layout) -> float:
    execution = layout.execution
    num_linears = sum(layer_kind(layer).num_linears(layer) for layer in model.layers)
    num_linears += (model.source is not None) + (model.head is not None)
    num_ranks = layout.mesh.num_ranks
    seconds = _INDUCTOR_SECONDS if execution.compile is Compile.INDUCTOR else _PASS_SECONDS
    if not execution.compiled_autograd:
        per_linear = _LINEAR_SECONDS
    else:
        per_linear = _BACKWARD_SECONDS if execution.checkpointing is Checkpointing.NONE else _RECOMPUTED_SECONDS
    seconds += per_linear * num_ranks * num_linears
    if execution.compiled_autograd and layout.has(TensorParallel, SPMD):
        seconds += _BROKEN_SECONDS * num_ranks * num_linears**2
    if execution.compiled_autograd and model.length is not None:
        seconds += _SYMBOLIC_SECONDS * num_ranks * num_linears**2
    return seconds
