"""Gives each rank thread its own device meshes. Private torch API, tested with torch 2.9 to 2.15.

Meshes with equal ranks, names and devices compare equal. torch caches values by mesh that depend on the coordinate of the first
caller, for example how to reassemble a dim that is sharded twice. torch's own thread backend puts the thread into a mesh's hash
and equality through ``_thread_id``; this module does the same.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch.distributed.device_mesh import DeviceMesh

from equivcheck.worlds.sim.torch_private import is_rank_thread

_threads = threading.local()
_numbers = itertools.count(1)


@contextlib.contextmanager
def per_thread_meshes() -> Iterator[None]:
    """While entered, a rank's new or unpickled mesh equals only meshes created by its own thread."""
    mesh_class: Any = DeviceMesh
    made, unpickled = mesh_class.__init__, getattr(mesh_class, "__setstate__", _set_attributes)

    def make(mesh: Any, /, *arguments: Any, **options: Any) -> None:
        made(mesh, *arguments, **options)
        _claim(mesh)

    def unpickle(mesh: Any, state: dict[str, Any], /) -> None:
        unpickled(mesh, state)
        _claim(mesh)

    with patch.object(mesh_class, "__init__", make), patch.object(mesh_class, "__setstate__", unpickle, create=True):
        yield


def _set_attributes(mesh: Any, state: dict[str, Any]) -> None:
    """Python's default for a class without ``__setstate__``, for meshes in older versions."""
    vars(mesh).update(state)


def _claim(mesh: Any) -> None:
    """Assign the mesh to the calling rank's thread, by a number because thread identifiers are reused."""
    if is_rank_thread():
        if not hasattr(_threads, "number"):
            _threads.number = next(_numbers)
        # torch computes the hash lazily from `_thread_id` among others; None makes it compute again.
        mesh._thread_id, mesh._hash = _threads.number, None
