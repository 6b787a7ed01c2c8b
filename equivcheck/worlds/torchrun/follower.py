"""A process of a torchrun world other than rank 0. It runs rank 0's programs and reports progress."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any, TypeVar

from equivcheck.errors import EquivCheckError
from equivcheck.worlds.torchrun.links import LOST, Link, send_message
from equivcheck.worlds.torchrun.place import Place
from equivcheck.worlds.torchrun.rank_thread import RankThread

T = TypeVar("T")


class Follower:
    """Process of a rank other than 0 in a torchrun world. It runs the programs sent by rank 0."""

    def __init__(self, place: Place, leader: Link, thread: RankThread) -> None:
        self.place, self.thread = place, thread
        self._leader = leader
        self._tick = 0.0
        self.is_usable = True
        """Whether another run is possible."""

    def do(self, work: Callable[[], T]) -> T:  # noqa: ARG002 - rank 0 does it
        """Run programs from rank 0 until rank 0's `work` has finished. Then return its result or raise its exception.

        Raises `EquivCheckError` if the connection to rank 0 is lost.
        """
        while True:
            found = wait([self._leader, self.thread.answers], self._tick if self.thread.is_busy else None)
            if self.thread.answers in found:
                send_message(self._leader, "answer", self.thread.receive())
            if self._leader in found:
                try:
                    verb, payload = self._leader.recv()
                except LOST as error:
                    raise EquivCheckError(
                        f"world torchrun: rank {self.place.rank} has lost its connection to rank 0, which may have ended"
                    ) from error
                if verb == "end":
                    return self._outcome(*payload)  # type: ignore[no-any-return]
                self._obey(verb, payload)
            if self.thread.is_busy:
                send_message(self._leader, "cpu", self.thread.cpu_seconds())

    def close(self) -> None:
        """Close the connection to rank 0."""
        self._leader.close()

    def _obey(self, verb: str, payload: Any) -> None:
        if verb == "run":
            request, self._tick = payload
            self.thread.start(request)
        elif verb == "report":
            send_message(self._leader, "report", self.thread.report())

    def _outcome(self, value: Any, error: BaseException | None, is_usable: bool) -> Any:
        self.is_usable = is_usable
        if error is not None:
            raise error
        return value
