"""Ranks as real processes that talk over gloo, kept alive between runs."""

from equivcheck.worlds.gloo.world import GlooRanks

__all__ = ["GlooRanks"]
