"""What a kind of layer states of its parameters: the words in which kinds of layers and parallelisms meet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from equivcheck.choice import Choice
from equivcheck.scenario import AuxiliaryLinear, Norm

Shape = tuple[int, ...]


class Initial(Choice):
    """How the values of a parameter are drawn."""

    WEIGHT = "weight"
    """Normal, divided by the root of what enters."""
    UNIT_WEIGHT = "unit_weight"
    """The same with a first row that is not negative: the first unit then rarely dies in a ReLU."""
    TABLE = "table"
    """Normal: the rows of an embedding."""
    FACTOR = "factor"
    """Uniform from 0.5 to 1.5."""
    OFFSET = "offset"
    """Uniform from -0.5 to 0.5."""
    UNIT_OFFSET = "unit_offset"
    """The same with a first one that is not negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterOf:
    """One parameter of a part of a model."""

    name: str
    """Name within its owner, as ``linear.weight``."""
    shape: Shape
    """Full shape."""
    initial: Initial
    """How its values are drawn."""
    column_dim: int | None = None
    """The dim that a column-parallel layer cuts; None for what it leaves whole."""
    row_dim: int | None = None
    """The dim that a row-parallel layer cuts; None for what it leaves whole."""
    runs: AuxiliaryLinear | None = None
    """At which steps it takes part; None for every one."""


def norm_parameters(norm: Norm | None, features: int) -> tuple[ParameterOf, ...]:
    """The parameters of a module ``norm``."""
    factor = ParameterOf(name="norm.weight", shape=(features,), initial=Initial.FACTOR)
    offset = ParameterOf(name="norm.bias", shape=(features,), initial=Initial.OFFSET)
    return (factor,) * (norm is not None) + (offset,) * (norm is Norm.LAYER)


def linear_parameters_of(name: str, inputs: int, outputs: int, *, bias: bool = False) -> tuple[ParameterOf, ...]:
    """The parameters of a plain linear module."""
    weight = ParameterOf(name=f"{name}.weight", shape=(outputs, inputs), initial=Initial.WEIGHT)
    return (weight, *((ParameterOf(name=f"{name}.bias", shape=(outputs,), initial=Initial.OFFSET),) if bias else ()))


def ready_linears(parameters: Iterable[ParameterOf], linears: Iterable[str], *, autocast: bool) -> tuple[str, ...]:
    """Names in the order in which backward has gradients ready, of linears in the order of backward and a norm before them."""
    attributes = ("weight", "bias") if autocast else ("bias", "weight")
    order = [f"{linear}.{attribute}" for linear in linears for attribute in attributes]
    owned = {parameter.name for parameter in parameters}
    return tuple(name for name in (*order, "norm.weight", "norm.bias") if name in owned)
