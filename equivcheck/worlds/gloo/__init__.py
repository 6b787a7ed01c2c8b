"""Ranks as real processes that talk over gloo, kept alive between runs."""
