"""Installs hooks and replaces functions of torch while a process is recorded.

None may be traced into a compiled graph: while torch compiles, each one only calls the function of torch that it replaces.

Private torch API, tried on torch 2.9 to 2.15:
- `clip_grad._get_total_norm` and `clip_grad._clip_grads_with_norm_`: `clip_grad_norm_` calls them. Clipping has no hook.
- `nn.Module._compiled_call_impl`: `nn.Module.compile` sets it, and it calls no global hook. Copies and files of the module do not
  have it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from equivcheck.recording.watch.recorder import Recorder


@contextlib.contextmanager
def install_hooks(recorder: Recorder) -> Iterator[None]:
    """Inside the context, call the recorder for module calls, backward passes, gradient clipping and updates in this process."""
    replaced = (
        (torch.autograd, "backward", recorder.backward),
        (torch.autograd, "grad", recorder.gradients),
        (clip_grad, "_get_total_norm", recorder.total_norm),
        (nn.utils, "get_total_norm", recorder.total_norm),
        (clip_grad, "_clip_grads_with_norm_", recorder.clip),
        (nn.utils, "clip_grads_with_norm_", recorder.clip),
        (FullyShardedDataParallel, "clip_grad_norm_", recorder.clip_flat),
        (torch.amp.GradScaler, "step", recorder.scaled_step),
        (nn.Module, "compile", recorder.compile),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, around in replaced:
            stack.enter_context(_replaced(owner, name, around))
        for handle in (
            register_module_forward_pre_hook(_eager(recorder.before_forward)),
            register_module_forward_hook(_eager(recorder.after_forward), with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(_eager(recorder.before_update)),
            register_optimizer_step_post_hook(_eager(recorder.after_update)),
        ):
            stack.callback(handle.remove)
        yield


def _eager(hook: Callable[..., Any]) -> Callable[..., Any]:
    def call_eagerly(*arguments: Any) -> Any:
        return None if torch.compiler.is_compiling() else hook(*arguments)

    return call_eagerly


@contextlib.contextmanager
def _replaced(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Replace a function by one that calls `around` with the original function and its arguments."""
    replaced = getattr(owner, name)

    @functools.wraps(replaced)
    def call_around(*arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling():
            return replaced(*arguments, **keywords)
        return around(replaced, *arguments, **keywords)

    setattr(owner, name, call_around)
    try:
        yield
    finally:
        setattr(owner, name, replaced)
