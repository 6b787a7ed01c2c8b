"""What the fork server imports once, so that each rank starts with it and shares its memory.

Tried on torch 2.13. A name that a torch version lacks is skipped: ranks import it when they need it.
"""

from __future__ import annotations

import contextlib
import importlib

MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch._dynamo",
)


def preload() -> None:
    """Import all of `MODULES` that exist here."""
    for name in MODULES:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
