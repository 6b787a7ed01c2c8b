"""What worlds refuse, why, and in which versions of torch. What is not listed is generated and must agree with the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from collectives.cases import (
    ARITHMETIC,
    BITWISE,
    COMPLEX,
    FLOATS,
    INTEGERS,
    LIST_ALL_TO_ALL,
    MOVES,
    NO_LIST_ALL_TO_ALL,
    REDUCTIONS,
    Case,
    Kind,
)
from collectives.posts import Coalesced
from equivcheck.system.torch_version import is_torch_in

BOTH = ("sim", "gloo")
OTHER_TYPES = ("int16", "uint16", "uint32", "uint64")
GROUP = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Calls that raise on every rank."""

    name: str
    """What is refused."""
    kinds: tuple[Kind, ...]
    """Which collectives."""
    dtypes: tuple[str, ...] = ("float64",)
    """Element types."""
    ops: tuple[str, ...] = ("",)
    """Reductions."""
    rows: tuple[tuple[int, ...], ...] = ()
    """As in `Case`."""
    worlds: tuple[str, ...] = BOTH
    """Where; elsewhere they work."""
    torch: str = ""
    """The versions that refuse them; empty for all."""
    text: str
    """Regular expression that the error's text contains, in some world."""
    reason: str
    """Why."""

    def cases(self) -> Iterator[Case]:
        """Every call that is refused."""
        for kind in self.kinds:
            for op in self.ops:
                for dtype in self.dtypes:
                    yield Case(kind=kind, group=GROUP, dtype=dtype, shape=(2,), rows=self.rows, op=op)


DECLARED = (
    Refusal(
        name="mean of whole numbers",
        kinds=REDUCTIONS,
        dtypes=(*INTEGERS, "bool"),
        ops=("avg",),
        text="result type Float can't be cast|a mean is for",
        reason="gloo adds, then divides in the tensor's own type",
    ),
    Refusal(
        name="bitwise reduction of floating point",
        kinds=REDUCTIONS,
        dtypes=FLOATS,
        ops=BITWISE,
        text="with non-integral dtype|bitwise reductions are for",
        reason="there is no such thing",
    ),
    Refusal(
        name="reduction of complex numbers",
        kinds=REDUCTIONS,
        dtypes=COMPLEX,
        ops=(*(op for op in ARITHMETIC if op != "sum"), *BITWISE),
        text="not support.*on complex tensors|complex numbers can only|bitwise",
        reason="complex tensors travel as pairs of reals, which only sums and means allow",
    ),
    Refusal(
        name="reduction of other integers",
        kinds=REDUCTIONS,
        dtypes=OTHER_TYPES,
        ops=("sum",),
        text="Invalid scalar type|is not supported",
        reason="gloo and NCCL have no such type",
    ),
    Refusal(
        name="move of other integers",
        kinds=MOVES,
        dtypes=OTHER_TYPES,
        text="Invalid scalar type|is not supported",
        reason="gloo and NCCL have no such type, although a move need not know it",
    ),
    Refusal(
        name="gather of complex numbers",
        kinds=(Kind.GATHER,),
        dtypes=COMPLEX,
        worlds=("gloo",),
        text="Invalid scalar type",
        reason="torch.distributed.gather does not take them as pairs of reals, as the other collectives do",
    ),
    Refusal(
        name="uneven list all-gather",
        kinds=(Kind.ALL_GATHER,),
        rows=((1, 2), (3, 0)),
        text="invalid tensor size|outputs torch",
        reason="only NCCL gathers tensors of different sizes",
    ),
    Refusal(
        name="list all-to-all",
        kinds=(Kind.ALL_TO_ALL,),
        torch=NO_LIST_ALL_TO_ALL,
        text="Backend gloo does not support alltoall|a list of tensors is not supported by gloo",
        reason="gloo exchanges parts of one tensor only (pytorch #165435)",
    ),
    Refusal(
        name="uneven list all-to-all",
        kinds=(Kind.ALL_TO_ALL,),
        rows=((1, 2), (3, 0)),
        torch=LIST_ALL_TO_ALL,
        text="invalid tensor size|inputs torch",
        reason="gloo wants equal sizes; all_to_all_single takes uneven ones everywhere, and NCCL takes these",
    ),
)

REFUSALS = tuple(refusal for refusal in DECLARED if is_torch_in(refusal.torch))
"""Those of the installed torch."""

STUCK = tuple(replace(Case(kind=kind, group=GROUP, shape=(2,)), rows=((1, 2), (3, 1))) for kind in (Kind.GATHER, Kind.SCATTER))
"""Parts of different sizes, which the root refuses while the others wait."""

FUNCTIONAL_COMPLEX_GATHER = Coalesced(
    functional=True,
    asynchronous=False,
    cases=(Case(kind=Kind.ALL_GATHER_SINGLE, group=GROUP, dtype="complex64", shape=(2,)),),
)
"""Refused by gloo: the functional form does not take complex tensors as pairs of reals, as all_gather_single does."""
