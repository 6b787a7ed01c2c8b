"""Computes the results of each collective from the inputs of all members.

Reductions run in rank order, so every rank gets the same bits. A combining function takes one list of tensors per member and
returns one list of results per member. It may overwrite the given tensors and return the same tensor for several members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

Shares = list[list[torch.Tensor]]
Combine = Callable[[Any], Shares]

_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "product": torch.Tensor.mul_,
    "min": lambda left, right: torch.minimum(left, right, out=left),
    "max": lambda left, right: torch.maximum(left, right, out=left),
    "band": torch.Tensor.bitwise_and_,
    "bor": torch.Tensor.bitwise_or_,
    "bxor": torch.Tensor.bitwise_xor_,
}

UNSET_BYTE = 0x5A
"""Value of every byte of an integer result before `wait`."""


class DisagreementError(Exception):
    """Ranks in a group passed contradicting sizes to one collective."""


def fill_unset(output: torch.Tensor) -> None:
    """Fill an output with conspicuous values, so that wrong results show if a rank reads it before `wait`.

    The values are NaN, bytes equal to `UNSET_BYTE`, or True, depending on the dtype.
    """
    (output._values() if output.is_sparse else output).fill_(unset_value(output.dtype))


@cache
def unset_value(dtype: torch.dtype) -> float | int | bool:
    """Return the value used by `fill_unset` for outputs of this dtype."""
    if dtype == torch.bool:
        return True
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return int.from_bytes(bytes([UNSET_BYTE]) * dtype.itemsize, "big")


def fold(op: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Reduce the tensors in rank order with the reduction `op`, such as ``sum``, and return the result.

    The result is written into the first tensor.
    """
    total = tensors[0]
    step = _FOLDS[op]
    for other in tensors[1:]:
        step(total, other if other.shape == total.shape else other.view(total.shape))
    if op == "avg":
        exact = total.is_floating_point() or total.is_complex()
        total.div_(len(tensors)) if exact else total.div_(len(tensors), rounding_mode="trunc")
    return total


@cache
def all_reduce(op: str) -> Combine:
    """Return a function for an all-reduce: every member gets, for each tensor, the reduction over all members."""

    def combine(shares: Shares) -> Shares:
        return [[fold(op, tensors) for tensors in zip(*shares, strict=True)]] * len(shares)

    return combine


def sum_sparse(shares: Shares) -> Shares:
    """Compute an all-reduce on coalesced sparse tensors: every member gets the sum. `shares` has each member's inputs."""
    total = shares[0][0]
    for (other,) in shares[1:]:
        total = total + other
    return [[total.coalesce()]] * len(shares)


@cache
def reduce(op: str, root: int) -> Combine:
    """Return a function for a reduce: `root` gets, for each tensor, the reduction over all members."""

    def combine(shares: Shares) -> Shares:
        totals = [fold(op, tensors) for tensors in zip(*shares, strict=True)]
        return [totals if member == root else [] for member in range(len(shares))]

    return combine


@cache
def broadcast(root: int) -> Combine:
    """Return a function for a broadcast: all other members get the tensors from `root`."""

    def combine(shares: Shares) -> Shares:
        return [[] if member == root else shares[root] for member in range(len(shares))]

    return combine


def all_gather(shares: Shares) -> Shares:
    """Compute an all-gather into lists: all members get every member's tensors, ordered by tensor and then by member."""
    gathered = [tensor for tensors in zip(*shares, strict=True) for tensor in tensors]
    return [gathered] * len(shares)


def all_gather_single(shares: Shares) -> Shares:
    """Compute an all-gather into single tensors.

    Every member gets one flat tensor for each input: the concatenation of this input from all members.
    """
    gathered = [torch.cat([tensor.view(-1) for tensor in tensors]) for tensors in zip(*shares, strict=True)]
    return [gathered] * len(shares)


@cache
def reduce_scatter(op: str) -> Combine:
    """Return a function for a reduce-scatter on lists: member i gets the reduction over all members' i-th tensors."""

    def combine(shares: Shares) -> Shares:
        return [[fold(op, tensors)] for tensors in zip(*shares, strict=True)]

    return combine


@cache
def reduce_scatter_single(op: str) -> Combine:
    """Return a function for a reduce-scatter on single tensors: member i gets the i-th part of each reduced tensor."""

    def combine(shares: Shares) -> Shares:
        parts = [fold(op, tensors).view(len(shares), -1).unbind() for tensors in zip(*shares, strict=True)]
        return [[part[member] for part in parts] for member in range(len(shares))]

    return combine


@cache
def gather(root: int) -> Combine:
    """Return a function for a gather: `root` gets every member's tensor."""

    def combine(shares: Shares) -> Shares:
        return [[tensors[0] for tensors in shares] if member == root else [] for member in range(len(shares))]

    return combine


@cache
def scatter(root: int) -> Combine:
    """Return a function for a scatter: member i gets the i-th tensor from `root`."""

    def combine(shares: Shares) -> Shares:
        return [[tensor] for tensor in shares[root]]

    return combine


def all_to_all(shares: list[tuple[list[torch.Tensor], list[int]]]) -> Shares:
    """Compute an all-to-all: member i gets the i-th tensor from every member.

    `shares` has each member's tensors, and the sizes that this member expects. Raises `DisagreementError` if a member sends
    another size.
    """
    for receiver, (_, expected) in enumerate(shares):
        for sender, (tensors, _) in enumerate(shares):
            sent = tensors[receiver].numel()
            if sent != expected[sender]:
                text = f"member {sender} sends {sent} elements to member {receiver}, which expects {expected[sender]}"
                raise DisagreementError(text)
    return [[tensors[receiver] for tensors, _ in shares] for receiver in range(len(shares))]


def nothing(shares: Shares) -> Shares:
    """Compute a barrier: no member gets a tensor."""
    return [[]] * len(shares)
