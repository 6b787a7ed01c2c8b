"""A module with an instant warm-up."""

from __future__ import annotations


def warm_up() -> None:
    """Do nothing."""
