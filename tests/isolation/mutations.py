"""Changes of state that outlives a run, as programs of users may make them, each with a look at what it changes.

Looks do not use the tables that are tested. All are functions of this module, as ranks that are processes import them by name.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import io
import os
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

from equivcheck.worlds.meshes import device_mesh

_optimizer: Any = importlib.import_module("torch.optim.optimizer")

_entered: list[Any] = []
"""What was entered and is not left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One change."""

    change: Callable[[], object]
    """Makes it, in the calling rank."""
    look: Callable[[], object]
    """What it changes, as something that has the same `repr` in each process."""


class _AllZero(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        return result * 0 if isinstance(result, torch.Tensor) and result.is_floating_point() else result


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        return function(*arguments, **(options or {}))


def _enter(context: Any) -> None:
    _entered.append(context)
    context.__enter__()


def _wrong(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("a function that a program has put in the place of one of torch's")


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def _replaced(owner: Any, name: str) -> Mutation:
    """A function or method is replaced."""
    return Mutation(change=_set(owner, name, _wrong), look=lambda: getattr(owner, name) is _wrong)


def _flag(read: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Mutation:
    return Mutation(change=lambda: put(value), look=read)


def _setting(module: str, name: str) -> Mutation:
    """A boolean setting of the compiler is the other way round."""
    config = importlib.import_module(module)
    return Mutation(change=_set(config, name, not getattr(config, name)), look=lambda: getattr(config, name))


def _digest(state: object) -> str:
    return hashlib.sha256(repr(state).encode()).hexdigest()


def _numpy_state() -> str:
    name, key, *rest = np.random.get_state()
    return _digest((name, key.tolist(), *rest))


def _destroy_part() -> None:
    dist.destroy_process_group(device_mesh((2, 1), ("dp", "tp")).get_group("dp"))


def _groups_work() -> float | str:
    """What a rank gets from its world and from a mesh that is kept between runs."""
    found = torch.ones((), device="cpu", dtype=torch.float64)
    try:
        dist.all_reduce(found)
        dist.all_reduce(found, group=device_mesh((2, 1), ("dp", "tp")).get_group("dp"))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return found.item()


def _sizes(*names: str) -> list[int]:
    return [len(getattr(nn.modules.module, name)) for name in names]


MUTATIONS: dict[str, Mutation] = {
    "grad mode": _flag(torch.is_grad_enabled, torch.set_grad_enabled, False),
    "inference mode": Mutation(change=lambda: _enter(torch.inference_mode()), look=torch.is_inference_mode_enabled),
    "default element type": _flag(torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16),
    "default device": _flag(torch.get_default_device, torch.set_default_device, "meta"),
    "deterministic algorithms": _flag(torch.get_deterministic_debug_mode, torch.use_deterministic_algorithms, True),
    "fill of memory": Mutation(
        change=_set(torch.utils.deterministic, "fill_uninitialized_memory", False),
        look=lambda: torch.utils.deterministic.fill_uninitialized_memory,
    ),
    "anomaly detection": _flag(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, True),
    "matrix precision": _flag(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "matrix precision of oneDNN": Mutation(
        change=_set(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
        look=lambda: torch.backends.mkldnn.matmul.fp32_precision,
    ),
    "oneDNN": _flag(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
    "attention": _flag(torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False),
    "repeated warnings": _flag(torch.is_warn_always_enabled, torch.set_warn_always, True),
    "debug level": _flag(dist.get_debug_level, dist.set_debug_level, dist.DebugLevel.DETAIL),
    "number of threads": _flag(torch.get_num_threads, torch.set_num_threads, 3),
    "view replay": _flag(torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled, True),
    "forward gradients": _flag(torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled, False),
    "denormal numbers": _flag(lambda: sys.float_info.min / 2, torch.set_flush_denormal, True),
    "autocast": _flag(lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on), True),
    "hooks for saved tensors": Mutation(
        change=lambda: _enter(torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 0, lambda saved: saved)),
        look=lambda: torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
    ),
    "refusal of hooks": Mutation(
        change=lambda: torch._C._autograd._saved_tensors_hooks_disable("no"),
        look=torch._C._autograd._saved_tensors_hooks_get_disabled_error_message,
    ),
    "transform": Mutation(
        change=lambda: torch._C._functorch._vmap_increment_nesting(2, "error"),
        look=lambda: torch._C._functorch.peek_interpreter_stack() is None,
    ),
    "function mode": Mutation(change=lambda: _enter(_AllZero()), look=torch._C._len_torch_function_stack),
    "dispatch mode": Mutation(change=lambda: _enter(_Dispatched()), look=torch._C._len_torch_dispatch_stack),
    "module hook": Mutation(
        change=lambda: nn.modules.module.register_module_forward_hook(lambda _module, _inputs, outputs: outputs * 2),
        look=lambda: _sizes("_global_forward_hooks"),
    ),
    "module backward hook": Mutation(
        change=lambda: nn.modules.module.register_module_full_backward_hook(lambda _module, gradients, _outputs: gradients),
        look=lambda: _sizes("_global_backward_hooks"),
    ),
    "optimizer hook": Mutation(
        change=lambda: _optimizer.register_optimizer_step_pre_hook(_wrong),
        look=lambda: len(_optimizer._global_optimizer_pre_hooks),
    ),
    "swapped parameters": _flag(
        torch.__future__.get_swap_module_params_on_conversion, torch.__future__.set_swap_module_params_on_conversion, True
    ),
    "cached parametrizations": Mutation(change=lambda: _enter(parametrize.cached()), look=lambda: parametrize._cache_enabled),
    "checkpoints": Mutation(
        change=lambda: _enter(set_checkpoint_early_stop(False)),
        look=lambda: torch.utils.checkpoint._enable_checkpoint_early_stop,
    ),
    "loss_parallel": Mutation(
        change=lambda: _enter(loss_parallel()), look=lambda: len(DTensor._op_dispatcher._custom_op_handlers)
    ),
    "settings of dynamo": _setting("torch._dynamo.config", "assume_static_by_default"),
    "settings of inductor": _setting("torch._inductor.config", "fallback_random"),
    "settings of functorch": _setting("torch._functorch.config", "functionalize_rng_ops"),
    "function": _replaced(nn.functional, "linear"),
    "method": _replaced(nn.Linear, "forward"),
    "method that was inherited": _replaced(nn.Linear, "__call__"),
    "method of tensors": _replaced(torch.Tensor, "backward"),
    "step of an optimizer": _replaced(torch.optim.AdamW, "step"),
    "collective": _replaced(dist, "all_reduce"),
    "default group": Mutation(change=dist.destroy_process_group, look=_groups_work),
    "group of a kept mesh": Mutation(change=_destroy_part, look=_groups_work),
    "environment": Mutation(
        change=lambda: os.environ.update(EQUIVCHECK_TEST="1"), look=lambda: os.environ.get("EQUIVCHECK_TEST")
    ),
    "environment, less": Mutation(change=lambda: os.environ.pop("PATH", None), look=lambda: os.environ.get("PATH")),
    "working directory": _flag(os.getcwd, os.chdir, "/"),
    "warning filters": Mutation(change=lambda: warnings.simplefilter("once"), look=lambda: _digest(warnings.filters)),
    "import path": Mutation(change=lambda: sys.path.insert(0, "/nowhere"), look=lambda: sys.path[0]),
    "random": Mutation(change=lambda: random.seed(5), look=lambda: _digest(random.getstate())),
    "numpy.random": Mutation(change=lambda: np.random.seed(5), look=_numpy_state),
    "torch's generator": Mutation(
        change=lambda: torch.manual_seed(99), look=lambda: _digest(torch.default_generator.get_state().tolist())
    ),
    "recursion limit": _flag(sys.getrecursionlimit, sys.setrecursionlimit, 2345),
    "garbage collection": Mutation(change=gc.disable, look=gc.isenabled),
    "output": Mutation(change=lambda: setattr(sys, "stdout", io.StringIO()), look=lambda: type(sys.stdout).__name__),
}
"""By name."""


def mutate(names: tuple[str, ...], how: str) -> None:
    """Make some changes on the calling rank, one after the other, and end as it says; one may make the next impossible."""
    for name in names:
        with contextlib.suppress(Exception):
            MUTATIONS[name].change()
    if how == "raises":
        raise ValueError("meant")


def looks() -> dict[str, str]:
    """What each look shows, here and now."""
    return {name: repr(mutation.look()) for name, mutation in MUTATIONS.items()}
