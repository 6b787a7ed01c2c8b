"""What ranks that are kept write to the store of their world: apart for each run.

Private torch API: where `torch.distributed` keeps the default group's store; tried on torch 2.9, 2.13 and 2.15.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_numbers = itertools.count()
"""Of runs: the same on all ranks, as each run is on all of them."""


@contextmanager
def own_keys() -> Iterator[None]:
    """While entered, what the calling process writes to the store of its default group has a prefix that no other run has.

    torch finds the members of a new group by the group's name, and gives a name that is free again once more: without a prefix of
    their own, they would look for each other where those of a run before were, which have left, and wait there for ever.
    """
    number, group = next(_numbers), c10d.GroupMember.WORLD
    if group is None:  # this run makes it
        yield
        return
    groups: Any = c10d._world.pg_map
    backend, store = groups[group]
    groups[group] = backend, dist.PrefixStore(f"equivcheck/run/{number}", store)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if group in groups:
            groups[group] = backend, store
