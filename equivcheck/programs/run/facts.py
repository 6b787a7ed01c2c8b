"""Facts about a tensor program as short texts. They group findings, and tell which known issues a program can show."""

from __future__ import annotations

from collections.abc import Iterator

from equivcheck.programs.nouns.placement import REPLICATE, reduction_of, sharded_dim
from equivcheck.programs.nouns.program import Constant, Leaf, Operation, Redistribution, TensorProgram

NO_ELEMENTS = "no elements"
"""Fact about a program that has an empty leaf (an input tensor without elements)."""
_NORMS = (
    *("norm_dim", "norm_dim_3", "norm_fro", "norm", "norm_1", "norm_3", "norm_half", "norm_old", "norm_old_1"),
    *("foreach_norm", "foreach_norm_1", "pairwise_distance"),
)
"""Operations whose result may be partial with a norm as its reduction."""
_SHARD_PARTIALS = frozenset(
    {
        *("sort", "sort_stable", "sort_descending", "argsort", "msort", "topk", "topk_smallest", "cummin", "cummax"),
        *("gather", "take_along", "scatter_add", "scatter_add_own", "scatter_value"),
        *(
            "max_pool1d",
            "max_pool2d",
            "max_pool2d_indices",
            "max_pool3d",
            "max_unpool2d",
            "adaptive_max_pool1d",
            "adaptive_max_pool2d",
        ),
        *("avg_pool1d", "avg_pool2d", "avg_pool2d_padded", "adaptive_avg_pool2d"),
    }
)
"""Operations whose result DTensor shards if the argument is partial."""
_EMBEDDINGS = (
    *("embedding", "embedding_padded", "embedding_scaled", "embedding_max_norm"),
    *("embedding_transposed", "embedding_flat", "embedding_stacked"),
)
"""Operations that look up rows. If rows are sharded, each rank masks rows on other ranks before results are added up."""


def facts_of(program: TensorProgram) -> frozenset[str]:
    """Return facts about a program as short texts, such as ``several axes``.

    They concern its leaves, constants, operations and redistributions.
    """
    found = {"several axes"} if len(program.mesh) > 1 else set()
    for number, statement in enumerate(program.statements):
        if isinstance(statement, (Leaf, Constant)):
            found.update(_tensor_facts(statement, program.mesh))
        elif isinstance(statement, Redistribution):
            found.update(_redistribution_facts(statement.placements))
        elif isinstance(statement, Operation):
            found.update(_operation_facts(statement))
            taken = (program.statements[number - back] for back in statement.arguments)
            if not all(isinstance(each, (Leaf, Constant)) for each in taken):
                found.add("takes a result")
        if isinstance(statement, (Leaf, Constant, Redistribution)) and set(statement.placements) != {REPLICATE}:
            found.add("not replicated")
    if any(map(reduction_of, found)) and not _SHARD_PARTIALS.isdisjoint(program.operations):
        found.add("sharded")
    return frozenset(found)


def _operation_facts(statement: Operation) -> Iterator[str]:
    if statement.dim < 0:
        yield "negative dim"
    if statement.name in _NORMS:
        yield "norms"
    if statement.name in _EMBEDDINGS:
        yield "looks up rows"
    if statement.name == "real_view":
        yield "bits"


def _tensor_facts(statement: Leaf | Constant, mesh: tuple[int, ...]) -> Iterator[str]:
    sharded: list[int] = []
    for size, placement in zip(mesh, statement.placements, strict=True):
        dim, reduction = sharded_dim(placement), reduction_of(placement)
        if reduction is not None:
            yield f"P({reduction})"
        elif dim is None:
            yield "replicated"
        else:
            yield from _shard_facts(statement.shape[dim], size)
            sharded.append(dim)
        if size == 1:
            yield "axis of one rank"
    if len(set(sharded)) < len(sharded):
        yield "dim sharded twice"
    if 0 in statement.shape:
        yield NO_ELEMENTS


def _redistribution_facts(placements: tuple[str, ...]) -> Iterator[str]:
    """Yield facts that may hold for a redistributed value, because its size is unknown."""
    sharded = [dim for dim in map(sharded_dim, placements) if dim is not None]
    if sharded:
        yield from ("sharded", "uneven", "one-element dim sharded", "empty shard")
    if len(set(sharded)) < len(sharded):
        yield "dim sharded twice"


def _shard_facts(extent: int, size: int) -> Iterator[str]:
    yield "sharded"
    if extent % size:
        yield "uneven"
    if extent == 1:
        yield "one-element dim sharded"
    if -(-extent // size) * (size - 1) >= extent:
        yield "empty shard"
