"""What a kind of layer states of its parameters: the words in which kinds of layers and parallelisms meet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from equivcheck.scenario import AuxiliaryLinear, Norm, Split
from equivcheck.system.choice import Choice

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
    within_dim: int | None = None
    """The dim that a layer cuts whose units within are shared out; None for what it leaves whole."""
    expert_dim: int | None = None
    """The dim along which experts lie, each of which computes the rows that have chosen it; None for what belongs to none."""
    runs: AuxiliaryLinear | None = None
    """At which steps it takes part; None for every one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A linear of a layer, as part of what the layer computes."""

    name: str
    """Name within its layer."""
    reads_input: bool = False
    """Whether it maps the layer's input, normalised or not; else what other parts have made, units apart."""
    gives_output: bool = False
    """Whether the layer's output is made of what it gives; else what it gives lies within, units one after the other."""
    activated: bool = False
    """Whether it gives the layer's output through an activation, which backward asks for again."""
    runs: AuxiliaryLinear | None = None
    """At which steps it takes part; None for every one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """How a layer gives rows to units, such as experts, that have chosen them by values."""

    trains_rows: bool
    """Whether the rows depend on parameters of the layer that are trained, such as those of a norm."""
    num_counted: int = 0
    """Units whose choices are counted over all rows of a microbatch, for a loss of the layer's own; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingChoice:
    """A way in which ranks share out a layer: its linears, that is, as a norm is whole on every rank."""

    split: Split
    """How; the parameters say along which dim each is cut."""
    units: int | None = None
    """How many things it shares out of which each is computed on one rank, such as heads; None where any cut will do."""
    words: str = ""
    """What these are, for people."""
    weights: int | None = None
    """Weights of each position that multiply what a rank computes, where each computes an addend of the output and the module's
    `region` moves values; None where they are moved for each linear, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looking:
    """What of each position a layer exchanges with others: each of them looks at keys and values by queries."""

    heads: int
    """Heads of the query."""
    kv_heads: int
    """Heads of key and value, each for as many neighbours of the query."""
    width: int
    """Features of a head."""


def norm_parameters(norm: Norm | None, features: int) -> tuple[ParameterOf, ...]:
    """The parameters of a module ``norm``."""
    factor = ParameterOf(name="norm.weight", shape=(features,), initial=Initial.FACTOR)
    offset = ParameterOf(name="norm.bias", shape=(features,), initial=Initial.OFFSET)
    return (factor,) * (norm is not None) + (offset,) * (norm is Norm.LAYER)


def linear_parameters_of(name: str, inputs: int, outputs: int, *, bias: bool = False) -> tuple[ParameterOf, ...]:
    """The parameters of a plain linear module, which may be cut by columns or rows."""
    weight = ParameterOf(name=f"{name}.weight", shape=(outputs, inputs), initial=Initial.WEIGHT, column_dim=0, row_dim=1)
    offset = ParameterOf(name=f"{name}.bias", shape=(outputs,), initial=Initial.OFFSET, column_dim=0)
    return (weight, offset) if bias else (weight,)


def part_parameters(part: Part, inputs: int, outputs: int, *, bias: bool) -> tuple[ParameterOf, ...]:
    """The parameters of a part: units are outputs of what reads the layer's input, and inputs of what gives its output."""
    found = linear_parameters_of(part.name, inputs, outputs, bias=bias)
    return tuple(
        replace(each, column_dim=None, row_dim=None, within_dim=each.column_dim if part.reads_input else each.row_dim)
        for each in found
    )


def ready_linears(parameters: Iterable[ParameterOf], linears: Iterable[str], *, autocast: bool) -> tuple[str, ...]:
    """Names in the order in which backward has gradients ready, of linears in the order of backward and a norm before them."""
    attributes = ("weight", "bias") if autocast else ("bias", "weight")
    order = [f"{linear}.{attribute}" for linear in linears for attribute in attributes]
    owned = {parameter.name for parameter in parameters}
    return tuple(name for name in (*order, "norm.weight", "norm.bias") if name in owned)
