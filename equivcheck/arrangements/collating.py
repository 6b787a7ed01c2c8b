"""Refuse collate functions that drop or reorder examples, because the check would report this as a mistake in the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from equivcheck.arrangements.fields import tensors_in
from equivcheck.arrangements.rows import Example
from equivcheck.arrangements.usage import invalid

_ALL = "a batch with all examples, in the given order"


def require_packed(batch: Any, path: tuple[Any, ...], tokens: Sequence[torch.Tensor]) -> None:
    """Raise `UsageError` if the user's packed batch does not contain all examples' tokens, one example after the other.

    `tokens` are the examples' tokens, and `path` leads to the packed tokens in the batch. If there is no tensor at `path`,
    nothing is checked.
    """
    packed = dict(tensors_in(batch)).get(path)
    if packed is None:
        return
    values, start = packed.flatten().tolist(), 0
    for number, own in enumerate(tokens):
        wanted = own.flatten().tolist()
        found = _first_place(values, wanted, start)
        if found is None:
            is_there = _first_place(values, wanted, 0) is not None
            why = (
                f"it put example {number} before an earlier example"
                if is_there
                else f"it dropped or changed tokens of example {number}"
            )
            raise invalid("packing", why, _ALL)
        start = found + len(wanted)


def _first_place(values: list[int], wanted: list[int], start: int) -> int | None:
    """Return the index of the first occurrence from `start`; None if there is no occurrence."""
    places = range(start, len(values) - len(wanted) + 1)
    return next((place for place in places if values[place : place + len(wanted)] == wanted), None)


def require_collated(batch: Any, collated: Any, examples: Sequence[Example]) -> None:
    """Raise `UsageError` if the user's collate function dropped or reordered examples."""
    found = dict(tensors_in(collated))
    for path, tensor in tensors_in(batch):
        name, other = ".".join(map(str, path)), found.get(path)
        tensor_name = f" for {name!r}" if name else ""
        if not tensor.dim():
            continue
        if other is None or not other.dim() or len(other) != len(tensor):
            rows = "no tensor" if other is None or not other.dim() else f"{len(other)} rows"
            why = f"for {len(examples)} examples it returned {rows}{tensor_name}, but the batch has {len(tensor)} rows"
            raise invalid("collate", why, _ALL)
        if other.shape == tensor.shape and not torch.equal(other, tensor) and _has_same_rows(other, tensor):
            raise invalid("collate", f"it returned the rows{tensor_name} in another order than the batch", _ALL)


def _has_same_rows(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = (sorted(each.flatten(1).tolist() if each.dim() > 1 else each.tolist()) for each in (one, other))
    return first == second
