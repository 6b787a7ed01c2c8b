"""Parameters in a linear layer."""

from __future__ import annotations

from equivcheck.scenario import Layer
from equivcheck.training.layers.facts import Initial, ParameterOf, norm_parameters


def linear_parameters(layer: Layer, inputs: int) -> tuple[ParameterOf, ...]:
    """Parameters that the layer owns, in the order of `torch.nn.Module.named_parameters`."""
    matrix, vector = (layer.width, inputs), (layer.width,)
    weight = ParameterOf(name="linear.weight", shape=matrix, initial=Initial.UNIT_WEIGHT, column_dim=0, row_dim=1)
    bias = ParameterOf(name="linear.bias", shape=vector, initial=Initial.UNIT_OFFSET, column_dim=0)
    auxiliary = ParameterOf(
        name="auxiliary.weight", shape=matrix, initial=Initial.WEIGHT, column_dim=0, row_dim=1, runs=layer.auxiliary
    )
    return (
        *norm_parameters(layer.norm, inputs),
        *((weight,) if layer.shares is None else ()),
        *((bias,) if layer.bias else ()),
        *(() if layer.auxiliary is None else (auxiliary,)),
    )
