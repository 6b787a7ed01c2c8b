"""What stands in, while ranks run, for parts of torch that threads as ranks cannot use as they are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from equivcheck.worlds.replacing import replaced
from equivcheck.worlds.sim.stand_ins import compiling, futures, out_collectives, profiling, refused

_PLACES = (*profiling.PLACES, *futures.PLACES, *out_collectives.PLACES)


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """While entered, they are in place for rank threads; other threads find what is torch's."""
    with replaced((compiling.place(), *_PLACES, *refused.places(len(sys.modules)))):
        try:
            yield
        finally:
            compiling.undo()
