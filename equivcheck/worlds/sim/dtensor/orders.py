"""Caches in which order mesh dims shard a tensor. Private torch API, tested with torch 2.13.

DTensor considers many placements for the arguments of an operation, and computes and verifies this order for each placement. Both
depend only on the placements, so all ranks can share them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Hashable, Iterator
from typing import Any

MAX_ORDERS = 4_096
"""Maximum number of cached orders, a few hundred bytes each."""

_SPEC = "torch.distributed.tensor._dtensor_spec"
_COMPUTE, _VERIFY = "compute_default_shard_order", "_verify_shard_order"


@contextlib.contextmanager
def cached_shard_orders() -> Iterator[None]:
    """Inside this context, cache DTensor's shard orders: the order in which mesh dims shard a tensor.

    No effect if DTensor is not imported, or if this torch version has no shard orders.
    """
    spec: Any = getattr(sys.modules.get(_SPEC), "DTensorSpec", None)
    compute, verify = (getattr(spec, "__dict__", {}).get(name) for name in (_COMPUTE, _VERIFY))
    if compute is None or verify is None:
        yield
        return
    setattr(spec, _COMPUTE, staticmethod(_computing(compute.__func__)))
    setattr(spec, _VERIFY, _verifying(verify))
    try:
        yield
    finally:
        setattr(spec, _COMPUTE, compute)
        setattr(spec, _VERIFY, verify)


@functools.cache
def _computing(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    orders: dict[Hashable, Any] = {}

    def compute(placements: Any) -> Any:
        if not isinstance(placements, tuple):
            return original(placements)
        if placements not in orders:
            if len(orders) >= MAX_ORDERS:
                orders.clear()
            orders[placements] = original(placements)
        return orders[placements]

    return compute


@functools.cache
def _verifying(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    proven: set[Hashable] = set()

    def verify(spec: Any, order: Any) -> None:
        pair = (spec.placements, order)
        if pair in proven:
            return
        original(spec, order)
        if len(proven) >= MAX_ORDERS:
            proven.clear()
        proven.add(pair)

    return verify
