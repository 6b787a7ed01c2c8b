"""What DTensor keeps between operations, and how it is dropped; private, tried on torch 2.9, 2.13 and 2.15.

For each operation it keeps the sharding of the result, by the placements and the mesh of the arguments, and for each
redistribution its plan. Meshes of the same names and ranks are equal, be they parts of different ones or made by another run,
with process groups of their own: an answer that was found on one is given for the other, and the result then lies on a mesh that
it was not computed on. Ranks of which one has such an answer and another has none communicate over different groups, and wait for
ever.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from equivcheck.system.torch_version import torch_in

MAX_SHARDINGS = 500
"""Operations whose sharding one rank keeps before it drops them (about 5 kilobytes each)."""

REMEMBERS_ROWS_OF_EMBEDDINGS = "<2.11"
"""Versions of torch in which the gradient of an embedding has as many rows as that of one before it had, with equal results."""

PROPAGATION = "torch.distributed.tensor._sharding_prop"
"""The module of DTensor that finds shardings; imported only where DTensor is in use."""
_forgotten = threading.local()


def bound_shardings() -> None:
    """Drop what is kept for the calling thread when it has become much, or would be taken for what comes next."""
    are_many = num_worked_out() - _forgotten.__dict__.get("num_worked_out", 0) > MAX_SHARDINGS
    if are_many or torch_in(REMEMBERS_ROWS_OF_EMBEDDINGS):
        forget_shardings()


def forget_shardings() -> None:
    """Drop what is kept for the calling thread, and plans, which are quick to make again, of all threads."""
    if PROPAGATION not in sys.modules:
        return
    _forgotten.num_worked_out = num_worked_out()
    for clear in (getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None), *_python_caches()):
        if clear is not None:
            clear()
    if not _is_kept_in_cpp():
        _forgotten.num_dropped = _forgotten.num_worked_out


def num_worked_out() -> int:
    """How many operations DTensor has worked out for the calling thread."""
    if PROPAGATION not in sys.modules:
        return 0
    if _is_kept_in_cpp():
        return int(torch._C._get_DTensor_sharding_propagator_cache_stats()[1])
    return int(_shardings().cache_info().misses) + int(_forgotten.__dict__.get("num_dropped", 0))


@contextlib.contextmanager
def looked_up_anew() -> Iterator[None]:
    """While entered, the method of DTensor that finds shardings can be replaced: torch 2.9 keeps the one that it began with."""
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
    """A cache as the propagator's own, of the method that its class has when something is worked out."""

    def propagate(schema: Any) -> Any:
        return propagator.propagate_op_sharding_non_cached(schema)

    return type(propagator.propagate_op_sharding)(propagate)


def _is_kept_in_cpp() -> bool:
    """Whether shardings are kept outside Python, as from torch 2.10 on."""
    return hasattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats")


def _shardings() -> Any:
    """What Python keeps of shardings for the calling thread."""
    return _propagator().propagate_op_sharding.cache


def _python_caches() -> list[Callable[[], None] | None]:
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    names = ("_gen_transform_infos", "_gen_transform_infos_non_cached")
    caches = [_shardings(), *(getattr(redistribute, name, None) for name in names)]
    planners = getattr(redistribute, "_planner_cache", None)
    return [getattr(planners, "clear", None), *(getattr(cache, "cache_clear", None) for cache in caches)]


def _propagator() -> Any:
    return sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher.sharding_propagator
