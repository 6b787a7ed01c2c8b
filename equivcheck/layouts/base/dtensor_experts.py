"""Experts stored as DTensors: their parameters, and the division of their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivcheck.layouts.base.partition import shard_dim
from equivcheck.scenario import FSDP2, ExpertParallel, ExpertStorage, Layout, Model
from equivcheck.training.layers.parameters import Parameter, parameters_of

if TYPE_CHECKING:
    from torch import nn


def has_dtensor_experts(layout: Layout) -> bool:
    """Whether a layout stores experts as DTensors if there are any. The axis may have one rank."""
    return any(each.storage is ExpertStorage.DTENSOR for each in layout.of(ExpertParallel))


def is_dtensor_expert(layout: Layout, parameter: Parameter) -> bool:
    """Whether a parameter belongs to experts stored as DTensors."""
    kept = [each for each in layout.of(ExpertParallel) if each.storage is ExpertStorage.DTENSOR]
    return any(shard_dim(each, parameter) is not None for each in kept)


def dtensor_experts(model: Model, layout: Layout) -> list[Parameter]:
    """Parameters of all experts, if the layout stores experts as DTensors. Otherwise the list is empty."""
    return [parameter for parameter in parameters_of(model) if is_dtensor_expert(layout, parameter)]


def has_expert_units(layout: Layout) -> bool:
    """Whether each layer's experts are a separate `fully_shard` unit.

    If so, their gradients are divided by the number of all ranks.
    """
    return layout.has(FSDP2) and has_dtensor_experts(layout)


def shards_over_ep(layout: Layout) -> bool:
    """Whether `fully_shard` reduces gradients of parameters outside experts over expert-parallel ranks, too."""
    return layout.has(ExpertParallel) and any(fsdp.shard_over_ep for fsdp in layout.of(FSDP2))


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Return one module for each layer with experts: the module that holds all experts of the layer."""
    from equivcheck.training.layers.module import RoutedModule

    return [layer.units() for layer in model.modules() if isinstance(layer, RoutedModule)]
