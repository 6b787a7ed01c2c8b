"""Mistakes in tensor-parallel layers: reductions that are missing, averaged or done twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from equivcheck.diagnosis.catalogue.counterfactual import Change, all_then_each, on_emulated_ranks, on_one_device
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.emulated_ranks import total_of
from equivcheck.diagnosis.emulation.scenario_ranks import ScenarioRanks
from equivcheck.diagnosis.mistake import Mistake, Span
from equivcheck.diagnosis.mistakes.reductions import mean_along, reduce_by
from equivcheck.diagnosis.suspects import Masks, suspects
from equivcheck.diagnosis.words import gradients, join_words, tensors
from equivcheck.layouts.base.partition import chunk_size
from equivcheck.layouts.base.plan.layers import plan_over_ranks
from equivcheck.layouts.base.plan.rules import fits, inputs_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import ActivationSharding, LayerPlan, LoRALinear, Split
from equivcheck.scenario.mesh import TP
from equivcheck.training.layers.registry import layer_kind
from equivcheck.training.setup import Setup

Forward = Callable[[nn.Linear, torch.Tensor], torch.Tensor]
"""Replacement for a linear's forward."""
Normed = Callable[[torch.Tensor], torch.Tensor]
Linears = tuple[str, ...]
"""Linears reading one layer's input, by name."""


def wrong_tensor_parallelism(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes in tensor-parallel layers. Each is tried in all layers with the same split, then in each layer alone."""
    parallelism, num_ranks = plan_over_ranks(diverged.layout), diverged.mesh.size(TP)
    if parallelism is None or diverged.rounding is not None or not fits(diverged.training.model, parallelism.plan):
        return
    plan = parallelism.plan
    yield from _replicated(diverged, num_ranks)
    yield from _of_positions(diverged)
    yield from _of_adapters(diverged, plan, num_ranks)
    yield from _of_row_wise(diverged, plan, num_ranks)
    for layers in all_then_each(list(_linears_split(diverged, plan, Split.COLWISE).values())):
        yield from _of_columns(diverged, layers, num_ranks)
    for layers in all_then_each(list(_linears_within(diverged, plan, reads=True).values())):
        yield from _of_columns(diverged, layers, num_ranks)
    if diverged.training.model.head is not None and parallelism.head is Split.COLWISE:
        yield from _of_columns(diverged, (("head.linear",),), num_ranks)


def _linears_split(diverged: DivergedRun, plan: Sequence[LayerPlan], split: Split) -> dict[int, Linears]:
    """Return names of linears with a split, by layers with this split."""
    return {
        at: tuple(f"layers.{at}.{part.name}" for part in layer_kind(layer).linears(layer) if part.replicated_under is not split)
        for at, (layer, entry) in enumerate(zip(diverged.training.model.layers, plan, strict=True))
        if entry.split is split
    }


def _of_adapters(diverged: DivergedRun, plan: Sequence[LayerPlan], num_ranks: int) -> Iterator[Mistake]:
    """Yield mistakes in adapters only, while the base is right."""
    where, adapted = diverged.ranks_text((TP,)), []
    for at, (layer, entry) in enumerate(zip(diverged.training.model.layers, plan, strict=True)):
        if isinstance(layer, LoRALinear) and entry.split in (Split.COLWISE, Split.ROWWISE):
            adapted.append((f"layers.{at}.lora_b",))
    for layers in all_then_each(adapted):
        words = f"the output of {_named(layers)} is divided by {num_ranks}, as if it were averaged over {where}"
        yield on_one_device(Cause.OUTPUT_AVERAGED, words, _forwarding(layers, _averaged(num_ranks, backward=True)))
        yield _partial_input_gradients(diverged, layers, num_ranks)


def _linears_within(diverged: DivergedRun, plan: Sequence[LayerPlan], *, reads: bool) -> dict[int, Linears]:
    """Return names of linears that read a layer's input, or give its output, by layers split by heads or hidden features."""
    found: dict[int, Linears] = {}
    for at, (layer, entry) in enumerate(zip(diverged.training.model.layers, plan, strict=True)):
        parts = layer_kind(layer).linears(layer) if entry.split is Split.HEADS_OR_HIDDEN else ()
        names = tuple(f"layers.{at}.{part.name}" for part in parts if (part.reads_input if reads else part.gives_output))
        found |= {at: names} if names else {}
    return found


def _of_positions(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield norm gradients without reduction under sequence parallelism, although each rank has only some positions."""
    model = diverged.training.model
    plan, where = plan_over_ranks(diverged.layout), diverged.ranks_text((TP,))
    if plan is None or model.length is None or diverged.resumes:
        return
    normed = (*(layer.norm for layer in model.layers), model.head and model.head.norm)
    names = [*(f"layers.{at}.norm" for at in range(len(model.layers))), "head.norm"]
    found = [
        name
        for name, norm, lies in zip(names, normed, inputs_of(model, plan), strict=True)
        if norm is not None and lies is ActivationSharding.ROWS
    ]
    for chosen in all_then_each(found):
        words = f"the gradients of {tensors(chosen)} are left unreduced over {where}: each rank keeps those of its own positions"
        yield on_emulated_ranks(Cause.NOT_REDUCED, words, partial(_learning_from_part, names=chosen))


def _learning_from_part(emulated: ScenarioRanks, names: Sequence[str]) -> None:
    ranks = emulated.mesh.size(TP)
    for rank, setup in zip(emulated.coordinates, emulated.setups, strict=True):
        for name in names:
            norm = setup.model.get_submodule(name)
            norm.forward = partial(_normed_apart, norm, norm.forward, rank.indices[TP], ranks)


def _normed_apart(norm: nn.Module, normed: Normed, place: int, ranks: int, values: torch.Tensor) -> torch.Tensor:
    """Bug: parameters of a norm get gradients only through one rank's positions."""
    fixed = _with_fixed_parameters(norm, values)
    size = -(-values.shape[1] // ranks)
    own = slice(place * size, (place + 1) * size)
    learning = normed(values[:, own].detach())
    return torch.cat((fixed[:, : own.start], fixed[:, own] + (learning - learning.detach()), fixed[:, own.stop :]), 1)


def _replicated(diverged: DivergedRun, num_ranks: int) -> Iterator[Mistake]:
    """Yield gradients of replicated parameters without reduction."""
    where = diverged.ranks_text((TP,))
    for masks in () if diverged.resumes else suspects(diverged):
        what = gradients(diverged, diverged.updated if masks is None else tuple(masks))
        words = f"{what} left unreduced over {where}: each rank keeps the gradient of its own rows"
        yield on_emulated_ranks(Cause.NOT_REDUCED, words, _own_rows(masks, num_ranks))
        divided = f"{words}, but divided by the number of ranks"
        yield on_emulated_ranks(Cause.NOT_REDUCED, divided, _own_rows(masks, 1))


def _own_rows(masks: Masks | None, divisor: int) -> Callable[[ScenarioRanks], None]:
    def change(ranks: ScenarioRanks) -> None:
        reduce_by(partial(mean_along, axes=ranks.axes, divisor=divisor), masks, Span(first=0))(ranks)
        ranks.axes = (*ranks.axes, TP)

    return change


def _with_fixed_parameters(norm: nn.Module, values: torch.Tensor) -> torch.Tensor:
    if isinstance(norm, nn.LayerNorm):
        return functional.layer_norm(values, norm.normalized_shape, norm.weight.detach(), norm.bias.detach(), norm.eps)
    assert isinstance(norm, nn.RMSNorm), norm
    return functional.rms_norm(values, norm.normalized_shape, norm.weight.detach(), norm.eps)


def _of_row_wise(diverged: DivergedRun, plan: Sequence[LayerPlan], num_ranks: int) -> Iterator[Mistake]:
    """Yield mistakes in row-wise linears, also in those that give an attention's or a gated MLP's output.

    Each is tried in all linears, in all with one kind, and in each alone.
    """
    row_wise = _linears_split(diverged, plan, Split.ROWWISE)
    giving, layers = _linears_within(diverged, plan, reads=False), diverged.training.model.layers
    units = {
        name: next(
            each.units or 1 for each in layer_kind(layers[at]).shardings(layers[at]) if each.split is Split.HEADS_OR_HIDDEN
        )
        for at, names in giving.items()
        for name in names
    }
    everything = tuple(names for _, names in sorted((row_wise | giving).items()))
    kinds = (everything, tuple(row_wise.values()), tuple(giving.values()))
    for chosen in filter(None, dict.fromkeys((*kinds, *((each,) for each in everything)))):
        yield from _of_rows(diverged, chosen, num_ranks, units)


def _of_rows(diverged: DivergedRun, layers: tuple[Linears, ...], num_ranks: int, units: Mapping[str, int]) -> Iterator[Mistake]:
    who, where = _named(layers), diverged.ranks_text((TP,))
    words = f"the bias of {who} is added on each of {where}, not once"
    for counted in (True, False):
        yield on_one_device(Cause.BIAS_ON_EVERY_RANK, words, _forwarding(layers, _biased(num_ranks, counted=counted)))
    for backward in (True, False):
        words = f"the output of {who} is averaged over {where}, not summed"
        yield on_one_device(Cause.OUTPUT_AVERAGED, words, _forwarding(layers, _averaged(num_ranks, backward=backward)))
    words = f"the output of {who} is not summed over {where}: each rank continues with its partial sum"
    for share in (1.0, 1 / num_ranks, 0.0):
        # If the other ranks add no bias, the first rank adds all of it.
        shares = [share or 1.0, *[share] * (num_ranks - 1)]
        change = partial(_leave_partial, layers=layers, units=units, shares=shares)
        yield on_emulated_ranks(Cause.PARTIAL_OUTPUT, words, change)


def _leave_partial(
    ranks: ScenarioRanks, *, layers: tuple[Linears, ...], units: Mapping[str, int], shares: Sequence[float]
) -> None:
    """Leave linears' outputs partial. `units` has the number of heads or hidden features by linear; others split features.

    Their input gradients are gathered, or the layer's input gradients are summed.
    """
    for rank, setup in zip(ranks.coordinates, ranks.setups, strict=True):
        found = dict(setup.model.named_modules())
        for name in (name for layer in layers for name in layer if name in found):
            linear: Any = found[name]
            num_units = units.get(name, linear.in_features)
            size = chunk_size(num_units, len(shares)) * (linear.in_features // num_units)
            place = rank.indices[TP]
            own = slice(place * size, (place + 1) * size)
            linear.forward = partial(_own_features, linear, own, shares[place])
            if name not in units:
                _exchange_input_gradient(ranks, rank.rank, linear, partial(_gathered, size=size))
                continue
            for key, other in found.items():
                if isinstance(other, nn.Linear) and other is not linear and key.startswith(f"{name.rpartition('.')[0]}."):
                    _exchange_input_gradient(ranks, rank.rank, other, total_of)


def _exchange_input_gradient(
    ranks: ScenarioRanks, rank: int, linear: Any, together: Callable[[list[torch.Tensor]], torch.Tensor]
) -> None:
    forward = linear.forward
    linear.forward = lambda values: forward(ranks.with_gradient(rank, values, (TP,), together))


def _gathered(parts: list[torch.Tensor], *, size: int) -> torch.Tensor:
    return torch.cat([part[..., place * size : (place + 1) * size] for place, part in enumerate(parts)], -1)


def _own_features(linear: nn.Linear, own: slice, share: float, values: torch.Tensor) -> torch.Tensor:
    """Compute with one rank's features. The bias is multiplied by `share` in forward; its gradient stays unchanged."""
    outputs = functional.linear(values[..., own], linear.weight[:, own])
    return outputs if linear.bias is None else outputs + (linear.bias + (share - 1.0) * linear.bias.detach())


def _of_columns(diverged: DivergedRun, layers: tuple[Linears, ...], num_ranks: int) -> Iterator[Mistake]:
    who, where = _named(layers), diverged.ranks_text((TP,))
    words = f"the gradient of the input of {who} is summed twice over {where}"
    yield on_one_device(Cause.INPUT_GRADIENT_SUMMED_TWICE, words, _forwarding(layers, _input_gradient_summed_twice(num_ranks)))
    yield _partial_input_gradients(diverged, layers, num_ranks)


def _partial_input_gradients(diverged: DivergedRun, layers: tuple[Linears, ...], num_ranks: int) -> Mistake:
    who, where = _named(layers), diverged.ranks_text((TP,))
    words = f"the gradient of the input of {who} is not summed over {where}: each rank continues with its partial sum"
    change = _on_each(layers, lambda place: _partial_input_gradient(place, num_ranks))
    return on_emulated_ranks(Cause.PARTIAL_INPUT_GRADIENT, words, change)


def _named(layers: tuple[Linears, ...]) -> str:
    names = [f"`{name}`" for layer in layers for name in layer if not name.endswith(".auxiliary")]
    return join_words(names) if len(names) < 4 else f"{len(layers)} layers"


def _forwarding(layers: tuple[Linears, ...], forward: Forward) -> Change:
    def change(setup: Setup) -> None:
        found = dict(setup.model.named_modules())
        for name in (name for layer in layers for name in layer if name in found):
            found[name].forward = partial(forward, found[name])

    return change


def _on_each(layers: tuple[Linears, ...], forward_of: Callable[[int], Forward]) -> Callable[[ScenarioRanks], None]:
    def change(ranks: ScenarioRanks) -> None:
        for rank, setup in zip(ranks.coordinates, ranks.setups, strict=True):
            _forwarding(layers, forward_of(rank.indices[TP]))(setup)

    return change


def _biased(num_ranks: int, *, counted: bool) -> Forward:
    def forward(linear: nn.Linear, values: torch.Tensor) -> torch.Tensor:
        outputs = functional.linear(values, linear.weight, linear.bias)
        if linear.bias is None:
            return outputs
        return outputs + (num_ranks - 1) * (linear.bias if counted else linear.bias.detach())

    return forward


def _averaged(num_ranks: int, *, backward: bool) -> Forward:
    def forward(linear: nn.Linear, values: torch.Tensor) -> torch.Tensor:
        outputs = functional.linear(values, linear.weight)
        outputs = outputs / num_ranks if backward else outputs + (outputs / num_ranks - outputs).detach()
        return outputs if linear.bias is None else outputs + linear.bias

    return forward


def _input_gradient_summed_twice(num_ranks: int) -> Forward:
    def forward(linear: nn.Linear, values: torch.Tensor) -> torch.Tensor:
        twice = num_ranks * values - (num_ranks - 1) * values.detach() if values.requires_grad else values
        return functional.linear(twice, linear.weight, linear.bias)

    return forward


def _partial_input_gradient(place: int, num_ranks: int) -> Forward:
    def forward(linear: nn.Linear, values: torch.Tensor) -> torch.Tensor:
        outputs = functional.linear(values.detach(), linear.weight, linear.bias)
        size = -(-outputs.shape[-1] // num_ranks)
        own = torch.zeros(outputs.shape[-1], dtype=outputs.dtype)
        own[place * size : (place + 1) * size] = 1.0
        through = functional.linear(values, linear.weight.detach())
        return outputs + (through - through.detach()) * own

    return forward
