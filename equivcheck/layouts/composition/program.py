"""The function that every rank runs for a scenario."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from equivcheck.layouts.base.execution.compiled import compile_setup, compiling
from equivcheck.layouts.base.execution.in_backward import update_in_backward
from equivcheck.layouts.base.execution.whole_step import trace_steps
from equivcheck.layouts.composition.registry import kind_of
from equivcheck.scenario import Checkpointing, Execution, Scenario
from equivcheck.training.layers.module import LayerModule, use_rank_implementations
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.setup import Setup
from equivcheck.worlds.marks import mark
from equivcheck.worlds.meshes import device_mesh, submesh
from equivcheck.worlds.trace.trace import Trace

if TYPE_CHECKING:
    from torch import nn


def rank_program(
    scenario: Scenario, alter: Callable[[Setup], None] | None = None, prepare: Callable[[Setup], None] | None = None
) -> Trace:
    """Train this rank's part of a scenario, and return its trace.

    `prepare` may change the rank's setup. `alter` may then plant a bug in it.
    """
    with compiling(scenario.layout.execution):
        setup = rank_setup(scenario)
        for change in (prepare, alter):
            if change is not None:
                change(setup)
        try:
            return train(setup)
        finally:
            setup.release()


def rank_setup(scenario: Scenario) -> Setup:
    """Build this rank's setup and apply every parallelism, innermost first."""
    setup, layout = single_device_setup(scenario.training), scenario.layout
    setup.announce, setup.layout = mark, layout
    recompute_layers(setup.model, layout.execution)
    use_rank_implementations(setup.model)
    mesh = setup.mesh = device_mesh(layout.mesh.shape, layout.mesh.names)
    kinds = [(kind_of(each), each, submesh(mesh, layout.axes_of(each))) for each in layout.parallelisms]
    for kind, parallelism, axes in kinds:
        kind.apply(setup, parallelism, axes)
    for kind, parallelism, axes in kinds:
        kind.finish(setup, parallelism, axes)
    compile_setup(setup, layout.execution)
    if layout.execution.whole_step:
        trace_steps(setup)
    if layout.execution.optimizer_in_backward:
        update_in_backward(setup)
    return setup


def recompute_layers(model: nn.Module, execution: Execution) -> None:
    """Turn on activation checkpointing for the layers that `execution` chooses, or activation offload.

    It must run before any parallelism is applied, so that wrappers around a layer are outside the recomputation.
    """
    for index, layer in enumerate(model.get_submodule("layers").children()):
        if isinstance(layer, LayerModule):
            layer.recomputes = execution.checkpoints(index)
            layer.keeps_products = execution.checkpointing is Checkpointing.SELECTIVE
            layer.offloads = execution.checkpointing is Checkpointing.OFFLOAD
