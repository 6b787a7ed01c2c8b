"""Clears the caches kept by DTensor between operations. Private torch API, tested with torch 2.9, 2.13 and 2.15.

DTensor caches the sharding of each operation's result, keyed by placements and mesh of the arguments, and a plan for each
redistribution. Two meshes with the same names and ranks compare equal, even if they belong to different runs with different
process groups. A cached result can therefore refer to the wrong mesh. If only some ranks have such an entry, ranks communicate
over different groups and hang.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from equivcheck.system.torch_version import is_torch_in

MAX_SHARDINGS = 500
"""Cached shardings per rank before the cache is cleared; one sharding takes about 5 kilobytes."""

REMEMBERS_ROWS_OF_EMBEDDINGS = "<2.11"
"""torch versions whose cached embedding gradient keeps the row count of an earlier embedding, although results are equal."""

PROPAGATION = "torch.distributed.tensor._sharding_prop"
"""DTensor's module for sharding propagation; looked up in `sys.modules` to avoid importing it."""
_forgotten = threading.local()


def limit_sharding_cache() -> None:
    """Clear this thread's sharding cache if it is large, or if this torch version would reuse wrong entries.

    The cache is large if DTensor has computed more than `MAX_SHARDINGS` shardings since the cache was last cleared.
    """
    are_many = num_propagations() - _forgotten.__dict__.get("num_worked_out", 0) > MAX_SHARDINGS
    if are_many or is_torch_in(REMEMBERS_ROWS_OF_EMBEDDINGS):
        forget_shardings()


def forget_shardings() -> None:
    """Clear this thread's sharding cache, and all threads' redistribution plans."""
    if PROPAGATION not in sys.modules:
        return
    _forgotten.num_worked_out = num_propagations()
    for clear in (getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None), *_python_caches()):
        if clear is not None:
            clear()
    if not _is_kept_in_cpp():
        _forgotten.num_dropped = _forgotten.num_worked_out


def num_propagations() -> int:
    """Count how often DTensor computed a sharding for an operation in this thread, because none was cached."""
    if PROPAGATION not in sys.modules:
        return 0
    if _is_kept_in_cpp():
        return int(torch._C._get_DTensor_sharding_propagator_cache_stats()[1])
    return int(_shardings().cache_info().misses) + int(_forgotten.__dict__.get("num_dropped", 0))


def num_plans() -> int:
    """Count the redistributions planned by DTensor in this process since its plan cache was last cleared.

    On a mesh with three dims, one operation may plan thousands of them before it communicates.
    """
    plan = getattr(sys.modules.get("torch.distributed.tensor._redistribute"), "_gen_transform_infos", None)
    info = getattr(plan, "cache_info", None)  # private, a functools cache on torch 2.9 to 2.15
    return 0 if info is None else int(info().misses)


@contextlib.contextmanager
def patchable_propagation() -> Iterator[None]:
    """Inside this context, let patches to DTensor's method for sharding propagation take effect.

    Otherwise torch 2.9 ignores such a patch, because it keeps a reference to the original method.
    """
    if PROPAGATION not in sys.modules or _is_kept_in_cpp():
        yield
        return
    propagator = _propagator()
    original = propagator.propagate_op_sharding
    propagator.propagate_op_sharding = _late(propagator)
    try:
        yield
    finally:
        propagator.propagate_op_sharding = original


@cache
def _late(propagator: Any) -> Any:

    def propagate(schema: Any) -> Any:
        return propagator.propagate_op_sharding_non_cached(schema)

    return type(propagator.propagate_op_sharding)(propagate)


def _is_kept_in_cpp() -> bool:
    return hasattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats")


def _shardings() -> Any:
    return _propagator().propagate_op_sharding.cache


def _python_caches() -> list[Callable[[], None] | None]:
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    names = ("_gen_transform_infos", "_gen_transform_infos_non_cached")
    caches = [_shardings(), *(getattr(redistribute, name, None) for name in names)]
    planners = getattr(redistribute, "_planner_cache", None)
    return [getattr(planners, "clear", None), *(getattr(cache, "cache_clear", None) for cache in caches)]


def _propagator() -> Any:
    return sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher.sharding_propagator
