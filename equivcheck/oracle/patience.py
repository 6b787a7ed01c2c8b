"""How long ranks may compile before that is called a hang."""

from __future__ import annotations

from equivcheck.scenario import Layout, Scenario, Side, Training

COMPILE_SECONDS = 150.0
"""For all that one pass compiles: 2 to 20 s where nothing else runs.

40 s on 4 ranks with compiled autograd over DTensors, whose graph breaks at each of their conversions
(https://github.com/pytorch/pytorch/issues/127797); and beside other work several times as long.
"""


def num_graphs(training: Training) -> int:
    """Passes that differ, each compiled anew: for every size of microbatch, and with and without what runs at even steps."""
    changes = training.steps > 1 and any(layer.side is Side.EVEN_STEPS for layer in training.model.layers)
    return len(set(training.data.microbatches)) * (2 if changes else 1)


def compile_seconds(training: Training, layout: Layout) -> float:
    """What the ranks of a layout have beyond their deadline; 0 where nothing is compiled."""
    return COMPILE_SECONDS * num_graphs(training) if layout.execution.is_compiled else 0.0


def all_compile_seconds(scenario: Scenario) -> float:
    """The same for all layouts that a scenario is handed over between."""
    return sum(compile_seconds(scenario.training, layout) for layout in scenario.layouts)
