"""Properties of layers and their parameters that parallelisms need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from equivcheck.scenario import AuxiliaryLinear, Norm, Split
from equivcheck.system.choice import PrintableEnum

Shape = tuple[int, ...]


def runs_at(steps: AuxiliaryLinear | None, step: int) -> bool:
    """Whether a linear runs in a step. `steps` gives the steps in which it runs; None stands for all."""
    return steps is None or (steps is AuxiliaryLinear.EVEN_STEPS and step % 2 == 0)


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
    """Name within its layer, embedding or head, such as ``linear.weight``."""
    shape: Shape
    """Full shape."""
    initial: Initialization
    """Distribution for its initial values."""
    colwise_dim: int | None = None
    """Dim that column-parallel sharding splits; None if it replicates the parameter."""
    rowwise_dim: int | None = None
    """Dim that row-parallel sharding splits; None if it replicates the parameter."""
    unit_dim: int | None = None
    """Dim that sharding by heads or hidden features splits; None if it replicates the parameter."""
    expert_dim: int | None = None
    """Dim with one index for each expert; None if the parameter belongs to no expert."""
    runs: AuxiliaryLinear | None = None
    """Steps that use the parameter; None for all steps."""
    is_frozen: bool = False
    """Whether the parameter has `requires_grad=False` although its layer is trained."""

    def is_used_at(self, step: int) -> bool:
        """Whether a forward in this step uses the parameter."""
        return runs_at(self.runs, step)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLinear:
    """One linear inside a layer: its name, and whether it takes the layer's input or returns the layer's output."""

    name: str
    """Name within its layer."""
    reads_input: bool = False
    """Whether the linear takes the layer's input, perhaps after a norm. Otherwise it takes the output of the layer's other
    linears.
    """
    gives_output: bool = False
    """Whether the linear's output is the layer's output. Otherwise it is a hidden activation, split into heads or hidden
    features.
    """
    activated: bool = False
    """Whether an activation function follows, so that backward needs the linear's output."""
    runs: AuxiliaryLinear | None = None
    """Steps in which the linear runs; None for all steps."""
    replicated_under: Split | None = None
    """Split of the layer under which this linear stays replicated; None if it is split like the layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """How a layer sends rows to its experts. A third-party layer may have other units in place of experts."""

    trains_rows: bool
    """Whether the sent rows need gradients, because parameters before the experts are trained, such as a norm's."""
    num_counted: int = 0
    """How many experts a load-balancing loss counts in a microbatch; 0 if there is no such loss."""
    num_counted_each_sequence: int = 0
    """How many experts a load-balancing loss counts in each sequence; 0 if there is no such loss."""
    num_counted_each_step: int = 0
    """How many experts are counted for a router's bias; 0 if there is no such bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSharding:
    """One way to shard a layer's linears over ranks. Norms are always replicated."""

    split: Split
    """Kind of sharding. For each kind, `LayerParameter` has the dim."""
    units: int | None = None
    """Number of heads or other units, each computed on one rank because a unit cannot be split. None if any split is allowed."""
    words: str = ""
    """Plural noun for the units, such as ``key and value heads``."""
    weights: int | None = None
    """Number of routing weights for each position, if the module's `region` communicates for the whole layer. They multiply a
    rank's partial sum.

    None if each linear communicates by itself.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """How many attention heads a layer has, and their size. Context parallelism needs both."""

    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key and value heads, each for several consecutive query heads."""
    width: int
    """Features in each head."""


def norm_parameters(norm: Norm | None, features: int) -> tuple[LayerParameter, ...]:
    """List the parameters in a submodule ``norm``; none if `norm` is None."""
    factor = LayerParameter(name="norm.weight", shape=(features,), initial=Initialization.FACTOR)
    offset = LayerParameter(name="norm.bias", shape=(features,), initial=Initialization.OFFSET)
    return (factor,) * (norm is not None) + (offset,) * (norm is Norm.LAYER)


def linear_parameters_of(
    name: str, in_features: int, outputs: int, *, bias: bool = False, is_frozen: bool = False
) -> tuple[LayerParameter, ...]:
    """List the parameters in a linear that can be sharded column-parallel or row-parallel."""
    shape, initial = (outputs, in_features), Initialization.WEIGHT
    weight = LayerParameter(
        name=f"{name}.weight", shape=shape, initial=initial, colwise_dim=0, rowwise_dim=1, is_frozen=is_frozen
    )
    offset = LayerParameter(name=f"{name}.bias", shape=(outputs,), initial=Initialization.OFFSET, colwise_dim=0)
    return (weight, offset) if bias else (weight,)


def part_parameters(part: LayerLinear, in_features: int, outputs: int, *, bias: bool) -> tuple[LayerParameter, ...]:
    """List the parameters of the linear `part`, in a layer that is sharded by heads or hidden features.

    The linear is column-parallel if it takes the layer's input, and row-parallel otherwise.
    """
    found = linear_parameters_of(part.name, in_features, outputs, bias=bias)
    return tuple(
        replace(each, colwise_dim=None, rowwise_dim=None, unit_dim=each.colwise_dim if part.reads_input else each.rowwise_dim)
        for each in found
    )


def ready_linears(parameters: Iterable[LayerParameter], linears: Iterable[str], *, autocast: bool) -> tuple[str, ...]:
    """Return parameter names in the order in which backward computes their gradients.

    `linears` are the linears' names in this order; the norm's parameters come last. A linear's bias comes before its weight,
    except under autocast.
    """
    attributes = ("weight", "bias") if autocast else ("bias", "weight")
    order = [f"{linear}.{attribute}" for linear in linears for attribute in attributes]
    owned = {parameter.name for parameter in parameters}
    return tuple(name for name in (*order, "norm.weight", "norm.bias") if name in owned)
