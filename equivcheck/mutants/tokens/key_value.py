"""Key and value heads with some copies' gradients only, or with shifted positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from equivcheck.mutants.mutant import ONE_RANK, fault
from equivcheck.mutants.needs import EVERYWHERE
from equivcheck.mutants.parameter_use import transform
from equivcheck.mutants.rank import rank_along, size_of
from equivcheck.mutants.tensor_parallel.plan import TENSOR_PARALLEL
from equivcheck.mutants.tokens.needs import attentions, layers_of, length_of, plan_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Attention, Scenario, Split
from equivcheck.scenario.mesh import TP
from equivcheck.training.layers.attention.module import AttentionModule, rotate
from equivcheck.training.setup import Setup


def _is_grouped(scenario: Scenario) -> bool:
    return any(layer.num_heads > layer.num_kv_heads and not layer.frozen for layer in attentions(scenario))


def _turns_heads(scenario: Scenario) -> bool:
    """Whether ranks have separate heads with rotary positions."""
    plan, layers = plan_of(scenario), scenario.training.model.layers
    if plan is None or length_of(scenario) == 1:
        return False
    pairs = zip(layers, plan.plan, strict=True)
    return any(isinstance(layer, Attention) and layer.rotary and entry.split is Split.HEADS_OR_HIDDEN for layer, entry in pairs)


def _attentions(setup: Setup) -> Iterator[tuple[AttentionModule, int]]:
    """Yield the attention modules on this rank, with the number of query heads per key and value head."""
    for module in setup.model.modules():
        if isinstance(module, AttentionModule):
            yield module, module.layer.num_heads // module.layer.num_kv_heads


@fault(layouts=EVERYWHERE, applies=_is_grouped, causes=(Cause.KV_HEADS,), minimum=ONE_RANK)
def kv_gradient_of_one_copy(setup: Setup) -> None:
    """Bug: a repeated key and value head gets its gradient from the first copy only."""
    for module, copies in _attentions(setup):
        module.repeat_kv_heads = partial(_with_gradient_of_first, copies)  # type: ignore[method-assign]


def _with_gradient_of_first(copies: int, values: torch.Tensor) -> torch.Tensor:
    return torch.stack([values, *[values.detach()] * (copies - 1)], -3).flatten(-4, -3)


@fault(layouts=EVERYWHERE, applies=_is_grouped, causes=(Cause.KV_HEADS,), minimum=ONE_RANK)
def kv_gradients_averaged(setup: Setup) -> None:
    """Bug: a repeated key and value head gets the mean gradient over its copies instead of the sum."""
    for module, copies in _attentions(setup):
        module.repeat_kv_heads = partial(_averaging, module.repeat_kv_heads, copies)  # type: ignore[method-assign]


def _averaging(inner: Callable[[torch.Tensor], torch.Tensor], copies: int, values: torch.Tensor) -> torch.Tensor:
    return inner(transform(values, gradients=lambda gradient: gradient / copies))


@fault(layouts=TENSOR_PARALLEL, applies=_turns_heads, causes=(Cause.POSITIONS,))
def rotary_keys_shifted_on_one_rank(setup: Setup) -> None:
    """Bug: rotary positions for keys are one too large on the last tensor-parallel rank."""
    if rank_along(setup, TP) != size_of(setup, TP) - 1:
        return
    # Before a checkpoint, the layout may have no plan.
    for module, _ in layers_of(setup, lambda place: place.plan.split is Split.HEADS_OR_HIDDEN):
        if isinstance(module, AttentionModule):
            _KeysLater(module)


class _KeysLater:
    """Bug: every second call is shifted, because the module places the query first, then the key."""

    def __init__(self, module: AttentionModule) -> None:
        self._num_calls = 0
        module.with_rotary = self  # type: ignore[method-assign]

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        self._num_calls += 1
        return rotate(values, torch.arange(values.shape[-2]) + (self._num_calls + 1) % 2)
