"""Redistributions that torch gets wrong or refuses, and in which versions. All others are drawn and must be right."""

from __future__ import annotations

from dataclasses import dataclass

from redistribution.cases import Held, Order, Placement, Redistribution, Start

WHOLE = Placement()


def shard(dim: int = 0) -> Placement:
    """A part of a dim."""
    return Placement(held=Held.SHARD, dim=dim)


def stride(split: int) -> Placement:
    """A strided part of the first dim."""
    return Placement(held=Held.STRIDED, split=split)


def addend(op: str = "sum") -> Placement:
    """An addend."""
    return Placement(held=Held.PARTIAL, op=op)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One redistribution that is not what arithmetic says."""

    name: str
    """What differs."""
    case: Redistribution
    """An example, in which it does on every rank that `wrong` or `error` tells of."""
    torch: str = ""
    """The versions of torch that differ; empty for all."""
    wrong: str = ""
    """The field of a result that is wrong on some rank: `after` it, or its `gradient`."""
    error: str = ""
    """Regular expression that the error's text contains, on every rank."""
    hangs: bool = False
    """Whether some ranks raise, or have gone on, and others wait for them; over gloo none waits for parts without elements."""
    reason: str
    """Why."""


def _of_op(op: str) -> Difference:
    return Difference(
        name=f"gradient of {op}",
        case=Redistribution(mesh=(3,), shape=(4,), source=(addend(op),), target=(WHOLE,), seed=5),
        wrong="gradient",
        reason="the backward hands the result's gradient to every addend, as is right for sums",
    )


def _pending(op: str) -> Difference:
    return Difference(
        name=f"pending gradient of {op}",
        case=Redistribution(mesh=(3,), shape=(4,), source=(addend(op),), target=(WHOLE,), pending=(True,), seed=5),
        torch=">=2.11",
        error="Redistribution from one partial type",
        reason="the backward takes the addends of the gradient for those of the tensor",
    )


DIFFERENCES = (
    Difference(
        name="mesh of descending ranks",
        case=Redistribution(mesh=(3,), order=Order.DESCENDING, shape=(4,), source=(shard(),), target=(WHOLE,)),
        wrong="after",
        reason="groups have ranks in ascending order, so that parts are put together in reverse (pytorch #176126)",
    ),
    Difference(
        name="gather of uneven nested parts along a flattened axis",
        case=Redistribution(mesh=(2, 2), flattened=True, shape=(5,), source=(shard(), shard()), target=(WHOLE, WHOLE)),
        torch=">=2.11",
        wrong="after",
        reason="one gather takes 2, 1, 1, 1 rows for 2, 2, 1, 0 (pytorch #194457)",
    ),
    Difference(
        name="gather along a flattened axis of other order",
        case=Redistribution(
            mesh=(2, 2), order=Order.COLUMNS, flattened=True, shape=(4,), source=(shard(), shard()), target=(WHOLE, WHOLE)
        ),
        torch=">=2.11",
        wrong="after",
        reason="the flattened group has ranks in ascending order, which is not theirs (pytorch #176126)",
    ),
    *(_of_op(op) for op in ("avg", "max", "min")),
    *(_pending(op) for op in ("avg", "max", "min")),
    Difference(
        name="pending gradient of a sum",
        case=Redistribution(mesh=(3,), shape=(4,), source=(addend(),), target=(WHOLE,), pending=(True,), seed=5),
        torch="<2.11",
        wrong="gradient",
        reason="from_local leaves the gradients of addends pending (pytorch #173153)",
    ),
    Difference(
        name="scatter of uneven strided parts",
        case=Redistribution(mesh=(2, 2), shape=(5,), source=(stride(2), shard()), target=(WHOLE, WHOLE), start=Start.DISTRIBUTED),
        torch=">=2.10",
        error="AssertionError",
        reason="parts are not padded to one size",
    ),
    Difference(
        name="scatter of uneven strided parts",
        case=Redistribution(mesh=(2, 2), shape=(5,), source=(stride(2), shard()), target=(WHOLE, WHOLE), start=Start.DISTRIBUTED),
        torch="<2.10",
        wrong="gradient",
        reason="the gradient is laid out as if there were no stride",
    ),
    Difference(
        name="gather of uneven strided parts",
        case=Redistribution(mesh=(2, 2), shape=(6,), source=(stride(2), shard()), target=(WHOLE, WHOLE)),
        torch="<2.10",
        wrong="after",
        reason="they are put together as if they were even (pytorch #163843)",
    ),
    Difference(
        name="order of cuts beside addends",
        case=Redistribution(mesh=(1, 2, 2), shape=(8,), source=(addend("max"), WHOLE, WHOLE), target=(WHOLE, stride(2), shard())),
        torch=">=2.10,<2.11",
        error="No path found",
        reason="the backward has no plan for it",
    ),
    Difference(
        name="stride of a view",
        case=Redistribution(mesh=(2,), shape=(8,), source=(stride(2),), target=(WHOLE,)),
        torch=">=2.10,<2.12",
        error="AssertionError|is unable",
        reason="strides are taken for orders of cuts only",
    ),
    Difference(
        name="stride of a view, to a dim that is cut twice",
        case=Redistribution(mesh=(2, 2), shape=(8,), source=(WHOLE, stride(2)), target=(shard(), shard())),
        torch=">=2.10,<2.12",
        error="AssertionError|is unable",
        reason="strides are taken for orders of cuts only",
    ),
    Difference(
        name="stride of a view, to a dim that is cut twice",
        case=Redistribution(mesh=(2, 2), shape=(8,), source=(WHOLE, stride(2)), target=(shard(), shard())),
        torch=">=2.12",
        error="Expected cond to be True",
        reason="the backward's plan, made axis by axis, does not see that an earlier axis cuts the dim",
    ),
    Difference(
        name="addend that is kept",
        case=Redistribution(mesh=(2, 2), shape=(4,), source=(addend(), shard()), target=(addend(), WHOLE)),
        torch="<2.10",
        error="Can not redistribute to Partial",
        reason="redistributing to an addend is refused, even where there is one",
    ),
    Difference(
        name="part without elements",
        case=Redistribution(mesh=(2,), shape=(3, 0), source=(shard(),), target=(WHOLE,)),
        torch="<2.10",
        hangs=True,
        reason="padding such a part raises, and the ranks that need none wait",
    ),
    Difference(
        name="gradient of a leaf in uneven parts",
        case=Redistribution(mesh=(4,), shape=(2, 9), source=(shard(),), target=(shard(),), start=Start.DISTRIBUTED),
        torch="<2.12",
        hangs=True,
        reason="ranks whose gradient seems to be laid out otherwise gather it, the others do not (pytorch #107661)",
    ),
)
