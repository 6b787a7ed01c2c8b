"""Faults in precision, loss scaling, recomputation and shared weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from equivcheck.layouts.composition.registry import rounding_of
from equivcheck.mutants.comm_hooks import average_bucket_in, reduce_with
from equivcheck.mutants.mutant import ONE_RANK, Minimum, fault
from equivcheck.mutants.needs import EVERYWHERE, all_of, has_next_step, is_eager, is_wrapped, layouts_with, reduces_by_hooks
from equivcheck.mutants.parameter_use import FirstValues, TensorFunction, use_weight_through
from equivcheck.mutants.rank import around_update, optimizer_parameters, scale
from equivcheck.mutants.torch_private import ReduceInBfloat16, reduce_scatter_with
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import DDP, FSDP1, FSDP2, SPMD, AnyLayer, Checkpointing, ElementType, Layout, Replicate, Scenario
from equivcheck.scenario.mesh import DP, SHARD
from equivcheck.training.layers.linear.module import Block
from equivcheck.training.setup import Setup

LOSS_FACTOR = 1024.0
"""Loss scale for float16 gradients. A power of two does not round."""
_NARROW = (ElementType.BFLOAT16, ElementType.FLOAT16)


def _reduces_wide(scenario: Scenario) -> bool:
    """Whether gradients are reduced in more digits than bfloat16 has, through a replaceable hook."""
    layout = scenario.layout
    rounding = rounding_of(layout, scenario.training.precision)
    is_wide = rounding is None or rounding.reduce not in _NARROW
    return is_wide and (_scatters(layout) or (is_wrapped(layout) and reduces_by_hooks(scenario)))


def _scatters(layout: Layout) -> bool:
    return layout.has(FSDP2) and layout.mesh.size(DP, SHARD) > 1


def _clips(scenario: Scenario) -> bool:
    return scenario.training.clipping is not None


@fault(
    layouts=("fsdp2", "ddp", "replicate", "fsdp2 x tensor_parallel", "ddp x tensor_parallel", "replicate x tensor_parallel"),
    applies=all_of(is_eager, _reduces_wide),
    causes=(Cause.REDUCED_IN_LOWER_PRECISION,),
)
def reduced_in_bfloat16(setup: Setup) -> None:
    """Bug: gradients are reduced in bfloat16 instead of the configured type."""
    reduce_with(setup, partial(average_bucket_in, torch.bfloat16))
    reduce_scatter_with(setup, ReduceInBfloat16)


@fault(layouts=EVERYWHERE, causes=(Cause.MASTERS_IN_LOWER_PRECISION,), minimum=ONE_RANK)
def masters_in_bfloat16(setup: Setup) -> None:
    """Bug: parameters are rounded to bfloat16 between steps."""

    def round_parameters(optimizer: Optimizer) -> None:
        with torch.no_grad():
            for parameter in optimizer_parameters(optimizer):
                parameter.copy_(parameter.to(torch.bfloat16))

    around_update(setup, after=round_parameters)


@fault(layouts=EVERYWHERE, causes=(Cause.NOT_UNSCALED, Cause.SCALED), minimum=ONE_RANK)
def never_unscaled(setup: Setup) -> None:
    """Bug: gradients are never divided by the loss scale."""
    setup.before_update.append(lambda optimizer, _step: scale(optimizer, LOSS_FACTOR))


@fault(layouts=EVERYWHERE, applies=_clips, causes=(Cause.NOT_UNSCALED, Cause.SCALED), minimum=ONE_RANK)
def unscaled_after_clipping(setup: Setup) -> None:
    """Bug: gradients are unscaled after clipping, so clipping sees scaled gradients."""
    never_unscaled(setup)
    around_update(setup, before=lambda optimizer: scale(optimizer, 1.0 / LOSS_FACTOR))


_SHARING = (*layouts_with(DDP.tag), *(tag.tag for tag in (FSDP1, FSDP2, Replicate, SPMD)))


def _recomputes_dropout(scenario: Scenario) -> bool:
    """Whether the scenario's own layout recomputes a layer with dropout."""
    execution = scenario.layout.execution
    return any(layer.dropout and execution.checkpoints(index) for index, layer in enumerate(scenario.training.model.layers))


def _shares_trained(scenario: Scenario) -> bool:
    layers = scenario.training.model.layers
    return any(layer.shares is not None and not layers[layer.shares].frozen for layer in layers)


def _shares_longer(scenario: Scenario) -> bool:
    """Whether a weight is shared for at least two steps."""
    return _shares_trained(scenario) and has_next_step(scenario)


@fault(layouts=EVERYWHERE, applies=all_of(is_eager, _recomputes_dropout), causes=(Cause.ANOTHER_MASK,), minimum=ONE_RANK)
def mask_redrawn_by_recomputation(setup: Setup) -> None:
    """Bug: activation checkpointing recomputes a layer with a new dropout mask."""
    for module in setup.model.modules():
        if isinstance(module, Block) and module.recomputes and module.layer.dropout:
            _draw_again(module)


def _draw_again(block: Block) -> None:
    """Invert a mask that the layer has seen before, because that call is the recomputation."""
    compute, had = block.compute, set[torch.Tensor]()

    def compute_again(inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:
        if mask is None:
            return compute(inputs, mask, step)
        # Both calls invert it, because selective checkpointing expects the same operations again.
        other = other_mask(mask, block.layer)
        if mask in had:
            return compute(inputs, other, step)
        had.add(mask)
        return compute(inputs, mask, step)

    block.compute = compute_again  # type: ignore[method-assign]


def _offloads_dropout(scenario: Scenario) -> bool:
    """Whether the scenario's own layout offloads activations of a layer with dropout."""
    offloads = scenario.layout.execution.checkpointing is Checkpointing.OFFLOAD
    return offloads and any(layer.dropout for layer in scenario.training.model.layers)


@fault(
    layouts=("ddp", "replicate", "fsdp1", "fsdp2"),
    applies=all_of(is_eager, _offloads_dropout),
    causes=(Cause.ANOTHER_MASK,),
    minimum=ONE_RANK,
)
def mask_overwritten_in_host_memory(setup: Setup) -> None:
    """Bug: a dropout mask is overwritten in host memory before backward reads it."""
    for module in setup.model.modules():
        if isinstance(module, Block) and module.layer.dropout:
            _offload_another(module)


def _offload_another(block: Block) -> None:
    """Save the inverted mask for backward."""
    compute = block.compute

    def compute_saving(inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:
        def save(tensor: torch.Tensor) -> torch.Tensor:
            if mask is None or tensor.shape != mask.shape or tensor.data_ptr() != mask.data_ptr():
                return tensor
            return other_mask(mask, block.layer)

        with saved_tensors_hooks(save, lambda tensor: tensor):
            return compute(inputs, mask, step)

    block.compute = compute_saving  # type: ignore[method-assign]


def other_mask(mask: torch.Tensor, layer: AnyLayer) -> torch.Tensor:
    """Return the inverted dropout mask with the same scaling."""
    kept: torch.Tensor = (mask == 0.0).to(mask.dtype) / (1.0 - layer.dropout)
    return kept


@fault(
    layouts=_SHARING,
    applies=all_of(is_eager, _shares_longer),
    causes=(Cause.UNTIED, Cause.STALE),
    minimum=Minimum(ranks=1, layers=2, steps=2, because="two layers share a weight, and the first step is right"),
)
def tied_weight_stale(setup: Setup) -> None:
    """Bug: a shared weight is updated for one layer and keeps its initial value in the other."""
    _untie(setup, FirstValues)


@fault(
    layouts=_SHARING,
    applies=all_of(is_eager, _shares_trained),
    causes=(Cause.UNTIED, Cause.GRADIENT_LOST),
    minimum=Minimum(ranks=1, layers=2, because="two layers share a weight"),
)
def tied_weight_without_gradient(setup: Setup) -> None:
    """Bug: one layer adds nothing to the gradient for its shared weight."""
    _untie(setup, lambda: torch.Tensor.detach)


def _untie(setup: Setup, through: Callable[[], TensorFunction]) -> None:
    """Let each layer with a shared weight use the weight through its own function."""
    for module in setup.model.modules():
        if isinstance(module, Block) and module.layer.shares is not None:
            use_weight_through(module.linear, through())
