"""Context parallelism: each rank holds a shard of the positions in every sequence."""

from __future__ import annotations

from typing import ClassVar

from equivcheck.scenario.mesh import CP
from equivcheck.scenario.noun import frozen_dataclass, option
from equivcheck.scenario.parallelisms.base import Parallelism, StagePosition
from equivcheck.system.choice import PrintableEnum


class AttentionExchange(PrintableEnum):
    """How a rank's queries attend to other ranks' keys and values."""

    GATHER = "gather"
    """All-gather keys and values, so that every rank holds all positions."""
    ULYSSES = "ulysses"
    """Exchange position shards for head shards by an all-to-all, attend over full sequences, and exchange back. A rank may get no
    head.
    """
    RING = "ring"
    """Pass keys and values around a ring and merge the softmax block by block."""


class LoadBalancer(PrintableEnum):
    """How positions are assigned to ranks. A sequence is split like `torch.chunk`; the last chunk may be empty."""

    CONTIGUOUS = "contiguous"
    """One chunk per rank, in order."""
    HEAD_TAIL = "head_tail"
    """Two chunks per rank, one from the front and one from the back, which balances the work under a causal mask."""


@frozen_dataclass
class ContextParallel(Parallelism):
    """Shard positions over the ranks of an axis, with explicit collectives on plain tensors.

    Each rank holds all parameters and computes the loss for its own positions. After the last backward in a step, gradients are
    summed over ranks, one parameter at a time.
    """

    tag: ClassVar[str] = "context_parallel"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((CP,),)
    stage_position: ClassVar[StagePosition | None] = StagePosition.INSIDE
    shards_positions: ClassVar[bool] = True
    exchange: AttentionExchange = AttentionExchange.GATHER
    """How a rank's queries attend to other ranks' keys and values."""
    balance: LoadBalancer = option(default=LoadBalancer.CONTIGUOUS, limits=False)
    """How positions are assigned to ranks."""
