"""Adapter for DeepSpeed's engine: ZeRO stages 0 to 3. Tried with DeepSpeed 0.18.2 to 0.19.8 on torch 2.13, on the CPU.

DeepSpeed is imported on ranks only, in the world ``gloo``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

from equivcheck.user.batches import map_tensors
from equivcheck.user.loop import call_model
from equivcheck.user.trainers.protocol import LocalPart, Record, import_framework, number_of_microbatches
from equivcheck.user.usage import invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeed:
    """Adapter for `deepspeed.initialize`. Takes a configuration, as in ``ds.json``.

    Accumulation follows from the batches, and the optimizer from `check_training`. All other fields stay as they are.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    """DeepSpeed's configuration."""
    gradients_are: Literal["unclipped", "clipped"] = "unclipped"
    """ZeRO keeps unclipped gradients until its step."""

    def reference_step(self) -> Callable[..., Any]:
        """Mean over microbatches, and clipping as configured."""
        if "gradient_clipping" not in self.config:  # 0.18.3 does not clip then, 0.19.8 clips at 1.0
            why = "its config has no gradient_clipping, whose default depends on DeepSpeed's version"
            raise invalid("trainer DeepSpeed", why, "a limit, or 0.0 for none")
        if self.config.get("bf16", {}).get("enabled") and not self._stage:
            why = "with bf16 and without ZeRO, its master weights cannot be read"
            raise invalid("trainer DeepSpeed", why, "zero_optimization with stage 1, 2 or 3")
        return self._step

    @property
    def _stage(self) -> int:
        return int(self.config.get("zero_optimization", {}).get("stage", 0))

    def _step(self, model: nn.Module, microbatches: Sequence[Any], optimizer: Any, loss: Any) -> dict[str, Any]:
        optimizer.zero_grad()
        total = 0.0
        for inputs, targets in microbatches:
            value = loss(call_model(model, inputs), targets) / len(microbatches)
            value.backward()
            total += float(value.detach())
        limit = float(self.config["gradient_clipping"])
        norm = clip_grad_norm_(model.parameters(), limit or math.inf)
        optimizer.step()
        has_norm = self._stage  # without ZeRO, the engine keeps no norm
        return {"loss": total, "norm": norm} if has_norm else {"loss": total}

    def train(  # noqa: PLR0913, PLR0917 - the protocol
        self,
        model: nn.Module,
        mesh: Any,  # noqa: ARG002 - DeepSpeed has one group of all ranks
        batches: Sequence[Sequence[Any]],
        loss: Callable[[Any, Any], torch.Tensor],
        make_optimizer: Callable[[list[Any]], Any],
        record: Record,
    ) -> None:
        """Train with DeepSpeed's engine."""
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        engine = self._engine(model, make_optimizer, batches)
        computes_in_bfloat16 = engine.bfloat16_enabled()

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.bfloat16() if computes_in_bfloat16 and tensor.is_floating_point() else tensor

        for microbatches in batches:
            total = 0.0
            for inputs, targets in microbatches:
                value = loss(call_model(engine, map_tensors(inputs, cast)), targets)
                total += float(value.detach()) / len(microbatches)
                engine.backward(value)
                if engine.is_gradient_accumulation_boundary():
                    record.before_update([*_parts(engine.module, shapes, _gradient)])
                engine.step()
            norm = engine.get_global_grad_norm()
            norm = None if norm is None else float(norm)
            record.after_update(total, [*_parts(engine.module, shapes, _parameter)], norm=norm)
        record.at_end([*_state(engine, shapes)])

    def _engine(self, model: nn.Module, make_optimizer: Callable[[list[Any]], Any], batches: Sequence[Sequence[Any]]) -> Any:
        deepspeed = _imported()
        own = {"gradient_accumulation_steps": number_of_microbatches(batches), "train_micro_batch_size_per_gpu": 1}
        config = {**self.config, **own}
        if config.get("fp16", {}).get("enabled") and not deepspeed.get_accelerator().is_fp16_supported():
            raise invalid("trainer DeepSpeed", "its config enables fp16, which needs a GPU", "bf16 or neither")
        config.setdefault("zero_allow_untested_optimizer", True)
        config.setdefault("zero_force_ds_cpu_optimizer", False)
        optimizer = make_optimizer(list(model.parameters()))
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return engine


def _imported() -> ModuleType:
    """Import DeepSpeed for the CPU, and let it use this process's group.

    Its first start compiles shared-memory collectives for some minutes, and waits forever for the lock of a killed start. gloo
    does not need them.
    """
    deepspeed = import_framework("DeepSpeed", "deepspeed", "deepspeed", DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
    comm = import_module("deepspeed.comm.torch")  # `from deepspeed.comm import torch` gives torch itself
    comm.build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    return deepspeed


Read = Callable[[nn.Parameter, tuple[int, ...]], "tuple[torch.Tensor, int | None] | None"]
"""Function from a parameter to its local elements, and their offset if they are a run. None if this rank holds none."""


def _parts(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], read: Read) -> Iterator[LocalPart]:
    for name, parameter in model.named_parameters():
        found = read(parameter, shapes[name])
        if found is not None:
            tensor = found[0].float() if found[0].dtype is torch.bfloat16 else found[0]  # the optimizer updates in float32
            yield LocalPart(name=name, shape=shapes[name], tensor=tensor.clone(), offset=found[1])


def _gradient(parameter: nn.Parameter, shape: tuple[int, ...]) -> tuple[torch.Tensor, int | None] | None:
    value: Any = parameter
    if not parameter.requires_grad:
        return None
    if hasattr(value, "ds_id"):
        from deepspeed.utils import safe_get_local_grad

        return _partition(parameter, shape, safe_get_local_grad(parameter))
    if getattr(value, "_hp_mapping", None) is not None:
        address = value._hp_mapping.lp_fragment_address
        fragment = value._hp_mapping.get_lp_grad_fragment(value._index_in_param_group).flatten()
        return (fragment if len(fragment) == address.numel else fragment.narrow(0, address.start, address.numel)), address.start
    return None if hasattr(value, "_hp_mapping") or parameter.grad is None else (parameter.grad, None)


def _parameter(parameter: nn.Parameter, shape: tuple[int, ...]) -> tuple[torch.Tensor, int | None] | None:
    value: Any = parameter
    if hasattr(value, "ds_id"):
        from deepspeed.utils import safe_get_local_fp32_param

        local = safe_get_local_fp32_param(parameter) if parameter.requires_grad else value.ds_tensor
        return _partition(parameter, shape, local)
    if getattr(value, "_hp_mapping", None) is not None and value._hp_mapping.hp_fragment.dtype != parameter.dtype:
        return value._hp_mapping.hp_fragment.detach(), value._hp_mapping.lp_fragment_address.start  # float32 for bfloat16
    is_master_elsewhere = hasattr(value, "_hp_mapping") and parameter.dtype is torch.bfloat16
    return None if is_master_elsewhere else (parameter.detach(), None)


def _partition(parameter: Any, shape: tuple[int, ...], local: torch.Tensor) -> tuple[torch.Tensor, int | None] | None:
    """A ZeRO-3 partition without the padding of the last ranks."""
    size = parameter.ds_tensor.numel()
    start = dist.get_rank() * size
    length = min(size, math.prod(shape) - start)
    return (local.flatten()[:length], start) if length > 0 else None


def _state(engine: Any, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[LocalPart]:
    """Optimizer state. ZeRO keeps it for flat tensors that hold many parameters' fragments."""
    for name, parameter in engine.module.named_parameters():
        found = _fragment(engine, parameter)
        if found is None:
            continue
        owner, start, length = found
        for key, value in engine.basic_optimizer.state.get(owner, {}).items():
            if not isinstance(value, torch.Tensor) or value.shape != owner.shape:
                yield LocalPart(name=f"{name}/{key}", shape=(), tensor=torch.as_tensor(value).clone())
                continue
            local = value.detach().flatten()[start : start + length].clone()
            if hasattr(parameter, "ds_id"):
                placed = _partition(parameter, shapes[name], local)
            else:
                fragment = getattr(parameter, "_hp_mapping", None)
                placed = local, 0 if fragment is None else fragment.lp_fragment_address.start
            if placed is not None:
                yield LocalPart(name=f"{name}/{key}", shape=shapes[name], tensor=placed[0], offset=placed[1])


def _fragment(engine: Any, parameter: Any) -> tuple[torch.Tensor, int, int] | None:
    """Tensor that the optimizer updates for a parameter, first element and length in it. None if this rank updates no part."""
    if not parameter.requires_grad:
        return None
    if hasattr(parameter, "ds_id"):
        zero = engine.optimizer
        group, start, length = zero.grad_position[zero.get_param_id(parameter)]
        return zero.fp32_partitioned_groups_flat[group], start, length
    if not hasattr(parameter, "_hp_mapping"):
        return parameter, 0, parameter.numel()
    fragment = parameter._hp_mapping
    if fragment is None:
        return None
    (owner,) = engine.basic_optimizer.param_groups[fragment.param_group_index]["params"]
    return owner, fragment.hp_fragment_address.start, fragment.hp_fragment_address.numel
