"""What ranks compute in fewer digits than their parameters have, as far as it can be seen from outside.

`FSDPModule` tells nobody its policy: its state is private API of torch, tried on 2.9 to 2.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from equivcheck.scenario import ElementType, LowPrecision, MixedPrecision
from equivcheck.user.batches import mapped

LOW = (torch.bfloat16, torch.float16)
"""Element types of fewer digits than float32."""


@contextlib.contextmanager
def watched(module: nn.Module) -> Iterator[list[str]]:
    """What is seen while a module is called: the precision that says the same, as code; empty for nothing."""
    seen: list[str] = []
    if getattr(module, "_compiled_call_impl", None) is not None:  # its hooks would be compiled with it
        yield seen
        return
    hook = module.register_forward_hook(lambda _module, _inputs, outputs: _look(outputs, seen))
    try:
        yield seen
    finally:
        hook.remove()


def _look(outputs: Any, seen: list[str]) -> None:
    if not seen:
        if torch.is_autocast_enabled("cpu"):
            seen.append(repr(LowPrecision(_name(torch.get_autocast_dtype("cpu")))))
        else:
            mapped(outputs, lambda tensor: _note(tensor, seen))


def _note(tensor: torch.Tensor, seen: list[str]) -> torch.Tensor:
    if tensor.dtype in LOW and not seen:
        seen.append(f"MixedPrecision(param={ElementType(_name(tensor.dtype))!r})")
    return tensor


def policy_of(module: nn.Module) -> str:
    """The policy of a unit of fully sharded data parallelism within, as a noun in code; empty where none casts."""
    return next(filter(None, map(_policy, module.modules())), "")


def _policy(unit: nn.Module) -> str:
    if isinstance(unit, FSDPModule):
        given: Any = getattr(unit._get_fsdp_state(), "_mp_policy", None)  # noqa: SLF001
    elif isinstance(unit, FullyShardedDataParallel):
        given = unit.mixed_precision
    else:
        return ""
    kinds = {"param": "param_dtype", "reduce": "reduce_dtype", "output": "output_dtype"}
    found = {key: getattr(given, name, None) for key, name in kinds.items()}
    named = {key: ElementType(_name(kind)) for key, kind in found.items() if kind is not None and _name(kind) in _KNOWN}
    return repr(MixedPrecision(**named)) if named else ""


_KNOWN = {kind.value for kind in ElementType}


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
