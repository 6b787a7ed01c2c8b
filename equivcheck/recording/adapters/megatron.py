"""Positions and gradients from Megatron's attributes: on parameters, on modules, and in `megatron.core.parallel_state`.

Handwritten tensor parallelism may set the same attributes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from equivcheck.errors import UsageError
from equivcheck.recording.adapters.parts import Move, shard_move

_EXPERT_NUMBER = re.compile(r"(?<=\.local_experts\.)\d+|(?<=\.linear_fc[12]\.weight)\d+|(?<=\.linear_fc[12]\.bias)\d+")
"""An expert's number among the rank's experts, in a parameter's name."""


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's gradient. If it has none, return ``main_grad``, in which Megatron accumulates gradients."""
    if parameter.grad is not None:
        return parameter.grad
    main = getattr(parameter, "main_grad", None)
    return main if isinstance(main, torch.Tensor) and main.shape == parameter.shape else None


def shard_of(name: str, parameter: torch.Tensor, owner: nn.Module | None, declared: tuple[int, int] | None) -> Move | None:
    """Return the position of a tensor-parallel shard in the full parameter; None if the parameter is not a shard.

    `owner` is the module with this parameter. `declared` is the rank and size in the tensor-parallel group, if the user passed a
    mesh. Raises `UsageError` if neither `owner`, megatron.core nor `declared` gives the rank. Also raises it if the dim in the
    attribute ``partition_dim`` does not exist or cannot be split.
    """
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    dim, stride = parameter.partition_dim, getattr(parameter, "partition_stride", 1)  # type: ignore[attr-defined]
    shape = tuple(parameter.shape)
    if not 0 <= dim < len(shape) or shape[dim] % stride:
        raise UsageError(
            f"partition_dim {dim} of parameter {name!r} is not valid: its shard has shape {shape}. Expected a dim of this "
            f"shape, with a size that is divisible by partition_stride {stride}."
        )
    group = getattr(owner, "tp_group", None)
    if isinstance(group, dist.ProcessGroup):
        place: tuple[int, int] | None = (dist.get_rank(group), dist.get_world_size(group))
    else:
        place = _place_in("tensor_model" if getattr(parameter, "allreduce", True) else "expert_tensor") or declared
    if place is None:
        raise UsageError(
            f"parameter {name!r} without mesh is not valid: it is a tensor-parallel shard, and neither megatron.core nor "
            "tp_group on its module gives this rank's position. Expected a mesh with an axis tp, such as {'dp': 2, 'tp': 2}."
        )
    rank, num_ranks = place
    return shard_move(shape, dim, rank, num_ranks, stride) if num_ranks > 1 else None


def _place_in(kind: str) -> tuple[int, int] | None:
    """Return rank and size in a parallel group of `megatron.core`; None if it is not initialized."""
    state: Any = sys.modules.get("megatron.core.parallel_state")  # never imported here: it is slow, and not everybody's
    if state is None or not state.model_parallel_is_initialized():
        return None
    return getattr(state, f"get_{kind}_parallel_rank")(), getattr(state, f"get_{kind}_parallel_world_size")()


def expert_names(
    parameters: Mapping[str, torch.Tensor], declared: tuple[int, int] | None
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return a new name for each expert-parallel parameter, with the expert's number in the full model.

    The old name has the expert's number on this rank. Also returns the old names for which the number in the full model is not
    known. `declared` is the rank and size in the expert-parallel group, if the user passed a mesh.
    """
    own = [name for name, parameter in parameters.items() if not getattr(parameter, "allreduce", True)]
    place = _place_in("expert_model") or declared
    if place is None:
        return {}, tuple(own)
    if place[1] == 1:
        return {}, ()
    numbers = {name: int(found[0]) for name in own if (found := _EXPERT_NUMBER.search(name))}
    counts: dict[str, int] = {}
    for name, number in numbers.items():
        pattern = _EXPERT_NUMBER.sub("*", name)
        counts[pattern] = max(counts.get(pattern, 0), number + 1)
    renamed = {
        name: _EXPERT_NUMBER.sub(str(place[0] * counts[_EXPERT_NUMBER.sub("*", name)] + number), name)
        for name, number in numbers.items()
    }
    return renamed, tuple(name for name in own if name not in renamed)
