"""A cluster node: it starts worker processes and relays their messages."""

from __future__ import annotations

import time
from collections.abc import Sequence

from equivcheck.campaign.cluster.bridge import Order, Remove, Start, Tell, WorkerMessage
from equivcheck.campaign.workers.crew import LocalWorkers
from equivcheck.campaign.workers.messages import Progress

_ANSWER_SECONDS = 0.2
"""Seconds that progress messages may wait for further messages. Other messages are relayed at once."""


class NodeServer:
    """Starts a campaign's workers on one cluster node, and exchanges messages with them.

    The workers end with this object and with its process.
    """

    def __init__(self) -> None:
        self._crew = LocalWorkers()

    def exchange(self, orders: Sequence[Order]) -> tuple[WorkerMessage, ...]:
        """Carry out the orders, and return the workers' messages since the last call."""
        for order in orders:
            self._obey(order)
        messages: list[WorkerMessage] = []
        until = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < until and all(isinstance(each.message, Progress) for each in messages):
            messages += [WorkerMessage(place=worker.place, message=message) for worker, message in self._crew.messages()]
        return tuple(messages)

    def close(self) -> None:
        """Kill all workers on this node, and the process from which they are forked."""
        for worker in list(self._crew.workers):
            self._crew.remove(worker)
        with self._crew:
            pass

    def _obey(self, order: Order) -> None:
        if isinstance(order, Start):
            self._crew.start(order.plan, order.place)
            return
        # None if the worker ended before the order arrived
        worker = next((worker for worker in self._crew.workers if worker.place == order.place), None)
        if worker is not None and isinstance(order, Tell):
            worker.send(order.message)
        elif worker is not None and isinstance(order, Remove):
            self._crew.remove(worker)
