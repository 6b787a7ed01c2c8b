"""Workers on the nodes of a cluster, as a campaign's supervisor sees them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from equivcheck.campaign.cluster.orders import Connected, Joined, NoCluster, Order, Ordered, Remove, Said, Start, Tell
from equivcheck.campaign.crew import Node
from equivcheck.campaign.messages import Lost, NodeLost
from equivcheck.campaign.plan import Plan
from equivcheck.errors import EquivCheckError
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.worlds.workers.link import Stop
from equivcheck.worlds.workers.process import Ended, WorkerProcess

CONNECT_SECONDS = 300.0
"""Limit for a cluster to answer, and for Ray to be imported on a busy machine; where nobody listens is told at once."""
JOIN_SECONDS = 900.0
"""Limit for the nodes of one that has answered: more than the limits for all that each of them is asked."""
_TICK = 0.2
"""Seconds that the supervisor waits for messages."""
_END_SECONDS = 10.0
"""Limit for the nodes to end what they have started."""


class ClusterFailed(EquivCheckError):
    """There is no cluster to be used."""


@dataclass(slots=True, kw_only=True, eq=False)
class RemoteWorker:
    """A worker process of a node; see `Worker`."""

    bridge: WorkerProcess
    """The way to it."""
    node: str
    """Where it is."""
    place: tuple[int, int]
    """Its number, and how many processes it has had before."""
    suspect: CaseVerdict | None
    """What it is to check again, alone; None if it draws."""
    done: bool = False
    """Whether it has said its last word."""

    def send(self, message: object) -> None:
        """Say something to it."""
        self.order(Tell(place=self.place, message=message))

    def order(self, order: Order) -> None:
        """Say something about it to its node."""
        self.bridge.send(Ordered(node=self.node, order=order))


class ClusterCrew:
    """Workers on the nodes that a bridge reaches; see `Crew`. Raises `ClusterFailed` where it reaches none."""

    def __init__(self, bridge: WorkerProcess, address: str) -> None:
        self._bridge = bridge
        self.workers: list[RemoteWorker] = []
        try:
            self.nodes = _joined(bridge, address)
        except BaseException:
            bridge.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End all that the nodes have started; more than once does no harm."""
        self._bridge.send(Stop())
        self._bridge.end_within(_END_SECONDS)
        self._bridge.close()

    @property
    def num_workers(self) -> int:
        """Worker processes that all nodes together have room for."""
        return sum(node.num_workers for node in self.nodes if not node.lost)

    @property
    def has_room(self) -> bool:
        """Whether one more would find a core."""
        return any(self._room_of(node) > 0 for node in self.nodes if not node.lost)

    def start(self, plan: Plan, place: tuple[int, int], suspect: CaseVerdict | None = None) -> None:
        """Start one more where the most room is."""
        node = max((node for node in self.nodes if not node.lost), key=self._room_of)
        worker = RemoteWorker(bridge=self._bridge, node=node.name, place=place, suspect=suspect)
        self.workers.append(worker)
        worker.order(Start(plan=plan, place=place))

    def messages(self) -> Iterator[tuple[RemoteWorker, Any]]:
        """See `Crew`."""
        message: Any = None
        wait = _TICK
        while not isinstance(message, Ended) and self._bridge.poll(wait):
            message, wait = self._bridge.receive(), 0.0
            yield from self._told(message)

    def remove(self, worker: RemoteWorker) -> None:
        """Have one killed; what it has said before and is still to come is not heard."""
        worker.order(Remove(place=worker.place))
        self.workers.remove(worker)

    def _told(self, message: tuple[Said, ...] | NodeLost | Ended) -> Iterator[tuple[RemoteWorker, Any]]:
        if isinstance(message, NodeLost):
            yield from self._lost(message)
        elif isinstance(message, Ended):
            why = _last_line(self._bridge, "the connection to the cluster has ended")
            for node in self.nodes:
                if not node.lost:
                    yield from self._lost(NodeLost(name=node.name, why=why))
        else:
            for said in message:
                yield from self._said(said)

    def _said(self, said: Said) -> Iterator[tuple[RemoteWorker, Any]]:
        for worker in [worker for worker in self.workers if worker.place == said.place]:
            if isinstance(said.message, Ended | Lost):
                self.workers.remove(worker)
            yield worker, said.message

    def _lost(self, lost: NodeLost) -> Iterator[tuple[RemoteWorker, NodeLost]]:
        """The end of all workers of a node."""
        for node in self.nodes:
            if node.name == lost.name:
                node.lost = f"lost: {lost.why}"
        gone = [worker for worker in self.workers if worker.node == lost.name]
        self.workers = [worker for worker in self.workers if worker not in gone]
        yield from ((worker, lost) for worker in gone)

    def _room_of(self, node: Node) -> int:
        return node.num_workers - sum(worker.node == node.name for worker in self.workers)


def _joined(bridge: WorkerProcess, address: str) -> tuple[Node, ...]:
    """The nodes, once those that take part are ready."""
    until = time.monotonic() + CONNECT_SECONDS
    while bridge.poll(max(0.0, until - time.monotonic())):
        message = bridge.receive()
        if isinstance(message, Joined):
            return message.nodes
        if isinstance(message, NoCluster):
            raise ClusterFailed(message.why)
        if isinstance(message, Ended):
            raise ClusterFailed(f"no cluster at {address} can be used: {_last_line(bridge, bridge.how_it_ended())}")
        assert isinstance(message, Connected), message
        until = time.monotonic() + JOIN_SECONDS
    raise ClusterFailed(f"no cluster answers at {address} within {CONNECT_SECONDS:.0f} s")


def _last_line(bridge: WorkerProcess, otherwise: str) -> str:
    """Of what a process printed."""
    lines = bridge.printed().strip().splitlines()
    return lines[-1] if lines else otherwise
