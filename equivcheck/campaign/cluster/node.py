"""One node of a cluster: it starts worker processes as a campaign on that machine would, and relays what they say."""

from __future__ import annotations

import time
from collections.abc import Sequence

from equivcheck.campaign.cluster.orders import Order, Remove, Said, Start, Tell
from equivcheck.campaign.crew import LocalCrew
from equivcheck.campaign.messages import Progress
from equivcheck.campaign.process import CheckingProcess

_ANSWER_SECONDS = 0.2
"""How long counts of checks may wait for more; all else is told at once."""


class NodeServer:
    """Its workers end with it, and with its process."""

    def __init__(self) -> None:
        self._crew = LocalCrew()

    def exchange(self, orders: Sequence[Order]) -> tuple[Said, ...]:
        """Obey orders, and tell what workers say from then on."""
        for order in orders:
            self._obey(order)
        said: list[Said] = []
        until = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < until and all(isinstance(each.message, Progress) for each in said):
            said += [Said(place=worker.place, message=message) for worker, message in self._crew.messages()]
        return tuple(said)

    def close(self) -> None:
        """Kill all workers, and what they are forked from."""
        for worker in list(self._crew.workers):
            self._crew.remove(worker)
        with self._crew:
            pass

    def _obey(self, order: Order) -> None:
        if isinstance(order, Start):
            self._crew.start(order.plan, order.place)
            return
        worker = self._worker(order.place)
        if worker is not None and isinstance(order, Tell):
            worker.send(order.message)
        elif worker is not None and isinstance(order, Remove):
            self._crew.remove(worker)

    def _worker(self, place: tuple[int, int]) -> CheckingProcess | None:
        """None if it has come to its end before it was spoken to."""
        return next((worker for worker in self._crew.workers if worker.place == place), None)
