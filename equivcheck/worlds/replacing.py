"""Attributes of torch, replaced while ranks run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Place = tuple[Any, str, Callable[[Any], Any]]
"""An owner, the name of its attribute, and what makes the stand-in of the original: once for each, as runs come often."""


@contextlib.contextmanager
def replaced(places: Sequence[Place]) -> Iterator[None]:
    """While entered, the stand-ins are in place."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for owner, name, make in places:
        setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
