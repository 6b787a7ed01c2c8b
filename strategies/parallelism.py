"""One strategy for each built-in parallelism, and one for third-party parallelisms."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from functools import cache
from typing import Any, get_type_hints

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.errors import UsageError
from equivcheck.layouts.composition.registry import layout_kinds
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SPMD,
    AttentionExchange,
    Collectives,
    Compression,
    ContextParallel,
    Distribution,
    ElementType,
    ExpertParallel,
    ExpertStorage,
    LoadBalancer,
    LocalDataParallel,
    LocalTensorParallel,
    LowPrecision,
    MeshDims,
    MixedPrecision,
    Parallelism,
    Pipeline,
    Replicate,
    Replicator,
    ShardingStrategy,
    TensorParallel,
    Wrapping,
)
from equivcheck.strategies.chance import EVENLY, MOSTLY, RARELY, SOMETIMES

PARAM_TYPES: SearchStrategy[ElementType | None] = st.sampled_from(
    (ElementType.BFLOAT16, ElementType.FLOAT16, None, ElementType.FLOAT32)
)
REDUCE_TYPES: SearchStrategy[ElementType | None] = st.sampled_from(
    (None, ElementType.FLOAT32, ElementType.BFLOAT16, ElementType.FLOAT16)
)
OUTPUT_TYPES: SearchStrategy[ElementType | None] = st.sampled_from((None, *ElementType))

DDP_PRECISIONS: SearchStrategy[dict[str, Any]] = st.sampled_from(
    (
        {"autocast": LowPrecision.BFLOAT16},
        {"autocast": LowPrecision.FLOAT16},
        {"compression": Compression.FP16},
        {"autocast": LowPrecision.BFLOAT16, "compression": Compression.FP16},
    )
)
"""Options with which DDP lowers precision. Its bfloat16 hook is left out, because it does not run on CPU."""

_BUCKETS_MB = st.sampled_from((25.0, 0.0001, 0.001))
"""Bucket sizes in MB that give one bucket for all parameters, about one bucket for each parameter, or a few buckets."""
_ZERO_OPTIONS: SearchStrategy[dict[str, Any]] = st.sampled_from(
    ({}, {}, {"zero_redundancy": True}, {"zero_redundancy": True, "parameters_as_bucket_view": True})
)
_REPLICATORS = st.sampled_from(Replicator)
_WRAPPINGS = st.sampled_from(Wrapping)
_SHARDINGS = st.sampled_from(ShardingStrategy)
_DIVIDE_FACTORS = st.sampled_from((None, 2.0, 4.0, 1.0, 3.0, 0.5, 2.5))
"""Factors to divide gradients by: possible rank counts, other powers of two, and factors whose quotient is rounded."""
_RESHARDINGS: SearchStrategy[dict[str, Any]] = st.sampled_from(
    (
        {},
        {},
        {"reshard_after_forward": False},
        {"reshard_after_forward": False},
        {"reshard_to": 2},
        {"reshard_to": 4},
        {"reshard_to": 3},
    )
)
"""If shards cannot be split over the requested rank count, they are resharded to all ranks."""
_DISTRIBUTIONS = st.sampled_from(Distribution)
_COLLECTIVES = st.sampled_from((Collectives.FUNCTIONAL, Collectives.FUNCTIONAL, Collectives.TYPED))


@st.composite
def mixed_precisions(draw: DrawFn, *, outputs: SearchStrategy[ElementType | None] = OUTPUT_TYPES) -> MixedPrecision:
    """Draw `MixedPrecision` with any dtypes. `outputs` is the strategy for the output's dtype."""
    param, reduce, output = draw(PARAM_TYPES), draw(REDUCE_TYPES), draw(outputs)
    if param is reduce is output is None:
        return MixedPrecision(param=ElementType.BFLOAT16)
    return MixedPrecision(param=param, reduce=reduce, output=output)


_MIXED_PRECISIONS = mixed_precisions()
_WITHOUT_OUTPUTS = mixed_precisions(outputs=st.none())


@st.composite
def ddp(draw: DrawFn) -> DDP:
    """Draw `DDP`. In one third of the draws all options have their defaults, otherwise all options are drawn."""
    if not draw(MOSTLY):
        return DDP()
    return DDP(
        no_sync=draw(EVENLY),
        bucket_cap_mb=draw(_BUCKETS_MB),
        gradient_as_bucket_view=draw(SOMETIMES),
        static_graph=draw(SOMETIMES),
        find_unused_parameters=draw(SOMETIMES),
        unequal_start=draw(SOMETIMES),
        **draw(_ZERO_OPTIONS),
        **(draw(DDP_PRECISIONS) if draw(SOMETIMES) else {}),
    )


@st.composite
def replicate(draw: DrawFn) -> Replicate:
    """Draw `Replicate` with either implementation and its options."""
    # Drawn for both implementations, because the plainer one must take no more choices than the other.
    implementation, no_sync, compresses = draw(_REPLICATORS), draw(EVENLY), draw(SOMETIMES)
    if implementation is Replicator.DDP:
        compression = Compression.FP16 if compresses else Compression.NONE
        return Replicate(no_sync=no_sync, bucket_cap_mb=draw(_BUCKETS_MB), compression=compression)
    return Replicate(implementation=implementation, no_sync=no_sync, wrapping=draw(_WRAPPINGS))


@st.composite
def fsdp1(draw: DrawFn, *, strategies: SearchStrategy[ShardingStrategy] = _SHARDINGS) -> FSDP1:
    """Draw `FSDP1` with the given sharding strategies."""
    return FSDP1(
        strategy=draw(strategies),
        wrapping=draw(_WRAPPINGS),
        no_sync=draw(EVENLY),
        use_orig_params=not draw(EVENLY),
        mixed_precision=draw(_WITHOUT_OUTPUTS) if draw(SOMETIMES) else None,
    )


@st.composite
def _divisions(draw: DrawFn) -> dict[str, Any]:
    """Draw settings for how `fully_shard` divides gradients; the default is most frequent."""
    if not draw(SOMETIMES):
        return {}
    return {"gradient_divide_factor": draw(_DIVIDE_FACTORS), "sum_reductions": not draw(SOMETIMES)}


_DIVISIONS = _divisions()


_UNITS: SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "layers_per_unit": st.sampled_from((1, 1, 1, 2, 3)),
        "embedding_unit": SOMETIMES,
        "head_unit": SOMETIMES,
        "loss_chunks": st.sampled_from((1, 1, 1, 2, 3)),
    }
)
_MESH_DIMS = st.sampled_from((None,) * 9 + (MeshDims.SHARD, MeshDims.SHARD, MeshDims.REPLICATE))
_SHARDED_DIMS: SearchStrategy[dict[str, Any]] = st.sampled_from(
    ({}, {}, {}, {}, {"shard_last_dim": True}, {"shard_largest_dim": True})
)


@st.composite
def fsdp2(draw: DrawFn) -> FSDP2:
    """Draw `FSDP2` with all combinations of its options."""
    wrapping, mesh_dims, divisions, replica_hook = draw(_WRAPPINGS), draw(_MESH_DIMS), draw(_DIVISIONS), draw(RARELY)
    units = draw(_UNITS) if wrapping is Wrapping.PER_LAYER else {}
    units |= {} if units.get("head_unit") else {"loss_chunks": 1}
    if mesh_dims is not None:
        divisions = {"gradient_divide_factor": 1.0, "sum_reductions": True}
    mixed_precision = draw(_MIXED_PRECISIONS) if draw(SOMETIMES) else None
    return FSDP2(
        wrapping=wrapping,
        mesh_dims=mesh_dims,
        **units,
        no_sync=draw(EVENLY),
        **draw(_RESHARDINGS),
        reshard_after_backward=not draw(SOMETIMES),
        explicit_prefetch=draw(SOMETIMES),
        explicit_unshard=draw(SOMETIMES),
        cpu_offload=draw(SOMETIMES),
        mixed_precision=mixed_precision,
        full_precision_norms=mixed_precision is not None and draw(EVENLY),
        all_reduce_once=draw(SOMETIMES),
        replica_hook=replica_hook and mesh_dims is None,
        **divisions,
        separate_reduce_group=draw(SOMETIMES),
        **draw(_SHARDED_DIMS),
        experts_on_all_ranks=draw(SOMETIMES),
        shard_over_ep=draw(SOMETIMES),
        ignore_frozen=draw(SOMETIMES),
        distributed_muon=draw(EVENLY),
    )


@st.composite
def tensor_parallel(draw: DrawFn) -> TensorParallel:
    """Draw `TensorParallel` without a plan. `scenarios` draws a legal plan for the model."""
    return TensorParallel(redistribute_gradients=not draw(SOMETIMES))


@st.composite
def spmd(draw: DrawFn) -> SPMD:
    """Draw `SPMD` with either distribution."""
    return SPMD(distribution=draw(_DISTRIBUTIONS), redistribute_gradients=not draw(SOMETIMES))


def local_tensor_parallel() -> SearchStrategy[LocalTensorParallel]:
    """Return a strategy for `LocalTensorParallel` with either kind of collectives. `scenarios` draws its plan."""
    return st.builds(LocalTensorParallel, collectives=_COLLECTIVES)


def pipeline() -> SearchStrategy[Pipeline]:
    """Return a strategy for `Pipeline` with default options. `scenarios` draws options to fit its ranks and the model."""
    return st.builds(Pipeline)


def context_parallel() -> SearchStrategy[ContextParallel]:
    """Return a strategy for `ContextParallel` with every exchange and every assignment of positions."""
    return st.builds(ContextParallel, exchange=st.sampled_from(AttentionExchange), balance=st.sampled_from(LoadBalancer))


_SHIPPED: dict[str, SearchStrategy[Parallelism]] = {
    DDP.tag: ddp(),
    Replicate.tag: replicate(),
    FSDP1.tag: fsdp1(),
    FSDP2.tag: fsdp2(),
    TensorParallel.tag: tensor_parallel(),
    SPMD.tag: spmd(),
    Pipeline.tag: pipeline(),
    LocalTensorParallel.tag: local_tensor_parallel(),
    ContextParallel.tag: context_parallel(),
    ExpertParallel.tag: st.builds(ExpertParallel, storage=st.sampled_from(ExpertStorage)),
    LocalDataParallel.tag: st.builds(LocalDataParallel, flat_buffer=EVENLY),
}


@cache
def parallelisms_of(tag: str) -> SearchStrategy[Parallelism]:
    """Return a strategy for a registered parallelism: its kind's own `strategy()` if defined, else values drawn for its fields.

    Raises `UsageError` if the tag is not registered.
    """
    kinds = layout_kinds()
    if tag not in kinds:
        raise UsageError(f"layout {tag!r} is not valid: unknown name. Expected {', '.join(kinds)}")
    if tag in _SHIPPED:
        return _SHIPPED[tag]
    own = getattr(kinds[tag], "strategy", None)
    return _from_fields(kinds[tag].parallelism) if own is None else own()


def _from_fields(kind: type[Parallelism]) -> SearchStrategy[Parallelism]:
    """Draw booleans and enums freely; keep defaults elsewhere; draw required fields by type."""
    hints = get_type_hints(kind)
    drawn = {
        field.name: st.from_type(hints[field.name])
        for field in fields(kind)
        if isinstance(hints[field.name], type) and issubclass(hints[field.name], (bool, Enum))
    }
    return st.builds(kind, **drawn)
