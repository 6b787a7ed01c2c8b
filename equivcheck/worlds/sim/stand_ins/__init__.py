"""What stands in, while ranks run, for parts of torch that threads as ranks cannot use as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from equivcheck.worlds.sim.stand_ins.compiling import no_compiling
from equivcheck.worlds.sim.stand_ins.futures import futures_of_ranks
from equivcheck.worlds.sim.stand_ins.out_collectives import out_collectives
from equivcheck.worlds.sim.stand_ins.profiling import one_profiler


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """While entered, they are in place for rank threads; other threads find what is torch's."""
    with no_compiling(), one_profiler(), futures_of_ranks(), out_collectives():
        yield
