"""Worker processes on cluster nodes, with the same interface as worker processes on this machine."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any, Self

from equivcheck.campaign.cluster.bridge import (
    Connected,
    Joined,
    NoCluster,
    Order,
    Ordered,
    Remove,
    Start,
    Tell,
    Wanted,
    WorkerMessage,
)
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.workers.crew import Node
from equivcheck.campaign.workers.messages import Lost, NodeLost
from equivcheck.errors import EquivCheckError, UsageError
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.worlds.workers.link import Stop
from equivcheck.worlds.workers.process import Ended, WorkerProcess

_HOST_AND_PORT = re.compile(r"(?!.*//)\S+:[0-9]{1,5}")
CONNECT_SECONDS = 300.0
"""Seconds in which the cluster must answer, including the import of Ray on a busy machine. A refused connection fails at once."""
JOIN_SECONDS = 900.0
"""Seconds in which the nodes must join after the cluster has answered. Each limit for a single node is shorter."""
_TICK = 0.2
"""Seconds that the supervisor waits for messages."""
_END_SECONDS = 10.0
"""Seconds in which the nodes must end their processes."""


class ClusterFailed(EquivCheckError):
    """No cluster answers, or none of its nodes can be used. The text says why."""


@dataclass(slots=True, kw_only=True, eq=False)
class RemoteWorker:
    """A worker process on a cluster node, with the interface of `Worker`."""

    bridge: WorkerProcess
    """Bridge process, through which messages are sent to the worker."""
    node: str
    """Name of the node."""
    place: tuple[int, int]
    """Worker number, and how many processes this worker has had before."""
    suspect: CaseVerdict | None
    """A failed verdict to check again in this process; None if the worker draws cases."""
    done: bool = False
    """Whether the worker has sent its last message."""

    def send(self, message: object) -> None:
        """Send a message to the worker, through the bridge process and the node."""
        self.order(Tell(place=self.place, message=message))

    def order(self, order: Order) -> None:
        """Send an order about this worker to its node, such as to kill it."""
        self.bridge.send(Ordered(node=self.node, order=order))


class ClusterWorkers:
    """A campaign's workers on cluster nodes, with the interface of `CampaignWorkers`.

    Raises `ClusterFailed` if no node can be used.
    """

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
        """End all processes on the nodes. A second call does nothing."""
        self._bridge.send(Stop())
        self._bridge.end_within(_END_SECONDS)
        self._bridge.close()

    @property
    def num_workers(self) -> int:
        """How many worker processes all nodes together can run."""
        return sum(node.num_workers for node in self.nodes if not node.lost)

    @property
    def has_room(self) -> bool:
        """Whether a core is free for one more worker."""
        return any(self._room_of(node) > 0 for node in self.nodes if not node.lost)

    def start(self, plan: Plan, place: tuple[int, int], suspect: CaseVerdict | None = None) -> None:
        """Start a worker on the node with the most free cores.

        `place` has the worker's number, and how many processes this worker had before. `suspect` is a verdict on a case to check
        again; None if the worker draws cases.
        """
        node = max((node for node in self.nodes if not node.lost), key=self._room_of)
        worker = RemoteWorker(bridge=self._bridge, node=node.name, place=place, suspect=suspect)
        self.workers.append(worker)
        worker.order(Start(plan=plan, place=place))

    def messages(self) -> Iterator[tuple[RemoteWorker, Any]]:
        """Wait briefly, and yield each new message with the worker that sent it."""
        message: Any = None
        wait = _TICK
        while not isinstance(message, Ended) and self._bridge.poll(wait):
            message, wait = self._bridge.receive(), 0.0
            yield from self._split(message)

    def remove(self, worker: RemoteWorker) -> None:
        """Kill a worker, and ignore its messages from now on."""
        worker.order(Remove(place=worker.place))
        self.workers.remove(worker)

    def _split(self, message: tuple[WorkerMessage, ...] | NodeLost | Ended) -> Iterator[tuple[RemoteWorker, Any]]:
        if isinstance(message, NodeLost):
            yield from self._lost(message)
        elif isinstance(message, Ended):
            why = _last_line(self._bridge, "the connection to the cluster has ended")
            for node in self.nodes:
                if not node.lost:
                    yield from self._lost(NodeLost(name=node.name, why=why))
        else:
            for one in message:
                yield from self._of_worker(one)

    def _of_worker(self, one: WorkerMessage) -> Iterator[tuple[RemoteWorker, Any]]:
        for worker in [worker for worker in self.workers if worker.place == one.place]:
            if isinstance(one.message, Ended | Lost):
                self.workers.remove(worker)
            yield worker, one.message

    def _lost(self, lost: NodeLost) -> Iterator[tuple[RemoteWorker, NodeLost]]:
        for node in self.nodes:
            if node.name == lost.name:
                node.lost = f"lost: {lost.why}"
        gone = [worker for worker in self.workers if worker.node == lost.name]
        self.workers = [worker for worker in self.workers if worker not in gone]
        yield from ((worker, lost) for worker in gone)

    def _room_of(self, node: Node) -> int:
        return node.num_workers - sum(worker.node == node.name for worker in self.workers)


def _joined(bridge: WorkerProcess, address: str) -> tuple[Node, ...]:
    # The limit is longer once the cluster has answered, because its nodes start interpreters.
    until = time.monotonic() + CONNECT_SECONDS
    while (left := until - time.monotonic()) > 0:
        if not bridge.poll(left):  # also before the limit: when the bridge has been forked
            continue
        message = bridge.receive()
        if isinstance(message, Joined):
            return message.nodes
        if isinstance(message, NoCluster):
            raise ClusterFailed(message.why)
        if isinstance(message, Ended):
            raise ClusterFailed(f"the cluster at {address} cannot be used: {_last_line(bridge, bridge.how_it_ended())}")
        assert isinstance(message, Connected), message
        until = time.monotonic() + JOIN_SECONDS
    raise ClusterFailed(f"the Ray cluster at {address} did not answer in time. See its state with `ray status`")


def _last_line(bridge: WorkerProcess, otherwise: str) -> str:
    lines = bridge.printed().strip().splitlines()
    return lines[-1] if lines else otherwise


def connect_ray(address: str, num_workers: int | None = None) -> ClusterWorkers:
    """Connect to a Ray cluster. Each node runs `num_workers` workers, or one on each core if this is None.

    Raises `UsageError` for an invalid address or if Ray is not installed, and `ClusterFailed` if no cluster can be used.
    """
    if address != "auto" and not _HOST_AND_PORT.fullmatch(address):
        raise UsageError(f"Ray address {address[:80]!r} is not valid: no port. Expected auto, or HOST:PORT of the head node")
    try:
        version("ray")
    except PackageNotFoundError:
        raise UsageError('--ray is not valid: ray is not installed. Expected: pip install "equivcheck[ray]"') from None
    wanted = Wanted(address=address, num_workers=num_workers)
    return ClusterWorkers(WorkerProcess("equivcheck.campaign.cluster.on_ray", wanted), address)
