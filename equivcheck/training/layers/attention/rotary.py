"""Base for rotary position embeddings."""

ROTARY_BASE = 100.0
"""Ratio between the first and last rotation frequency in a head. It is small because sequences are short."""
