"""Caches gradients of right emulated ranks, for mistakes outside of forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from equivcheck.oracle.reference.reduction import Gradients

Place = tuple[bool, int, int, int]
"""Key of a backward pass: whether ranks compute on their own rows, the rank, the step, and the number of the pass in its step."""

MOST_BYTES = 512 * 1024**2
"""Maximum bytes for cached gradients and parameters."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    loss: torch.Tensor
    given: list[torch.Tensor]
    gradients: Gradients


class KnownBackward:
    """Cache of gradients from correct backward passes on emulated ranks.

    Most mistakes come after the backward pass, and the pass takes most of an emulation's time. A cached pass is used if loss,
    parameters and buffers are equal.
    """

    def __init__(self) -> None:
        self.is_complete = False
        """Whether the correct ranks have run. Then no pass is added."""
        self._passes: dict[Place, _Pass] = {}
        self._num_bytes = 0

    def add(self, place: Place, loss: torch.Tensor, model: nn.Module, gradients: Gradients) -> None:
        """Add a backward pass to the cache, while the emulated ranks train without a mistake.

        Does nothing after their training has ended, or if the cache is full.
        """
        if self.is_complete:
            return
        given = _given(model)
        # Most ranks have the same parameters, and most microbatches have those of the microbatch before.
        same = next((other.given for other in reversed(self._passes.values()) if _are_equal(other.given, given)), None)
        size = sum(value.nbytes for value in (*gradients.values(), *(given if same is None else ())))
        if self._num_bytes + size <= MOST_BYTES:
            self._num_bytes += size
            kept = [value.detach().clone() for value in given] if same is None else same
            copies = {name: value.detach().clone() for name, value in gradients.items()}
            self._passes[place] = _Pass(loss.detach().clone(), kept, copies)

    def gradients(self, place: Place, loss: torch.Tensor, model: nn.Module) -> Gradients | None:
        """Return the gradients of a cached backward pass; None if the pass is not cached. The caller must not change them."""
        known = self._passes.get(place)
        if known is None or not _are_equal([known.loss, *known.given], [loss, *_given(model)]):
            return None
        return known.gradients


def _given(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _are_equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(
        one.shape == other.shape and one.dtype is other.dtype and torch.equal(one, other)
        for one, other in zip(some, others, strict=True)
    )


def computation(models: Sequence[nn.Module], others: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return a cache key for the code that a backward pass runs: modules, parameters, hooks and other objects, by identity.

    An emulation with a mistake in the model has another key. None if the model has backward hooks, because hooks would not run
    in a cached pass.
    """
    modules = [module for model in models for module in model.modules()]
    parameters = [parameter for model in models for parameter in model.parameters()]
    if any(_is_hooked(parameter) for parameter in parameters) or any(
        module._backward_hooks or module._backward_pre_hooks for module in modules
    ):
        return None
    hooks = tuple(tuple(getattr(module, kind)) for module in modules for kind in HOOKS)
    forwards = tuple(id(vars(module).get("forward")) for module in modules)
    return hooks, forwards, tuple(map(id, modules)), tuple(map(id, parameters)), tuple(map(id, others))


def _is_hooked(parameter: nn.Parameter) -> bool:
    # Private torch API; the attributes exist in torch 2.9 to 2.15.
    return bool(getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None))
