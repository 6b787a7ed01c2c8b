"""LoRA adapters under tensor parallelism: another scale, or a missing reduction between the adapter's two linears."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from equivcheck.layouts.base.plan.layers import PlannedLayer
from equivcheck.layouts.parallelisms.local_tensor_parallel.modules import LocalLinear
from equivcheck.mutants.mutant import fault
from equivcheck.mutants.needs import layouts_with
from equivcheck.mutants.parameter_use import change_input_gradient, treat_as_reduced
from equivcheck.mutants.tokens.needs import has_layer, layers_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import LocalTensorParallel, LoRALinear, Split, TensorParallel
from equivcheck.training.layers.lora.module import LoRAModule
from equivcheck.training.setup import Setup

PLANNED = layouts_with(TensorParallel.tag, LocalTensorParallel.tag)


def _is_scaled(place: PlannedLayer) -> bool:
    """Whether a layer is split over ranks, and has an adapter whose output is not multiplied by 0."""
    layer = place.site.layer
    return isinstance(layer, LoRALinear) and layer.alpha > 0 and place.plan.split in (Split.COLWISE, Split.ROWWISE)


def _is_column(place: PlannedLayer) -> bool:
    return _is_scaled(place) and place.plan.split is Split.COLWISE


@fault(layouts=PLANNED, applies=has_layer(_is_scaled), causes=(Cause.OUTPUT_AVERAGED,))
def adapter_scale_divided_by_ranks(setup: Setup) -> None:
    """Bug: the output of a tensor-parallel LoRA adapter is divided by the number of ranks."""
    for module, place in layers_of(setup, _is_scaled):
        assert isinstance(module, LoRAModule), "only adapters are selected"
        module.scale /= place.site.tp


@fault(layouts=PLANNED, applies=has_layer(_is_column), causes=(Cause.PARTIAL_INPUT_GRADIENT, Cause.RANKS_DISAGREE))
def adapter_gradient_not_reduced(setup: Setup) -> None:
    """Bug: in a column-parallel LoRA adapter, the gradient of the first linear's output is not summed over ranks."""
    for module, _ in layers_of(setup, _is_column):
        second: nn.Module = module.get_submodule("lora_b")
        if isinstance(second, LocalLinear):
            second.enter = replace(second.enter, gradient_source=second.enter.gradient_target)
        else:
            change_input_gradient(second, treat_as_reduced)
