"""Bridge process between a campaign and its cluster.

It keeps the cluster software's output, signals and crashes away from the campaign.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Protocol

from equivcheck.campaign.cluster.orders import Order, WorkerMessage
from equivcheck.campaign.messages import NodeLost
from equivcheck.worlds.workers.link import Link

Answer = tuple[WorkerMessage, ...] | NodeLost
"""Result from one exchange with a node."""


class Cluster(Protocol):
    """Nodes, each with one exchange at a time."""

    @property
    def names(self) -> Sequence[str]:
        """Names for the nodes in use."""

    def begin(self, name: str, orders: Sequence[Order]) -> None:
        """Begin an exchange: send orders to a node."""

    def answers(self) -> Iterator[tuple[str, Answer]]:
        """Yield the exchanges that end within a moment. Do not address a node again after its `NodeLost`."""


def relay(link: Link, cluster: Cluster) -> None:
    """Relay orders and messages until the campaign stops or no node is left."""
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
