"""Model: a stack of layers, optionally between a token embedding and a head."""

from __future__ import annotations

from equivcheck.errors import InvalidScenario
from equivcheck.scenario.layers.base import AnyLayer
from equivcheck.scenario.layers.linear import MAX_WIDTH, Layer
from equivcheck.scenario.layers.token_layers import MAX_LENGTH, Head, Tokens
from equivcheck.scenario.noun import frozen_dataclass, invalid_field, require_between

MAX_LAYERS = 8


@frozen_dataclass
class Model:
    """Stack of layers: an MLP on feature vectors, or a decoder on token sequences."""

    features: int
    """Input features of the first layer, 1 to 32; also the embedding dim in a token model."""
    length: int | None = None
    """Sequence length, 1 to 16; None if each row is a single vector."""
    document_length: int | None = None
    """Positions in each document packed into a sequence, 1 to 16; the last document may be shorter. None for one document per
    row. Documents do not attend to each other, and their positions start at 0. The label at a document's last position is ignored
    if another document follows.
    """
    source: Tokens | None = None
    """Token embedding before the layers; None for a model with real-valued input."""
    layers: tuple[AnyLayer, ...]
    """1 to 8 layers. At least one is trained and owns its weight."""
    head: Head | None = None
    """Output projection to vocabulary logits; None for no head."""
    counter: bool = False
    """Whether the model has an integer buffer that counts forward passes, like batch normalization."""
    offset: bool = False
    """Whether the model adds a floating-point buffer, with one element per output, to its outputs."""
    scale: bool = False
    """Whether a trained scalar parameter (shape ``[]``) multiplies the outputs before the offset, like a learned temperature."""

    def __post_init__(self) -> None:
        require_between(self, "features", 1, MAX_WIDTH)
        if self.length is not None:
            require_between(self, "length", 1, MAX_LENGTH)
        if self.document_length is not None:
            require_between(self, "document_length", 1, MAX_LENGTH)
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise InvalidScenario(f"Model.layers of length {len(self.layers)} is not valid. Expected 1 to {MAX_LAYERS} layers.")
        if all(layer.frozen or layer.shares is not None for layer in self.layers):
            raise InvalidScenario(
                "Model.layers is not valid: no layer is trained and also owns its weight. Expected at least one such layer."
            )
        for index in range(len(self.layers)):
            self._check_layer(index)
        self._check_tokens()

    def _check_layer(self, index: int) -> None:
        layer, inputs = self.layers[index], self.in_features(index)
        refusal = layer.refusal(inputs)
        if refusal is not None:
            field, expected = refusal
            raise invalid_field(layer, field, f"{expected} in layer {index}")
        if layer.needs_length and self.length is None:
            raise invalid_field(self, "length", f"1 to {MAX_LENGTH} if layer {index} is of class {type(layer).__name__}")
        if layer.shape_op is not None and self.length is not None:
            raise invalid_field(layer, "shape_op", f"None in layer {index}", "rows are sequences")
        if layer.shares is None:
            return
        owner = self.layers[layer.shares] if 0 <= layer.shares < index else None
        if not isinstance(owner, Layer) or owner.shares is not None:
            raise invalid_field(layer, "shares", f"the index of a linear layer with its own weight, before layer {index}")
        if (layer.out_features(inputs), inputs) != (owner.width, self.in_features(layer.shares)):
            raise invalid_field(layer, "shares", f"the index of a layer with the same input and output features as layer {index}")

    def _check_tokens(self) -> None:
        if self.source is not None and self.length is None:
            raise invalid_field(self, "length", f"1 to {MAX_LENGTH} if source is Tokens")
        if self.head is not None and self.source is None:
            raise invalid_field(self, "head", "None if source is None")
        last = self.in_features(len(self.layers))
        if self.head is not None and self.head.tied and last != self.features:
            raise invalid_field(
                self.head, "tied", f"False, or equal features before ({self.features}) and after ({last}) the layers"
            )

    def in_features(self, index: int) -> int:
        """Input features of the layer at `index`. For an index past the last layer: the last layer's output features."""
        features = self.features
        for layer in self.layers[:index]:
            features = layer.out_features(features)
        return features

    @property
    def widths(self) -> tuple[int, ...]:
        """Each layer's input features, followed by the last layer's output features."""
        return tuple(self.in_features(index) for index in range(len(self.layers) + 1))

    @property
    def packs_documents(self) -> bool:
        """Whether a sequence contains several documents."""
        return self.length is not None and self.document_length is not None and self.document_length < self.length

    @property
    def linears(self) -> tuple[Layer, ...]:
        """The model's layers if all are linear, else an empty tuple."""
        found = tuple(layer for layer in self.layers if isinstance(layer, Layer))
        return found if len(found) == len(self.layers) else ()

    @property
    def balances(self) -> bool:
        """Whether any layer has a load-balancing loss."""
        return any(layer.balance for layer in self.layers)

    @property
    def balances_microbatches(self) -> bool:
        """Whether any layer has a load-balancing loss that depends on all rows of a microbatch."""
        return any(layer.balance and not layer.balance_per_sequence for layer in self.layers)

    @property
    def has_router_bias(self) -> bool:
        """Whether any layer chooses experts with a bias that is updated once a step."""
        return any(layer.router_bias_rate for layer in self.layers)

    @property
    def has_matrices_only(self) -> bool:
        """Whether all parameters have exactly two dims.

        False if the model has biases, norms, stacked experts or an output scale.
        """
        head = self.head is None or not (self.head.bias or self.head.norm)
        return not self.scale and head and all(layer.has_matrices_only for layer in self.layers)

    @property
    def predicts_two(self) -> bool:
        """Whether the head makes two predictions. Outputs then have a dim with size 2 before the last dim."""
        return self.head is not None and self.head.predicts_two

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Output shape for each row, or for each position if rows are sequences."""
        return (2, self.out_features) if self.predicts_two else (self.out_features,)

    @property
    def out_features(self) -> int:
        """Output features for each row, or for each position if rows are sequences."""
        if self.head is not None and self.source is not None:
            return self.source.vocabulary
        return self.in_features(len(self.layers))
