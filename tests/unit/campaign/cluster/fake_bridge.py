"""A bridge to nodes that are all in its own process: a cluster without any software for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from equivcheck.campaign.cluster.bridge import Answer, Connected, Joined, NoCluster, Order, relay
from equivcheck.campaign.cluster.node import NodeServer
from equivcheck.campaign.workers.crew import Node
from equivcheck.campaign.workers.messages import NodeLost, Progress
from equivcheck.worlds.workers.link import SupervisorLink


def main(fd: int) -> None:
    """Its task has the nodes, and after how many checks each is lost; where it has none, there is no cluster."""
    link = SupervisorLink(fd)
    losses: Mapping[str, float] = link.task
    if not losses:
        link.send(NoCluster(why="nobody is there"))
        return
    link.send(Connected())
    link.send(Joined(nodes=tuple(Node(name=name, num_workers=1) for name in losses)))
    cluster = FakeCluster(losses)
    relay(link, cluster)
    cluster.close()


class FakeCluster:
    """Nodes that exchange in turns."""

    def __init__(self, losses: Mapping[str, float]) -> None:
        self._losses = losses
        self._servers = {name: NodeServer() for name in losses}
        self._orders: dict[str, Sequence[Order]] = {}
        self._checks = Counter[str]()

    @property
    def names(self) -> Sequence[str]:
        """Of all nodes."""
        return tuple(self._servers)

    def begin(self, name: str, orders: Sequence[Order]) -> None:
        """Keep orders for its next turn."""
        self._orders[name] = orders

    def answers(self) -> Iterator[tuple[str, Answer]]:
        """One exchange with each node that is left, and the loss of those that have checked enough."""
        for name, orders in list(self._orders.items()):
            del self._orders[name]
            yield name, self._answer(name, orders)

    def close(self) -> None:
        """End all workers."""
        for server in self._servers.values():
            server.close()

    def _answer(self, name: str, orders: Sequence[Order]) -> Answer:
        if self._checks[name] >= self._losses[name]:
            self._servers[name].close()
            return NodeLost(name=name, why="it was unplugged")
        said = self._servers[name].exchange(orders)
        self._checks[name] += sum(each.message.tally.num_checks for each in said if isinstance(each.message, Progress))
        return said
