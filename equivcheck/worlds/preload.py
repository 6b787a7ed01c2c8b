"""What is imported before there are ranks: once for all of them, and never in the middle of a run, whose limit it would use up.

Tried on torch 2.13. A name that a torch version lacks is skipped: ranks import it when they need it.
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
"""Modules that most ranks need; all but a few come with an optimizer anyway, which imports `torch._dynamo`."""
RARE = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
)
"""Modules that few ranks need. They take 0.25 s, most of it for `torch.distributed.optim`, which compiles TorchScript."""


@functools.cache
def preload() -> None:
    """Import all of these modules that exist here."""
    preload_common()
    _import(RARE)


@functools.cache
def preload_common() -> None:
    """Import the common ones: enough for programs of equivcheck, whose layouts name what else they need."""
    _import(COMMON)


def _import(names: tuple[str, ...]) -> None:
    """Import what exists; a warning that torch's own code causes must not be an error if the user makes warnings errors."""
    with warnings.catch_warnings(), rare_collections():
        warnings.simplefilter("ignore")
        for name in names:
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
