"""The error for a rank that uses a mesh or process group of another rank.

Ranks are threads, so a module global, a class attribute or a cached function holds one object for all of them. In a world of
processes every rank would find its own mesh there.
"""

from __future__ import annotations

from equivcheck.errors import EquivCheckError

SHARED = "ranks in world sim are threads and share module globals, class attributes and cached functions"
"""Why a rank can find another rank's object."""


class UsedByOtherRank(EquivCheckError):
    """A rank used a device mesh or process group that belongs to another rank."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            f"{kind}: use by another rank is not supported, because {SHARED}. "
            f'Use world="gloo", or let each rank keep its own {kind}.'
        )
