"""Limits for compiling, and for tracing a step into one graph."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from functools import cache

from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit
from equivcheck.layouts.base.limits.repairs import may_skip_parameters, with_execution
from equivcheck.scenario import SGD, Checkpointing, ClipNorm, Compile, Implementation, Layout, TensorParallel, Training, ZeroGrad


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
    reason="whole_step: activation checkpointing or offload is not supported: backward reads saved tensors through hooks that "
    "the tracer does not know",
    applies=lambda layout: layout.execution.whole_step and layout.execution.checkpointing is not Checkpointing.NONE,
    repair=lambda layout: replace(layout, execution=replace(layout.execution, checkpointing=Checkpointing.NONE)),
)

OFFLOAD_IS_EAGER = LayoutLimit(
    reason="torch.compile: activation offload is not supported: Dynamo does not trace `save_on_cpu`, so layers inside it run "
    "eagerly, and compiled autograd breaks its graph at each saved tensor",
    applies=lambda layout: layout.execution.is_compiled and layout.execution.checkpointing is Checkpointing.OFFLOAD,
    repair=lambda layout: with_execution(layout, checkpointing=Checkpointing.EVERY_LAYER),
)

NO_COUNTS_IN_GRAPHS = Limit(
    reason="whole_step: an optimizer that reads its step count as a number is not supported: a graph cannot hold the number "
    "(`capturable` computes it in float32); SGD, RMSprop, Adadelta and fused Adam and AdamW do not read it",
    applies=lambda training, layout: (
        layout.execution.whole_step and training.optimizer.implementation not in training.optimizer.traceable
    ),
    repair=_with_graph_optimizer,
)

UPDATES_IN_BACKWARD = LayoutLimit(
    reason="optimizer_in_backward: pipelines, DistributedDataParallel, FullyShardedDataParallel, explicit reductions after "
    "backward, heads in chunks and distributed Muon are not supported: a gradient is not complete when hooks run after its "
    "accumulation",
    applies=lambda layout: (
        layout.execution.optimizer_in_backward and not all(each.completes_gradients for each in layout.parallelisms)
    ),
    repair=lambda layout: with_execution(layout, optimizer_in_backward=False),
)

HOOKS_OUTSIDE_GRAPHS = LayoutLimit(
    reason="optimizer_in_backward: compiled autograd and whole_step are not supported: a graph of the backward pass has no hooks "
    "after accumulation",
    applies=lambda layout: (
        layout.execution.optimizer_in_backward and (layout.execution.compiled_autograd or layout.execution.whole_step)
    ),
    repair=lambda layout: with_execution(layout, optimizer_in_backward=False),
)

EXECUTION_LAYOUT_LIMITS = (
    STEPS_OF_OPERATIONS,
    NOTHING_TWICE_IN_GRAPHS,
    OFFLOAD_IS_EAGER,
    NO_COMPILER,
    UPDATES_IN_BACKWARD,
    HOOKS_OUTSIDE_GRAPHS,
)
"""Limits of layouts, checked before those of the parallelisms."""

IN_BACKWARD_LIMITS = (
    Limit(
        reason="optimizer_in_backward: clipping by norm is not supported: parameters are updated before all gradients exist",
        applies=lambda training, layout: layout.execution.optimizer_in_backward and isinstance(training.clipping, ClipNorm),
        repair=lambda training, _layout: replace(training, clipping=None),
    ),
    Limit(
        reason="optimizer_in_backward: ZeroGrad.ZERO with parameters that take no part in a step is not supported: the hook of "
        "such a parameter does not run, while an update after backward applies momentum and weight decay",
        applies=lambda training, layout: (
            layout.execution.optimizer_in_backward and training.zero_grad is ZeroGrad.ZERO and may_skip_parameters(training)
        ),
        repair=lambda training, _layout: replace(training, zero_grad=ZeroGrad.NONE),
    ),
)
"""Limits of trainings that update in backward."""
