"""Refuses communication calls that gloo refuses or computes wrongly. If a program runs here without errors, it works over gloo.

The rules describe gloo in torch 2.9 to 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from equivcheck.errors import EquivCheckError
from equivcheck.system.torch_version import is_torch_in

_CARRIED = "float16 bfloat16 float32 float64 int8 uint8 int32 int64 bool complex32 complex64 complex128"
CARRIED = frozenset(getattr(torch, name) for name in _CARRIED.split())
"""Element types for collectives; messages accept any type."""
_BITWISE = ("band", "bor", "bxor")
_LINEAR = ("sum", "avg")
NO_LIST_ALL_TO_ALL = "<2.12"
"""torch versions whose gloo cannot exchange tensor lists (pytorch #165435); parts from one tensor work in all versions."""


class CallRefused(EquivCheckError, ValueError):
    """A communication call that gloo, or every backend, would reject. Raised in the rank that makes the call."""


def check_type(op: str, dtype: torch.dtype) -> None:
    """Raise `CallRefused` if gloo does not support this dtype in the collective `op`, which is named as in `Call.op`."""
    reason = _reason(op, dtype)
    if reason:
        raise CallRefused(f"{op}: {dtype} is not supported: {reason}")


@cache
def _reason(op: str, dtype: torch.dtype) -> str:
    reduction = op.partition(".")[2]
    if reduction == "premul_sum":
        return "gloo has no premultiplied sum"
    if dtype not in CARRIED:
        return f"gloo transfers only {_CARRIED}"
    if reduction in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        return "bitwise reductions are for integers and bool"
    if reduction == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        return "a mean is for floating-point and complex types"
    if dtype.is_complex and reduction and reduction not in _LINEAR:
        return "complex numbers can only be summed or averaged"
    return ""


def check_strided(op: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise `CallRefused` for a tensor whose `layout` is not `torch.strided`, because gloo does not send other layouts."""
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise CallRefused(
                f"{op}: {tensor.layout} is not supported: gloo sends only strided tensors, except in a sparse all_reduce"
            )


def check_sparse(reduction: str, tensor: torch.Tensor) -> None:
    """Raise `CallRefused` if gloo cannot all-reduce this sparse tensor with this reduction."""
    if reduction != "sum":
        raise CallRefused(f"all_reduce.{reduction}: torch.sparse_coo is not supported: gloo can only sum sparse tensors")
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise CallRefused(f"all_reduce.sum: sparse {tensor.dtype} is not supported: gloo sums only real sparse numbers")


def check_list_all_to_all() -> None:
    """Raise `CallRefused` if gloo in this torch version has no all-to-all for lists of tensors."""
    if is_torch_in(NO_LIST_ALL_TO_ALL):
        raise CallRefused(
            f"all_to_all: a list of tensors is not supported by gloo in torch {NO_LIST_ALL_TO_ALL}. Use all_to_all_single."
        )


def check_root(op: str, root: int, size: int) -> None:
    """Raise `CallRefused` if `root` is not a rank within a group with `size` members."""
    if not 0 <= root < size:
        raise CallRefused(
            f"{op}: root {root} is not valid: it is not a member. Expected a rank within the group, 0 to {size - 1}."
        )


def check_peer(op: str, member: int, peer: int | None) -> None:
    """Raise `CallRefused` if a rank sends a message to itself, or receives one from itself."""
    if member == peer:
        raise CallRefused(f"{op}: rank {member} is not valid: it is the caller itself. Expected another rank within the group.")


def check_contiguous(op: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise `CallRefused` if a tensor is not contiguous. Use this for calls that send tensors as raw memory."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise CallRefused(
                f"{op}: {tensor.dtype} {list(tensor.shape)} is not valid: it is not contiguous. Expected a contiguous tensor."
            )


def check_gaps(op: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise `CallRefused` for tensors with gaps in memory, because gloo reads and writes wrong elements (pytorch #192920)."""
    check_strided(op, tensors)
    for tensor in tensors:
        if not tensor.is_contiguous() and not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            text = f"{op}: {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} is not supported"
            why = "gloo transfers wrong elements (pytorch #192920). Use tensors without gaps in memory."
            raise CallRefused(f"{text}: {why}")


Order = tuple[int, ...]
"""Tensor dims from widest to smallest stride; empty for the usual order."""


def orders_in_memory(tensors: Sequence[torch.Tensor]) -> tuple[Order, ...]:
    """Return each tensor's dims, sorted from the widest to the smallest stride; empty if all tensors are contiguous.

    All ranks must have the same order, because gloo sends raw memory.
    """
    if all(tensor.is_contiguous() for tensor in tensors):
        return ()
    orders = tuple(map(_order, tensors))
    return orders if any(orders) else ()


def common_order(op: str, tensors: Sequence[torch.Tensor]) -> tuple[Order, ...]:
    """Return the memory order that all tensors have, in the same form as `orders_in_memory`.

    Raises `CallRefused` if two orders differ.
    """
    orders = set(orders_in_memory(tensors))
    if len(orders) > 1:
        raise CallRefused(
            f"{op}: memory orders {sorted(orders)} of dims are not supported: gloo transfers wrong elements (pytorch #24836). "
            "Use contiguous tensors."
        )
    return tuple(orders)


def _order(tensor: torch.Tensor) -> Order:
    if tensor.is_contiguous():
        return ()
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    order = sorted(dims, key=tensor.stride, reverse=True)
    return () if order == dims else tuple(order)
