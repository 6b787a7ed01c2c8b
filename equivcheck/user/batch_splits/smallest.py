"""Shrinks a user's training while its verdict stays the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from equivcheck.errors import UsageError
from equivcheck.user.batches import map_tensors, tensors_of
from equivcheck.user.check import check_training
from equivcheck.user.verdict import UserVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest:
    """Result of `smallest`: the smallest training that was found, with its verdict."""

    arguments: Mapping[str, Any]
    """Arguments of `check_training` for this training."""
    verdict: UserVerdict
    """Verdict on these arguments."""
    num_tried: int
    """How many trainings were checked."""


def smallest(**arguments: Any) -> Smallest:
    """Shrink a training that diverged or failed: fewer steps, microbatches, rows, and ranks along each axis.

    Takes the arguments of `check_training`. A smaller training is kept if it has the same outcome and the same kinds of
    cause. If no cause is known, the first difference must be in the same phase of the step, such as the gradients. If the
    given training is equivalent, it is returned unchanged::

        found = smallest(**arguments)
        print(found.verdict.describe())
        check_training(**found.arguments)
    """
    arguments |= {"batches": list(arguments.get("batches", ()))}
    verdict, num_tried = check_training(**arguments), 1
    smaller = True
    while smaller and verdict.outcome.is_finding:
        smaller = False
        for changed in _smaller(arguments, verdict):
            num_tried += 1
            found = _checked_or_none(changed)
            if found is not None and _is_same(verdict, found):
                arguments, verdict, smaller = changed, found, True
                break
    return Smallest(arguments=arguments, verdict=verdict, num_tried=num_tried)


def _checked_or_none(arguments: Mapping[str, Any]) -> UserVerdict | None:
    """Check a smaller training. None if it is not valid, for example because its rows cannot be split evenly."""
    try:
        return check_training(**arguments)
    except UsageError:
        return None


def _is_same(one: UserVerdict, other: UserVerdict) -> bool:
    if one.outcome is not other.outcome or one.split != other.split or one.kinds != other.kinds:
        return False
    phases = [None if each.divergence is None else each.divergence.phase for each in (one, other)]
    return bool(one.kinds) or phases[0] is phases[1]


def _smaller(arguments: Mapping[str, Any], verdict: UserVerdict) -> Iterator[dict[str, Any]]:
    """Yield smaller trainings; within each kind the smallest first."""
    batches, mesh = arguments["batches"], arguments["mesh"]
    splits = arguments.get("batch_splits", False)
    if splits and not verdict.split:
        yield {**arguments, "batch_splits": False}
    elif splits:
        from equivcheck.user.batch_splits.splits import BatchSplits

        given = splits if isinstance(splits, BatchSplits) else BatchSplits()
        if given.only != (verdict.split,):
            yield {**arguments, "batch_splits": replace(given, only=(verdict.split,))}
    last = len(batches) if verdict.divergence is None else verdict.divergence.step + 1
    for count in sorted({1, last, len(batches) // 2, len(batches) - 1} - {0}):
        if count < len(batches):
            yield {**arguments, "batches": batches[:count]}
    for name, size in mesh.items():
        for count in (count for count in range(2, size) if size % count == 0):
            yield {**arguments, "mesh": {**mesh, name: count}}
    if any(isinstance(batch, list) and len(batch) > 1 for batch in batches):
        for count in sorted({1, max(len(batch) for batch in batches if isinstance(batch, list)) - 1}):
            yield {**arguments, "batches": [batch[:count] if isinstance(batch, list) else batch for batch in batches]}
    # Batches shrink to divisors of the largest number of rows in any tensor.
    most = max([1, *(tensor.shape[0] for tensor in tensors_of(batches) if tensor.dim())])
    for rows in (each for each in range(1, most) if most % each == 0):
        yield {**arguments, "batches": [map_tensors(batch, partial(_first_rows, rows)) for batch in batches]}


def _first_rows(count: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:count] if tensor.dim() else tensor
