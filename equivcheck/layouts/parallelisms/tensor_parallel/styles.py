"""Parallel styles for `parallelize_module`, one for each module of a plan.

Subclasses `ParallelStyle`, whose `_apply` is private; tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from equivcheck.layouts.base.plan.linears import LinearPlan, head_plan, linear_plan
from equivcheck.layouts.base.plan.rules import rows_dim
from equivcheck.scenario import ActivationSharding, AnyLayer, LayerPlan, Model, Split, TensorParallel
from equivcheck.training.layers.registry import layer_kind
from equivcheck.training.model import tie_head


def placement(model: Model, sharding: ActivationSharding) -> Placement:
    """Return the DTensor placement of an activation with shape (rows, features) or (rows, length, features)."""
    if sharding is ActivationSharding.REPLICATED:
        return Replicate()
    return Shard(rows_dim(model)) if sharding is ActivationSharding.ROWS else Shard(-1)


class Replicated(ParallelStyle):
    """Parallel style for a module with replicated parameters.

    The module computes on DTensors with the placement `computes`. `input` and `output` are the placements of the local tensors
    that it takes and returns.
    """

    def __init__(self, *, input: Placement, computes: Placement, output: Placement) -> None:
        super().__init__()
        self.input, self.computes, self.output = input, computes, output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # distribute_module uses the results of these two, although its annotations say that they return None.
        prepare_input: Any = self._prepare_input
        prepare_output: Any = self._prepare_output
        return distribute_module(module, device_mesh, self._replicate, prepare_input, prepare_output)

    def _replicate(self, _name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=self.src_data_rank)
            module.register_parameter(key, nn.Parameter(whole, requires_grad=parameter.requires_grad))

    def _prepare_input(self, _module: nn.Module, inputs: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> DTensor:
        whole = DTensor.from_local(inputs[0], mesh, [self.input], run_check=False)
        return whole.redistribute(placements=[self.computes])

    def _prepare_output(self, _module: nn.Module, outputs: DTensor, _mesh: DeviceMesh) -> torch.Tensor:
        return outputs.redistribute(placements=[self.output]).to_local()


def layer_styles(
    model: Model, layer: AnyLayer, plan: LayerPlan, sharding: ActivationSharding
) -> Iterator[tuple[str, ParallelStyle]]:
    """Yield the parallel style of each module with parameters in a layer. `sharding` is the placement of the layer's input."""
    if plan.split is Split.NOT_IN_PLAN:
        return
    if layer.norm is not None:
        yield "norm", _norm_style(model, sharding)
    for part in layer_kind(layer).linears(layer):
        yield part.name, _linear_style(model, linear_plan(model, part, plan, sharding))


def head_styles(model: Model, parallelism: TensorParallel) -> Iterator[tuple[str, ParallelStyle]]:
    """Yield the parallel style of each module in the head."""
    plan = head_plan(model, parallelism)
    if model.head is not None and model.head.norm is not None:
        yield "head.norm", _norm_style(model, plan.input)
    yield "head.linear", _linear_style(model, plan)


def source_styles(model: Model, parallelism: TensorParallel) -> Iterator[tuple[str, ParallelStyle]]:
    """Yield the parallel styles for the token embedding and the learned positions. Learned positions stay replicated."""
    output = placement(model, parallelism.source_output)
    if parallelism.source is Split.ROWWISE:
        yield "embedding", RowwiseParallel(input_layouts=Replicate(), output_layouts=output)
    elif parallelism.source is Split.COLWISE:
        yield "embedding", ColwiseParallel(output_layouts=output)
    else:
        yield "embedding", Replicated(input=Replicate(), computes=Replicate(), output=output)
    if model.source is not None and model.source.learned_positions:
        placed = Replicate() if output.is_replicate() else Shard(0)
        yield "positions", Replicated(input=Replicate(), computes=Replicate(), output=placed)


def _norm_style(model: Model, sharding: ActivationSharding) -> ParallelStyle:
    if sharding is ActivationSharding.ROWS:
        return SequenceParallel(sequence_dim=rows_dim(model), use_local_output=True)
    lies = placement(model, sharding)
    return Replicated(input=lies, computes=Replicate(), output=lies)


def _linear_style(model: Model, linear_plan: LinearPlan) -> ParallelStyle:
    lies, output = placement(model, linear_plan.input), placement(model, linear_plan.output)
    if linear_plan.split is Split.COLWISE:
        return ColwiseParallel(input_layouts=lies, output_layouts=output, use_local_output=not linear_plan.leaves_dtensor)
    if linear_plan.split is Split.ROWWISE:
        return RowwiseParallel(input_layouts=lies, output_layouts=output)
    return Replicated(input=lies, computes=lies if linear_plan.is_by_rows else Replicate(), output=output)


def tie_head_again(model: nn.Module) -> None:
    """Tie the head to the embedding again, because `parallelize_module` gave each its own parameter."""
    tie_head(model)
