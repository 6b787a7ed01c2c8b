"""What takes no time to warm up."""

from __future__ import annotations


def warm_up() -> None:
    """Nothing is needed."""
