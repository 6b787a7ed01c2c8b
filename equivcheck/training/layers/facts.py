"""Properties of layers and their parameters that parallelisms need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from equivcheck.scenario import AuxiliaryLinear, Norm, Split
from equivcheck.system.choice import PrintableEnum

Shape = tuple[int, ...]


class Initialization(PrintableEnum):
    """Distribution from which a parameter's initial values are drawn."""

    WEIGHT = "weight"
    """Normal, divided by the square root of the input features."""
    UNIT_WEIGHT = "unit_weight"
    """WEIGHT with a non-negative first row, so that the first unit rarely dies in a ReLU."""
    TABLE = "table"
    """Standard normal, for embeddings."""
    FACTOR = "factor"
    """Uniform from 0.5 to 1.5."""
    OFFSET = "offset"
    """Uniform from -0.5 to 0.5."""
    UNIT_OFFSET = "unit_offset"
    """Like OFFSET with a non-negative first element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParameter:
    """Parameter of a layer, embedding or head."""

    name: str
    """Name within its owner, such as ``linear.weight``."""
    shape: Shape
    """Full shape."""
    initial: Initialization
    """Distribution for its initial values."""
    colwise_dim: int | None = None
    """Dim that colwise sharding splits; None if colwise sharding replicates the parameter."""
    rowwise_dim: int | None = None
    """Dim that rowwise sharding splits; None if rowwise sharding replicates the parameter."""
    unit_dim: int | None = None
    """Dim that sharding by heads or hidden features splits; None if such sharding replicates the parameter."""
    expert_dim: int | None = None
    """Dim that indexes experts or similar units; None if the parameter belongs to no unit."""
    runs: AuxiliaryLinear | None = None
    """Steps that use the parameter; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLinear:
    """Linear in a layer, with its position in the computation."""

    name: str
    """Name within its layer."""
    reads_input: bool = False
    """Whether the linear's input is the layer's input, optionally normalized. Otherwise it is the hidden activation of other
    linears.
    """
    gives_output: bool = False
    """Whether the linear's output is the layer's output.
    Otherwise it is a hidden activation, split into heads or hidden features."""
    activated: bool = False
    """Whether an activation follows, so that backward needs the linear's output."""
    runs: AuxiliaryLinear | None = None
    """Steps at which the linear runs; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """How a layer routes rows to units, such as experts."""

    trains_rows: bool
    """Whether dispatched rows need gradients for trained parameters in the layer, such as a norm's."""
    num_counted: int = 0
    """Number of units with a load-balancing loss; 0 for no such loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSharding:
    """One way to shard a layer's linears over ranks. Norms are always replicated."""

    split: Split
    """Kind of sharding; each parameter states its dim."""
    units: int | None = None
    """Number of indivisible units, such as heads, each computed on one rank; None if any split is allowed."""
    words: str = ""
    """Description of the units for people."""
    weights: int | None = None
    """Number of routing weights per position, which multiply a rank's partial sum, if the module's `region` communicates.

    None if each linear communicates by itself.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Head counts and head size, for context parallelism."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads, each for several consecutive query heads."""
    width: int
    """Features in each head."""


def norm_parameters(norm: Norm | None, features: int) -> tuple[LayerParameter, ...]:
    """List the parameters in a module named ``norm``."""
    factor = LayerParameter(name="norm.weight", shape=(features,), initial=Initialization.FACTOR)
    offset = LayerParameter(name="norm.bias", shape=(features,), initial=Initialization.OFFSET)
    return (factor,) * (norm is not None) + (offset,) * (norm is Norm.LAYER)


def linear_parameters_of(name: str, in_features: int, outputs: int, *, bias: bool = False) -> tuple[LayerParameter, ...]:
    """List the parameters in a linear for colwise or rowwise sharding."""
    weight = LayerParameter(
        name=f"{name}.weight", shape=(outputs, in_features), initial=Initialization.WEIGHT, colwise_dim=0, rowwise_dim=1
    )
    offset = LayerParameter(name=f"{name}.bias", shape=(outputs,), initial=Initialization.OFFSET, colwise_dim=0)
    return (weight, offset) if bias else (weight,)


def part_parameters(part: LayerLinear, in_features: int, outputs: int, *, bias: bool) -> tuple[LayerParameter, ...]:
    """List parameters in a linear sharded by heads or hidden features: colwise for the first linears, rowwise for the last."""
    found = linear_parameters_of(part.name, in_features, outputs, bias=bias)
    return tuple(
        replace(each, colwise_dim=None, rowwise_dim=None, unit_dim=each.colwise_dim if part.reads_input else each.rowwise_dim)
        for each in found
    )


def ready_linears(parameters: Iterable[LayerParameter], linears: Iterable[str], *, autocast: bool) -> tuple[str, ...]:
    """Return parameter names in the order of their gradients in backward, for linears in backward order followed by a norm."""
    attributes = ("weight", "bias") if autocast else ("bias", "weight")
    order = [f"{linear}.{attribute}" for linear in linears for attribute in attributes]
    owned = {parameter.name for parameter in parameters}
    return tuple(name for name in (*order, "norm.weight", "norm.bias") if name in owned)
