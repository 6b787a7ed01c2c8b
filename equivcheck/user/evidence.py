"""Reasons why agreement between ranks and one device is not a proof."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from equivcheck.user.batches import mapped
from equivcheck.user.task import Task

SAME_ROWS = "all data ranks got the same rows in every batch, so a missing reduction cannot show: use batches with different rows"
"""Reason if all data ranks got the same rows."""
NO_UPDATE = "no step changes a parameter, so a wrong update cannot show: is the learning rate 0?"
"""Reason if all updates are zero."""


def missing_evidence(task: Task, *, changes_parameters: bool) -> str:
    """Return the reason why agreement would prove nothing; empty if it does prove something."""
    if not changes_parameters:
        return NO_UPDATE
    return SAME_ROWS if _same_rows(task) else ""


def _same_rows(task: Task) -> bool:
    """Whether all data ranks get the same rows in every batch. False if the user shards, because the parts are unknown."""
    if task.num_data_ranks == 1 or task.shard is not None:
        return False
    parts = (tensor.chunk(task.num_data_ranks) for batch in task.batches for tensor in _tensors(batch))
    first = next(parts, ())
    return bool(first) and _all_same(first) and all(map(_all_same, parts))


def _all_same(parts: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(parts[0], part) for part in parts[1:])


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []
    mapped(batch, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return (tensor for tensor in found if tensor.dim())
