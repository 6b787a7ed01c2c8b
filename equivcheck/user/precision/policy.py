"""What ranks round, as `precision=` says it, and what of that one device can do alike."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch

from equivcheck.errors import UsageError
from equivcheck.layouts.base.rounding import FULLY_SHARD_WITHOUT_GRAD_DTYPE, Division, Rounding
from equivcheck.scenario import ElementType, LowPrecision, MixedPrecision
from equivcheck.system.torch_version import torch_in
from equivcheck.user.task import Task

Precision: TypeAlias = LowPrecision | MixedPrecision
"""What `torch.autocast` casts to, or what fully sharded data parallelism casts."""

ALLOWED = (
    f"{', '.join(map(repr, LowPrecision))} (autocast), MixedPrecision(param=..., reduce=..., output=...) "
    f"of {', '.join(map(repr, ElementType))}, or None"
)
"""What `precision` may be, in words for people."""


def require_precision(task: Task) -> None:
    """Raises `UsageError` for what is no precision, and for autocast of numbers that it leaves alone."""
    precision: Any = task.precision
    if not isinstance(precision, Precision | None):
        raise UsageError(f"check_training: precision is {precision!r:.100}; allowed: {ALLOWED}")
    if isinstance(precision, MixedPrecision):
        for field in ("param", "reduce", "output"):
            value = getattr(precision, field)
            if not isinstance(value, ElementType | None):
                allowed = ", ".join(map(repr, ElementType))
                raise UsageError(f"check_training: precision has {field} {value!r:.100}; allowed: {allowed}, or None")
    if isinstance(precision, LowPrecision) and task.dtype is torch.float64:
        raise UsageError(
            f"check_training: precision is {precision!r} and dtype is torch.float64, which autocast leaves as it is; "
            "allowed with it: dtype=torch.float32, or None"
        )


def rounding_of(task: Task) -> Rounding:
    """Where the ranks of a task round, and into how many parts they cut its rows."""
    *outer, inner = [size for name, size in task.mesh if name in task.data_axes] or [1]
    if task.shard is not None:
        outer, inner = [], 1  # nobody but the user knows what the part of a rank is
    parts: dict[str, Any] = {"replicas": math.prod(outer), "shards": inner}
    policy = task.precision
    if isinstance(policy, MixedPrecision):
        return Rounding(compute=policy.param, output=policy.output, reduce=_reduced_in(policy), division=Division.AFTER, **parts)
    return Rounding(autocast=policy, **parts)


def _reduced_in(policy: MixedPrecision) -> ElementType | None:
    """None for the type of the parameters that the optimizer steps."""
    return policy.reduce or (policy.param if torch_in(FULLY_SHARD_WITHOUT_GRAD_DTYPE) else None)


def sums_in_parts(task: Task) -> bool:
    """Whether ranks may round parts of a sum that no single device has: across axes other than of data, or as users cut."""
    return task.shard is not None or any(size > 1 for name, size in task.mesh if name not in task.data_axes)


def computes_in_few_digits(rounding: Rounding) -> bool:
    """Whether products have fewer digits than float32: these add up in float32, whatever their operands' place in memory."""
    return rounding.autocast is not None or rounding.compute in (ElementType.BFLOAT16, ElementType.FLOAT16)


def torch_type(kind: ElementType | LowPrecision) -> torch.dtype:
    """The element type of torch."""
    dtype: torch.dtype = getattr(torch, kind.value)
    return dtype


def in_words(task: Task) -> str:
    """What a task with a precision computes in: ``float32, autocast to bfloat16``."""
    kept = "its own types" if task.dtype is None else str(task.dtype).removeprefix("torch.")
    policy = task.precision
    if isinstance(policy, MixedPrecision):
        kinds = {"parameters": policy.param, "reductions": policy.reduce, "outputs": policy.output}
        return ", ".join([kept, *(f"{what} in {kind.value}" for what, kind in kinds.items() if kind is not None)])
    return kept if policy is None else f"{kept}, autocast to {policy.value}"
