"""Compile a rank's forward and backward, and reset the compiler for the rank's next scenario.

Uses private torch API (compiled autograd's context, Dynamo's list of modules to inline). Tested with torch 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from equivcheck.scenario import Compile, Execution
from equivcheck.training.layers.module import LayerModule
from equivcheck.training.setup import Setup

_REDUCER_MODULE = "torch.nn.parallel.distributed"
"""`DistributedDataParallel` under compiled autograd adds this module permanently to the modules that Dynamo inlines."""
_REDUCER_CONFIG = ("_fuse_ddp_communication", "_fuse_ddp_bucket_size")
"""Inductor settings that `DistributedDataParallel` changes under compiled autograd."""

MAX_RECOMPILES = 64
"""A function may have this many variants before Dynamo runs it eagerly. All layers in a model share one function."""


@contextmanager
def compiling(execution: Execution) -> Iterator[None]:
    """Context manager: configure the compiler for `execution`, and reset it before and after.

    It does nothing if nothing is compiled.
    """
    if not execution.is_compiled:
        yield
        return
    import torch._dynamo.config

    # Compiled code of an earlier scenario would be reused, or count towards the recompile limit.
    torch._dynamo.reset()
    recursion_limit = sys.getrecursionlimit()  # Inductor raises it and does not restore it
    try:
        with (
            torch._dynamo.config.patch(recompile_limit=MAX_RECOMPILES),
            _traceable_reducer() if execution.compiled_autograd else nullcontext(),
        ):
            yield
    finally:
        sys.setrecursionlimit(recursion_limit)
        torch._dynamo.reset()


@contextmanager
def _traceable_reducer() -> Iterator[None]:
    """Make `DistributedDataParallel` reduce by Python hooks, because compiled autograd cannot trace its C++ reducer."""
    import torch._inductor.config
    from torch._dynamo import trace_rules

    before = {name: getattr(torch._inductor.config, name) for name in _REDUCER_CONFIG}
    try:
        with torch._dynamo.config.patch(optimize_ddp="python_reducer"), torch._inductor.config.patch(before):
            yield
    finally:
        # DDP added its module when it was built; the cached list must be rebuilt without it.
        trace_rules.LEGACY_MOD_INLINELIST.discard(_REDUCER_MODULE)
        trace_rules.get_legacy_mod_inlinelist.cache_clear()


def compile_setup(setup: Setup, execution: Execution) -> None:
    """Compile the whole model or each layer, and the backward passes if compiled autograd is on."""
    backend = Compile.AOT_EAGER if execution.compile is Compile.NONE else execution.compile
    if execution.per_layer:
        for layer in [module for module in setup.model.modules() if isinstance(module, LayerModule)]:
            # Layers share code, so a second width makes shapes symbolic. For DTensors these recurse without end (torch 2.13).
            layer.compile(backend=backend.value, dynamic=False)
    elif execution.compile is not Compile.NONE:
        setup.parts = [torch.compile(part, backend=backend.value) for part in setup.parts]  # type: ignore[misc]
    if execution.compiled_autograd:
        setup.accumulation = partial(_accumulation, setup.accumulation, backend.value)


@contextmanager
def _accumulation(inner: Any, backend: str, last: bool) -> Iterator[None]:
    # Private, because no public context manager sets the compiler for a backward pass.
    from torch._dynamo.compiled_autograd import _enable

    with inner(last), _enable(torch.compile(backend=backend)):
        yield
