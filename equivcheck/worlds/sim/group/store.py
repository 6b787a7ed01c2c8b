"""Key-value store of a simulated group. While a rank waits for a key, other ranks run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from equivcheck.worlds.sim.exchange import BEFORE, RawCall
from equivcheck.worlds.sim.torch_private import Store

_READS = ("check", "num_keys", "list_keys", "has_extended_api", "queue_len", "set_timeout")
_WRITES = ("set", "add", "append", "compare_set", "multi_set", "delete_key", "queue_push")


class _Board(Protocol):
    """State of a world that a store uses."""

    @property
    def scheduler(self) -> Any:
        """Scheduler of the world's ranks."""

    @property
    def store_waiters(self) -> list[int]:
        """Ranks that wait until another rank writes to a store."""


class PatientStore(Store):  # type: ignore[misc]  # torch says nothing of its type
    """Key-value store for a rank thread. While the rank waits for a key, other ranks run.

    torch's own store would block the only running thread, so no other rank could set the key.
    """

    def __init__(self, store: Any, board: _Board, rank: int) -> None:
        super().__init__()
        self.store = store
        self._board = board
        self._rank = rank

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key])
        value: bytes = self.store.get(key)
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several keys and return their values."""
        return [self.get(key) for key in keys]

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:  # noqa: ARG002
        """Wait until all keys are set. `timeout` is ignored, because the scheduler notices if no rank can set them."""
        while not self.store.check(list(keys)):
            self._board.store_waiters.append(self._rank)
            self._board.scheduler.block(self._rank, _pending(keys))

    def clone(self) -> PatientStore:
        """Return another object for the same store."""
        return PatientStore(self.store, self._board, self._rank)

    @property
    def timeout(self) -> Any:
        """The timeout configured on torch's store."""
        return self.store.timeout


def _pending(keys: Sequence[str]) -> RawCall:
    return (f"store.get of {', '.join(keys)}", (), 0, (), None, None, BEFORE)


def _passed_on(name: str, wakes: bool) -> Callable[..., Any]:
    def method(self: PatientStore, *arguments: Any, **options: Any) -> Any:
        found = getattr(self.store, name)(*arguments, **options)
        if wakes:
            waiters, self._board.store_waiters[:] = list(self._board.store_waiters), []
            for rank in waiters:
                self._board.scheduler.wake(rank)
        return found

    method.__name__ = name
    method.__doc__ = f"``{name}`` of the store."
    return method


for _name in (*_READS, *_WRITES):
    if hasattr(Store, _name):
        setattr(PatientStore, _name, _passed_on(_name, _name in _WRITES))
