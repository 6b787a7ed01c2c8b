"""Caches device meshes and process groups, because creating them costs more than a whole check.

Private torch API: the process group table and the group counter; tested with torch 2.13 and 2.15.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from equivcheck.system.torch_version import is_torch_in
from equivcheck.worlds.dtensor_caches import forget_shardings, limit_sharding_cache

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_kept = threading.local()

SUBMESH_ROOT_CHANGES = "<2.10"
"""Versions in which an equal slice changes a cached submesh's root, so submeshes cannot be cached."""


def device_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a CPU mesh with this shape and these axis names. Each rank creates it at the first call and caches it.

    If the rank used another mesh before, DTensor's sharding cache is cleared. Otherwise DTensor could reuse wrong entries,
    because a submesh of one mesh may compare equal to a submesh of another.
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


def submesh(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Return the submesh with these axes, cached on `mesh`.

    Slicing is slow, and DTensor treats each new slice as another mesh.
    """
    if axes == mesh.mesh_dim_names:
        return mesh
    if is_torch_in(SUBMESH_ROOT_CHANGES):
        return mesh[axes]
    kept: dict[tuple[str, ...], DeviceMesh] = vars(mesh).setdefault("_equivcheck_submeshes", {})
    if axes not in kept:
        kept[axes] = mesh[axes]
    return kept[axes]


def flattened_mesh(mesh: DeviceMesh, axes: tuple[str, ...], outer: tuple[str, ...] = ()) -> DeviceMesh:
    """Return a mesh with the axes `outer`, and `axes` flattened into one axis. `mesh` must have all ranks of the world.

    The flattened mesh and its process groups are cached on `mesh`, so every rank must call this function. Ranks keep their order
    in `mesh`. Axes in neither argument are left out, as when a mesh is sliced.
    """
    from torch.distributed.device_mesh import DeviceMesh

    kept: dict[tuple[str, ...], DeviceMesh] = vars(mesh).setdefault("_equivcheck_flattened", {})
    names = mesh.mesh_dim_names
    assert names is not None, "meshes of layouts have names"
    flat = "_".join(axes)
    if axes not in kept:
        inner = [name for name in names if name in axes]
        others = [name for name in names if name not in axes]
        ranks = mesh.mesh.permute([names.index(name) for name in (*others, *inner)]).flatten(len(others))
        before = _num_groups()
        kept[axes] = DeviceMesh("cpu", ranks, mesh_dim_names=(*others, flat))
        _kept.num_groups = _kept.__dict__.get("num_groups", 0) + _num_groups() - before
    return submesh(kept[axes], (*outer, flat))


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the process group for these global ranks (in rising order). Each rank creates it at the first call and caches it.

    Every rank must call this function. A rank outside `ranks` gets a group with all remaining ranks. All ranks then have
    equally many groups, so a world can tell whether a program created groups of its own.
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
def new_groups() -> Iterator[list[dist.ProcessGroup]]:
    """Yield an empty list. On exit, the process groups that the calling rank created inside the context are added to the list.

    Each group holds threads and sockets, so the caller may want to destroy them.
    """
    found: list[dist.ProcessGroup] = []
    before = set(c10d._world.pg_map)  # torch has no public list of groups
    yield found
    found += [group for group in c10d._world.pg_map if group not in before]


def groups_of_rank() -> tuple[dist.ProcessGroup, ...]:
    """Return all process groups created or joined by the calling rank."""
    return tuple(c10d._world.pg_map)


def has_lost_groups(groups: tuple[dist.ProcessGroup, ...]) -> bool:
    """Whether a program has destroyed any of these groups."""
    return not all(group in c10d._world.pg_map for group in groups)


def numbers_of_groups() -> tuple[int, int]:
    """Return how many process groups the calling rank has helped to create, and how many of them still exist.

    torch uses one of these numbers in the next group's name. Which one depends on the arguments of `new_group`.
    """
    # torch names a new group by the counter or, for `new_group(use_local_synchronization=True)`, by the number of existing names.
    return _num_groups(), len(c10d._world.pg_names)


def end_run(*, finished: bool = True) -> None:
    """Clear DTensor's caches after a program that created process groups or did not finish, or if the caches are large.

    Each rank calls this after joining its world and after each program. If a program creates groups, its meshes may compare equal
    to meshes in the next run. After an unfinished program, DTensor may still hold the index mask of a row-sharded embedding, and
    the next such embedding would raise.
    """
    if not finished or _num_groups() != _kept.__dict__.get("num_groups", 0):
        _kept.num_groups = _num_groups()
        forget_shardings()
    else:
        limit_sharding_cache()


def _num_groups() -> int:
    # The counter behind the names of new groups, which never goes down.
    return int(c10d._world.group_count)
