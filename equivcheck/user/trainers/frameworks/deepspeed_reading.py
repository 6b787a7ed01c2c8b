"""Reads local gradients, parameters and optimizer state in DeepSpeed's engines.

The attributes read here are private. Tried with DeepSpeed 0.18.2 to 0.19.8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from equivcheck.user.trainers.deepspeed_muon import MUON, MuonGradients, full_momentum
from equivcheck.user.trainers.protocol import LocalPart

LOW = (torch.bfloat16, torch.float16)
"""Element types of parameters whose optimizer updates a float32 copy."""
Found = tuple[torch.Tensor, int | None] | None
"""Local elements, and their offset if they are consecutive elements of the flattened tensor. None if this rank has no elements.
"""


class EngineReader:
    """Reads this rank's elements of parameters, gradients and optimizer state in a DeepSpeed engine.

    It does not gather tensors.
    """

    def __init__(self, engine: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`shapes` has the full shapes by parameter name."""
        self._engine, self._shapes = engine, shapes
        low, high = (getattr(engine.optimizer, f"fp{bits}_groups", []) for bits in (16, 32))
        pairs = (pair for groups in zip(low, high, strict=False) for pair in zip(*groups, strict=True))
        self._masters = {id(parameter): master for parameter, master in pairs} if not _is_zero(engine) else {}
        self._muon = MuonGradients(engine.optimizer) if engine.optimizer_name() == MUON else None
        self._before_muon: dict[int, torch.Tensor] = {}

    def gradients(self) -> list[LocalPart]:
        """Return the rank's gradients after all reductions, before clipping. They still have the factor `loss_scale`."""
        self._before_muon = self._muon.take() if self._muon is not None else {}
        return [*self._parts(self._gradient)]

    def parameters(self) -> list[LocalPart]:
        """Return the rank's parameters in float32, as the optimizer updates them."""
        return [*self._parts(self._parameter)]

    @property
    def loss_scale(self) -> float:
        """Factor in the gradients, by which DeepSpeed's step divides them. It is 1 if the loss is not scaled."""
        optimizer = self._engine.optimizer
        scaler = getattr(optimizer, "loss_scale_config", None) or getattr(optimizer, "loss_scaler", None) or optimizer
        return float(getattr(scaler, "cur_scale", 1.0))

    def _parts(self, read: Callable[[nn.Parameter, tuple[int, ...]], Found]) -> Iterator[LocalPart]:
        for name, parameter in self._engine.module.named_parameters():
            found = read(parameter, self._shapes[name])
            if found is not None:
                tensor = found[0].float() if found[0].dtype in LOW else found[0]  # the optimizer updates in float32
                yield LocalPart(name=name, shape=self._shapes[name], tensor=tensor.clone(), offset=found[1])

    def _gradient(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> Found:
        value: Any = parameter
        if not parameter.requires_grad:
            return None
        if id(parameter) in self._before_muon:
            return self._before_muon[id(parameter)], None
        if hasattr(value, "ds_id"):
            from deepspeed.utils import safe_get_local_grad

            return _partition(parameter, shape, safe_get_local_grad(parameter))
        if getattr(value, "_hp_mapping", None) is not None:
            address = value._hp_mapping.lp_fragment_address
            fragment = value._hp_mapping.get_lp_grad_fragment(value._index_in_param_group).flatten()
            return (
                fragment if len(fragment) == address.numel else fragment.narrow(0, address.start, address.numel)
            ), address.start
        return None if hasattr(value, "_hp_mapping") or parameter.grad is None else (parameter.grad, None)

    def _parameter(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> Found:
        value: Any = parameter
        if hasattr(value, "ds_id"):
            from deepspeed.utils import safe_get_local_fp32_param

            local = safe_get_local_fp32_param(parameter) if parameter.requires_grad else value.ds_tensor
            return _partition(parameter, shape, local)
        if id(parameter) in self._masters:
            return self._masters[id(parameter)].detach(), None
        if getattr(value, "_hp_mapping", None) is not None and value._hp_mapping.hp_fragment.dtype != parameter.dtype:
            return value._hp_mapping.hp_fragment.detach(), value._hp_mapping.lp_fragment_address.start
        is_master_elsewhere = hasattr(value, "_hp_mapping") and parameter.dtype in LOW
        return None if is_master_elsewhere else (parameter.detach(), None)

    def state(self) -> Iterator[LocalPart]:
        """Yield the rank's optimizer state. ZeRO keeps it in flat tensors with fragments of many parameters."""
        for name, parameter in self._engine.module.named_parameters():
            found = self._fragment(parameter)
            if found is None:
                continue
            owner, start, length = found
            for key, value in self._engine.basic_optimizer.state.get(owner, {}).items():
                if key == "momentum_buffer" and self._keeps_full_momentum(parameter):
                    group = parameter._hp_mapping.param_group_index
                    momentum = full_momentum(self._engine.optimizer, parameter, group, value).clone()
                    yield LocalPart(name=f"{name}/{key}", shape=self._shapes[name], tensor=momentum)
                    continue
                if not isinstance(value, torch.Tensor) or value.shape != owner.shape:
                    number = torch.as_tensor(value).clone()
                    number = number if number.is_floating_point() else number.float()  # Muon's own Adam has an int
                    yield LocalPart(name=f"{name}/{key}", shape=(), tensor=number)
                    continue
                placed = self._placed(parameter, self._shapes[name], value.detach().flatten()[start : start + length].clone())
                if placed is not None:
                    yield LocalPart(name=f"{name}/{key}", shape=self._shapes[name], tensor=placed[0], offset=placed[1])

    @staticmethod
    def _keeps_full_momentum(parameter: Any) -> bool:
        return getattr(parameter, "use_muon", False) and hasattr(parameter, "_hp_mapping")

    def _placed(self, parameter: Any, shape: tuple[int, ...], local: torch.Tensor) -> Found:
        if hasattr(parameter, "ds_id"):
            return _partition(parameter, shape, local)
        fragment = getattr(parameter, "_hp_mapping", None)
        return local, 0 if fragment is None else fragment.lp_fragment_address.start

    def _fragment(self, parameter: Any) -> tuple[torch.Tensor, int, int] | None:
        """Return the tensor that the optimizer updates, with the first element and the length of this parameter in it.

        None if this rank updates no part of the parameter.
        """
        if not parameter.requires_grad:
            return None
        if hasattr(parameter, "ds_id"):
            zero = self._engine.optimizer
            group, start, length = zero.grad_position[zero.get_param_id(parameter)]
            return zero.fp32_partitioned_groups_flat[group], start, length
        if not hasattr(parameter, "_hp_mapping"):
            return self._masters.get(id(parameter), parameter), 0, parameter.numel()
        fragment = parameter._hp_mapping
        if fragment is None:
            return None
        (owner,) = self._engine.basic_optimizer.param_groups[fragment.param_group_index]["params"]
        return owner, fragment.hp_fragment_address.start, fragment.hp_fragment_address.numel


def _is_zero(engine: Any) -> bool:
    """Whether ZeRO partitions the optimizer. Its attributes for flat groups have similar names."""
    return bool(engine.zero_optimization())


def _partition(parameter: Any, shape: tuple[int, ...], local: torch.Tensor) -> Found:
    """Return a parameter's ZeRO-3 partition without the padding on the last ranks."""
    size = parameter.ds_tensor.numel()
    start = dist.get_rank() * size
    length = min(size, math.prod(shape) - start)
    return (local.flatten()[:length], start) if length > 0 else None
