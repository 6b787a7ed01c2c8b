"""Assignment of findings to the workers that shrink them. If a machine is lost, another worker takes over."""

from __future__ import annotations

from collections import deque

Place = tuple[int, int]
"""Worker number, and how many processes this worker has had before."""


class Shrinkers:
    """Remembers the worker for each fingerprint."""

    def __init__(self) -> None:
        self._at: dict[str, Place] = {}
        self._left = deque[str]()

    def claim(self, mark: str, place: Place) -> bool:
        """Assign a fingerprint to a worker unless another has it. Returns whether this worker has it."""
        return self._at.setdefault(mark, place) == place

    def of(self, place: Place) -> tuple[str, ...]:
        """Fingerprints that a worker shrinks or shrank."""
        return tuple(mark for mark, other in self._at.items() if other == place)

    def leave(self, mark: str) -> None:
        """Free a fingerprint for the next worker that finds it or calls `take`."""
        del self._at[mark]
        self._left.append(mark)

    def take(self, place: Place) -> str | None:
        """Assign the fingerprint that has been free the longest to a worker; None if there is none."""
        while self._left:
            if self.claim(mark := self._left.popleft(), place):
                return mark
        return None
