"""Gives each run its own key prefix in the store of a world that is kept open.

Private torch API: the default group's store; tested with torch 2.9, 2.13 and 2.15.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_numbers = itertools.count()
"""Run number, equal on all ranks because every run uses all ranks."""


@contextmanager
def prefixed_store_keys() -> Iterator[None]:
    """Inside this context, all keys in the default group's store begin with a number that no other run uses.

    torch looks up a new group's members in the store by the group's name, and a new group may get a destroyed group's name.
    Without the number, ranks would find an earlier run's entries and wait for ranks that have left.
    """
    number, group = next(_numbers), c10d.GroupMember.WORLD
    if group is None:  # this run makes it
        yield
        return
    groups: Any = c10d._world.pg_map
    backend, store = groups[group]  # `new_group` reads the store from this table, so replacing the entry is enough
    groups[group] = backend, dist.PrefixStore(f"equivcheck/run/{number}", store)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if group in groups:
            groups[group] = backend, store
