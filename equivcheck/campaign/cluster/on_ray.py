"""Runs campaigns on Ray, with one actor on each node with cores. No other module imports Ray."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from equivcheck.campaign.cluster.bridge import Answer, Connected, Joined, NoCluster, Order, Wanted, relay
from equivcheck.campaign.cluster.crew import ClusterFailed
from equivcheck.campaign.cluster.node import NodeServer
from equivcheck.campaign.workers.crew import Node
from equivcheck.campaign.workers.messages import NodeLost
from equivcheck.worlds.workers.link import SupervisorLink

_PROBE_SECONDS = 5.0
"""Seconds in which the cluster's head must accept a connection."""
_NODE_SECONDS = 300.0
"""Seconds in which a node must report its versions, and again for its actor to start.
Each starts an interpreter, maybe on a busy machine."""
_TICK = 0.2
"""Seconds between two checks for the campaign's end."""
_CLOSE_SECONDS = 3.0
"""Seconds in which the nodes must end their workers, before their actors are killed."""


def main(fd: int) -> None:
    """Run the bridge process: connect to Ray, and relay messages for the campaign at the other end of the socket `fd`."""
    link = SupervisorLink(fd)
    try:
        cluster = _connected(link.task, link)
    except ClusterFailed as error:
        link.send(NoCluster(why=str(error)))
        return
    try:
        relay(link, cluster)
    finally:
        cluster.close()
        ray.shutdown()


class RayCluster:
    """A Ray cluster with one actor on each node, with the interface of `Cluster`."""

    def __init__(self, actors: dict[str, Any]) -> None:
        self._actors = actors
        self._running: dict[Any, str] = {}

    @property
    def names(self) -> Sequence[str]:
        """Names of the nodes in use."""
        return tuple(self._actors)

    def begin(self, name: str, orders: Sequence[Order]) -> None:
        """Send orders to the node called `name`. `answers` later yields the node's answer."""
        self._running[self._actors[name].exchange.remote(orders)] = name

    def answers(self) -> Iterator[tuple[str, Answer]]:
        """Wait briefly, and yield the name and the answer of each node whose exchange has ended."""
        first, others = ray.wait(list(self._running), timeout=_TICK)
        more, _ = ray.wait(others, num_returns=len(others), timeout=0) if others else ([], [])
        for ended in (*first, *more):
            name = self._running.pop(ended)
            yield name, self._answer(name, ended)

    def close(self) -> None:
        """End the workers on all nodes, and the actors."""
        with contextlib.suppress(Exception):
            closing = [actor.close.remote() for actor in self._actors.values()]
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS)
        for actor in self._actors.values():
            _kill(actor)

    def _answer(self, name: str, ended: Any) -> Answer:
        try:
            answer: Answer = ray.get(ended)
        except Exception as error:
            # A node counts as lost even if it was unreachable only for a moment, because its messages may be lost.
            _kill(self._actors.pop(name))
            return NodeLost(name=name, why=_in_a_line(error))
        return answer


def _connected(wanted: Wanted, link: SupervisorLink) -> RayCluster:
    _connect(wanted.address)
    link.send(Connected())
    found = [each for each in ray.nodes() if each["Alive"] and each["Resources"].get("CPU", 0) >= 1]
    places = dict(zip(_names(found), found, strict=True))
    nodes = [Node(name=name, num_workers=wanted.num_workers or _num_cores(each)) for name, each in places.items()]
    versions = ray.remote(_versions_function())
    _ask(
        nodes,
        lambda node: versions.options(num_cpus=0, max_retries=0, scheduling_strategy=_on(places[node.name])).remote(),
        _other_versions,
    )
    actors = {node.name: _actor(places[node.name], node.num_workers) for node in nodes if not node.lost}
    _ask(nodes, lambda node: actors[node.name].exchange.remote(()), lambda _: "")
    for node in nodes:
        if node.lost and node.name in actors:
            _kill(actors.pop(node.name))
    if not actors:
        each_one = "; ".join(f"{node.name}: {node.lost}" for node in nodes)
        raise ClusterFailed(f"no node of the Ray cluster at {wanted.address} can be used: {each_one or 'none has a core'}")
    link.send(Joined(nodes=tuple(nodes)))
    return RayCluster(actors)


def _connect(address: str) -> None:
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    try:
        if address != "auto":
            # If nobody listens, Ray would try to connect for minutes.
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_PROBE_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        raise ClusterFailed(f"no Ray cluster can be reached at {address}: {' '.join(str(error).split())}") from error


def _names(found: Sequence[dict[str, Any]]) -> list[str]:
    times = Counter(each["NodeName"] for each in found)
    return [each["NodeName"] + (f"/{each['NodeID'][:8]}" if times[each["NodeName"]] > 1 else "") for each in found]


def _num_cores(found: dict[str, Any]) -> int:
    return int(found["Resources"]["CPU"])


def _on(found: dict[str, Any]) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(found["NodeID"], soft=False)


def _actor(found: dict[str, Any], num_workers: int) -> Any:
    # The actor reserves the cores of its workers. It is not restarted, because its workers would be lost.
    remote: Any = ray.remote(NodeServer)
    num_cpus = min(num_workers, _num_cores(found))
    return remote.options(num_cpus=num_cpus, max_restarts=0, scheduling_strategy=_on(found)).remote()


def _ask(nodes: Sequence[Node], ask: Callable[[Node], Any], objection: Callable[[Any], str]) -> None:
    """Ask each node. A node is left out if it does not answer, or if `objection` returns a text."""
    asked = {ask(node): node for node in nodes if not node.lost}
    if not asked:
        return
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_NODE_SECONDS)
    for reference, node in asked.items():
        why = f"it does not answer within {_NODE_SECONDS:.0f} s; maybe its cores are in use"
        if reference in answered:
            try:
                why = objection(ray.get(reference))
            except Exception as error:
                why = _in_a_line(error)
        if why:
            node.lost, node.num_workers = f"left out: {why}", 0


def _versions_function() -> Callable[[], dict[str, str]]:
    # Ray sends a local function as code, and a node may lack this module.

    def versions() -> dict[str, str]:
        from importlib import import_module
        from importlib.metadata import PackageNotFoundError, version

        found = {"torch": "none", "equivcheck": "none"}
        try:
            found["torch"] = version("torch").partition("+")[0]
            found["equivcheck"] = import_module("equivcheck").__version__
        except (PackageNotFoundError, ImportError):
            pass
        return found

    return versions


def _other_versions(there: dict[str, str]) -> str:
    """Difference in versions, such as ``it has torch 2.12.1, this machine 2.13.0``; empty if all versions are equal."""
    here = _versions_function()()
    other = [f"it has {name} {there[name]}, this machine {here[name]}" for name in here if there[name] != here[name]]
    return " and ".join(other)


def _kill(actor: Any) -> None:
    with contextlib.suppress(Exception):
        ray.kill(actor)


def _in_a_line(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error  # the node's own error, if there is one
    return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"[:300]
