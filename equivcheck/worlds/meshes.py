"""Device meshes and groups of ranks, kept: building one makes process groups, which costs more than a whole check.

Private torch API: the groups that a rank has made, and their number; tried on torch 2.13 and 2.15.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from equivcheck.worlds.dtensor_caches import bound_shardings, forget_shardings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_kept = threading.local()


def device_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The CPU mesh of this rank's world with that shape and those axis names, built at most once a rank.

    A rank is a thread in sim and a process elsewhere, so what is kept per thread is kept per rank. What DTensor has found out on
    another mesh is forgotten: it takes equal parts of the two for one.
    """
    from torch.distributed.device_mesh import init_device_mesh

    kept: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMesh] = _kept.__dict__.setdefault("meshes", {})
    if _kept.__dict__.setdefault("last", (shape, names)) != (shape, names):
        _kept.last = (shape, names)
        forget_shardings()
    if (shape, names) not in kept:
        before = _num_groups()
        kept[shape, names] = init_device_mesh("cpu", shape, mesh_dim_names=names)
        _kept.num_groups = _kept.__dict__.get("num_groups", 0) + _num_groups() - before
    return kept[shape, names]


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of some ranks of the world, in rising order, or on other ranks that of the others; built at most once a rank.

    Every rank calls it. As each then is in one group more, all have as many, by which worlds tell whether a program has made any
    for itself.
    """
    kept: dict[tuple[int, ...], dist.ProcessGroup] = _kept.__dict__.setdefault("groups", {})
    if ranks not in kept:
        before = _num_groups()
        others = tuple(rank for rank in range(dist.get_world_size()) if rank not in ranks)
        made = {members: dist.new_group(list(members)) for members in (ranks, others) if members}
        kept[ranks] = made[ranks if dist.get_rank() in ranks else others]
        _kept.num_groups = _kept.__dict__.get("num_groups", 0) + _num_groups() - before
    return kept[ranks]


@contextmanager
def groups_made() -> Iterator[list[dist.ProcessGroup]]:
    """A list that has, once the context is left, the groups that this rank has made within it: each holds threads and sockets."""
    found: list[dist.ProcessGroup] = []
    before = set(c10d._world.pg_map)
    yield found
    found += [group for group in c10d._world.pg_map if group not in before]


def groups_of_rank() -> tuple[dist.ProcessGroup, ...]:
    """The groups that the calling rank has."""
    return tuple(c10d._world.pg_map)


def has_lost(groups: tuple[dist.ProcessGroup, ...]) -> bool:
    """Whether a program has destroyed any of the groups that the calling rank had before it."""
    return not all(group in c10d._world.pg_map for group in groups)


def numbers_of_groups() -> tuple[int, int]:
    """How many groups the calling rank has helped to make, and how many it has: torch names the next one by either."""
    return _num_groups(), len(c10d._world.pg_names)


def end_run(*, finished: bool = True) -> None:
    """Drop what DTensor has found out on meshes that this run's program made itself: those of the next run may equal them.

    To be called by each rank when it has joined its world, and after each program. Meshes have groups of their own, so no other
    program needs this unless it did not finish: if an embedding sharded by rows gave something that was not read, DTensor keeps
    the mask of its indices with the sharding, and the next such embedding raises. What was found out on kept meshes is dropped
    when it has become much.
    """
    if not finished or _num_groups() != _kept.__dict__.get("num_groups", 0):
        _kept.num_groups = _num_groups()
        forget_shardings()
    else:
        bound_shardings()


def _num_groups() -> int:
    """How many groups the calling rank has made so far."""
    return int(c10d._world.group_count)
