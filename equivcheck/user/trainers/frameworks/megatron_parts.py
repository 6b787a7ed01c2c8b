"""Finds the positions of megatron-core's shards in full tensors: tensor parallelism, pipelines, experts, optimizer shards."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from equivcheck.user.trainers.protocol import LocalPart
from equivcheck.user.usage import invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A rank's shard of a Megatron parameter, and its position.

    The shard consists of bands: consecutive rows of the full tensor.
    """

    name: str
    """The parameter's name in the single-device model, with layer and expert numbers in the full model."""
    parameter: nn.Parameter
    """The shard."""
    shape: tuple[int, ...]
    """The parameter's full shape."""
    bands: tuple[tuple[int, int], ...]
    """For each band, its first row and first column in the full tensor. All bands have equally many rows."""

    def parts(self, tensor: torch.Tensor, start: int = 0, suffix: str = "") -> Iterator[LocalPart]:
        """Yield the elements in `tensor` as boxes in the full tensor, with their positions.

        The first element in `tensor` is element `start` of the flattened shard. `suffix` is added to the name.
        """
        num_rows, num_columns = _rows_and_columns(self.parameter)
        rows_of_band = num_rows // len(self.bands)
        flat, stop = tensor.detach().reshape(-1), start + tensor.numel()
        for first, last in _row_aligned(start, stop, num_columns, rows_of_band):
            row, column = divmod(first, num_columns)
            full_row, full_column = self.bands[row // rows_of_band]
            corner = (full_row + row % rows_of_band, full_column + column)
            size = (max(1, (last - first) // num_columns), min(num_columns, last - first))
            piece = flat[first - start : last - start].reshape(size).clone()
            is_matrix = len(self.shape) > 1
            yield LocalPart(
                name=self.name + suffix,
                shape=self.shape,
                tensor=piece if is_matrix else piece.reshape(-1),
                start=corner if is_matrix else corner[:1],
            )

    def load(self, full: torch.Tensor) -> None:
        """Copy this rank's elements from the full tensor into the shard."""
        num_rows, num_columns = _rows_and_columns(self.parameter)
        size = num_rows // len(self.bands)
        for number, (row, column) in enumerate(self.bands):
            index = (slice(row, row + size), slice(column, column + num_columns))
            self.parameter.data[number * size : (number + 1) * size].copy_(full[index[: full.ndim]])


def _rows_and_columns(tensor: torch.Tensor) -> tuple[int, int]:
    return len(tensor), tensor.numel() // len(tensor)


def _row_aligned(start: int, stop: int, num_columns: int, rows_of_band: int) -> Iterator[tuple[int, int]]:
    """Split a run into a piece from the first row, full rows in one band, and a piece from the last row."""
    while start < stop:
        band_end = (start // (num_columns * rows_of_band) + 1) * num_columns * rows_of_band
        row_end = (start // num_columns + 1) * num_columns
        full_rows_end = min(stop, band_end) // num_columns * num_columns
        last = full_rows_end if start % num_columns == 0 and full_rows_end > start else min(stop, row_end)
        yield start, last
        start = last


def placed_parameters(megatron: SimpleNamespace, module: nn.Module) -> list[Placed]:
    """Return all parameters in a rank's Megatron module, with their positions in full tensors."""
    return [_placed(megatron, module, name, parameter) for name, parameter in module.named_parameters()]


def _placed(megatron: SimpleNamespace, module: nn.Module, name: str, parameter: Any) -> Placed:
    state = megatron.parallel_state
    is_expert = not getattr(parameter, "allreduce", True)
    dim = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
    shape, bands = list(parameter.shape), [(0, 0)]
    if parameter.ndim not in {1, 2}:
        raise invalid("trainer MegatronCore", f"its parameter {name} has {parameter.ndim} dims", "parameters with 1 or 2 dims")
    if dim >= 0:
        of_group = "expert_tensor_parallel" if is_expert else "tensor_model_parallel"
        size, rank = getattr(state, f"get_{of_group}_world_size")(), getattr(state, f"get_{of_group}_rank")()
        stride, local = getattr(parameter, "partition_stride", 1), parameter.shape[dim]
        shape[dim] = local * size
        rows = local // stride  # a gated layer has the gate's rows first, then the value's
        bands = [(number * rows * size + rank * rows, 0) for number in range(stride)] if dim == 0 else [(0, rank * local)]
    return Placed(name=_global_name(state, module, name), parameter=parameter, shape=tuple(shape), bands=tuple(bands))


def _global_name(state: Any, module: nn.Module, name: str) -> str:
    """Replace local numbers of experts and layers in a name by global numbers."""
    expert = re.match(r"(.*\blocal_experts)\.(\d+)\.(.*)", name)
    layer = re.match(r"(.*?\blayers)\.(\d+)\.", name)
    if expert:
        num_local = len([*module.get_submodule(expert[1]).children()])
        number = state.get_expert_model_parallel_rank() * num_local + int(expert[2])
        name = f"{expert[1]}.{number}.{expert[3]}"
    if layer:
        number = getattr(module.get_submodule(layer[0][:-1]), "layer_number", int(layer[2]) + 1) - 1  # from 1, over all stages
        name = f"{layer[1]}.{number}.{name[layer.end() :]}"
    return name


def state_parts_of(optimizer: Any, placed: list[Placed]) -> Iterator[LocalPart]:
    """Yield the parts of Megatron's optimizer state on this rank.

    If the optimizer is distributed, each rank has state only for its own consecutive elements.
    """
    by_parameter = {id(each.parameter): each for each in placed}
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(one, "optimizer", None) is None:
            continue
        for parameter, owner, start in _owners(one):
            for key, value in one.optimizer.state.get(owner, {}).items():
                found = by_parameter[id(parameter)]
                if isinstance(value, torch.Tensor) and value.numel() == owner.numel() and value.shape == owner.shape:
                    yield from found.parts(value, start, f"/{key}")
                else:
                    yield LocalPart(name=f"{found.name}/{key}", shape=(), tensor=torch.as_tensor(value).clone())


def _owners(one: Any) -> Iterator[tuple[Any, Any, int]]:
    """Yield each parameter, the tensor that the optimizer updates for it, and that tensor's first element."""
    if not hasattr(one, "model_fp32_groups"):
        yield from ((each, each, 0) for group in one.optimizer.param_groups for each in group["params"])
        return
    for parameters, shards in zip(one.model_fp32_groups, one.shard_fp32_groups, strict=True):
        for parameter, shard in zip(parameters, shards, strict=True):
            yield parameter, shard, one._get_model_param_range_map(parameter)["param"].start


def gradient_runs(optimizer: Any, placed: list[Placed]) -> Iterator[LocalPart]:
    """Yield the gradients in ``main_grad`` on this rank.

    Megatron's DistributedOptimizer reduces only the consecutive elements that this rank updates, so only these are yielded.
    """
    by_parameter = {id(each.parameter): each for each in placed}
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(one, "optimizer", None) is None:
            continue
        for parameter, owner, start in _owners(one):
            flat = parameter.main_grad.reshape(-1)[start : start + math.prod(owner.shape)]
            yield from by_parameter[id(parameter)].parts(flat, start)
