"""Gives each rank thread its own device meshes. Private torch API, tested with torch 2.9 to 2.15.

Meshes with equal ranks, names and devices compare equal. torch caches values by mesh that depend on the coordinate of the first
caller, for example how to reassemble a dim sharded twice. torch's own thread backend puts the thread into a mesh's hash
and equality through ``_thread_id``; this module does the same.

If a rank reads another rank's mesh, for example from a module global, it would get the other coordinate and group names. This
raises `UsedByOtherRank`.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any
from unittest.mock import patch

from torch.distributed.device_mesh import DeviceMesh

from equivcheck.worlds.sim.ownership import UsedByOtherRank
from equivcheck.worlds.sim.torch_private import is_rank_thread

_threads = threading.local()
_numbers = itertools.count(1)
_OF_RANK = ("_coordinate_on_dim", "_dim_group_names")
"""Attributes of a mesh with different values on each rank."""


@contextlib.contextmanager
def per_thread_meshes() -> Iterator[None]:
    """Inside this context, a rank's device meshes are equal only to meshes of its own thread."""
    mesh_class: Any = DeviceMesh
    made, unpickled = mesh_class.__init__, getattr(mesh_class, "__setstate__", _set_attributes)

    def make(mesh: Any, /, *arguments: Any, **options: Any) -> None:
        made(mesh, *arguments, **options)
        _claim(mesh)

    def unpickle(mesh: Any, state: dict[str, Any], /) -> None:
        unpickled(mesh, state | {"_thread_id": None})  # it may read attributes before `_claim`
        _claim(mesh)

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(mesh_class, "__init__", make))
        patches.enter_context(patch.object(mesh_class, "__setstate__", unpickle, create=True))
        for name in _OF_RANK:
            patches.enter_context(patch.object(mesh_class, name, _OfRank(name), create=True))
        yield


class _OfRank:
    """Attribute of a mesh that raises `UsedByOtherRank` if a rank reads it in another rank's mesh."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, mesh: Any, _: Any) -> Any:
        values = {} if mesh is None else vars(mesh)
        if self._name not in values:
            raise AttributeError(self._name)
        owner = values.get("_thread_id")
        is_foreign = owner is not None and owner != vars(_threads).get("number") and is_rank_thread()
        if is_foreign and not _is_propagating():
            raise UsedByOtherRank("device mesh")
        return values[self._name]

    def __set__(self, mesh: Any, value: Any) -> None:
        vars(mesh)[self._name] = value


def _is_propagating() -> bool:
    """Whether DTensor plans an operation. Cached plans hold the first planning rank's mesh, only to estimate costs."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.distributed.tensor._sharding_prop":
        frame = frame.f_back
    return frame is not None


def _set_attributes(mesh: Any, state: dict[str, Any]) -> None:
    """Set attributes as Python does for a class without ``__setstate__``, for meshes in older versions."""
    vars(mesh).update(state)


def _claim(mesh: Any) -> None:
    """Assign the mesh to the calling rank's thread, by a number because thread identifiers are reused."""
    if is_rank_thread():
        if not hasattr(_threads, "number"):
            _threads.number = next(_numbers)
        # torch computes the hash lazily from `_thread_id` among others; None makes it compute again.
        mesh._thread_id, mesh._hash = _threads.number, None
