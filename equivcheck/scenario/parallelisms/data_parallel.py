"""Data parallelisms: DDP, Replicate, FSDP, SPMD, and averaged gradients without a wrapper."""

from __future__ import annotations

from typing import ClassVar

from equivcheck.scenario.mesh import DP, EP, REPLICATE, SHARD
from equivcheck.scenario.noun import frozen_dataclass, invalid_field, option, require_between, require_positive
from equivcheck.scenario.parallelisms.base import Parallelism, ParameterFacts, StagePosition
from equivcheck.scenario.rounding import Compression, LowPrecision, MixedPrecision
from equivcheck.system.choice import PrintableEnum

DEFAULT_BUCKET_MB = 25.0
"""Default bucket size for DDP in MiB."""
MAX_BUCKET_MB = 2.0**20
"""Largest bucket size that torch can convert to bytes, in MiB."""

MAX_LOSS_CHUNKS = 8


class Wrapping(PrintableEnum):
    """Modules that `fully_shard` or `FullyShardedDataParallel` wraps."""

    ROOT_ONLY = "root_only"
    PER_LAYER = "per_layer"


class ShardingStrategy(PrintableEnum):
    """Members of `torch.distributed.fsdp.ShardingStrategy`."""

    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    NO_SHARD = "NO_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"
    HYBRID_SHARD_ZERO2 = "_HYBRID_SHARD_ZERO2"

    @property
    def is_hybrid(self) -> bool:
        """Whether the strategy shards along one mesh axis and replicates along another."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)


class Distribution(PrintableEnum):
    """Placement of parameters, gradients and optimizer state under SPMD; tensors without dims are replicated."""

    REPLICATE = "replicate"
    FULLY_SHARD = "fully_shard"


@frozen_dataclass
class DDP(Parallelism):
    """Options for `torch.nn.parallel.DistributedDataParallel`."""

    tag: ClassVar[str] = "ddp"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((DP,),)
    stage_position: ClassVar[StagePosition | None] = StagePosition.AROUND
    reduces_each_module: ClassVar[bool] = True
    bucket_cap_mb: float = DEFAULT_BUCKET_MB
    """Bucket size in MiB, above 0; 0.0001 is 104 bytes."""
    gradient_as_bucket_view: bool = option(default=False, limits=False, calls=False)
    """Whether gradients are views into the buckets."""
    static_graph: bool = False
    """Whether the autograd graph is declared to be the same at every step."""
    find_unused_parameters: bool = False
    """Whether DDP searches the graph for parameters without gradient."""
    no_sync: bool = option(default=False, limits=False)
    """Whether all microbatches except the last run under `no_sync`; otherwise each microbatch's gradients are reduced."""
    zero_redundancy: bool = False
    """Whether `ZeroRedundancyOptimizer` assigns each parameter to one rank, which updates and broadcasts it."""
    parameters_as_bucket_view: bool = False
    """Whether the parameters that a rank updates are views into one tensor, broadcast as a whole. Only with `zero_redundancy`."""
    autocast: LowPrecision | None = None
    """Dtype for `torch.autocast` around forward and loss; None disables it."""
    compression: Compression = Compression.NONE
    """Communication hook that compresses gradients for the all-reduce."""
    unequal_start: bool = option(default=False, limits=False, calls=False)
    """Whether ranks start with different parameters and buffers until DDP broadcasts those on rank 0."""

    def __post_init__(self) -> None:
        require_positive(self, "bucket_cap_mb")
        require_between(self, "bucket_cap_mb", 0.0, MAX_BUCKET_MB)
        if self.parameters_as_bucket_view and not self.zero_redundancy:
            raise invalid_field(self, "parameters_as_bucket_view", "False if zero_redundancy is False")

    @property
    def trains_local_tensors(self) -> bool:  # noqa: D102 - as inherited
        return True


class Replicator(PrintableEnum):
    """The two `replicate` functions in `torch.distributed._composable`."""

    DDP = "ddp"
    FSDP = "fsdp"


@frozen_dataclass
class Replicate(Parallelism):
    """Composable replicated data parallelism: hooks on the unwrapped model average gradients."""

    tag: ClassVar[str] = "replicate"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((DP,),)
    stage_position: ClassVar[StagePosition | None] = StagePosition.AROUND
    reduces_each_module: ClassVar[bool] = True
    implementation: Replicator = Replicator.DDP
    """`replicate`, which uses `DistributedDataParallel` internally, or `replicate_with_fsdp`, which is `fully_shard` without
    sharding."""
    bucket_cap_mb: float = DEFAULT_BUCKET_MB
    """Bucket size in MiB, above 0, at most 1,048,576. Only with `Replicator.DDP`."""
    wrapping: Wrapping = Wrapping.ROOT_ONLY
    """Whether each layer is wrapped inside the root. Only with `Replicator.FSDP`."""
    no_sync: bool = option(default=False, limits=False)
    """Whether only the last microbatch reduces gradients (`set_requires_gradient_sync`)."""
    compression: Compression = Compression.NONE
    """Communication hook that compresses gradients for the all-reduce. Only with `Replicator.DDP`."""

    def __post_init__(self) -> None:
        require_positive(self, "bucket_cap_mb")
        require_between(self, "bucket_cap_mb", 0.0, MAX_BUCKET_MB)
        if self.implementation is Replicator.DDP and self.wrapping is not Wrapping.ROOT_ONLY:
            raise invalid_field(self, "wrapping", "Wrapping.ROOT_ONLY if implementation is Replicator.DDP")
        if self.implementation is Replicator.FSDP and self.bucket_cap_mb != DEFAULT_BUCKET_MB:
            raise invalid_field(self, "bucket_cap_mb", f"{DEFAULT_BUCKET_MB} if implementation is Replicator.FSDP")
        if self.implementation is Replicator.FSDP and self.compression is not Compression.NONE:
            raise invalid_field(self, "compression", "Compression.NONE if implementation is Replicator.FSDP")

    @property
    def trains_local_tensors(self) -> bool:  # noqa: D102 - as inherited
        return self.implementation is Replicator.DDP

    @property
    def completes_gradients(self) -> bool:  # noqa: D102 - as inherited
        return self.implementation is Replicator.FSDP


@frozen_dataclass
class FSDP1(Parallelism):
    """Options for `torch.distributed.fsdp.FullyShardedDataParallel`."""

    tag: ClassVar[str] = "fsdp1"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((DP,), (REPLICATE, SHARD))
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    """Sharding strategy; a hybrid strategy needs a mesh with two axes."""
    use_orig_params: bool = True
    """Whether the optimizer gets the original parameters instead of flat parameters."""
    wrapping: Wrapping = Wrapping.ROOT_ONLY
    """Whether each layer is wrapped inside the root."""
    no_sync: bool = False
    """Whether all microbatches except the last run under `no_sync`."""
    mixed_precision: MixedPrecision | None = None
    """Dtypes for mixed precision, without `output`; None disables it."""

    def __post_init__(self) -> None:
        if self.mixed_precision is not None and self.mixed_precision.output is not None:
            raise invalid_field(
                self, "mixed_precision", "a MixedPrecision whose output is None", "FullyShardedDataParallel does not cast outputs"
            )

    @property
    def trains_local_tensors(self) -> bool:  # noqa: D102 - as inherited
        return True


class MeshDims(PrintableEnum):
    """How `torch.distributed.fsdp.DataParallelMeshDims` uses the mesh axes."""

    SHARD = "shard"
    """`dp` and `dp_shard` shard; `dp_replicate` replicates."""
    REPLICATE = "replicate"
    """All axes replicate. Several axes are flattened into one."""


@frozen_dataclass
class FSDP2(Parallelism):
    """Options for `torch.distributed.fsdp.fully_shard`; on a mesh with two axes it is HSDP."""

    tag: ClassVar[str] = "fsdp2"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((DP,), (REPLICATE, SHARD))
    stage_position: ClassVar[StagePosition | None] = StagePosition.AROUND
    reduces_each_module: ClassVar[bool] = True
    wrapping: Wrapping = Wrapping.ROOT_ONLY
    """Whether each layer is wrapped inside the root."""
    layers_per_unit: int = option(default=1, limits=False)
    """Number of consecutive layers that share a unit (`fully_shard` on a list of modules), at least 1.

    More than 1 needs `Wrapping.PER_LAYER`. The last unit may have fewer layers."""
    embedding_unit: bool = False
    """Whether the token embedding is a unit that backward does not gather (`set_unshard_in_backward`).

    Only with `Wrapping.PER_LAYER`; without an embedding it has no effect."""
    head_unit: bool = False
    """Whether the head's norm and linear are one unit (`fully_shard` on a list of modules).

    Only with `Wrapping.PER_LAYER`; without a head it has no effect."""
    loss_chunks: int = 1
    """Number of chunks, 1 to 8, into which positions are split. Head and loss run on one chunk at a time (chunked cross-entropy).

    The head's unit is then called outside the model's forward. More than 1 needs `head_unit`.
    """
    reshard_after_forward: bool = True
    """Whether parameters are resharded after forward."""
    reshard_to: int | None = None
    """Number of ranks to reshard to after forward (`reshard_after_forward` as an integer), at least 2.

    Backward then gathers only over that many neighbours on the sharding axis. None reshards to the whole axis."""
    reshard_after_backward: bool = option(default=True, limits=False)
    """Whether each microbatch's backward reshards the parameters.
    Otherwise only the last microbatch's backward reshards them (`set_reshard_after_backward`)."""
    explicit_prefetch: bool = option(default=False, limits=False)
    """Whether layers prefetch explicitly: the next one in forward, the previous one in backward
    (`set_modules_to_forward_prefetch`, `set_modules_to_backward_prefetch`)."""
    explicit_unshard: bool = option(default=False, limits=False, calls=False)
    """Whether all units are gathered at the start of each microbatch, before their forward (`unshard(async_op=True)`)."""
    no_sync: bool = option(default=False, limits=False)
    """Whether only the last microbatch reduces gradients (`set_requires_gradient_sync`)."""
    all_reduce_once: bool = option(default=False, limits=False)
    """Whether only the last microbatch all-reduces the accumulated gradient shards over replicas (`set_requires_all_reduce`).
    Without replicas it has no effect."""
    replica_hook: bool = False
    """Whether a hook averages gradients over replicas (`set_all_reduce_hook`), with `fully_shard` on the sharding axis only.

    Without replicas it has no effect. Not with `mesh_dims`."""
    mixed_precision: MixedPrecision | None = None
    """Dtypes for mixed precision; None disables it."""
    full_precision_norms: bool = False
    """Whether weights and biases of norms keep the training's precision in forward and backward (`param_dtype_override_fn`).

    Without a parameter dtype in `mixed_precision` it has no effect."""
    cpu_offload: bool = option(default=False, limits=False, calls=False)
    """Whether parameter shards, gradients and optimizer state are offloaded to host memory (`CPUOffloadPolicy` without pinning).

    `FSDP1` has no such option here because its offloading needs an accelerator."""
    gradient_divide_factor: float | None = None
    """Divisor for gradient sums over ranks (`set_gradient_divide_factor`), above 0; None for the number of ranks.

    The training scales the loss before backward to compensate, so that gradients keep their values."""
    sum_reductions: bool = False
    """Whether reductions use SUM and a separate division even if the backend supports AVG
    (`set_force_sum_reduction_for_comms`)."""
    mesh_dims: MeshDims | None = None
    """How `dp_mesh_dims` uses the mesh axes. None passes a mesh with only data-parallel axes to `fully_shard`.

    Parameters are replicated DTensors before `fully_shard`, and batches are DTensors that are sharded by rows. The loss is then
    that of the full batch, so gradients must be summed: only with `gradient_divide_factor` 1.0."""
    separate_reduce_group: bool = option(default=False, calls=False)
    """Whether gradients are reduced over a separate process group (`set_separate_reduce_scatter_group`).

    torch names that group by the number of groups on the rank, so ranks with unequal numbers wait forever
    (pytorch/pytorch#173608). No layout here has such ranks, but a script may."""
    shard_last_dim: bool = False
    """Whether parameters are sharded along their last dim instead of dim 0 (`shard_placement_fn`)."""
    shard_largest_dim: bool = False
    """Whether each parameter is sharded along its largest dim, or the first largest if several are equal (`shard_placement_fn`).

    Not with `shard_last_dim`.
    """
    experts_on_all_ranks: bool = False
    """Whether experts are also sharded over `dp_replicate`, on a mesh of all ranks (`ShardPlacementResult`).

    Their gradients are then reduced by one reduce-scatter over all ranks. Without replicas or experts it has no effect."""
    shard_over_ep: bool = False
    """Whether parameters outside experts are also sharded over `ep`, on a flattened mesh, as in torchtitan.

    Experts must be DTensors. `fully_shard` shards them over `dp` or `dp_shard` only. Without expert parallelism it has no effect.
    """
    ignore_frozen: bool = False
    """Whether `fully_shard` ignores frozen parameters (`ignored_params`), so that it does not shard them."""
    distributed_muon: bool = False
    """Whether distributed Muon assigns each matrix to one rank, its owner, which computes the matrix's update.

    The owner collects the shards by all-to-all, orthogonalizes the full matrix, and returns the update by another all-to-all.
    With other optimizers the option has no effect.
    """

    def __post_init__(self) -> None:
        if self.gradient_divide_factor is not None:
            require_positive(self, "gradient_divide_factor")
        if self.layers_per_unit < 1 or (self.layers_per_unit > 1 and self.wrapping is Wrapping.ROOT_ONLY):
            raise invalid_field(self, "layers_per_unit", "1, or more if wrapping is Wrapping.PER_LAYER")
        if not 1 <= self.loss_chunks <= (MAX_LOSS_CHUNKS if self.head_unit else 1):
            raise invalid_field(self, "loss_chunks", f"1, or 2 to {MAX_LOSS_CHUNKS} if head_unit is True")
        for name in ("embedding_unit", "head_unit"):
            if getattr(self, name) and self.wrapping is Wrapping.ROOT_ONLY:
                raise invalid_field(self, name, "False if wrapping is Wrapping.ROOT_ONLY")
        if self.reshard_to is not None and (self.reshard_to < 2 or not self.reshard_after_forward):
            raise invalid_field(self, "reshard_to", "None, or at least 2 if reshard_after_forward is True")
        if self.replica_hook and self.mesh_dims is not None:
            raise invalid_field(self, "replica_hook", "False if mesh_dims is set")
        if self.mesh_dims is not None and self.gradient_divide_factor != 1.0:
            raise invalid_field(self, "gradient_divide_factor", "1.0 if mesh_dims is set", "the loss covers the full batch")
        if self.shard_largest_dim and self.shard_last_dim:
            raise invalid_field(self, "shard_largest_dim", "False if shard_last_dim is True")

    @property
    def propagates_placements(self) -> bool:  # noqa: D102 - as inherited
        return self.mesh_dims is not None

    @property
    def completes_gradients(self) -> bool:  # noqa: D102 - as inherited
        return not self.distributed_muon and self.loss_chunks == 1

    def shard_dim(self, parameter: ParameterFacts) -> int | None:  # noqa: D102 - as inherited
        if (self.ignore_frozen and not parameter.trained) or self.mesh_dims is MeshDims.REPLICATE:
            return None
        if self.shard_largest_dim:
            return parameter.shape.index(max(parameter.shape))
        return len(parameter.shape) - 1 if self.shard_last_dim else 0

    def axes_of_shards(self, parameter: ParameterFacts, axes: tuple[str, ...]) -> tuple[str, ...]:  # noqa: D102 - as inherited
        if self.mesh_dims is MeshDims.REPLICATE:
            return ()
        if parameter.expert_dim is not None:
            return axes if self.experts_on_all_ranks else axes[-1:]
        return (*axes[-1:], EP) if self.shard_over_ep else axes[-1:]


@frozen_dataclass
class SPMD(Parallelism):
    """Data parallelism by DTensor propagation only: distributed parameters, and a batch sharded by rows."""

    tag: ClassVar[str] = "spmd"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((DP,),)
    traceable: ClassVar[bool] = True
    distribution: Distribution = Distribution.REPLICATE
    """Placement for the parameters."""
    redistribute_gradients: bool = True
    """Whether a hook on each parameter redistributes its gradient to the parameter's placements before accumulation.

    DTensor does not redistribute by itself: propagation may leave a gradient Partial or sharded along another dim."""

    @property
    def completes_gradients(self) -> bool:  # noqa: D102 - as inherited
        return True

    @property
    def propagates_placements(self) -> bool:  # noqa: D102 - as inherited
        return True

    def shard_dim(self, parameter: ParameterFacts) -> int | None:  # noqa: ARG002, D102 - as inherited
        return 0 if self.distribution is Distribution.FULLY_SHARD else None


@frozen_dataclass
class LocalDataParallel(Parallelism):
    """Average gradients of plain tensors explicitly after the last backward in a step, as training loops without a wrapper do."""

    tag: ClassVar[str] = "local_data_parallel"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((DP,),)
    stage_position: ClassVar[StagePosition | None] = StagePosition.AROUND
    flat_buffer: bool = option(default=False, limits=False)
    """Whether one all-reduce on a flat buffer sums all gradients, instead of one all-reduce per parameter."""
