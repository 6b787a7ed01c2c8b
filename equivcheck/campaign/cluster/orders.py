"""Messages between a campaign, the bridge to its cluster, and the nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from equivcheck.campaign.crew import Node
from equivcheck.campaign.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Sent to the bridge: connect to this cluster."""

    address: str
    """``auto``, or host and port of the cluster's head."""
    num_workers: int | None
    """Worker processes per node; None for one per core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Sent to a node: start a worker process."""

    plan: Plan
    """Plan for the worker."""
    place: tuple[int, int]
    """Worker number and process number, unique in the campaign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Sent to a node: pass this message to a worker."""

    place: tuple[int, int]
    """Worker number and process number."""
    message: Any
    """Message for the worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Sent to a node: kill a worker."""

    place: tuple[int, int]
    """Worker number and process number."""


Order = Start | Tell | Remove


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """Sent to the bridge: an order for a node."""

    node: str
    """Addressed node."""
    order: Order
    """Order for the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """Sent by the bridge: the cluster has answered, and its nodes are being asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Sent by the bridge: the nodes are ready."""

    nodes: tuple[Node, ...]
    """All nodes with cores. Nodes that cannot take part count as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCluster:
    """Sent by the bridge as its last message: there is no cluster."""

    why: str
    """Reason in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMessage:
    """Sent by a node: a message from one worker."""

    place: tuple[int, int]
    """Worker number and process number."""
    message: Any
    """Message from the worker; `Ended` and `Lost` are the last."""
