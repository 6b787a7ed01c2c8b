"""Where each rank's part is enough: what placements an operation needs of its arguments along one axis, and what it leaves."""

from __future__ import annotations

from collections.abc import Sequence

from equivcheck.programs.nouns.operations.registry import FAMILIES
from equivcheck.programs.nouns.placement import REPLICATE, cut_dim, partial, shard
from equivcheck.programs.nouns.statements import Operation

Shape = tuple[int, ...]
Needs = tuple[tuple[str, ...], str]
"""What each argument has to be, and what the results are."""

NOT_ELEMENTWISE = {"equal", "allclose", "expand_as", "type_as"}
ELEMENTWISE = {each.name for each in FAMILIES["elementwise"]} - NOT_ELEMENTWISE
SAME_SHAPE = {"flip", "roll", "cumsum"}
"""Linear, and of the same shape."""
LINEAR = {"clone", "neg", "mul_scalar", "div_scalar", "contiguous", "sum", "sum_dim", "sum_keepdim", "t"} | SAME_SHAPE
"""Of the first argument: addends of it make addends of the result."""
ALONG_A_DIM = {"softmax", "log_softmax", "cumprod", "logcumsumexp", "sort", "sort_descending", "argsort"} | SAME_SHAPE
"""Of the same shape, one slice along the dim independent of the others."""
SUMS = {"sum": None, "sum_dim": False, "sum_keepdim": True}
"""Of all dims, or of one that is dropped or kept."""
PRODUCTS = {"mm": False, "linear": True}
"""Of two matrices, the second transposed or not."""


def needs(statement: Operation, lies: Sequence[str], shapes: Sequence[Shape]) -> Needs:
    """Everything replicated where there is no rule, or what lies along the axis does not fit one."""
    found = _rule(statement, lies, shapes)
    return found or ((REPLICATE,) * len(lies), REPLICATE)


def _rule(statement: Operation, lies: Sequence[str], shapes: Sequence[Shape]) -> Needs | None:
    if lies[0] == partial() and statement.name in LINEAR:
        return (partial(),), partial()
    if statement.name in PRODUCTS:
        return _of_product(lies, shapes, transposed=PRODUCTS[statement.name])
    if statement.name in ELEMENTWISE:
        return _of_elements(lies, shapes)
    dim = cut_dim(lies[0])
    return None if dim is None or len(lies) > 1 else _of_part(statement, dim, len(shapes[0]))


def _of_part(statement: Operation, dim: int, num_dims: int) -> Needs | None:
    """Of one argument that is cut along a dim: what is independent along it, or is summed over it."""
    found, along = None, statement.dim % max(1, num_dims)
    if statement.name in ALONG_A_DIM and dim != along:
        found = shard(dim)
    elif statement.name == "t" and num_dims == 2:
        found = shard(1 - dim)
    elif statement.name in SUMS:
        kept = SUMS[statement.name]
        found = partial() if kept is None or dim == along else shard(dim if kept or dim < along else dim - 1)
    return None if found is None else ((shard(dim),), found)


def _of_product(lies: Sequence[str], shapes: Sequence[Shape], *, transposed: bool) -> Needs | None:
    """Rows of the first, columns of the second, or the dim that is summed over; or addends of one."""
    if len(shapes[0]) != 2 or len(shapes[1]) != 2:
        return None
    columns, inner = (0, 1) if transposed else (1, 0)
    if lies[0] == shard(0):
        return (shard(0), REPLICATE), shard(0)
    if lies[0] == shard(1) or lies[1] == shard(inner):
        return (shard(1), shard(inner)), partial()
    if lies[1] == shard(columns):
        return (REPLICATE, shard(columns)), shard(1)
    if lies[0] == partial():
        return (partial(), REPLICATE), partial()
    return ((REPLICATE, partial()), partial()) if lies[1] == partial() else None


def _of_elements(lies: Sequence[str], shapes: Sequence[Shape]) -> Needs | None:
    """The first dim that an argument is cut along, unless another is longer there; what is broadcast along it is whole."""
    num_dims = max(map(len, shapes))
    for each, shape in zip(lies, shapes, strict=True):
        dim = cut_dim(each)
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
