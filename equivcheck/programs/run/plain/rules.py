"""Sharding rules for operations on plain tensors: with which placements each rank can run the operation on its own part."""

from __future__ import annotations

from collections.abc import Sequence

from equivcheck.programs.nouns.operations.registry import FAMILIES
from equivcheck.programs.nouns.placement import REPLICATE, partial, shard, sharded_dim
from equivcheck.programs.nouns.program import Operation

Shape = tuple[int, ...]
Needs = tuple[tuple[str, ...], str]
"""Placements for the arguments and for the results."""

NOT_ELEMENTWISE = {"equal", "allclose", "expand_as", "type_as"}
ELEMENTWISE = {each.name for each in FAMILIES["elementwise"]} - NOT_ELEMENTWISE
SAME_SHAPE = {"flip", "roll", "cumsum"}
"""Linear operations that keep the shape."""
LINEAR = {"clone", "neg", "mul_scalar", "div_scalar", "contiguous", "sum", "sum_dim", "sum_keepdim", "t"} | SAME_SHAPE
"""Operations linear in the first argument: partial arguments give partial results."""
ALONG_A_DIM = {"softmax", "log_softmax", "cumprod", "logcumsumexp", "sort", "sort_descending", "argsort"} | SAME_SHAPE
"""Operations that keep the shape and work on each slice along the dim separately."""
SUMS = {"sum": None, "sum_dim": False, "sum_keepdim": True}
"""Sums over all dims (None), or over one dim, which is dropped (False) or kept (True)."""
PRODUCTS = {"mm": False, "linear": True}
"""Products of two matrices, by whether the second one is transposed."""


def needs(statement: Operation, current: Sequence[str], shapes: Sequence[Shape]) -> Needs:
    """Return placements along one mesh axis that let each rank run the operation on its own part.

    The first element contains the arguments' placements, the second is the results' placement. `current` contains the arguments'
    present placements, and `shapes` their shapes. If no rule fits, all placements are replicated.
    """
    found = _rule(statement, current, shapes)
    return found or ((REPLICATE,) * len(current), REPLICATE)


def _rule(statement: Operation, current: Sequence[str], shapes: Sequence[Shape]) -> Needs | None:
    if current[0] == partial() and statement.name in LINEAR:
        return (partial(),), partial()
    if statement.name in PRODUCTS:
        return _product_rule(current, shapes, transposed=PRODUCTS[statement.name])
    if statement.name in ELEMENTWISE:
        return _elementwise_rule(current, shapes)
    dim = sharded_dim(current[0])
    return None if dim is None or len(current) > 1 else _shard_rule(statement, dim, len(shapes[0]))


def _shard_rule(statement: Operation, dim: int, num_dims: int) -> Needs | None:
    """Return a rule for one argument sharded along `dim`, if the operation is independent along this dim or sums over it."""
    found, along = None, statement.dim % max(1, num_dims)
    if statement.name in ALONG_A_DIM and dim != along:
        found = shard(dim)
    elif statement.name == "t" and num_dims == 2:
        found = shard(1 - dim)
    elif statement.name in SUMS:
        kept = SUMS[statement.name]
        found = partial() if kept is None or dim == along else shard(dim if kept or dim < along else dim - 1)
    return None if found is None else ((shard(dim),), found)


def _product_rule(current: Sequence[str], shapes: Sequence[Shape], *, transposed: bool) -> Needs | None:
    """Shard the first matrix's rows, the second matrix's columns, or the inner dim; or keep one matrix partial."""
    if len(shapes[0]) != 2 or len(shapes[1]) != 2:
        return None
    columns, inner = (0, 1) if transposed else (1, 0)
    if current[0] == shard(0):
        return (shard(0), REPLICATE), shard(0)
    if current[0] == shard(1) or current[1] == shard(inner):
        return (shard(1), shard(inner)), partial()
    if current[1] == shard(columns):
        return (REPLICATE, shard(columns)), shard(1)
    if current[0] == partial():
        return (partial(), REPLICATE), partial()
    return ((REPLICATE, partial()), partial()) if current[1] == partial() else None


def _elementwise_rule(current: Sequence[str], shapes: Sequence[Shape]) -> Needs | None:
    """Shard the first sharded dim, unless another argument is longer there.

    Arguments that broadcast along this dim are replicated.
    """
    num_dims = max(map(len, shapes))
    for each, shape in zip(current, shapes, strict=True):
        dim = sharded_dim(each)
        if dim is None:
            continue
        from_end = dim - len(shape)
        sizes = [other[from_end] if -from_end <= len(other) else 1 for other in shapes]
        if max(sizes) == shape[dim]:
            wanted = tuple(
                shard(len(other) + from_end) if -from_end <= len(other) and size == shape[dim] else REPLICATE
                for other, size in zip(shapes, sizes, strict=True)
            )
            return wanted, shard(num_dims + from_end)
    return None
