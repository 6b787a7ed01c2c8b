"""Compiling a rank's forward and backward, and leaving nothing of it to the next scenario on the same rank.

Private torch API (compiled autograd's context, Dynamo's list of modules to inline); tried on torch 2.13.
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
"""What a `DistributedDataParallel` built for compiled autograd adds to the modules that Dynamo looks into, for good."""
_REDUCER_CONFIG = ("_fuse_ddp_communication", "_fuse_ddp_bucket_size")
"""What it sets in Inductor's configuration."""

MAX_RECOMPILES = 64
"""Variants of one function before Dynamo gives up and runs it eagerly: the layers of a model share theirs."""


@contextmanager
def compiling(execution: Execution) -> Iterator[None]:
    """A fresh compiler, set up for an execution, while a setup is built and trained; nothing where nothing is compiled."""
    if not execution.is_compiled:
        yield
        return
    import torch._dynamo.config

    torch._dynamo.reset()
    recursion_limit = sys.getrecursionlimit()  # which Inductor raises, for good
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
    """While entered, a `DistributedDataParallel` reduces by hooks in Python, which compiled autograd can look into."""
    import torch._inductor.config
    from torch._dynamo import trace_rules

    before = {name: getattr(torch._inductor.config, name) for name in _REDUCER_CONFIG}
    try:
        with torch._dynamo.config.patch(optimize_ddp="python_reducer"), torch._inductor.config.patch(before):
            yield
    finally:
        trace_rules.LEGACY_MOD_INLINELIST.discard(_REDUCER_MODULE)
        trace_rules.get_legacy_mod_inlinelist.cache_clear()


def compile_setup(setup: Setup, execution: Execution) -> None:
    """Compile what is called or each layer, and the backward passes."""
    backend = Compile.AOT_EAGER if execution.compile is Compile.NONE else execution.compile
    if execution.per_layer:
        for layer in [module for module in setup.model.modules() if isinstance(module, LayerModule)]:
            # Layers share their code: with symbolic shapes, those of DTensors recurse without end (torch 2.13).
            layer.compile(backend=backend.value, dynamic=False)
    elif execution.compile is not Compile.NONE:
        setup.module = torch.compile(setup.module, backend=backend.value)  # type: ignore[assignment]
    if execution.compiled_autograd:
        setup.accumulation = partial(_accumulation, setup.accumulation, backend.value)


@contextmanager
def _accumulation(inner: Any, backend: str, last: bool) -> Iterator[None]:
    from torch._dynamo.compiled_autograd import _enable

    with inner(last), _enable(torch.compile(backend=backend)):
        yield
