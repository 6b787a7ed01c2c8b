"""What DTensor keeps between operations, and how it is dropped; private, tried on torch 2.13 and 2.15.

For each operation it keeps the sharding of the result, by the placements and the mesh of the arguments, and for each
redistribution its plan. Meshes of the same names and ranks are equal, be they parts of different ones or made by another run,
with process groups of their own: an answer that was found on one is given for the other, and the result then lies on a mesh that
it was not computed on. Ranks of which one has such an answer and another has none communicate over different groups, and wait for
ever.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

MAX_SHARDINGS = 500
"""Operations whose sharding one rank keeps before it drops them (about 5 kilobytes each)."""

PROPAGATION = "torch.distributed.tensor._sharding_prop"
"""The module of DTensor that finds shardings; imported only where DTensor is in use."""
_forgotten = threading.local()


def bound_shardings() -> None:
    """Drop what is kept for the calling thread when it has become much."""
    if num_worked_out() - _forgotten.__dict__.get("num_worked_out", 0) > MAX_SHARDINGS:
        forget_shardings()


def forget_shardings() -> None:
    """Drop what is kept for the calling thread, and plans, which are quick to make again, of all threads."""
    if PROPAGATION not in sys.modules:
        return
    for clear in (getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None), *_python_caches()):
        if clear is not None:
            clear()
    _forgotten.num_worked_out = num_worked_out()


def num_worked_out() -> int:
    """How many operations DTensor has worked out for the calling thread."""
    stats = getattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats", None)
    if PROPAGATION not in sys.modules:
        return 0
    if stats is not None:
        return int(stats()[1])
    cache = _propagator().propagate_op_sharding
    return int(cache.cache_info().misses)


def _python_caches() -> list[Callable[[], None] | None]:
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    names = ("_gen_transform_infos", "_gen_transform_infos_non_cached")
    caches = [_propagator().propagate_op_sharding, *(getattr(redistribute, name, None) for name in names)]
    planners = getattr(redistribute, "_planner_cache", None)
    return [getattr(planners, "clear", None), *(getattr(cache, "cache_clear", None) for cache in caches)]


def _propagator() -> Any:
    return sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher.sharding_propagator
