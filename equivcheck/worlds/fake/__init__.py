"""One rank of a world as large as one likes: no peers, no data."""

from __future__ import annotations

from equivcheck.worlds.fake.ranks import FakeRanks

__all__ = ["FakeRanks"]
