"""Checks a call's shapes and element types against gloo's rules in torch 2.9 to 2.15.

Gloo compares shapes, not only element counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from equivcheck.worlds.sim.refusals import CallRefused

Tensors = Sequence[torch.Tensor]


def check_one(op: str, tensors: Sequence[object]) -> None:
    """Raise `CallRefused` unless the list has one tensor. For several tensors, gloo raises or adds up all."""
    if len(tensors) != 1:
        raise CallRefused(
            f"{op}: a list of {len(tensors)} tensors is not supported on a simulated rank: pass one, or run over gloo."
        )


def check_some(op: str, tensors: Tensors) -> None:
    """Raise `CallRefused` for an empty list or tensors with different types."""
    if not tensors:
        raise CallRefused(f"{op}: an empty list is not valid. Expected one or more tensors.")
    dtype = tensors[0].dtype
    if any(tensor.dtype != dtype for tensor in tensors):
        raise CallRefused(f"{op}: types {', '.join(_types(tensors))} are not valid. Expected one type.")


def check_list(op: str, what: str, tensors: Tensors, like: torch.Tensor, size: int) -> None:
    """Raise `CallRefused` unless there is one tensor for each member, with `like`'s shape and type."""
    if len(tensors) != size:
        raise CallRefused(f"{op}: {len(tensors)} {what} are not valid. Expected one for each of {size} members.")
    shape, dtype = like.shape, like.dtype
    for tensor in tensors:
        if tensor.shape != shape or tensor.dtype != dtype:
            raise CallRefused(f"{op}: {what} {_described(tensors)} are not valid. Gloo expects {_described([like])} only.")


def check_part(op: str, output: torch.Tensor, parts: Tensors, member: int, size: int) -> None:
    """Raise `CallRefused` unless there is one part for each member and the output matches this member's part."""
    if len(parts) != size:
        raise CallRefused(f"{op}: {len(parts)} inputs are not valid. Expected one for each of {size} members.")
    if parts[member].shape != output.shape or parts[member].dtype != output.dtype:
        raise CallRefused(
            f"{op}: output {_described([output])} is not valid for input {_described([parts[member]])}. Gloo expects equal ones."
        )


def check_wholes(op: str, parts: Tensors, wholes: Tensors, size: int) -> None:
    """Raise `CallRefused` unless each tensor in `wholes` is `size` parts, concatenated along dim 0."""
    if len(parts) != len(wholes):
        raise CallRefused(f"{op}: {len(parts)} parts of {len(wholes)} tensors are not valid. Expected one part of each.")
    for part, whole in zip(parts, wholes, strict=True):
        theirs, shape = part.shape, whole.shape
        if not theirs or not shape or shape[0] != size * theirs[0] or shape[1:] != theirs[1:] or part.dtype != whole.dtype:
            raise CallRefused(
                f"{op}: part {part.dtype} {list(theirs)} is not valid for the full tensor {whole.dtype} {list(shape)}. Expected "
                f"equal types and shapes, with {size} times the part's size along dim 0"
            )


def _described(tensors: Tensors) -> str:
    return ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)


def _types(tensors: Tensors) -> list[str]:
    return [str(tensor.dtype) for tensor in tensors]
