"""Limits for compiling, and for tracing a step into one graph."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from functools import cache

from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit
from equivcheck.layouts.base.limits.repairs import with_execution
from equivcheck.scenario import SGD, Checkpointing, Compile, Implementation, Layout, TensorParallel, Training


@cache
def has_compiler() -> bool:
    """Whether the C++ compiler that Inductor calls exists: `$CXX`, or else the system's default."""
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) is not None


NO_COMPILER = LayoutLimit(
    reason="torch.compile with backend inductor: a machine without a C++ compiler is not supported: neither $CXX nor the "
    "system's default exists",
    applies=lambda layout: layout.execution.compile is Compile.INDUCTOR and not has_compiler(),
    repair=lambda layout: with_execution(layout, compile=Compile.AOT_EAGER),
)


def without_compilation(layout: Layout) -> Layout:
    """Return the layout with eager execution."""
    return with_execution(layout, compile=Compile.NONE, per_layer=False, compiled_autograd=False)


def _with_graph_optimizer(training: Training, layout: Layout) -> Training:
    optimizer = training.optimizer
    # Over a tensor-parallel plan another limit turns fused optimizers into for-loops, also if a training resumes under it.
    is_loop = optimizer.implementation is Implementation.FOR_LOOP
    if Implementation.FUSED in optimizer.traceable and not is_loop and not layout.has(TensorParallel):
        return replace(training, optimizer=replace(optimizer, implementation=Implementation.FUSED))
    return replace(training, optimizer=SGD(lr=optimizer.lr, weight_decay=optimizer.weight_decay, maximize=optimizer.maximize))


STEPS_OF_OPERATIONS = LayoutLimit(
    reason="whole_step: parallelisms with hooks, such as DDP and FSDP, are not supported: the traced graph contains operations "
    "only, not the work of hooks",
    applies=lambda layout: layout.execution.whole_step and not all(taken.traceable for taken in layout.parallelisms),
    repair=lambda layout: replace(layout, execution=replace(layout.execution, whole_step=False)),
)

NOTHING_TWICE_IN_GRAPHS = LayoutLimit(
    reason="whole_step: activation checkpointing is not supported: it runs a layer again on saved tensors that the tracer does "
    "not know",
    applies=lambda layout: layout.execution.whole_step and layout.execution.checkpointing is not Checkpointing.NONE,
    repair=lambda layout: replace(layout, execution=replace(layout.execution, checkpointing=Checkpointing.NONE)),
)

NO_COUNTS_IN_GRAPHS = Limit(
    reason="whole_step: an optimizer that reads its step count as a number is not supported: a graph cannot hold the number "
    "(`capturable` computes it in float32); SGD, RMSprop, Adadelta and fused Adam and AdamW do not read it",
    applies=lambda training, layout: (
        layout.execution.whole_step and training.optimizer.implementation not in training.optimizer.traceable
    ),
    repair=_with_graph_optimizer,
)
