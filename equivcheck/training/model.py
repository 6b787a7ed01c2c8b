"""The torch module for a scenario's model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from equivcheck.scenario import Head, Model
from equivcheck.training.documents import places_in_documents
from equivcheck.training.layers.module import UninitializedEmbedding, UninitializedLinear, norm_of, replicated_like
from equivcheck.training.layers.parameters import parameters_of
from equivcheck.training.layers.registry import layer_kind
from equivcheck.training.layers.sequence import FULL_SEQUENCE, Sequence


class HeadModule(nn.Module):
    """Head of a token model: a linear after an optional norm."""

    def __init__(self, head: Head, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = norm_of(head.norm, inputs)
        self.outputs, self.predicts_two = outputs, head.predicts_two
        self.linear = UninitializedLinear(inputs, outputs * (1 + head.predicts_two), bias=head.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map features to logits.

        Logits have the shape (..., classes), or (..., 2, classes) if the head predicts two tokens.
        """
        return self.project(inputs if self.norm is None else self.norm(inputs))

    def project(self, normed: torch.Tensor) -> torch.Tensor:
        """Apply the head's linear to the norm's output."""
        logits: torch.Tensor = self.linear(normed)
        if self.predicts_two:
            logits = logits.unflatten(-1, (2, self.outputs))  # type: ignore[no-untyped-call]
        return logits


class MLP(nn.Module):
    """Module for a scenario's model: a stack of layers, optionally with embedding and head.

    If the batch dim is 1, the module transposes its input and output.
    """

    forwards: torch.Tensor
    offset: torch.Tensor
    scale: nn.Parameter

    def __init__(self, model: Model, batch_dim: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.batch_dim, self.length, tokens = batch_dim, model.length or 0, model.source
        self.sequence: Sequence = FULL_SEQUENCE
        self.document_length = model.document_length if model.packs_documents else None
        self.embedding: UninitializedEmbedding | None = None
        self.positions: UninitializedEmbedding | None = None
        self.head: HeadModule | None = None
        self.defers_head = False
        if tokens is not None:
            self.embedding = UninitializedEmbedding(tokens.vocabulary, model.features, padding_idx=tokens.padding)
            self.positions = UninitializedEmbedding(self.length, model.features) if tokens.learned_positions else None
        layers = [layer_kind(layer).build(layer, model.in_features(index)) for index, layer in enumerate(model.layers)]
        for module in layers:
            module.document_length = self.document_length
        self.layers = nn.ModuleList(layers)
        if model.head is not None:
            self.head = HeadModule(model.head, model.in_features(len(model.layers)), model.out_features)
        if model.counter:
            self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        if model.offset:
            self.register_buffer("offset", offset_of(model, dtype))
        if model.scale:
            self.scale = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, inputs: torch.Tensor, masks: tuple[torch.Tensor | None, ...], step: int) -> torch.Tensor:
        """Map inputs to outputs. `step` is the step's index, because auxiliary linears run only in some steps.

        Shapes are (rows, features) for inputs and (rows, outputs) for outputs. Sequences have a further dim: (rows, length,
        features). Token inputs have no feature dim. If the batch dim is 1, rows are the second dim.
        """
        if "forwards" in self._buffers:
            self.forwards += 1
        values = self.finished(self.through_layers(inputs, masks, step))
        return values.transpose(0, 1) if self.batch_dim else values

    def through_layers(self, inputs: torch.Tensor, masks: tuple[torch.Tensor | None, ...], step: int) -> torch.Tensor:
        """Run embedding and layers, but not the head, the scale and the offset. Rows are dim 0 in the output."""
        values = self.embed(inputs.transpose(0, 1) if self.batch_dim else inputs)
        for layer, mask in zip(self.layers, masks, strict=True):
            values = layer(values, mask, step)
        return values

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        """Replace each token by its embedding, plus its position's embedding if the model has any.

        Return other inputs unchanged.
        """
        if self.embedding is None:
            return inputs
        values: torch.Tensor = self.embedding(inputs)
        if self.positions is None:
            return values
        places = places_in_documents(self.sequence.positions(inputs.shape[-1], inputs.device), self.document_length)
        placed: torch.Tensor = self.positions(replicated_like(inputs, places))
        return values + placed

    def finished(self, values: torch.Tensor) -> torch.Tensor:
        """Apply head, scale and offset to the last layer's output."""
        if self.head is not None and self.defers_head:
            return values if self.head.norm is None else self.head.norm(values)
        return self.scale_outputs(values if self.head is None else self.head(values))

    def project(self, values: torch.Tensor) -> torch.Tensor:
        """Apply the head's linear, the scale and the offset. If `defers_head` is set, `forward` leaves this out."""
        assert self.head is not None, "a model without a head defers nothing"
        return self.scale_outputs(self.head.project(values))

    def scale_outputs(self, values: torch.Tensor) -> torch.Tensor:
        """Multiply outputs by the model's scale and add its offset."""
        if self._parameters.get("scale") is not None:
            values = values * self.scale
        if "offset" in self._buffers:
            values = values + replicated_like(values, self.offset)
        return values


def build_model(model: Model, parameters: Mapping[str, torch.Tensor], batch_dim: int = 0) -> MLP:
    """Build the model's module with copies of the given initial parameters."""
    module = MLP(model, batch_dim, next(iter(parameters.values())).dtype)
    trained = {parameter.full_name: parameter.trained for parameter in parameters_of(model)}
    for name, values in parameters.items():
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, nn.Parameter(values.clone(), requires_grad=trained[name]))
    share_weights(module, model)
    if model.head is not None and model.head.tied:
        tie_head(module)
    return module


def share_weights(module: nn.Module, model: Model) -> None:
    """Make layers share weights as the model specifies."""
    for index, layer in enumerate(model.layers):
        if layer.shares is not None:
            module.get_submodule(f"layers.{index}.linear").weight = module.get_submodule(f"layers.{layer.shares}.linear").weight


def tie_head(module: nn.Module) -> None:
    """Make the head use the embedding's weight as its own."""
    module.get_submodule("head.linear").weight = module.get_submodule("embedding").weight


def offset_of(model: Model, dtype: torch.dtype) -> torch.Tensor:
    """Return the constant that a model with `offset` adds to its outputs, shape (outputs,).

    Its elements are distinct and nonzero.
    """
    return torch.linspace(0.25, 0.75, model.out_features, dtype=dtype)
