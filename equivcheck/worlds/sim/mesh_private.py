"""What tells the meshes of rank threads apart; private, tried on torch 2.9 to 2.15.

Meshes are equal where they have the same ranks, names and devices, and torch caches by mesh what depends on the coordinate of the
rank that asks first: how a dim that is cut twice is put together again, for example. Its own backend of threads puts the thread
into a mesh's hash and equality, in ``_thread_id``; the same is done here for the threads of simulated ranks.
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
def meshes_of_threads() -> Iterator[None]:
    """While entered, a mesh that a rank makes or unpickles equals those of its own thread alone."""
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
    """What Python does for a class without ``__setstate__``, as meshes of older versions are."""
    vars(mesh).update(state)


def _claim(mesh: Any) -> None:
    """Make the mesh one of the calling rank's thread: by a number, since identifiers of threads are used again."""
    if is_rank_thread():
        if not hasattr(_threads, "number"):
            _threads.number = next(_numbers)
        mesh._thread_id, mesh._hash = _threads.number, None
