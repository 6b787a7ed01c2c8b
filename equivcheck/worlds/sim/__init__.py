"""The simulated world: every rank is a thread of this process, and exactly one runs at a time."""

from __future__ import annotations

from equivcheck.worlds.sim.ranks import SimRanks

__all__ = ["SimRanks"]
