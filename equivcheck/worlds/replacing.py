"""Replaces torch attributes while ranks run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Place = tuple[Any, str, Callable[[Any], Any]]
"""Owner, attribute name, and a function from the original to its replacement.

The function should cache, because runs are frequent.
"""


@contextlib.contextmanager
def replace_attributes(places: Sequence[Place]) -> Iterator[None]:
    """Inside this context, replace attributes in modules or classes.

    Each place has the owner, the attribute's name, and a function that gets the old value and returns the new one.
    """
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for owner, name, make in places:
        setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
