"""What is generated: one collective call of a group of ranks, as data. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from collectives.model import Array
from equivcheck.system.choice import PrintableEnum
from equivcheck.system.torch_version import is_torch_in

MAX_SIZE = 5
FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int8", "uint8")
COMPLEX = ("complex128", "complex64")
DTYPES = (*FLOATS, *INTEGERS, "bool", *COMPLEX)
ARITHMETIC = ("sum", "product", "min", "max")
BITWISE = ("band", "bor", "bxor")


class Kind(PrintableEnum):
    """The collectives, by the form in which tensors are passed."""

    BROADCAST = "broadcast"
    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    REDUCE_SCATTER = "reduce_scatter"
    REDUCE_SCATTER_SINGLE = "reduce_scatter_single"
    ALL_GATHER = "all_gather"
    ALL_GATHER_SINGLE = "all_gather_single"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"
    ALL_TO_ALL_SINGLE = "all_to_all_single"


LIST_ALL_TO_ALL, NO_LIST_ALL_TO_ALL = ">=2.12", "<2.12"
"""Whether gloo, and so sim, exchanges lists of tensors (pytorch #165435), or refuses: see `unsupported`."""
KINDS = tuple(kind for kind in Kind if kind is not Kind.ALL_TO_ALL or is_torch_in(LIST_ALL_TO_ALL))
"""Those that the installed torch has in every world."""
REDUCTIONS = (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE_SCATTER_SINGLE)
MOVES = tuple(kind for kind in KINDS if kind not in REDUCTIONS)
ROOTED = (Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER)
IN_PARTS = (Kind.REDUCE_SCATTER, Kind.REDUCE_SCATTER_SINGLE, Kind.SCATTER, Kind.ALL_TO_ALL, Kind.ALL_TO_ALL_SINGLE)
"""Each member puts in a part for each member."""
CONCATENATED = (Kind.REDUCE_SCATTER_SINGLE, Kind.ALL_GATHER_SINGLE, Kind.ALL_TO_ALL_SINGLE)
"""Parts are rows of one tensor, so a part has at least one dim."""
STRIDED = tuple(kind for kind in Kind if kind not in CONCATENATED)
"""Tensors need not be contiguous."""
UNEVEN = (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL_SINGLE)
"""Parts may have different numbers of rows, in every world."""


class Values(PrintableEnum):
    """What numbers inputs are made of."""

    WHOLE = "whole"
    """Small whole numbers, so that floating-point reductions are exact in any order."""
    NORMAL = "normal"
    """Standard normal in floating point; any number of an integer type."""
    SPECIAL = "special"
    """With NaN, infinities and negative zero where the type has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One collective, issued by the members of a group."""

    kind: Kind
    """Which."""
    group: tuple[int, ...] = (0,)
    """Global ranks of the members, ascending."""
    dtype: str = "float64"
    """Element type, as torch names it."""
    shape: tuple[int, ...] = ()
    """Shape of an input, or of each part; without dim 0 where `rows` gives that."""
    rows: tuple[tuple[int, ...], ...] = ()
    """Rows of the part that each member (first index) has for each; empty when all parts have `shape`."""
    op: str = ""
    """Reduction; empty for others."""
    root: int = 0
    """Rank of the root within the group; 0 for those that have none."""
    strided: bool = False
    """Whether tensors of two dims or more lie in memory with their dims reversed."""
    asynchronous: bool = False
    """Whether a handle is waited for after all calls of the batch have been issued, the last first."""
    values: Values = Values.WHOLE
    """What numbers."""
    seed: int = 0
    """Of the numbers."""

    def part_shape(self, sender: int, receiver: int) -> tuple[int, ...]:
        """Shape of what a member has for another."""
        return (self.rows[sender][receiver], *self.shape) if self.rows else self.shape

    def received_shapes(self, member: int) -> list[tuple[int, ...]]:
        """Shapes of what a member receives; of a rooted collective, of what it would if it were the root."""
        members = range(len(self.group))
        if self.kind in (Kind.ALL_GATHER, Kind.ALL_GATHER_SINGLE, Kind.GATHER):
            return [self.part_shape(sender, 0) for sender in members]
        if self.kind in (Kind.ALL_TO_ALL, Kind.ALL_TO_ALL_SINGLE):
            return [self.part_shape(sender, member) for sender in members]
        return [self.part_shape(0, member) if self.kind in IN_PARTS else self.shape]


def inputs_of(case: Case, member: int) -> list[Array]:
    """What a member puts in: one array, or its parts in the order of members."""
    generator = np.random.default_rng([case.seed, member])
    num_parts = len(case.group) if case.kind in IN_PARTS else 1
    return [numbers(generator, case, case.part_shape(member, part)) for part in range(num_parts)]


def numbers(generator: np.random.Generator, case: Case, shape: tuple[int, ...]) -> Array:
    """Numbers that the case's type represents exactly, in the type that NumPy has for it."""
    if case.dtype == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    if "int" in case.dtype:
        info = np.iinfo(case.dtype)
        low, high = (info.min, info.max) if case.values is not Values.WHOLE else (max(info.min, -3), 3)
        return generator.integers(low, high, shape, dtype=case.dtype, endpoint=True)
    if case.dtype in COMPLEX:
        found = np.empty(shape, dtype=case.dtype)
        found.real, found.imag = reals(generator, case.values, shape), reals(generator, case.values, shape)
        return found
    return rounded(reals(generator, case.values, shape), case.dtype)


def reals(generator: np.random.Generator, values: Values, shape: tuple[int, ...]) -> Array:
    """Real numbers in float64."""
    if values is Values.WHOLE:
        return generator.integers(-3, 3, shape, endpoint=True).astype(np.float64)
    found = np.asarray(generator.standard_normal(shape))
    if values is Values.SPECIAL:
        return np.where(generator.random(shape) < 0.5, found, generator.choice([np.nan, np.inf, -np.inf, -0.0], shape))
    return found


def numpy_dtype(dtype: str) -> np.dtype[np.generic]:
    """The type in which NumPy holds tensors of a type; bfloat16 fits into float32."""
    return np.dtype("float32" if dtype == "bfloat16" else dtype)


def rounded(array: Array, dtype: str) -> Array:
    """Floating-point numbers that the type represents, near those given."""
    found = np.asarray(array).astype(numpy_dtype(dtype))
    if dtype == "bfloat16":
        return np.asarray((found.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)).reshape(array.shape)
    return found


SIZES = st.sampled_from((1, 2, 3, 4, MAX_SIZE, 2, 3, 4))
"""Ranks of a world: seldom one, which hides most mistakes."""
EXTENTS = st.sampled_from((1, 2, 3, 2, 3, 2, 3, 0))
"""Of a dim: seldom none, which hides all."""
SEEDS = st.integers(0, 1000)


@st.composite
def shapes(draw: DrawFn, *, min_dims: int = 0) -> tuple[int, ...]:
    """Shapes of up to three dims, 0-d and empty ones among them."""
    return tuple(draw(st.lists(EXTENTS, min_size=min_dims, max_size=3)))


@st.composite
def groups(draw: DrawFn, size: int) -> tuple[int, ...]:
    """Groups of a world: all of it half of the time, else any subset, seldom of one."""
    if draw(st.booleans()):
        return tuple(range(size))
    fewest = min(size, draw(st.sampled_from((1, 2, 2, 2))))
    return tuple(sorted(draw(st.sets(st.integers(0, size - 1), min_size=fewest))))


def dtypes_of(kind: Kind, op: str) -> tuple[str, ...]:
    """Types that a collective takes in every world; see `unsupported`."""
    if op in BITWISE:
        return (*INTEGERS, "bool")
    if op == "avg":
        return (*FLOATS, *COMPLEX)
    if kind is Kind.GATHER or op not in ("", "sum"):
        return (*FLOATS, *INTEGERS, "bool")
    return DTYPES


@st.composite
def calls(draw: DrawFn, kind: Kind, size: int) -> Case:
    """One collective in a world of that size."""
    op = draw(st.sampled_from((*ARITHMETIC, "avg", *BITWISE))) if kind in REDUCTIONS else ""
    group = draw(groups(size))
    uneven = kind in UNEVEN and draw(st.booleans())
    return Case(
        kind=kind,
        group=group,
        dtype=draw(st.sampled_from(dtypes_of(kind, op))),
        shape=draw(shapes(min_dims=1 if kind in CONCATENATED and not uneven else 0)),
        rows=draw(rows_of(kind, len(group))) if uneven else (),
        op=op,
        root=draw(st.integers(0, len(group) - 1)) if kind in ROOTED else 0,
        strided=kind in STRIDED and draw(st.booleans()),
        asynchronous=draw(st.booleans()),
        values=draw(st.sampled_from((Values.WHOLE, Values.NORMAL) if op else tuple(Values))),
        seed=draw(SEEDS),
    )


@st.composite
def rows_of(draw: DrawFn, kind: Kind, size: int) -> tuple[tuple[int, ...], ...]:
    """Rows of each member's parts; what is reduced has the same for all members."""
    row = st.lists(EXTENTS, min_size=size, max_size=size).map(tuple)
    return (draw(row),) * size if kind is Kind.REDUCE_SCATTER else tuple(draw(row) for _ in range(size))


@st.composite
def batches(draw: DrawFn, kind: Kind) -> tuple[int, tuple[Case, ...]]:
    """A world's size and some calls that its ranks issue one after another, so that one run tries several."""
    size = draw(SIZES)
    return size, tuple(draw(st.lists(calls(kind, size), min_size=1, max_size=12)))
