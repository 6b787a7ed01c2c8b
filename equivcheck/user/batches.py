"""Batches of users: tensors in tuples, lists and dicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from equivcheck.errors import UsageError
from equivcheck.user.conversion import as_type
from equivcheck.user.task import Task


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with every tensor changed; what is no tensor, tuple, list or dict stays as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        parts = [mapped(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [mapped(part, change) for part in value]
    if isinstance(value, dict):
        return {key: mapped(part, change) for key, part in value.items()}
    return value


def converted(batch: Any, dtype: torch.dtype | None) -> Any:
    """A batch whose numbers, but for integers, have another precision; always of tensors of its own."""
    return mapped(batch, lambda tensor: as_type(tensor, dtype))


def moved(batch: Any, eps: float, generator: np.random.Generator) -> Any:
    """A batch whose real numbers are off by up to one unit in the last place."""
    return mapped(batch, lambda tensor: tensor * factors(tensor, eps, generator) if tensor.is_floating_point() else tensor)


def factors(tensor: torch.Tensor, eps: float, generator: np.random.Generator) -> torch.Tensor:
    """``1 + eps * U(-1, 1)`` for each element."""
    return torch.from_numpy(np.asarray(1.0 + eps * generator.uniform(-1.0, 1.0, tuple(tensor.shape)))).to(tensor.dtype)


def share_of(task: Task, batch: Any, mesh: DeviceMesh) -> Any:
    """What this rank computes on: what the user says, or its rows of every tensor, in row-major order over the data axes."""
    if task.shard is not None:
        return task.shard(mapped(batch, torch.clone), mesh)
    return part_of(batch, data_number(task, mesh), task.num_data_ranks)


def data_number(task: Task, mesh: DeviceMesh) -> int:
    """Which part of the rows is this rank's."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank of the world is in the mesh"
    return number_at(task, dict(zip(task.axis_names, coordinate, strict=True)))


def number_at(task: Task, indices: Mapping[str, int]) -> int:
    """Which part of the rows is that of the rank with these indices along the axes."""
    number = 0
    for name, size in task.mesh:
        number = number * size + indices[name] if name in task.data_axes else number
    return number


def part_of(batch: Any, number: int, count: int) -> Any:
    """One of equal parts of the rows of every tensor, copied; numbers without dims are whole in every part."""
    return mapped(batch, lambda tensor: (tensor.chunk(count)[number] if tensor.dim() else tensor).clone())


def split(batch: Any, count: int) -> list[Any]:
    """The microbatches of a step, each in equal parts."""
    return [part_of(microbatch, number, count) for microbatch in microbatches(batch) for number in range(count)]


def microbatches(batch: Any) -> list[Any]:
    """The microbatches of a step; a list that is no list of pairs is one pair, as a `DataLoader` gives it."""
    if not isinstance(batch, list):
        return [batch]
    return [tuple(batch)] if len(batch) == 2 and not all(map(_is_pair, batch)) else batch


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def require_parts(task: Task) -> None:
    """Raise `UsageError` for batches that are no pairs, or whose rows the data axes cannot share out."""
    for number, batch in enumerate(task.batches):
        if task.step is None or task.rank_step is None:
            for microbatch in microbatches(batch):
                _require_pair(number, microbatch)
            if not microbatches(batch):
                raise UsageError(f"check_training: batch {number} is []; allowed: at least one microbatch")
        if task.shard is None:
            _require_rows(task, number, batch)


def _require_pair(number: int, microbatch: Any) -> None:
    if not _is_pair(microbatch):
        allowed = "a pair (inputs, targets), a list of such microbatches, or anything with a step of your own"
        raise UsageError(f"check_training: batch {number} has a {type(microbatch).__name__}; allowed: {allowed}")


def _require_rows(task: Task, number: int, batch: Any) -> None:
    def require(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() and tensor.shape[0] % task.num_data_ranks:
            axes = " x ".join(f"{name} {size}" for name, size in task.mesh if name in task.data_axes)
            raise UsageError(
                f"check_training: batch {number} has a tensor of {tensor.shape[0]} rows, which {axes} cannot share out evenly; "
                f"allowed: a multiple of {math.prod(size for name, size in task.mesh if name in task.data_axes)}, or shard=..."
            )
        return tensor

    mapped(batch, require)
