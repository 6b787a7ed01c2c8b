"""Context managers of torch, each with an observation that shows whether it is entered."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad, graph
from torch.distributed.fsdp import wrap
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

Context = tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Any]]
"""One function to create the context manager, one to observe it."""

_torch: Any = torch
_dispatcher: Any = DTensor._op_dispatcher
_plans: Any = _redistribute
_checkpoint: Any = checkpoint
_autograd: Any = torch.autograd


@contextlib.contextmanager
def setting(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Iterator[None]:
    """Context for settings with only a getter and a setter."""
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


class Doubling(TorchFunctionMode):
    """Makes `torch.ones` return twos."""

    def __torch_function__(self, function: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **options or {})
        return result * 2 if function is torch.ones else result


class Halving(TorchDispatchMode):
    """Makes `torch.ones` return halves."""

    def __torch_dispatch__(self, function: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **options or {})
        return result / 2 if function is torch.ops.aten.ones.default else result


@contextlib.contextmanager
def global_hook() -> Iterator[None]:
    """A hook for every module; adds one to the output."""
    handle = nn.modules.module.register_module_forward_hook(lambda _module, _inputs, outputs: outputs + 1)
    try:
        yield
    finally:
        handle.remove()


def graded() -> Any:
    """Product recorded by autograd, unless disabled."""
    return torch.full((1,), 3.0, requires_grad=True) ** 2


def packed() -> Any:
    """Value saved by autograd for a product, as a program unpacks it, and whether hooks may be set."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
            allowed = True
        except RuntimeError:
            allowed = False
    return allowed, graded().grad_fn._saved_self.item()


def mutated() -> Any:
    """Whether a tensor saved by autograd may be written before backward."""
    tensor = torch.full((1,), 3.0, requires_grad=True) * 1
    loss = (tensor**2).sum()
    tensor.mul_(2)
    try:
        loss.backward()
    except RuntimeError:
        return False
    return True


def flags(backend: Any, *names: str) -> tuple[Any, ...]:
    """Settings for a backend."""
    return tuple(getattr(backend, name) for name in names)


def precision() -> tuple[Any, ...]:
    """Precision settings for float32 matrix products, from all getters."""
    return torch.get_float32_matmul_precision(), torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]


def wrapped() -> Any:
    """Result of `wrap` on a module."""
    return type(wrap.wrap(nn.Identity())).__name__


class Wrapper(nn.Module):
    """Wrapper added by `enable_wrap`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


CONTEXTS: dict[str, Context] = {
    "no_grad": (torch.no_grad, lambda: graded().requires_grad),
    "set_grad_enabled": (lambda: torch.set_grad_enabled(False), lambda: graded().requires_grad),
    "inference_mode": (torch.inference_mode, lambda: torch.ones(1).is_inference()),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.mm(torch.eye(2), torch.eye(2)).dtype),
    "detect_anomaly": (lambda: _autograd.set_detect_anomaly(True, check_nan=False), lambda: bool(graded().grad_fn.metadata)),
    "sdpa_kernel": (
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
    ),
    "sdpa_kernel by priority": (
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
        _torch._C._get_sdp_priority_order,
    ),
    "deterministic algorithms": (
        lambda: setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1),
        torch.get_deterministic_debug_mode,
    ),
    "default dtype": (
        lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        lambda: torch.ones(1).dtype,
    ),
    "device": (lambda: torch.device("meta"), lambda: torch.ones(1).device.type),
    "float32 precision": (
        lambda: setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
        precision,
    ),
    "cudnn flags": (
        lambda: torch.backends.cudnn.flags(enabled=False, deterministic=True),
        lambda: flags(torch.backends.cudnn, "enabled", "deterministic"),
    ),
    "mkldnn": (
        lambda: setting(_torch._C._get_mkldnn_enabled, _torch._C._set_mkldnn_enabled, False),
        lambda: flags(torch.backends.mkldnn, "enabled"),  # type: ignore[attr-defined]
    ),
    "sparse invariants": (
        _torch.sparse.check_sparse_tensor_invariants,
        _torch.sparse.check_sparse_tensor_invariants.is_enabled,
    ),
    "warn always": (lambda: setting(torch.is_warn_always_enabled, torch.set_warn_always, True), torch.is_warn_always_enabled),
    "saved_tensors_hooks": (lambda: graph.saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor), packed),
    "save_on_cpu": (graph.save_on_cpu, lambda: _torch._C._autograd._top_saved_tensors_default_hooks(True) is None),
    "disable_saved_tensors_hooks": (lambda: graph.disable_saved_tensors_hooks("meant"), packed),
    "allow_mutation_on_saved_tensors": (
        graph.allow_mutation_on_saved_tensors,
        lambda: (_autograd.graph._allow_mutation_on_saved_tensors_enabled, mutated()),
    ),
    "multithreading": (lambda: _autograd.set_multithreading_enabled(True), _torch._C._is_multithreading_enabled),
    "dual_level": (forward_ad.dual_level, lambda: _autograd.forward_ad._current_level),
    "loss_parallel": (loss_parallel, lambda: len(_dispatcher._custom_op_handlers)),
    "implicit_replication": (implicit_replication, lambda: _dispatcher._allow_implicit_replication),
    "CommDebugMode": (CommDebugMode, _torch._C._len_torch_dispatch_stack),
    "FlopCounterMode": (lambda: FlopCounterMode(display=False), _torch._C._len_torch_dispatch_stack),
    "FakeTensorMode": (FakeTensorMode, lambda: type(torch.ones(1)).__name__),
    "TorchFunctionMode": (Doubling, lambda: float(torch.ones(1))),
    "TorchDispatchMode": (Halving, lambda: float(torch.ones(1))),
    "checkpoint early stop": (
        lambda: checkpoint.set_checkpoint_early_stop(False),
        lambda: _checkpoint._enable_checkpoint_early_stop,
    ),
    "checkpoint debug": (lambda: checkpoint.set_checkpoint_debug_enabled(True), lambda: _checkpoint._checkpoint_debug_enabled),
    "checkpoint device": (
        lambda: setting(
            checkpoint.DefaultDeviceType.get_device_type,
            checkpoint.DefaultDeviceType.set_device_type,
            "xla",
        ),
        checkpoint.DefaultDeviceType.get_device_type,
    ),
    "parametrize.cached": (parametrize.cached, lambda: parametrize._cache_enabled),
    "hook of all modules": (global_hook, lambda: float(nn.Identity()(torch.zeros(1)))),
    "enable_wrap": (lambda: wrap.enable_wrap(wrapper_cls=Wrapper), wrapped),
    "swapped parameters": (
        lambda: setting(
            torch.__future__.get_swap_module_params_on_conversion,
            torch.__future__.set_swap_module_params_on_conversion,
            True,
        ),
        torch.__future__.get_swap_module_params_on_conversion,
    ),
    "debug level": (lambda: setting(_get_level, _set_level, dist.DebugLevel.DETAIL), lambda: _get_level().name),
}
"""Contexts by name."""


def _get_level() -> Any:
    return dist.get_debug_level()


def _set_level(level: Any) -> None:
    dist.set_debug_level(level)


if hasattr(_redistribute, "use_min_cost_redistribution_plan"):
    CONTEXTS["redistribution of least cost"] = (
        _plans.use_min_cost_redistribution_plan,
        lambda: _plans._FORCE_MIN_COST_REDISTRIBUTION_PLAN,
    )


def looked_at(names: tuple[str, ...]) -> tuple[Any, ...]:
    """Observations of some contexts; an error counts as an observation, because some contexts forbid it."""
    return tuple(_look(name) for name in names)


def _look(name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of some things once for a process
            return CONTEXTS[name][1]()
    except Exception as error:
        return type(error).__name__


def seen_in_turn(names: tuple[str, ...], meet: Callable[[], object]) -> list[tuple[Any, ...]]:
    """Observations of each rank for each context, while only rank 1 is inside, and afterwards."""
    seen = []
    for name in names:
        with CONTEXTS[name][0]() if dist.get_rank() == 1 else contextlib.nullcontext():
            meet()
            inside = looked_at((name,))
            meet()
        seen.append((name, *inside, *looked_at((name,))))
    return seen
