"""The private parts of DTensor that ranks as threads need; tried on torch 2.13.

DTensor works out the shape of each result by tracing the operation on fake tensors, and keeps the answers per thread: once for
each rank, and for ever. Here ranks share the answers, which do not depend on the rank, and what is kept is bounded.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

MAX_SHAPES = 20_000
"""Answers that are shared before they are dropped (about half a kilobyte each)."""

MAX_SHARDINGS = 3_000
"""Operations whose sharding one rank keeps before it drops them (about 5 kilobytes each)."""

_PROPAGATION = "torch.distributed.tensor._sharding_prop"
_METHOD = "_propagate_tensor_meta_non_cached"
_shapes: dict[Hashable, Any] = {}
_cleared = threading.local()


@contextlib.contextmanager
def shared_shapes() -> Iterator[None]:
    """While entered, threads share what DTensor finds out about the shapes of results; without effect where it is not in use."""
    propagator = getattr(sys.modules.get(_PROPAGATION), "ShardingPropagator", None)
    original = getattr(propagator, _METHOD, None)
    if original is None:
        yield
        return
    setattr(propagator, _METHOD, _sharing(original))
    try:
        yield
    finally:
        setattr(propagator, _METHOD, original)


def _sharing(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def propagate(propagator: Any, schema: Any) -> Any:
        key = None if torch._C._len_torch_dispatch_stack() else _key_of(schema)
        if key is None:
            return original(propagator, schema)
        if key not in _shapes:
            if len(_shapes) >= MAX_SHAPES:
                _shapes.clear()
            _shapes[key] = original(propagator, schema)
        shape = _shapes[key]
        return list(shape) if isinstance(shape, list) else shape

    return propagate


def _key_of(schema: Any) -> Hashable | None:
    """Everything that the shapes of the results depend on, or None when that cannot be told."""
    try:
        arguments = tuple(map(_frozen, schema.args_schema))
        options = tuple((name, _frozen(value)) for name, value in schema.kwargs_schema.items())
        key = (schema.op, torch.get_default_dtype(), arguments, options)
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_frozen, value))
    if hasattr(value, "tensor_meta"):
        return (type(value), value.tensor_meta)
    return (type(value), value)


def bound_shardings() -> None:
    """Drop what DTensor keeps for the calling thread when it has become much."""
    misses = _num_misses()
    if misses - _cleared.__dict__.get("misses", 0) > MAX_SHARDINGS:
        for clear in (getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None), *_python_caches()):
            if clear is not None:
                clear()
        _cleared.misses = _num_misses()


def _num_misses() -> int:
    """How many operations DTensor has worked out for the calling thread."""
    stats = getattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats", None)
    if _PROPAGATION not in sys.modules:
        return 0
    if stats is not None:
        return int(stats()[1])
    cache = _propagator().propagate_op_sharding
    return int(cache.cache_info().misses)


def _python_caches() -> list[Callable[[], None] | None]:
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    names = ("_gen_transform_infos", "_gen_transform_infos_non_cached")
    caches = [_propagator().propagate_op_sharding, *(getattr(redistribute, name, None) for name in names)]
    return [getattr(cache, "cache_clear", None) for cache in caches]


def _propagator() -> Any:
    return sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher.sharding_propagator
