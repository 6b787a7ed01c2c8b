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
    """First message to the bridge process: connect to a Ray cluster."""

    address: str
    """``auto``, or ``host:port`` of the cluster's head."""
    num_workers: int | None
    """Worker processes on each node; None for one on each core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Order to a node: start a worker process."""

    plan: Plan
    """The campaign's plan, for the worker."""
    place: tuple[int, int]
    """Worker number and process number, unique in the campaign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Order to a node: pass a message on to one of its workers."""

    place: tuple[int, int]
    """Worker number and process number."""
    message: Any
    """Message for the worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Order to a node: kill one of its workers."""

    place: tuple[int, int]
    """Worker number and process number."""


Order = Start | Tell | Remove


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """Message to the bridge process: pass an order on to a node."""

    node: str
    """Name of the node."""
    order: Order
    """Start a worker, kill a worker, or pass a message on to a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """Message from the bridge process: it is connected to the cluster, and waits until the nodes are ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Message from the bridge process: the nodes are ready to start workers."""

    nodes: tuple[Node, ...]
    """All nodes with cores. If a node cannot take part, it counts as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCluster:
    """Last message from the bridge process if the cluster cannot be used."""

    why: str
    """Reason in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMessage:
    """Message from a node: a message from one of its workers."""

    place: tuple[int, int]
    """Worker number and process number."""
    message: Any
    """Message from the worker; `Ended` and `Lost` are the last."""


Answer = tuple[WorkerMessage, ...] | NodeLost
"""Result from one exchange with a node: messages, or the loss of the node."""


class Cluster(Protocol):
    """Protocol for the nodes of a cluster.

    An exchange sends orders to a node and receives an answer. Each node has at most one exchange at a time.
    """

    @property
    def names(self) -> Sequence[str]:
        """Names of the nodes in use."""

    def begin(self, name: str, orders: Sequence[Order]) -> None:
        """Send orders to the node called `name`. This begins an exchange; `answers` ends it."""

    def answers(self) -> Iterator[tuple[str, Answer]]:
        """Wait briefly, and yield the name and the answer of each node whose exchange has ended.

        If the answer is `NodeLost`, send this node no more orders.
        """


def relay(link: SupervisorLink, cluster: Cluster) -> None:
    """Pass orders from the campaign to the nodes, and messages back, until the campaign stops or all nodes are lost."""
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
