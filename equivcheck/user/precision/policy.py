"""Checks the argument `precision`, finds the points at which one device must round, and observes how ranks round.

FSDP2 has no public access to its policy. The private state used here was tried on torch 2.9 to 2.15.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from equivcheck.layouts.base.rounding import FULLY_SHARD_WITHOUT_GRAD_DTYPE, Division, Rounding
from equivcheck.scenario import ElementType, LowPrecision, MixedPrecision
from equivcheck.system.torch_version import is_torch_in
from equivcheck.user.batches import map_tensors
from equivcheck.user.task import Task
from equivcheck.user.usage import invalid

Precision: TypeAlias = LowPrecision | MixedPrecision
"""Autocast type, or mixed-precision policy for FSDP."""

ALLOWED = (
    f"{', '.join(map(repr, LowPrecision))} (autocast), MixedPrecision(param=..., reduce=..., output=...) "
    f"of {', '.join(map(repr, ElementType))}, or None"
)
"""Allowed values for `precision`, in words."""


def require_precision(task: Task) -> None:
    """Check the argument `precision`. Raises `UsageError` if its type is wrong, or if autocast would ignore float64."""
    precision: Any = task.precision
    if not isinstance(precision, Precision | None):
        raise invalid(f"precision {precision!r:.100}", "its type is wrong", ALLOWED)
    if isinstance(precision, MixedPrecision):
        for field in ("param", "reduce", "output"):
            value = getattr(precision, field)
            if not isinstance(value, ElementType | None):
                expected = f"{', '.join(map(repr, ElementType))}, or None"
                raise invalid(f"precision.{field} {value!r:.100}", "it is not an ElementType", expected)
    if isinstance(precision, LowPrecision) and task.dtype is torch.float64:
        given = f"precision {precision!r} with dtype torch.float64"
        raise invalid(given, "autocast does not cast float64", "dtype=torch.float32 or None")


def rounding_of(task: Task, *, in_parts: bool = True) -> Rounding:
    """Return the points at which ranks round, and the number of parts into which they split the rows.

    If not `in_parts`, this number is 1.
    """
    *outer, inner = [size for name, size in task.mesh if name in task.data_axes] or [1]
    if task.shard is not None or not in_parts:
        outer, inner = [], 1  # only the user's `shard` knows a rank's part
    parts: dict[str, Any] = {"replicas": math.prod(outer), "shards": inner}
    policy = task.precision
    if isinstance(policy, MixedPrecision):
        return Rounding(compute=policy.param, output=policy.output, reduce=_reduced_in(policy), division=Division.AFTER, **parts)
    return Rounding(autocast=policy, **parts)


def _reduced_in(policy: MixedPrecision) -> ElementType | None:
    """Return the reduction type; None stands for the master parameters' type."""
    return policy.reduce or (policy.param if is_torch_in(FULLY_SHARD_WITHOUT_GRAD_DTYPE) else None)


def sums_in_parts(task: Task) -> bool:
    """Whether ranks may round partial sums that do not exist on one device.

    They may if the mesh has an axis without data parallelism, or if the user passes `shard`.
    """
    return task.shard is not None or any(size > 1 for name, size in task.mesh if name not in task.data_axes)


def computes_in_few_digits(rounding: Rounding) -> bool:
    """Whether the operands of matrix products are bfloat16 or float16.

    Such products accumulate in float32, whatever the operands' memory layout.
    """
    return rounding.autocast is not None or rounding.compute in (ElementType.BFLOAT16, ElementType.FLOAT16)


def torch_type(kind: ElementType | LowPrecision) -> torch.dtype:
    """Return the torch dtype for an element type."""
    dtype: torch.dtype = getattr(torch, kind.value)
    return dtype


def precision_text(task: Task) -> str:
    """Describe a task's element types and rounding: ``float32, autocast to bfloat16``."""
    kept = "its own types" if task.dtype is None else str(task.dtype).removeprefix("torch.")
    policy = task.precision
    if isinstance(policy, MixedPrecision):
        kinds = {"parameters": policy.param, "reductions": policy.reduce, "outputs": policy.output}
        return ", ".join([kept, *(f"{what} in {kind.value}" for what, kind in kinds.items() if kind is not None)])
    return kept if policy is None else f"{kept}, autocast to {policy.value}"


LOW = (torch.bfloat16, torch.float16)
"""Element types with fewer digits than float32."""


class PrecisionObserver:
    """Records the low precision in which a module runs."""

    def __init__(self) -> None:
        self.precision: LowPrecision | MixedPrecision | None = None

    @contextlib.contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Inside the context, watch the module's outputs and the autocast state."""
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
    """Return the mixed-precision policy of the outermost FSDP unit that casts its parameters; None if no unit does."""
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
