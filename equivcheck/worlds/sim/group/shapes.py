"""Checks a call's shapes and element types against gloo's rules in torch 2.9 to 2.15.

Gloo compares shapes, not only element counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from equivcheck.worlds.sim.refusals import CallRefused

Tensors = Sequence[torch.Tensor]


def check_one(op: str, tensors: Sequence[object]) -> None:
    """Raise `CallRefused` unless the list contains exactly one tensor.

    If there are several tensors, some gloo calls raise, and others add up all tensors.
    """
    if len(tensors) != 1:
        raise CallRefused(
            f"{op}: a list of {len(tensors)} tensors is not supported on a simulated rank: pass one tensor, or run over gloo."
        )


def check_some(op: str, tensors: Tensors) -> None:
    """Raise `CallRefused` if the list is empty or the tensors have different dtypes."""
    if not tensors:
        raise CallRefused(f"{op}: an empty list is not valid. Expected one or more tensors.")
    dtype = tensors[0].dtype
    if any(tensor.dtype != dtype for tensor in tensors):
        raise CallRefused(f"{op}: dtypes {', '.join(_types(tensors))} are not valid. Expected tensors with one dtype.")


def check_list(op: str, what: str, tensors: Tensors, like: torch.Tensor, size: int) -> None:
    """Raise `CallRefused` unless there is one tensor for each of `size` members, all with the shape and dtype of `like`.

    `what` names the tensors in the message, such as ``outputs``.
    """
    if len(tensors) != size:
        raise CallRefused(f"{op}: got {len(tensors)} {what} in a group of {size} ranks. Expected one tensor for each rank.")
    shape, dtype = like.shape, like.dtype
    for tensor in tensors:
        if tensor.shape != shape or tensor.dtype != dtype:
            raise CallRefused(
                f"{op}: {what} {_described(tensors)} are not valid for gloo. Expected {_described([like])} for each."
            )


def check_part(op: str, output: torch.Tensor, parts: Tensors, member: int, size: int) -> None:
    """Raise `CallRefused` unless there are `size` inputs in `parts`, and `output` has the shape and dtype of ``parts[member]``.

    `size` is the number of ranks in the group.
    """
    if len(parts) != size:
        raise CallRefused(f"{op}: got {len(parts)} inputs in a group of {size} ranks. Expected one input for each rank.")
    if parts[member].shape != output.shape or parts[member].dtype != output.dtype:
        raise CallRefused(
            f"{op}: output {_described([output])} is not valid for input {_described([parts[member]])}. "
            "Expected equal dtypes and shapes."
        )


def check_wholes(op: str, parts: Tensors, wholes: Tensors, size: int) -> None:
    """Raise `CallRefused` unless each tensor in `wholes` fits its part in `parts`.

    The full tensor must have the part's dtype and shape, but `size` times as many rows.
    """
    if len(parts) != len(wholes):
        raise CallRefused(f"{op}: got {len(parts)} parts for {len(wholes)} tensors. Expected one part for each tensor.")
    for part, whole in zip(parts, wholes, strict=True):
        theirs, shape = part.shape, whole.shape
        if not theirs or not shape or shape[0] != size * theirs[0] or shape[1:] != theirs[1:] or part.dtype != whole.dtype:
            raise CallRefused(
                f"{op}: part {part.dtype} {list(theirs)} is not valid for the full tensor {whole.dtype} {list(shape)}. Expected "
                f"equal dtypes, and equal shapes except that the full tensor is {size} times as long along dim 0."
            )


def _described(tensors: Tensors) -> str:
    return ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)


def _types(tensors: Tensors) -> list[str]:
    return [str(tensor.dtype) for tensor in tensors]
