"""What is imported before there are ranks: once for all of them, and never in the middle of a run, whose limit it would use up.

Tried on torch 2.13. A name that a torch version lacks is skipped: ranks import it when they need it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings

MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch._dynamo",
)


@functools.cache
def preload() -> None:
    """Import all of `MODULES` that exist here; what torch warns of in its own code must not be an error where warnings are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODULES:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)


def compile_once() -> None:
    """Have a forward compiled: copies of this process then have nearly all that compilers import late.

    Without gradients: where autograd has run on threads of its own, torch refuses to differentiate in a copy of the process
    (https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork).
    """
    import torch

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("torch._inductor.lowering")  # which backwards take from it
        torch.compile(torch.nn.Linear(1, 1), backend="aot_eager")(torch.ones(1, 1))
        torch._dynamo.reset()
