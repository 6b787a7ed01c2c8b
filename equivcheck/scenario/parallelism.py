"""What happens along the axes of a mesh: one noun for each kind of parallelism."""

from __future__ import annotations

from typing import ClassVar

from equivcheck.scenario.context_parallel import ContextParallel
from equivcheck.scenario.expert_parallel import ExpertParallel
from equivcheck.scenario.local_data_parallel import LocalDataParallel
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD
from equivcheck.scenario.noun import noun, refuse, require_between, require_positive
from equivcheck.scenario.parallelism_base import Parallelism, ParameterFacts
from equivcheck.scenario.pipeline import Pipeline
from equivcheck.scenario.rounding import Compression, LowPrecision, MixedPrecision
from equivcheck.scenario.tensor_parallel import LocalTensorParallel, TensorParallel
from equivcheck.system.choice import Choice

DEFAULT_BUCKET_MB = 25.0
"""Largest bucket of gradients in MiB where nothing else is said."""
MAX_BUCKET_MB = 2.0**20
"""What torch reckons with as a number of bytes."""


class Wrapping(Choice):
    """What becomes a unit of sharding."""

    WHOLE = "whole"
    PER_LAYER = "per_layer"


class ShardingStrategy(Choice):
    """The strategies of `torch.distributed.fsdp.ShardingStrategy`."""

    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    NO_SHARD = "NO_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"
    HYBRID_SHARD_ZERO2 = "_HYBRID_SHARD_ZERO2"

    @property
    def is_hybrid(self) -> bool:
        """Whether it shards along one axis and replicates along another."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)


class Distribution(Choice):
    """How SPMD data parallelism places parameters, gradients and optimizer state; what has no dim to shard is replicated."""

    REPLICATE = "replicate"
    FULLY_SHARD = "fully_shard"


@noun
class DDP(Parallelism):
    """`torch.nn.parallel.DistributedDataParallel`."""

    tag: ClassVar[str] = "ddp"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((DP,),)
    bucket_cap_mb: float = DEFAULT_BUCKET_MB
    """Largest bucket in MiB, above 0; 0.0001 is 104 bytes."""
    gradient_as_bucket_view: bool = False
    """Whether gradients are views into the buckets."""
    static_graph: bool = False
    """Whether the graph is promised to be the same at every step."""
    find_unused_parameters: bool = False
    """Whether parameters that take no part in a step are looked for."""
    no_sync: bool = False
    """Whether all microbatches but the last run under `no_sync`, rather than each being reduced."""
    zero_redundancy: bool = False
    """Whether each parameter is updated by one rank alone (`ZeroRedundancyOptimizer`), which sends it to the others."""
    parameters_as_bucket_view: bool = False
    """Whether the parameters that a rank updates are views into one tensor, sent whole; only with `zero_redundancy`."""
    autocast: LowPrecision | None = None
    """What `torch.autocast` casts to around forward and loss; None for no autocast."""
    compression: Compression = Compression.NONE
    """Which hook compresses gradients for their reduction."""
    unequal_start: bool = False
    """Whether ranks have different parameters and buffers until they are wrapped, which makes them those of the first."""

    def __post_init__(self) -> None:
        require_positive(self, "bucket_cap_mb")
        require_between(self, "bucket_cap_mb", 0.0, MAX_BUCKET_MB)
        if self.parameters_as_bucket_view and not self.zero_redundancy:
            raise refuse(self, "parameters_as_bucket_view", "False without zero_redundancy")

    @property
    def trains_local_tensors(self) -> bool:  # noqa: D102 - as inherited
        return True


class Replicator(Choice):
    """The two functions named `replicate` in `torch.distributed._composable`."""

    DDP = "ddp"
    FSDP = "fsdp"


@noun
class Replicate(Parallelism):
    """Composable replicated data parallelism: the model keeps its class and names, hooks on it average gradients."""

    tag: ClassVar[str] = "replicate"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((DP,),)
    implementation: Replicator = Replicator.DDP
    """`replicate`, with a `DistributedDataParallel` inside, or `replicate_with_fsdp`, which is `fully_shard` without shards."""
    bucket_cap_mb: float = DEFAULT_BUCKET_MB
    """Largest bucket in MiB, above 0, at most 1,048,576; with `Replicator.DDP` only."""
    wrapping: Wrapping = Wrapping.WHOLE
    """Whether each layer is a unit of its own inside the root's; with `Replicator.FSDP` only."""
    no_sync: bool = False
    """Whether only the last microbatch reduces gradients (`set_requires_gradient_sync`)."""
    compression: Compression = Compression.NONE
    """Which hook compresses gradients for their reduction; with `Replicator.DDP` only."""

    def __post_init__(self) -> None:
        require_positive(self, "bucket_cap_mb")
        require_between(self, "bucket_cap_mb", 0.0, MAX_BUCKET_MB)
        if self.implementation is Replicator.DDP and self.wrapping is not Wrapping.WHOLE:
            raise refuse(self, "wrapping", "Wrapping.WHOLE with Replicator.DDP")
        if self.implementation is Replicator.FSDP and self.bucket_cap_mb != DEFAULT_BUCKET_MB:
            raise refuse(self, "bucket_cap_mb", f"{DEFAULT_BUCKET_MB} with Replicator.FSDP")
        if self.implementation is Replicator.FSDP and self.compression is not Compression.NONE:
            raise refuse(self, "compression", "Compression.NONE with Replicator.FSDP")

    @property
    def trains_local_tensors(self) -> bool:  # noqa: D102 - as inherited
        return self.implementation is Replicator.DDP


@noun
class FSDP1(Parallelism):
    """`torch.distributed.fsdp.FullyShardedDataParallel`."""

    tag: ClassVar[str] = "fsdp1"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((DP,), (REPLICATE, SHARD))
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    """What is sharded; a hybrid strategy exactly on a mesh of two axes."""
    use_orig_params: bool = True
    """Whether the optimizer sees the original parameters rather than flat ones."""
    wrapping: Wrapping = Wrapping.WHOLE
    """Whether each layer is a unit of its own inside the root's."""
    no_sync: bool = False
    """Whether all microbatches but the last run under `no_sync`."""
    mixed_precision: MixedPrecision | None = None
    """What is cast, outputs excepted; None for nothing."""

    def __post_init__(self) -> None:
        if self.mixed_precision is not None and self.mixed_precision.output is not None:
            raise refuse(self, "mixed_precision", "one without output: FullyShardedDataParallel leaves outputs as they are")

    @property
    def trains_local_tensors(self) -> bool:  # noqa: D102 - as inherited
        return True


@noun
class FSDP2(Parallelism):
    """`torch.distributed.fsdp.fully_shard`; on a mesh of two axes it is HSDP."""

    tag: ClassVar[str] = "fsdp2"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((DP,), (REPLICATE, SHARD))
    wrapping: Wrapping = Wrapping.WHOLE
    """Whether each layer is a unit of its own inside the root's."""
    layers_per_unit: int = 1
    """How many layers in turn are one unit (`fully_shard` of a list of modules), at least 1; more than 1 with
    `Wrapping.PER_LAYER`. The last unit has those that are left."""
    reshard_after_forward: bool = True
    """Whether parameters are freed between forward and backward."""
    reshard_to: int | None = None
    """How many ranks share out the parameters that are freed (`reshard_after_forward` as an integer), at least 2.

    They are neighbours along the axis of shards, and backward gathers over them alone. None for all along that axis."""
    reshard_after_backward: bool = True
    """Whether parameters are freed after the backward of each microbatch, rather than of the last alone
    (`set_reshard_after_backward`)."""
    explicit_prefetch: bool = False
    """Whether each unit of a layer is told to gather the next one ahead of time in forward, and the one before in backward
    (`set_modules_to_forward_prefetch`, `set_modules_to_backward_prefetch`)."""
    no_sync: bool = False
    """Whether only the last microbatch reduces gradients (`set_requires_gradient_sync`)."""
    all_reduce_once: bool = False
    """Whether only the last microbatch reduces gradients over replicas, of all that shards have added up by then
    (`set_requires_all_reduce`); without replicas it changes nothing."""
    mixed_precision: MixedPrecision | None = None
    """What is cast; None for nothing."""
    cpu_offload: bool = False
    """Whether shards, gradients and optimizer state stay in the host's memory (`CPUOffloadPolicy`, not pinned).

    `FSDP1` has no such option here: its offloading needs an accelerator."""
    gradient_divide_factor: float | None = None
    """What sums of gradients over ranks are divided by (`set_gradient_divide_factor`), above 0; None for the number of ranks.

    Backward begins with so much more or less of the loss that gradients are what they would be."""
    sum_reductions: bool = False
    """Whether reductions sum and division is apart where the backend could average (`set_force_sum_reduction_for_comms`)."""
    separate_reduce_group: bool = False
    """Whether gradients are reduced over a process group of their own (`set_separate_reduce_scatter_group`).

    torch 2.13 names that group by how many a rank has, so that ranks which have unequal numbers of groups wait in it for ever
    (pytorch/pytorch#173608); no layout leaves ranks so, but a script may."""
    shard_last_dim: bool = False
    """Whether parameters are cut along their last dim rather than the first (`shard_placement_fn`)."""
    ignore_frozen: bool = False
    """Whether every rank keeps frozen parameters whole (`ignored_params`)."""
    muon_owners: bool = False
    """Whether a rank owns each matrix that `Muon` updates, and orthogonalises it whole: an all-to-all brings it the shards of all
    ranks, and another one the update to them. With other optimizers it changes nothing."""

    def __post_init__(self) -> None:
        if self.gradient_divide_factor is not None:
            require_positive(self, "gradient_divide_factor")
        if self.layers_per_unit < 1 or (self.layers_per_unit > 1 and self.wrapping is Wrapping.WHOLE):
            raise refuse(self, "layers_per_unit", "1, or with Wrapping.PER_LAYER a number of at least 1")
        if self.reshard_to is not None and (self.reshard_to < 2 or not self.reshard_after_forward):
            raise refuse(self, "reshard_to", "None, or with reshard_after_forward a number of at least 2")

    def cut_dim(self, parameter: ParameterFacts) -> int | None:  # noqa: D102 - as inherited
        if self.ignore_frozen and not parameter.trained:
            return None
        return len(parameter.shape) - 1 if self.shard_last_dim else 0


@noun
class SPMD(Parallelism):
    """Data parallelism by DTensor propagation: parameters distributed, the batch sharded by rows, nothing else said."""

    tag: ClassVar[str] = "spmd"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((DP,),)
    traceable: ClassVar[bool] = True
    distribution: Distribution = Distribution.REPLICATE
    """Placement of parameters."""
    redistribute_gradients: bool = True
    """Whether a hook on each parameter redistributes its gradient to the parameter's placements before it is accumulated.

    DTensor does not do that by itself: it leaves a gradient as propagation does, pending a sum, or cut along another dim."""

    def cut_dim(self, parameter: ParameterFacts) -> int | None:  # noqa: ARG002, D102 - as inherited
        return 0 if self.distribution is Distribution.FULLY_SHARD else None


PARALLELISMS: tuple[type[Parallelism], ...] = (
    DDP,
    Replicate,
    FSDP1,
    FSDP2,
    TensorParallel,
    SPMD,
    Pipeline,
    LocalTensorParallel,
    ContextParallel,
    ExpertParallel,
    LocalDataParallel,
)
"""Every parallelism that ships with the package, simplest first."""
