"""The process between a campaign and its cluster: what the software of a cluster prints, catches or aborts stays in here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Protocol

from equivcheck.campaign.cluster.orders import Order, Said
from equivcheck.campaign.messages import NodeLost
from equivcheck.worlds.workers.link import Link

Answer = tuple[Said, ...] | NodeLost
"""What came of an exchange with a node."""


class Cluster(Protocol):
    """Nodes, each of which serves one exchange after the other."""

    @property
    def names(self) -> Sequence[str]:
        """Of the nodes that take part."""

    def begin(self, name: str, orders: Sequence[Order]) -> None:
        """Begin an exchange with a node: hand it orders."""

    def answers(self) -> Iterator[tuple[str, Answer]]:
        """Of the exchanges that are over within a moment; a lost node is not spoken to again."""


def relay(link: Link, cluster: Cluster) -> None:
    """Hand orders of a campaign to nodes, and what they say to the campaign, until it says stop or no node is left."""
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
