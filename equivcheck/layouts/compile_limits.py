"""What cannot be compiled, and the nearest layout that can."""

from __future__ import annotations

import os
import shutil
import sys
from functools import cache

from equivcheck.layouts.kind import LayoutLimit
from equivcheck.layouts.limits import with_execution, with_options
from equivcheck.scenario import DDP, Compile, Layout, Replicate, Replicator, TensorParallel
from equivcheck.scenario.parallelism import DEFAULT_BUCKET_MB

FIRST_BUCKET_MB = 1.0
"""Size of the first bucket that `DDPOptimizer`, which cuts what is compiled to fit buckets, takes for granted."""


@cache
def has_compiler() -> bool:
    """Whether there is the C++ compiler that Inductor takes: that of the environment variable CXX, or else the system's."""
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) is not None


NO_COMPILER = LayoutLimit(
    reason="torch.compile with backend inductor: there is no C++ compiler here, neither that of CXX nor the system's",
    applies=lambda layout: layout.execution.compile is Compile.INDUCTOR and not has_compiler(),
    repair=lambda layout: with_execution(layout, compile=Compile.AOT_EAGER),
)


def uncompiled(layout: Layout) -> Layout:
    """The layout run eagerly."""
    return with_execution(layout, compile=Compile.NONE, per_layer=False, compiled_autograd=False)


def _reduces_by_ddp(layout: Layout) -> bool:
    return layout.has(DDP) or any(parallelism.implementation is Replicator.DDP for parallelism in layout.of(Replicate))


def _has_small_buckets(layout: Layout) -> bool:
    execution = layout.execution
    caps = [ddp.bucket_cap_mb for ddp in layout.of(DDP)] + [replicate.bucket_cap_mb for replicate in layout.of(Replicate)]
    return (
        execution.compile is not Compile.NONE and not execution.compiled_autograd and any(cap < FIRST_BUCKET_MB for cap in caps)
    )


NO_SMALL_BUCKETS = LayoutLimit(
    reason="torch.compile of DistributedDataParallel: no bucket may be smaller than 1 MiB ('First bucket should be ...')",
    applies=_has_small_buckets,
    repair=lambda layout: with_options(layout, (DDP, Replicate), bucket_cap_mb=DEFAULT_BUCKET_MB),
)

LOCAL_TENSORS_BY_LAYER = LayoutLimit(
    reason="DistributedDataParallel over tensor parallelism: compiled as a whole, its swapping of DTensors and local tensors "
    "makes a parameter that backward goes through twice; compile each layer",
    applies=lambda layout: (
        _reduces_by_ddp(layout)
        and layout.has(TensorParallel)
        and layout.execution.compile is not Compile.NONE
        and not layout.execution.per_layer
    ),
    repair=lambda layout: with_execution(layout, per_layer=True),
)

LOCAL_TENSORS_WITHOUT_COMPILED_AUTOGRAD = LayoutLimit(
    # https://github.com/pytorch/pytorch/issues/127797
    reason="DistributedDataParallel over tensor parallelism: compiled autograd cannot trace the backward of its DTensors",
    applies=lambda layout: _reduces_by_ddp(layout) and layout.has(TensorParallel) and layout.execution.compiled_autograd,
    repair=lambda layout: with_execution(layout, compiled_autograd=False),
)

COMPILED_DDP = (NO_SMALL_BUCKETS, LOCAL_TENSORS_BY_LAYER, LOCAL_TENSORS_WITHOUT_COMPILED_AUTOGRAD)
"""Of everything that has a `DistributedDataParallel` in it."""

FSDP_WITHOUT_COMPILED_AUTOGRAD = LayoutLimit(
    # https://github.com/pytorch/pytorch/pull/174906 took out what there was of it.
    reason="FSDP: compiled autograd does not see its hooks, and gradients stay away",
    applies=lambda layout: layout.execution.compiled_autograd,
    repair=lambda layout: with_execution(layout, compiled_autograd=False),
)
