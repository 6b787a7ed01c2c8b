"""Tensor parallelism plans, for DTensors or for plain tensors with explicit collectives."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from equivcheck.errors import InvalidScenario
from equivcheck.scenario.mesh import TP
from equivcheck.scenario.model import MAX_LAYERS
from equivcheck.scenario.noun import frozen_dataclass, invalid_field
from equivcheck.scenario.parallelisms.base import Parallelism, ParameterFacts, ParameterOwner, StagePosition
from equivcheck.system.choice import PrintableEnum


class Split(PrintableEnum):
    """How a plan for tensor parallelism shards a layer. A layer that is not in the plan keeps plain tensors."""

    REPLICATED = "replicated"
    COLWISE = "colwise"
    """Colwise: linears by output features, embeddings by embedding dim."""
    ROWWISE = "rowwise"
    """Rowwise: linears by input features, embeddings by vocabulary."""
    HEADS_OR_HIDDEN = "heads_or_hidden"
    """Sharded by heads or hidden features: the first linears are colwise, the last one is rowwise.

    Expert layers are sharded by the hidden features in each expert, on plain tensors only. Their routers are replicated.
    """
    NOT_IN_PLAN = "not_in_plan"


class ActivationSharding(PrintableEnum):
    """Placement of an activation along the axis: replicated, sharded by rows (sequence parallel), or sharded by features.

    If rows are sequences, `ROWS` shards positions instead.
    """

    REPLICATED = "replicated"
    ROWS = "rows"
    FEATURES = "features"


@frozen_dataclass
class LayerPlan:
    """How tensor parallelism shards one layer and its output."""

    split: Split = Split.REPLICATED
    """How the layer's linears are sharded."""
    output: ActivationSharding = ActivationSharding.REPLICATED
    """Placement for the layer's output, and so for the next layer's input."""

    def __post_init__(self) -> None:
        if self.split in (Split.REPLICATED, Split.HEADS_OR_HIDDEN) and self.output is ActivationSharding.FEATURES:
            raise invalid_field(self, "output", f"ActivationSharding.REPLICATED or ROWS if split is {self.split!r}")
        if self.split is Split.NOT_IN_PLAN and self.output is not ActivationSharding.REPLICATED:
            raise invalid_field(self, "output", "ActivationSharding.REPLICATED if split is Split.NOT_IN_PLAN")


@frozen_dataclass
class PlannedParallelism(Parallelism):
    """Base class for tensor parallelism: a plan shards embedding, layers and head, and places the activations between them."""

    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((TP,),)
    returns_local_tensors: ClassVar[bool] = False
    """Whether modules in the plan compute DTensors and return their local tensors, which are views."""
    plan: tuple[LayerPlan, ...] = (LayerPlan(),)
    """One entry per layer, 1 to 8.

    An entry before a layer that is not in the plan must replicate its output. The last entry must also replicate its output,
    unless a head in the plan follows."""
    source: Split = Split.NOT_IN_PLAN
    """How the token embedding is sharded; no effect on a model without tokens. Position embeddings are replicated."""
    source_output: ActivationSharding = ActivationSharding.REPLICATED
    """Placement of the embedding's output: replicated or sharded by positions. It is replicated if the embedding is not in the
    plan."""
    head: Split = Split.NOT_IN_PLAN
    """How the head's linear is sharded; no effect on a model without a head."""
    loss_parallel: bool = False
    """Whether logits stay sharded by class and the loss reduces the softmax statistics over ranks, like torch's `loss_parallel`
    context. Only with a colwise head."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not 1 <= len(self.plan) <= MAX_LAYERS:
            raise InvalidScenario(
                f"{name}.plan of length {len(self.plan)} is not valid. Expected 1 to {MAX_LAYERS} entries, one per layer."
            )
        for field in ("source", "head"):
            if getattr(self, field) is Split.HEADS_OR_HIDDEN:
                raise invalid_field(self, field, "a Split other than HEADS_OR_HIDDEN")
        if self.loss_parallel and self.head is not Split.COLWISE:
            raise invalid_field(self, "loss_parallel", "False, or True with head=Split.COLWISE")
        ends = (
            (ActivationSharding.REPLICATED,)
            if self.head is Split.NOT_IN_PLAN
            else (ActivationSharding.REPLICATED, ActivationSharding.ROWS)
        )
        if self.plan[-1].output not in ends:
            raise InvalidScenario(
                f"{name}.plan with last output {self.plan[-1].output!r} is not valid. "
                "Expected ActivationSharding.REPLICATED, or ROWS if a head in the plan follows."
            )
        if self.source_output is ActivationSharding.FEATURES:
            raise invalid_field(self, "source_output", "ActivationSharding.REPLICATED or ROWS")
        if self.source_output is ActivationSharding.ROWS and Split.NOT_IN_PLAN in (self.source, self.plan[0].split):
            raise invalid_field(
                self, "source_output", "ActivationSharding.REPLICATED if the source or the first layer is Split.NOT_IN_PLAN"
            )
        for before, entry in pairwise(self.plan):
            if entry.split is Split.NOT_IN_PLAN and before.output is not ActivationSharding.REPLICATED:
                raise InvalidScenario(
                    f"{name}.plan is not valid: a layer has output {before.output!r}, and the next layer is Split.NOT_IN_PLAN. "
                    "Expected output ActivationSharding.REPLICATED."
                )

    def shard_dim(self, parameter: ParameterFacts) -> int | None:  # noqa: D102 - as inherited
        dims = {
            Split.COLWISE: parameter.colwise_dim,
            Split.ROWWISE: parameter.rowwise_dim,
            Split.HEADS_OR_HIDDEN: parameter.unit_dim,
        }
        return dims.get(self.split_of(parameter))

    @property
    def completes_gradients(self) -> bool:  # noqa: D102 - as inherited
        return True

    def split_of(self, parameter: ParameterFacts) -> Split:
        """How the plan shards the module with this parameter; `Split.NOT_IN_PLAN` for parameters that the model itself owns."""
        if parameter.layer is not None:
            # A plan that does not fit the model has a limit of its own.
            return self.plan[parameter.layer].split if parameter.layer < len(self.plan) else Split.NOT_IN_PLAN
        return {ParameterOwner.SOURCE: self.source, ParameterOwner.HEAD: self.head}.get(parameter.owner, Split.NOT_IN_PLAN)


@frozen_dataclass
class TensorParallel(PlannedParallelism):
    """`torch.distributed.tensor.parallel.parallelize_module` with a plan for each layer."""

    tag: ClassVar[str] = "tensor_parallel"
    stage_position: ClassVar[StagePosition | None] = StagePosition.INSIDE
    returns_local_tensors: ClassVar[bool] = True
    traceable: ClassVar[bool] = True
    redistribute_gradients: bool = True
    """Whether hooks redistribute gradients, as in `SPMD.redistribute_gradients`.

    Outer parallelisms replace the parameters with hooks and redistribute gradients themselves."""


class Collectives(PrintableEnum):
    """Implementation of the collectives with which modules on plain tensors pass activations: from torch or from spmd_types."""

    FUNCTIONAL = "functional"
    """torch's functional collectives inside autograd functions."""
    TYPED = "typed"
    """Collectives from the package spmd_types, which torchtitan uses."""


@frozen_dataclass
class LocalTensorParallel(PlannedParallelism):
    """Tensor parallelism on plain tensors, as in Megatron and torchtitan.

    Each rank holds parameter shards as plain tensors. Differentiable collectives move activations between modules.
    """

    tag: ClassVar[str] = "local_tensor_parallel"
    stage_position: ClassVar[StagePosition | None] = StagePosition.INSIDE
    collectives: Collectives = Collectives.FUNCTIONAL
    """Collectives that move activations; `Collectives.TYPED` needs spmd_types."""
