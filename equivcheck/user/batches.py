"""Splits and converts batches: tensors nested in tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from equivcheck.scenario.scenario import count
from equivcheck.user.task import Task
from equivcheck.user.usage import invalid


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to every tensor in a nested structure. Returns the same structure; other values stay unchanged."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        parts = [map_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [map_tensors(part, change) for part in value]
    if isinstance(value, dict):
        return {key: map_tensors(part, change) for key, part in value.items()}
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return all tensors in nested tuples, lists and dicts, in order."""
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, collect)
    return found


def convert_batch(batch: Any, dtype: torch.dtype | None) -> Any:
    """Copy a batch. Floating-point and complex tensors get the precision of `dtype`; if it is None, all types stay."""
    return map_tensors(batch, lambda tensor: convert_tensor(tensor, dtype))


def perturb_batch(batch: Any, eps: float, generator: np.random.Generator) -> Any:
    """Copy a batch, with each floating-point value multiplied by a random factor between 1 - `eps` and 1 + `eps`."""
    return map_tensors(
        batch, lambda tensor: tensor * perturbation_factors(tensor, eps, generator) if tensor.is_floating_point() else tensor
    )


def perturbation_factors(tensor: torch.Tensor, eps: float, generator: np.random.Generator) -> torch.Tensor:
    """Return random factors between 1 - `eps` and 1 + `eps`, in the shape and type of `tensor`."""
    return torch.from_numpy(np.asarray(1.0 + eps * generator.uniform(-1.0, 1.0, tuple(tensor.shape)))).to(tensor.dtype)


def rank_batch(task: Task, batch: Any, mesh: DeviceMesh) -> Any:
    """Return this rank's part of a batch: an equal part of the rows, or the part that the user's `shard` returns.

    Parts are numbered in row-major order over the data axes.
    """
    if task.shard is not None:
        return task.shard(map_tensors(batch, torch.clone), mesh)
    return rows_part(batch, part_number(task, mesh), task.num_data_ranks)


def part_number(task: Task, mesh: DeviceMesh) -> int:
    """Return which part of the rows this rank gets, from 0."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank of the world is in the mesh"
    return part_number_at(task, dict(zip(task.axis_names, coordinate, strict=True)))


def part_number_at(task: Task, indices: Mapping[str, int]) -> int:
    """Return which part of the rows the rank at these mesh indices gets, from 0."""
    number = 0
    for name, size in task.mesh:
        number = number * size + indices[name] if name in task.data_axes else number
    return number


def same_loss_ranks(task: Task) -> tuple[tuple[int, ...], ...]:
    """Return groups of ranks that get the same rows and must return the same loss.

    The ranks in a group differ only in their indices along `Task.loss_axes`.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(product(*map(range, task.shape))):
        others = zip(task.axis_names, place, strict=True)
        groups.setdefault(tuple(index for name, index in others if name not in task.loss_axes), []).append(rank)
    return tuple(map(tuple, groups.values()))


def rows_part(batch: Any, number: int, count: int) -> Any:
    """Copy part `number` of a batch whose rows are divided into `count` equal parts. Tensors without dims are in every part."""
    return map_tensors(batch, lambda tensor: (tensor.chunk(count)[number] if tensor.dim() else tensor).clone())


def split(batch: Any, count: int) -> list[Any]:
    """Split each microbatch of a step into `count` equal parts. Returns the parts as a list of smaller microbatches."""
    return [rows_part(microbatch, number, count) for microbatch in microbatches(batch) for number in range(count)]


def microbatches(batch: Any) -> list[Any]:
    """Return the microbatches in one step's batch.

    A list ``[inputs, targets]``, as a `DataLoader` returns it, is one pair and not two microbatches.
    """
    if not isinstance(batch, list):
        return [batch]
    return [tuple(batch)] if len(batch) == 2 and not all(map(_is_pair, batch)) else batch


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def require_parts(task: Task) -> None:
    """Check the batches. Raises `UsageError` if one is not a pair, or if its rows cannot be split evenly over the data axes."""
    for number, batch in enumerate(task.batches):
        if task.step is None or task.rank_step is None:
            for microbatch in microbatches(batch):
                _require_pair(number, microbatch)
            if not microbatches(batch):
                raise invalid(f"batch {number}", "it has no microbatch", "at least one pair (inputs, targets)")
        if task.shard is None:
            _require_rows(task, number, batch)


def _require_pair(number: int, microbatch: Any) -> None:
    if not _is_pair(microbatch):
        expected = "a pair (inputs, targets) or a list of such pairs. With your own step=, a batch may be anything"
        if isinstance(microbatch, torch.Tensor):
            expected += ". For a single step, pass batches=[(inputs, targets)]"
        elif isinstance(microbatch, dict):
            expected += ". If your model returns its loss, pass (batch, None) and loss=lambda outputs, _: outputs.loss"
        raise invalid(f"batch {number}", f"it has a {type(microbatch).__name__} instead of a pair", expected)


def _require_rows(task: Task, number: int, batch: Any) -> None:
    for tensor in tensors_of(batch):
        if tensor.dim() and (not len(tensor) or len(tensor) % task.num_data_ranks):
            axes = " x ".join(f"{name} {size}" for name, size in task.mesh if name in task.data_axes)
            rows = count(len(tensor), "row, which does", "rows, which do")
            why = f"a tensor has {rows} not split evenly over {axes}" if len(tensor) else "a tensor has no rows"
            raise invalid(f"batch {number}", why, f"a multiple of {task.num_data_ranks} rows, or shard=fn(batch, mesh)")


def convert_tensor(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Copy a tensor. Floating-point and complex values get the precision of `dtype`; integers stay unchanged."""
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.detach().clone()
    return tensor.detach().to(dtype.to_complex() if tensor.is_complex() else dtype, copy=True)


def convert_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a model's parameters and buffers in place. `Module.to` would drop the imaginary part of complex buffers."""
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if buffer.is_complex()
    ]
    for module, name, _ in buffers:
        setattr(module, name, None)
    model = model.to(dtype)
    shared = {id(buffer): convert_tensor(buffer, dtype) for _, _, buffer in buffers}
    for module, name, buffer in buffers:
        setattr(module, name, shared[id(buffer)])
    return model


def complex_parameter(model: nn.Module) -> str:
    """Return the first complex parameter's name; empty if there is none."""
    return next((name for name, parameter in model.named_parameters() if parameter.is_complex()), "")


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as real numbers, with pairs along a new last dim. Real tensors stay unchanged."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor
