"""Stand-ins that let megatron-core train on the CPU. They replace the parts that need CUDA, and change no number.

Tried with megatron-core 0.16 on torch 2.13.

| what needs CUDA | stand-in | reason |
|---|---|---|
| `device="cuda"` in torch's factory functions | `device="cpu"` | buffers for norms, scales and token counts |
| `Tensor.type()` | a name that begins with `torch.cuda` | DistributedOptimizer and clipping refuse other types |
| `torch.cuda.current_device()` | the CPU | parameters and buffers are created on the result |
| `torch.cuda.synchronize()` | nothing | CPU tensors are always complete |
| `Tensor.cuda()` | the tensor | it is where Megatron wants it |
| `torch.cuda.Stream`, `current_stream`, `stream` | a stream that does nothing | experts' token counts are copied on it |
| forking CUDA's random state | nothing | it only draws dropout, which a comparison cannot have |
| `maybe_move_tensor_to_cpu` | a list of numbers | it only converts CUDA tensors, and collectives take no tensor as sizes |
| `WrappedTorchNorm` under sequence parallelism | torch's norm with marked parameters | norms for CUDA mark them, too |
| `te_general_gemm` in `moe_utils` | None | 0.16 defines it only if Transformer Engine is installed, and reads it always |
| `torch.compile` for fused functions | the plain functions | compiling takes minutes, and rounds differently |
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from equivcheck.user.trainers.protocol import import_framework


def import_megatron() -> SimpleNamespace:
    """Import and return the Megatron modules that the adapter uses. Functions that Megatron compiles stay uncompiled."""
    jit = import_framework("MegatronCore", "megatron.core.jit", "megatron-core", CUDA_DEVICE_MAX_CONNECTIONS="1")
    jit.disable_jit_fuser()
    from importlib import import_module

    names = (
        *("parallel_state", "distributed", "optimizer", "pipeline_parallel", "transformer"),
        *("tensor_parallel.random", "transformer.torch_norm", "transformer.moe.moe_utils"),
        "transformer.moe.token_dispatcher",
    )
    return SimpleNamespace(**{name.split(".")[-1]: import_module(f"megatron.core.{name}") for name in names})


class _CpuForCuda(TorchFunctionMode):
    """Creates tensors on the CPU if they should be on CUDA, and gives CPU tensors CUDA's type names."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = "cpu"
        if func is torch.Tensor.type and len(args) == 1 and not given:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return args[0] if func is torch.Tensor.cuda else func(*args, **given)


def _norm(_class: type, config: Any, hidden_size: int, eps: float = 1e-5, *_given: Any, **_keywords: Any) -> nn.Module:
    kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
    norm = kind(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def _to_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
    return tensor.tolist() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _NoStream:
    def wait_stream(self, _other: Any) -> None:
        """Return at once, because CPU tensors are always complete."""

    def record_event(self) -> _NoStream:
        """Return an event that has already occurred."""
        return self

    def synchronize(self) -> None:
        """Return without waiting: the CPU has no queued work."""


@contextlib.contextmanager
def megatron_on_cpu(megatron: SimpleNamespace) -> Iterator[None]:
    """Inside the context, Megatron trains on the CPU.

    At the end, CUDA's functions are restored and Megatron's groups are removed.
    """
    stream = _NoStream()
    replaced: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda *_given: None,
        "Stream": lambda *_given, **_keywords: stream,
        "current_stream": lambda *_given: stream,
        "default_stream": lambda *_given: stream,
        "stream": lambda _stream: contextlib.nullcontext(),
    }
    tracker = megatron.random.CudaRNGStatesTracker
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **replaced))
        stack.enter_context(mock.patch.object(tracker, "fork", return_value=contextlib.nullcontext()))
        stack.enter_context(mock.patch.object(megatron.torch_norm.WrappedTorchNorm, "__new__", _norm))
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(_CpuForCuda())
        stack.enter_context(mock.patch.object(megatron.token_dispatcher, "maybe_move_tensor_to_cpu", _to_numbers))
        if not hasattr(megatron.moe_utils, "te_general_gemm"):
            megatron.moe_utils.te_general_gemm = None
        try:
            yield
        finally:
            for group in megatron.parallel_state._global_process_group_list or ():
                if group is not None:  # None is the default group, which belongs to equivcheck
                    torch.distributed.destroy_process_group(group)
            megatron.parallel_state.destroy_model_parallel()
