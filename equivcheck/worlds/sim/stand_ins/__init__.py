"""Replacements for parts of torch that do not work with threads as ranks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from equivcheck.worlds.replacing import replace_attributes
from equivcheck.worlds.sim.stand_ins import compiling, futures, out_collectives, profiling, refused

_PLACES = (*profiling.PLACES, *futures.PLACES, *out_collectives.PLACES)


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Inside this context, rank threads use replacements for some functions of torch.

    Other threads still use torch's functions.
    """
    with replace_attributes((compiling.place(), *_PLACES, *refused.places(len(sys.modules)))):
        try:
            yield
        finally:
            compiling.undo()
