"""Parameters in the token embedding and the head."""

from __future__ import annotations

from math import prod

from equivcheck.scenario import Model
from equivcheck.training.layers.facts import Initialization, LayerParameter, linear_parameters_of, norm_parameters

EMBEDDING = "embedding.weight"
POSITIONS = "positions.weight"
HEAD = "head.linear.weight"


def embedding_parameters(model: Model) -> tuple[LayerParameter, ...]:
    """List the parameters in token and position embeddings."""
    if model.source is None or model.length is None:
        return ()
    shape = (model.source.vocabulary, model.features)
    tokens = LayerParameter(name=EMBEDDING, shape=shape, initial=Initialization.TABLE, colwise_dim=1, rowwise_dim=0)
    positions = LayerParameter(name=POSITIONS, shape=(model.length, model.features), initial=Initialization.TABLE)
    return (tokens, positions) if model.source.learned_positions else (tokens,)


def head_parameters(model: Model) -> tuple[LayerParameter, ...]:
    """List the head's parameters: those of its norm and its linear. A tied weight is left out, because the embedding owns it."""
    if model.head is None:
        return ()
    inputs = model.in_features(len(model.layers))
    linear = linear_parameters_of("linear", inputs, prod(model.output_shape), bias=model.head.bias)
    return (*norm_parameters(model.head.norm, inputs), *(linear[1:] if model.head.tied else linear))
