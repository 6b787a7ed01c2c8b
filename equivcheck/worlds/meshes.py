"""Device meshes, kept: building one makes process groups, which costs more than a whole check."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_kept = threading.local()


def device_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The CPU mesh of this rank's world with that shape and those axis names, built at most once a rank.

    A rank is a thread in sim and a process elsewhere, so what is kept per thread is kept per rank. What DTensor has found out on
    another mesh is forgotten: it takes equal parts of the two for one.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from equivcheck.worlds.dtensor_caches import forget_shardings

    kept: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMesh] = _kept.__dict__.setdefault("meshes", {})
    if _kept.__dict__.setdefault("last", (shape, names)) != (shape, names):
        _kept.last = (shape, names)
        forget_shardings()
    if (shape, names) not in kept:
        kept[shape, names] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return kept[shape, names]
