"""Attention with wrong masks, positions, or key and value heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from equivcheck.layouts.base.plan.layers import PlannedLayer
from equivcheck.mutants.mutant import ONE_RANK, fault
from equivcheck.mutants.needs import EVERYWHERE
from equivcheck.mutants.rank import rank_along
from equivcheck.mutants.tensor_parallel.plan import TENSOR_PARALLEL
from equivcheck.mutants.tokens.needs import Chosen, has_layer, layers_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import SPMD, Attention, Split
from equivcheck.scenario.mesh import TP
from equivcheck.training.layers.attention.module import AttentionModule, attention, rotate
from equivcheck.training.setup import Setup


def _is_causal(place: PlannedLayer) -> bool:
    layer = place.site.layer
    return isinstance(layer, Attention) and layer.causal and (place.site.model.length or 1) > 1


def _is_causal_over_parts(place: PlannedLayer) -> bool:
    return _is_causal(place) and place.num_parts > 1


def _turns_parts(place: PlannedLayer) -> bool:
    """Whether positions of the same document are on several ranks. Attention depends only on their differences."""
    layer, length = place.site.layer, place.site.model.document_length
    crosses = length is None or place.part_length % length > 0
    return isinstance(layer, Attention) and layer.rotary and place.num_parts > 1 and crosses


def _repeats_several(place: PlannedLayer) -> bool:
    """Whether a rank has several key and value heads, each for several query heads; otherwise repeating has one order only."""
    layer = place.site.layer
    if not isinstance(layer, Attention):
        return False
    own = layer.num_kv_heads // (place.site.tp if place.plan.split is Split.HEADS_OR_HIDDEN else 1)
    return own > 1 and layer.num_heads > layer.num_kv_heads


def _copies_heads(place: PlannedLayer) -> bool:
    """Whether query heads are divisible over ranks, but key and value heads are not and therefore replicated."""
    layer = place.site.layer
    if not isinstance(layer, Attention) or layer.frozen or place.plan.split is not Split.REPLICATED or place.site.tp == 1:
        return False
    return layer.num_heads % place.site.tp == 0 and layer.num_kv_heads % place.site.tp != 0


def _attentions(setup: Setup, chosen: Chosen) -> Iterator[tuple[AttentionModule, PlannedLayer]]:
    for module, place in layers_of(setup, chosen):
        assert isinstance(module, AttentionModule), "only attention layers are selected"
        yield module, place


@fault(layouts=EVERYWHERE, applies=has_layer(_is_causal), causes=(Cause.ATTENTION_MASK,), minimum=ONE_RANK)
def causal_mask_lost(setup: Setup) -> None:
    """Bug: the causal mask is missing, so queries see later positions."""
    for module, place in _attentions(setup, _is_causal):
        positions = torch.arange(place.site.model.length or 1)
        _see(module, module.hide_other_documents(None, positions, positions))
        module.unseen = partial(module.hide_other_documents, None)  # type: ignore[method-assign]


@fault(layouts=TENSOR_PARALLEL, applies=has_layer(_is_causal_over_parts), causes=(Cause.ATTENTION_MASK,))
def causal_mask_of_part(setup: Setup) -> None:
    """Bug: the causal mask counts queries from the start of each sequence shard."""
    for module, place in _attentions(setup, _is_causal_over_parts):
        positions = torch.arange(place.site.model.length or 1)
        _see(module, positions > (positions % place.part_length)[:, None])


def _see(module: AttentionModule, unseen: torch.Tensor | None) -> None:
    module.attend = lambda query, key, value: attention(query, key, value, unseen)  # type: ignore[method-assign]
    module.unseen = lambda *_positions: unseen  # type: ignore[method-assign]


@fault(layouts=TENSOR_PARALLEL, applies=has_layer(_turns_parts), causes=(Cause.POSITIONS,))
def rotary_positions_restarted(setup: Setup) -> None:
    """Bug: rotary positions restart at 0 in each sequence shard."""
    for module, place in _attentions(setup, _turns_parts):
        _place(module, torch.arange(place.site.model.length or 1) % place.part_length)


@fault(layouts=TENSOR_PARALLEL, applies=has_layer(_turns_parts), causes=(Cause.POSITIONS,))
def rotary_positions_off_by_one(setup: Setup) -> None:
    """Bug: rotary positions are off by one in the last sequence shard."""
    for module, place in _attentions(setup, _turns_parts):
        positions = torch.arange(place.site.model.length or 1)
        _place(module, positions + (positions >= (place.num_parts - 1) * place.part_length))


def _place(module: AttentionModule, positions: torch.Tensor) -> None:
    module.with_rotary = lambda values: rotate(values, positions)  # type: ignore[method-assign]


@fault(
    layouts=tuple(name for name in EVERYWHERE if name != SPMD.tag),
    applies=has_layer(_repeats_several),
    causes=(Cause.KV_HEADS,),
    minimum=ONE_RANK,
)
def kv_heads_repeated_in_another_order(setup: Setup) -> None:
    """Bug: key and value heads are repeated in the wrong order, so queries use other heads."""
    for module, _ in _attentions(setup, _repeats_several):
        groups = module.layer.num_heads // module.layer.num_kv_heads
        module.repeat_kv_heads = _repeating(groups)  # type: ignore[assignment,method-assign]


def _repeating(groups: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda values: values.repeat(1, groups, 1, 1)


@fault(
    layouts=TENSOR_PARALLEL,
    applies=has_layer(_copies_heads),
    causes=(Cause.KV_HEADS, Cause.NOT_REDUCED, Cause.RANKS_DISAGREE),
)
def copied_kv_gradients_not_summed(setup: Setup) -> None:
    """Bug: gradients for replicated key and value heads are not summed over tensor-parallel ranks."""
    for module, place in _attentions(setup, _copies_heads):
        heads, ranks = module.layer.num_heads, place.site.tp
        own = torch.arange(heads) * ranks // heads == rank_along(setup, TP)
        for linear in (module.key, module.value):
            linear.forward = _twice(linear)  # type: ignore[assignment,method-assign]
        module.repeat_kv_heads = _learning_from(own, heads // module.layer.num_kv_heads)  # type: ignore[assignment,method-assign]


def _twice(linear: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a linear's output twice: one copy passes gradients to the input only, the other copy to the parameters only."""

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        bias = None if linear.bias is None else linear.bias.detach()
        of_inputs = functional.linear(inputs, linear.weight.detach(), bias)
        return torch.cat((of_inputs, functional.linear(inputs.detach(), linear.weight, linear.bias)), -1)

    return forward


def _learning_from(own: torch.Tensor, groups: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that repeats heads; parameters get gradients through this rank's query heads only."""

    def repeat_heads(values: torch.Tensor) -> torch.Tensor:
        of_inputs, of_parameters = (half.repeat_interleave(groups, -3) for half in values.chunk(2, -3))
        return of_inputs + (of_parameters - of_parameters.detach()) * own[:, None, None]

    return repeat_heads
