"""Input placements: parse placements written by users, and list all possible placements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from equivcheck.errors import InvalidScenario, UsageError
from equivcheck.programs.nouns.placement import ALLOWED, REDUCTIONS, REPLICATE, partial, reduction_of, require_placements, shard
from equivcheck.programs.operation_check.run import Placements
from equivcheck.programs.operation_check.task import OperationTask, invalid

MOST = 2000
"""Maximum number of placements in one check. More placements are probably a mistake."""


def all_placements(task: OperationTask, reductions: Sequence[str]) -> list[Placements]:
    """Return all combinations of placements for the task's tensors. The first tensor's placement varies slowest.

    `reductions` are used in partial placements. Only floating-point tensors can be partial.
    """
    for each in reductions:
        if each not in REDUCTIONS:
            raise invalid(f"reductions {each!r}", "unknown reduction", f"any of {', '.join(REDUCTIONS)}")
    choices = [list(_of_tensor(tensor, len(task.mesh), reductions)) for _, tensor in task.tensors]
    if math.prod(map(len, choices)) > MOST:
        counts = " x ".join(str(len(each)) for each in choices)
        raise invalid("placements None", f"{counts} combinations are more than {MOST:,}", "a list of fewer combinations")
    return list(itertools.product(*choices))


def _of_tensor(tensor: torch.Tensor, num_axes: int, reductions: Sequence[str]) -> Iterable[tuple[str, ...]]:
    addends = [partial(each) for each in reductions] if tensor.is_floating_point() else []
    return itertools.product([REPLICATE, *map(shard, range(tensor.ndim)), *addends], repeat=num_axes)


def given_placements(task: OperationTask, given: Iterable[Any]) -> list[Placements]:
    """Parse the user's placements for `check_operation`. Raises `UsageError` for an invalid placement."""
    return [_given(task, each) for each in given]


def _given(task: OperationTask, given: Any) -> Placements:
    tensors, num_axes = task.tensors, len(task.mesh)
    each_of = [given] if len(tensors) == 1 and isinstance(given, (str, Placement)) else given
    if isinstance(each_of, (str, Placement)) or not isinstance(each_of, Sequence) or len(each_of) != len(tensors):
        names = ", ".join(name for name, _ in tensors)
        raise invalid(f"placements {given!r}", "each tensor needs an item", f"a list of length {len(tensors)}, for {names}")
    return tuple(_of_axes(name, tensor, own, num_axes) for (name, tensor), own in zip(tensors, each_of, strict=True))


def _of_axes(name: str, tensor: torch.Tensor, given: Any, num_axes: int) -> tuple[str, ...] | None:
    if given is None:
        return None
    along = [given] if isinstance(given, (str, Placement)) else list(given)
    if len(along) != num_axes:
        raise invalid(f"placements {given!r} of {name}", "each mesh axis needs a placement", f"a list of length {num_axes}")
    texts = tuple(_text(each, tensor.ndim) for each in along)
    try:
        require_placements(tensor, texts, tensor.ndim)
    except InvalidScenario as error:
        raise UsageError(f"check_operation: placements of {name}: {str(error).partition('.placements ')[2]}") from None
    if not tensor.is_floating_point() and any(map(reduction_of, texts)):
        raise invalid(f"placements {given!r} of {name}", f"{tensor.dtype} cannot be partial", "R or S(dim)")
    return texts


def _text(placement: Any, num_dims: int) -> str:
    if isinstance(placement, str):
        return placement
    if type(placement) is Shard:
        return shard(placement.dim % num_dims if num_dims and -num_dims <= placement.dim < 0 else placement.dim)
    if type(placement) is Replicate:
        return REPLICATE
    if type(placement) is Partial and placement.reduce_op in REDUCTIONS:
        return partial(placement.reduce_op)
    raise invalid(f"placements {placement!r}", "unknown placement", ALLOWED)
