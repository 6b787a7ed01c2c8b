"""The torch module of a model noun."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from equivcheck.layers.parameters import layer_of
from equivcheck.scenario import Activation, AuxiliaryLinear, Layer, Model, Norm
from equivcheck.train.shape_ops import SHAPE_OPS, beside

Function = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[Activation, Function] = {
    Activation.RELU: functional.relu,
    Activation.GELU: functional.gelu,
    Activation.TANH: torch.tanh,
    Activation.SIGMOID: torch.sigmoid,
    Activation.SILU: functional.silu,
}
"""Every activation but the identity, which is left out."""


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Leave the parameters alone: they are replaced, and drawing them would use the process-wide generator."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerFunctions:
    """A layer as functions, for what computes without a `Block`; None for what it has not."""

    layer: Layer
    norm: Function | None
    linear: Function
    auxiliary: Function | None
    activation: Function | None
    shape_op: Function | None


def layer_output(block: Block | LayerFunctions, inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:
    """Map (rows, inputs) to (rows, width), or copies of the one to copies of the other."""
    normed = inputs if block.norm is None else block.norm(inputs)
    outputs: torch.Tensor = block.linear(normed)
    if block.auxiliary is not None and block.layer.auxiliary is AuxiliaryLinear.EVEN_STEPS and step % 2 == 0:
        outputs = outputs + block.auxiliary(normed)
    if block.activation is not None:
        outputs = block.activation(outputs)
    if mask is not None:
        outputs = outputs * mask
    if block.layer.residual:
        outputs = outputs + inputs
    return outputs if block.shape_op is None else block.shape_op(outputs)


class Block(nn.Module):
    """One layer of the MLP."""

    def __init__(self, layer: Layer, inputs: int) -> None:
        super().__init__()
        self.layer = layer
        self.norm = _norm(layer.norm, inputs)
        self.linear = _Linear(inputs, layer.width, bias=layer.bias)
        self.auxiliary = None if layer.auxiliary is None else _Linear(inputs, layer.width, bias=False)
        self.activation = ACTIVATIONS.get(layer.activation)
        self.shape_op = None if layer.shape_op is None else SHAPE_OPS[layer.shape_op]
        self.recomputes = False

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:
        """Map (rows, inputs) to (rows, width); a block that recomputes keeps nothing between the two for backward."""
        if not self.recomputes:
            return self.compute(inputs, mask, step)
        outputs: torch.Tensor = checkpoint(self.compute, inputs, mask, step, use_reentrant=False)
        return outputs

    def compute(self, inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:
        """What `forward` maps by."""
        return layer_output(self, inputs, mask, step)


class MLP(nn.Module):
    """A stack of blocks between two transpositions, where rows do not come first."""

    forwards: torch.Tensor
    offset: torch.Tensor
    scale: nn.Parameter

    def __init__(self, model: Model, batch_dim: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.batch_dim = batch_dim
        self.layers = nn.ModuleList(Block(layer, model.inputs(index)) for index, layer in enumerate(model.layers))
        if model.counter:
            self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        if model.offset:
            self.register_buffer("offset", offset_of(model, dtype))
        if model.scale:
            self.scale = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, inputs: torch.Tensor, masks: tuple[torch.Tensor | None, ...], step: int) -> torch.Tensor:
        """Map (rows, features) to (rows, outputs), or both the other way round; `step` decides which auxiliary linears run."""
        if "forwards" in self._buffers:
            self.forwards += 1
        values = inputs.T if self.batch_dim else inputs
        for layer, mask in zip(self.layers, masks, strict=True):
            values = layer(values, mask, step)
        if "scale" in self._parameters:
            values = values * self.scale
        if "offset" in self._buffers:
            values = values + beside(values, self.offset)
        return values.T if self.batch_dim else values


def build_model(model: Model, parameters: Mapping[str, torch.Tensor], batch_dim: int = 0) -> MLP:
    """The module of a noun with copies of the given initial parameters, for rows along a dim of inputs and outputs."""
    module = MLP(model, batch_dim, next(iter(parameters.values())).dtype)
    for name, values in parameters.items():
        owner, _, attribute = name.rpartition(".")
        frozen = (of_layer := layer_of(name)) is not None and model.layers[of_layer].frozen
        setattr(module.get_submodule(owner), attribute, nn.Parameter(values.clone(), requires_grad=not frozen))
    for index, layer in enumerate(model.layers):
        if layer.shares is not None:
            module.get_submodule(f"layers.{index}.linear").weight = module.get_submodule(f"layers.{layer.shares}.linear").weight
    return module


def offset_of(model: Model, dtype: torch.dtype) -> torch.Tensor:
    """What a model with an offset adds to its outputs, shape (outputs,): no two alike, none of them zero."""
    return torch.linspace(0.25, 0.75, model.outputs, dtype=dtype)


def _norm(norm: Norm | None, features: int) -> nn.Module | None:
    if norm is None:
        return None
    return nn.LayerNorm(features) if norm is Norm.LAYER else nn.RMSNorm(features)
