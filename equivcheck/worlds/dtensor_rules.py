"""Restores DTensor's sharding rules after a check. Private torch API, tested with torch 2.13 and 2.15."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from equivcheck.worlds.dtensor_caches import forget_shardings
from equivcheck.worlds.sim.dtensor.private import forget_shared


@contextmanager
def preserved_sharding_rules() -> Iterator[None]:
    """Restore DTensor's registered sharding rules on exit, and clear cached shardings on entry and exit.

    Without the clearing, DTensor would use shardings cached under another rule.
    """
    from torch.distributed.tensor import DTensor

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    # Rules are spread over several dicts of the propagator, and their names differ between versions: all of them are saved.
    tables = [(table, dict(table)) for table in vars(propagator).values() if isinstance(table, dict)]
    _forget()
    try:
        yield
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)
        _forget()


def _forget() -> None:
    forget_shardings()
    forget_shared()
