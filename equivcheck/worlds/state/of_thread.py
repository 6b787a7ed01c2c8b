"""State that torch keeps separately for each thread.

Uses private torch API if there is no public getter; tested with torch 2.9, 2.13 and 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from equivcheck.worlds.state.entry import ABSENT, Entry

_autograd: Any = torch._C._autograd
_device: Any = torch._GLOBAL_DEVICE_CONTEXT

_CONFIGS = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")
"""Compiler settings; per thread in newer torch versions, per process in older versions."""


def _autocast() -> tuple[Any, ...]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


def _put_autocast(settings: tuple[Any, ...]) -> None:
    enabled, dtype, cached = settings
    torch.set_autocast_enabled("cpu", enabled)
    torch.set_autocast_dtype("cpu", dtype)
    torch.set_autocast_cache_enabled(cached)
    torch.clear_autocast_cache()


def _put_default_device(context: Any) -> None:
    if context is None:
        _device.__dict__.pop("device_context", None)  # torch 2.9 would read the device of None
    else:
        _device.device_context = context


def _put_stack(pop: Callable[[], Any], push: Callable[[Any], Any], read: Callable[[], list[Any]], saved: list[Any]) -> None:
    for _ in read():
        pop()
    for mode in saved:
        push(mode)


def _function_modes() -> list[Any]:
    stack: Callable[[], list[Any]] = _get_current_function_mode_stack
    return stack() if torch._C._len_torch_function_stack() else []


def _dispatch_modes() -> list[Any]:
    return _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []


def _saved_tensors_hooks() -> Any:
    # torch has a public context manager for these hooks, but no getter.
    return _autograd._top_saved_tensors_default_hooks(True)


def _put_saved_tensors_hooks(saved: Any) -> None:
    while (top := _saved_tensors_hooks()) is not None and top != saved:
        _autograd._pop_saved_tensors_default_hooks()


def _put_why_no_hooks(why: str | None) -> None:
    if why is None:
        _autograd._saved_tensors_hooks_enable()
    else:
        _autograd._saved_tensors_hooks_disable(why)


def _config_hash(name: str) -> Any:
    config: Any = sys.modules.get(name)
    return ABSENT if config is None else config.get_hash()


def _config_values(name: str) -> dict[str, Any]:
    values: dict[str, Any] = sys.modules[name].get_config_copy()
    return values


def _put_config(name: str, values: dict[str, Any]) -> None:
    for key, value in _config_values(name).items():
        if key in values and values[key] != value:
            setattr(sys.modules[name], key, values[key])


OF_THREAD = (
    Entry(name="grad mode", read=torch.is_grad_enabled, put=torch._C._set_grad_enabled),
    Entry(name="inference mode", read=torch.is_inference_mode_enabled),
    Entry(name="autocast", read=_autocast, put=_put_autocast),
    Entry(name="number of threads", read=torch.get_num_threads, put=torch.set_num_threads),
    Entry(
        name="multithreaded backward",
        read=torch._C._is_multithreading_enabled,
        put=torch.autograd.set_multithreading_enabled,
    ),
    Entry(name="view replay", read=torch._C._is_view_replay_enabled, put=torch._C._set_view_replay_enabled),
    Entry(name="forward-mode gradients", read=torch._C._is_fwd_grad_enabled, put=torch._C._set_fwd_grad_enabled),
    Entry(name="hooks for saved tensors", read=_saved_tensors_hooks, put=_put_saved_tensors_hooks),
    Entry(
        name="refusal of hooks for saved tensors",
        read=_autograd._saved_tensors_hooks_get_disabled_error_message,
        put=_put_why_no_hooks,
    ),
    Entry(name="transforms of torch.func", read=lambda: torch._C._functorch.peek_interpreter_stack() is not None),
    Entry(name="flushing of denormal numbers", read=lambda: sys.float_info.min / 2 == 0, put=torch.set_flush_denormal),
    Entry(name="default device", read=lambda: getattr(_device, "device_context", None), put=_put_default_device),
    Entry(
        name="torch function modes",
        read=_function_modes,
        put=partial(_put_stack, torch._C._pop_torch_function_stack, torch._C._push_on_torch_function_stack, _function_modes),
    ),
    Entry(
        name="torch dispatch modes",
        read=_dispatch_modes,
        put=partial(_put_stack, _pop_mode, _push_mode, _dispatch_modes),
    ),
    *(
        Entry(
            name=f"settings in {name}",
            read=partial(_config_hash, name),
            put=partial(_put_config, name),
            copy=partial(_config_values, name),
        )
        for name in _CONFIGS
    ),
)
"""All entries that each thread has for itself."""
