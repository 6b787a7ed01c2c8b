"""Detect whether ranks compute in lower precision.

FSDP2 has no public access to its policy. The private state used here was tried on torch 2.9 to 2.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from equivcheck.scenario import ElementType, LowPrecision, MixedPrecision
from equivcheck.user.batches import map_tensors

LOW = (torch.bfloat16, torch.float16)
"""Element types with fewer digits than float32."""


class PrecisionObserver:
    """Records the precision seen while a module runs; None if it saw none."""

    def __init__(self) -> None:
        self.precision: LowPrecision | MixedPrecision | None = None

    @contextlib.contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Watch the module's outputs and the autocast state."""
        if getattr(module, "_compiled_call_impl", None) is not None:  # compiling includes its hooks
            yield
            return
        hook = module.register_forward_hook(lambda _module, _inputs, outputs: self._look(outputs))
        try:
            yield
        finally:
            hook.remove()

    def _look(self, outputs: Any) -> None:
        if self.precision is None and torch.is_autocast_enabled("cpu"):
            self.precision = LowPrecision(_name(torch.get_autocast_dtype("cpu")))
        if self.precision is None:
            map_tensors(outputs, self._note)

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype in LOW:
            self.precision = MixedPrecision(param=ElementType(_name(tensor.dtype)))
        return tensor


def policy_of(module: nn.Module) -> MixedPrecision | None:
    """Return the policy from the outermost FSDP unit that casts to another type than its parameters have."""
    return next(filter(None, map(_policy, module.modules())), None)


def _policy(unit: nn.Module) -> MixedPrecision | None:
    if isinstance(unit, FSDPModule):
        given: Any = getattr(unit._get_fsdp_state(), "_mp_policy", None)
    elif isinstance(unit, FullyShardedDataParallel):
        given = unit.mixed_precision
    else:
        return None
    kinds = {"param": "param_dtype", "reduce": "reduce_dtype", "output": "output_dtype"}
    found = {key: getattr(given, name, None) for key, name in kinds.items()}
    named = {key: ElementType(_name(kind)) for key, kind in found.items() if kind is not None and _name(kind) in _KNOWN}
    own = {_name(parameter.dtype) for parameter in unit.parameters()}
    return MixedPrecision(**named) if {kind.value for kind in named.values()} - own else None


_KNOWN = {kind.value for kind in ElementType}


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
