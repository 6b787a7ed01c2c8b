"""Which worker shrinks which finding: each is shrunk once, and again by another where its machine was lost before it was done."""

from __future__ import annotations

from collections import deque

Place = tuple[int, int]
"""A worker's number, and how many processes it has had before."""


class Shrinkers:
    """The worker of each fingerprint that is being shrunk, or was."""

    def __init__(self) -> None:
        self._at: dict[str, Place] = {}
        self._left = deque[str]()

    def claim(self, mark: str, place: Place) -> bool:
        """Have a worker shrink a finding, unless another does or did; whether it is to."""
        return self._at.setdefault(mark, place) == place

    def of(self, place: Place) -> tuple[str, ...]:
        """The fingerprints that a worker shrinks, or has shrunk."""
        return tuple(mark for mark, other in self._at.items() if other == place)

    def leave(self, mark: str) -> None:
        """Have another worker shrink a finding: the first that finds it, or that takes what is left."""
        del self._at[mark]
        self._left.append(mark)

    def take(self, place: Place) -> str | None:
        """Have a worker shrink what was left the longest and is claimed by nobody since; its fingerprint, or None."""
        while self._left:
            if self.claim(mark := self._left.popleft(), place):
                return mark
        return None
