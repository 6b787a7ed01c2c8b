"""Context parallelism: each rank has some of the positions of every sequence."""

from __future__ import annotations

from typing import ClassVar

from equivcheck.scenario.mesh import CP
from equivcheck.scenario.noun import noun
from equivcheck.scenario.parallelism_base import Parallelism
from equivcheck.system.choice import Choice


class Exchange(Choice):
    """How what is computed of some positions looks at those of other ranks."""

    GATHER = "gather"
    """Keys and values of all positions are gathered on every rank."""
    ULYSSES = "ulysses"
    """Heads are shared out instead, all positions of each, and what they find is exchanged back; a rank may have none."""
    RING = "ring"
    """Keys and values go round all ranks, which put their softmax together block by block."""


class Balance(Choice):
    """Which positions a rank has, of the parts that `torch.chunk` makes of a sequence; the last of them may be empty."""

    CONTIGUOUS = "contiguous"
    """Of as many parts as ranks, one after the other."""
    HEAD_TAIL = "head_tail"
    """Of twice as many, one from the front and one from the back, so that a causal mask leaves all ranks as much to do."""


@noun
class ContextParallel(Parallelism):
    """Positions of sequences cut over the ranks of an axis, by collectives on plain tensors that are written here.

    Each rank has all parameters. A loss is of a rank's own positions, and gradients are summed over ranks, one parameter after
    the other, when the last backward of a step is through.
    """

    tag: ClassVar[str] = "context_parallel"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((CP,),)
    cuts_positions: ClassVar[bool] = True
    exchange: Exchange = Exchange.GATHER
    """How positions look at those of other ranks."""
    balance: Balance = Balance.CONTIGUOUS
    """Which positions a rank has."""
