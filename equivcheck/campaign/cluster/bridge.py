"""Messages between a campaign, the bridge process to its cluster, and the nodes.

The bridge keeps the cluster software's output, signals and crashes away from the campaign.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from equivcheck.campaign.plan import Plan
from equivcheck.campaign.workers.crew import Node
from equivcheck.campaign.workers.messages import NodeLost
from equivcheck.worlds.workers.link import SupervisorLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """First message to the bridge: connect to this cluster."""

    address: str
    """``auto``, or host and port of the cluster's head."""
    num_workers: int | None
    """Worker processes per node; None for one per core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Message to a node: start a worker process."""

    plan: Plan
    """Plan for the worker."""
    place: tuple[int, int]
    """Worker number and process number, unique in the campaign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Message to a node: pass a message on to a worker."""

    place: tuple[int, int]
    """Worker number and process number."""
    message: Any
    """Message for the worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Message to a node: kill a worker."""

    place: tuple[int, int]
    """Worker number and process number."""


Order = Start | Tell | Remove


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """Message to the bridge: an order for a node."""

    node: str
    """Addressed node."""
    order: Order
    """Order for the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """Message from the bridge: the cluster has answered, and its nodes are being asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Message from the bridge: the nodes are ready."""

    nodes: tuple[Node, ...]
    """All nodes with cores. Nodes that cannot take part count as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCluster:
    """Last message from the bridge if the cluster cannot be used."""

    why: str
    """Reason in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMessage:
    """Message from a node: a message from one worker."""

    place: tuple[int, int]
    """Worker number and process number."""
    message: Any
    """Message from the worker; `Ended` and `Lost` are the last."""


Answer = tuple[WorkerMessage, ...] | NodeLost
"""Result from one exchange with a node: messages, or the loss of the node."""


class Cluster(Protocol):
    """Machines in a cluster. Each node has at most one exchange of messages at a time."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the nodes in use."""

    def begin(self, name: str, orders: Sequence[Order]) -> None:
        """Begin an exchange of messages: send orders to a node."""

    def answers(self) -> Iterator[tuple[str, Answer]]:
        """Wait briefly, and yield the exchanges that end in this time. After its `NodeLost`, a node must get no more orders."""


def relay(link: SupervisorLink, cluster: Cluster) -> None:
    """Pass on orders and messages until the campaign stops or all nodes are lost."""
    waiting = defaultdict[str, list[Order]](list)
    left = set(cluster.names)
    for name in left:
        cluster.begin(name, ())
    while left and not link.stopped.is_set():
        for name, answer in cluster.answers():
            if answer:
                link.send(answer)
            for ordered in link.pending():
                waiting[ordered.node].append(ordered.order)
            if isinstance(answer, NodeLost):
                left.remove(name)
            else:
                cluster.begin(name, waiting.pop(name, ()))
