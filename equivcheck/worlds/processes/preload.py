"""Imports modules before ranks exist: once for all ranks, and outside the time limit of a run.

Tested with torch 2.13. Modules missing in a torch version are skipped.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings

from equivcheck.system.collection import rare_collections

COMMON = (
    "torch",
    "torch.distributed",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch._dynamo",
)
"""Modules for most ranks. An optimizer imports `torch._dynamo`, which imports most other modules."""
RARE = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
)
"""Modules for few ranks. They take 0.25 s, mostly because `torch.distributed.optim` compiles TorchScript."""


@functools.cache
def preload() -> None:
    """Import all modules needed by any check. Modules that this torch version does not have are skipped."""
    preload_common()
    _import(RARE)


@functools.cache
def preload_common() -> None:
    """Import the modules needed by all of equivcheck's own programs. Each layout names the further modules it needs."""
    _import(COMMON)


def _import(names: tuple[str, ...]) -> None:
    with warnings.catch_warnings(), rare_collections():
        warnings.simplefilter("ignore")
        for name in names:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)


def compile_once() -> None:
    """Call `torch.compile` on a small function, so that processes forked later inherit the modules that the compiler imports.

    The function has no backward pass, because torch refuses backward in a forked process after autograd has used threads
    (https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork).
    """
    import torch

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("torch._inductor.lowering")  # backward passes import it
        torch.compile(torch.nn.Linear(1, 1), backend="aot_eager")(torch.ones(1, 1))
        torch._dynamo.reset()
