"""Tensor parallelism: which layer is shared out how, by DTensors or by plain tensors and collectives."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from equivcheck.errors import InvalidScenario
from equivcheck.scenario.mesh import TP
from equivcheck.scenario.model import MAX_LAYERS
from equivcheck.scenario.noun import noun, refuse
from equivcheck.scenario.parallelism_base import Owner, Parallelism, ParameterFacts
from equivcheck.system.choice import Choice


class Split(Choice):
    """How tensor parallelism shares out a layer, as its kind says that it can; a layer outside the plan keeps plain tensors."""

    REPLICATED = "replicated"
    COLUMN = "column"
    """By outputs; of an embedding, by features."""
    ROW = "row"
    """By inputs; of an embedding, by tokens."""
    WITHIN = "within"
    """By what it has within, such as heads, or features between two linears: the first linears by outputs, the last by inputs.

    Of experts, by the features within each, on plain tensors alone: the router is whole on every rank."""
    OUTSIDE = "outside"


class ActivationSharding(Choice):
    """How an activation lies over the ranks of an axis: whole on each, by its rows (sequence parallel), or by its features.

    Where rows are sequences, it lies by their positions instead of by rows.
    """

    WHOLE = "whole"
    ROWS = "rows"
    FEATURES = "features"


@noun
class LayerPlan:
    """What tensor parallelism does to one layer."""

    split: Split = Split.REPLICATED
    """How ranks share out its linears."""
    output: ActivationSharding = ActivationSharding.WHOLE
    """How the layer leaves its output, and so how the next one finds its input."""

    def __post_init__(self) -> None:
        if self.split in (Split.REPLICATED, Split.WITHIN) and self.output is ActivationSharding.FEATURES:
            raise InvalidScenario(
                f"LayerPlan.output is ActivationSharding.FEATURES; allowed with {self.split!r}: ActivationSharding.WHOLE or ROWS"
            )
        if self.split is Split.OUTSIDE and self.output is not ActivationSharding.WHOLE:
            raise InvalidScenario(f"LayerPlan.output is {self.output!r}; allowed with Split.OUTSIDE: ActivationSharding.WHOLE")


@noun
class PlannedParallelism(Parallelism):
    """Shares out embedding, layers and head over the ranks of an axis, and activations between them, by a plan."""

    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((TP,),)
    plan: tuple[LayerPlan, ...] = (LayerPlan(),)
    """One entry a layer, 1 to 8; one before a layer outside the plan leaves its output whole, as the last does unless a head that
    is within the plan follows."""
    source: Split = Split.OUTSIDE
    """How ranks share out the embedding of tokens; of no effect on a model without tokens. Positions are whole on every rank."""
    source_output: ActivationSharding = ActivationSharding.WHOLE
    """How what tokens are embedded as is left, whole or by positions; whole where the source is outside the plan."""
    head: Split = Split.OUTSIDE
    """How ranks share out the linear of the head; of no effect on a model without one."""
    loss_parallel: bool = False
    """Whether each rank keeps the logits of its own classes, and the loss reduces what the softmax needs of all, as the context
    `loss_parallel` does for DTensors; only with a head by `Split.COLUMN`."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not 1 <= len(self.plan) <= MAX_LAYERS:
            raise InvalidScenario(f"{name}.plan has {len(self.plan)} entries; allowed: 1 to {MAX_LAYERS}, one a layer")
        for field in ("source", "head"):
            if getattr(self, field) is Split.WITHIN:
                raise refuse(self, field, "any Split but WITHIN")
        if self.loss_parallel and self.head is not Split.COLUMN:
            raise refuse(self, "loss_parallel", "False unless the head is Split.COLUMN")
        ends = (ActivationSharding.WHOLE,) if self.head is Split.OUTSIDE else (ActivationSharding.WHOLE, ActivationSharding.ROWS)
        if self.plan[-1].output not in ends:
            raise InvalidScenario(
                f"{name}.plan ends with output {self.plan[-1].output!r}; allowed: ActivationSharding.WHOLE, before a "
                "head that is not Split.OUTSIDE also ActivationSharding.ROWS"
            )
        if self.source_output is ActivationSharding.FEATURES:
            raise refuse(self, "source_output", "ActivationSharding.WHOLE or ROWS")
        if self.source_output is ActivationSharding.ROWS and Split.OUTSIDE in (self.source, self.plan[0].split):
            raise refuse(self, "source_output", "ActivationSharding.WHOLE where the source or the first layer is Split.OUTSIDE")
        for before, entry in pairwise(self.plan):
            if entry.split is Split.OUTSIDE and before.output is not ActivationSharding.WHOLE:
                raise InvalidScenario(
                    f"{name}.plan has Split.OUTSIDE after output {before.output!r}; allowed: ActivationSharding.WHOLE"
                )

    def cut_dim(self, parameter: ParameterFacts) -> int | None:  # noqa: D102 - as inherited
        dims = {Split.COLUMN: parameter.column_dim, Split.ROW: parameter.row_dim, Split.WITHIN: parameter.within_dim}
        return dims.get(self.split_of(parameter))

    def split_of(self, parameter: ParameterFacts) -> Split:
        """How ranks share out what a parameter belongs to; a parameter of the model itself is outside any plan."""
        if parameter.layer is not None:
            # A plan that does not fit the model has a limit of its own.
            return self.plan[parameter.layer].split if parameter.layer < len(self.plan) else Split.OUTSIDE
        return {Owner.SOURCE: self.source, Owner.HEAD: self.head}.get(parameter.owner, Split.OUTSIDE)


@noun
class TensorParallel(PlannedParallelism):
    """`torch.distributed.tensor.parallel.parallelize_module` with a plan for each layer."""

    tag: ClassVar[str] = "tensor_parallel"
    traceable: ClassVar[bool] = True
    redistribute_gradients: bool = True
    """As `SPMD.redistribute_gradients`. Parallelisms around this one put other parameters in the place of those with hooks, and
    redistribute gradients themselves."""


class Collectives(Choice):
    """What moves activations between modules of plain tensors."""

    FUNCTIONAL = "functional"
    """torch's functional collectives, within functions that have the derivatives."""
    TYPED = "typed"
    """Those of the package spmd_types, as torchtitan has them."""


@noun
class LocalTensorParallel(PlannedParallelism):
    """Tensor parallelism on plain tensors, as Megatron and torchtitan write it.

    Each rank has parts of parameters as plain tensors, and collectives with a derivative move activations between modules.
    """

    tag: ClassVar[str] = "local_tensor_parallel"
    collectives: Collectives = Collectives.FUNCTIONAL
    """What moves activations; `Collectives.TYPED` needs spmd_types."""
