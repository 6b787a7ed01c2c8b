"""What a campaign, the bridge to its cluster and the nodes of that say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from equivcheck.campaign.crew import Node
from equivcheck.campaign.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """To the bridge: what it is to connect to."""

    address: str
    """``auto``, or host and port of the cluster's head."""
    num_workers: int | None
    """Worker processes on each node; None for one per core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """To a node: start a worker process."""

    plan: Plan
    """What it is to do."""
    place: tuple[int, int]
    """Which worker it is, unlike any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """To a node: say something to one of its workers."""

    place: tuple[int, int]
    """Which."""
    message: Any
    """What."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """To a node: kill one of its workers."""

    place: tuple[int, int]
    """Which."""


Order = Start | Tell | Remove


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """To the bridge: an order for a node."""

    node: str
    """Which."""
    order: Order
    """What."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """From the bridge: the cluster has answered, and its nodes are being asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """From the bridge: everything is ready for workers."""

    nodes: tuple[Node, ...]
    """All of the cluster that have cores; those that cannot take part count as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCluster:
    """From the bridge: its last word, as there is nothing to connect to."""

    why: str
    """In a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """From a node: what one of its workers says."""

    place: tuple[int, int]
    """Which."""
    message: Any
    """What; `Ended` and `Lost` are the last of it."""
