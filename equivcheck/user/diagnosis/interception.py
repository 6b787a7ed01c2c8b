"""Intercepts backward passes and gradient clipping, through private torch API; tried on torch 2.9 to 2.15."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from equivcheck.diagnosis.emulation.emulated_ranks import norm_of
from equivcheck.user.precision import autograd_private

Backward = Callable[[torch.Tensor | None, Callable[[], None]], None]
"""Called instead of a backward pass, with a function that runs it, and the loss if it is the pass's only argument."""
Clip = Callable[[list[torch.Tensor], float, Callable[[list[torch.Tensor], torch.Tensor], None]], torch.Tensor]
"""Called instead of clipping, with tensors, norm type and a function that scales tensors by a norm. Returns the norm."""

_of_thread = threading.local()
_is_observed = threading.Event()


@contextlib.contextmanager
def observe_clipping() -> Iterator[None]:
    """Inside the context, torch's clipping by norm first calls the function passed to `call_before_clipping`.

    This holds in every thread. A nested context has no further effect.
    """
    if _is_observed.is_set():
        yield
        return
    own = clip_grad._clip_grads_with_norm_

    def clip(*arguments: Any, **keywords: Any) -> None:
        getattr(_of_thread, "before_clipping", lambda: None)()
        own(*arguments, **keywords)

    clip_grad._clip_grads_with_norm_ = nn.utils.clip_grads_with_norm_ = clip
    _is_observed.set()
    try:
        yield
    finally:
        _is_observed.clear()
        clip_grad._clip_grads_with_norm_ = nn.utils.clip_grads_with_norm_ = own


@contextlib.contextmanager
def call_before_clipping(function: Callable[[], None]) -> Iterator[None]:
    """Inside the context, call `function` before each clipping by a norm in this thread.

    Works only inside `observe_clipping`.
    """
    _of_thread.before_clipping = function
    try:
        yield
    finally:
        del _of_thread.before_clipping


@contextlib.contextmanager
def intercept_backward(backward: Backward) -> Iterator[None]:
    """Inside the context, every `Tensor.backward()` calls `backward`, in all threads.

    The function `backward` gets the loss, and a function that runs the original pass.
    """
    own_backward, own_run = torch.autograd.backward, autograd_private.run_backward

    def wrap(own: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments, **keywords: backward(_only_loss(arguments, keywords), lambda: own(*arguments, **keywords))

    torch.autograd.backward, autograd_private.run_backward = wrap(own_backward), wrap(own_run)
    try:
        yield
    finally:
        torch.autograd.backward, autograd_private.run_backward = own_backward, own_run


@contextlib.contextmanager
def intercept_clipping(clip: Clip) -> Iterator[None]:
    """Inside the context, `clip` replaces `clip_grad_norm_` and `torch.nn.utils.clip_grads_with_norm_`.

    A call to `clip_grads_with_norm_` is replaced only if the passed norm comes from `torch.nn.utils.get_total_norm`, or equals
    the 2-norm of all passed gradients.
    """
    own_norm, own_scaling = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_
    kinds: dict[int, tuple[torch.Tensor, float]] = {}

    # `clip_grad_norm_` calls two private functions. The first returns a placeholder because it does not know the parameters.
    # The second does, so the norm is computed there and written into the placeholder.
    def placeholder_norm(_gradients: Any, norm_type: float = 2.0, *_arguments: Any, **_keywords: Any) -> torch.Tensor:
        norm = torch.tensor(float("nan"), dtype=torch.float64)
        kinds[id(norm)] = norm, float(norm_type)
        return norm

    def total_norm(gradients: Any, norm_type: float = 2.0, *arguments: Any, **keywords: Any) -> torch.Tensor:
        norm = own_norm(gradients, norm_type, *arguments, **keywords)
        kinds[id(norm)] = norm, float(norm_type)
        return norm

    def scaling(parameters: Any, max_norm: float, norm: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        _, kind = kinds.pop(id(norm), (norm, 2.0 if _is_euclidean(norm, tensors) else None))
        if kind is None:
            own_scaling(tensors, max_norm, norm, *arguments, **keywords)
            return
        found = clip(tensors, kind, lambda some, by: own_scaling(some, max_norm, by, *arguments, **keywords))
        norm.data = found.detach()

    # The public names of both private functions are attributes of `torch.nn.utils`.
    clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_ = placeholder_norm, scaling  # type: ignore[assignment]
    nn.utils.get_total_norm, nn.utils.clip_grads_with_norm_ = total_norm, scaling  # type: ignore[assignment]
    try:
        yield
    finally:
        clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_ = own_norm, own_scaling
        nn.utils.get_total_norm, nn.utils.clip_grads_with_norm_ = own_norm, own_scaling


def _is_euclidean(norm: Any, tensors: Iterable[torch.Tensor]) -> bool:
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    if not isinstance(norm, torch.Tensor) or not gradients:
        return False
    own = norm_of(gradients, 2.0)
    return math.isclose(float(norm), float(own), rel_tol=8 * torch.finfo(own.dtype).eps)


def _only_loss(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> torch.Tensor | None:
    """Return the loss.

    None if the pass has explicit gradients, selected inputs, or a graph that is retained.
    """
    loss, *options = arguments or (None,)
    is_plain = all(option is None or option is False for option in (*options, *keywords.values()))
    return loss if isinstance(loss, torch.Tensor) and is_plain else None
