"""Builds phrases for tensors, ranks, axes and factors in a diagnosis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isclose

import numpy as np
import numpy.typing as npt

from equivcheck.diagnosis.evidence import RATIO, Evidence

_NAMED = 2
"""Number of named tensors if there are too many to name all; further tensors are counted."""


def tensors(names: Sequence[str]) -> str:
    """Join tensor names: ```a` and `b```, or ```a`, `b` and 3 more``."""
    return _name_some([f"`{name}`" for name in names], "{} more")


def _name_some(parts: Sequence[str], rest: str) -> str:
    """Join words. If there are many, `rest` stands for all but the first, with their number."""
    if len(parts) <= _NAMED + 1:
        return join_words(parts)
    return join_words([*parts[:_NAMED], rest.format(len(parts) - _NAMED)])


def join_words(parts: Sequence[str]) -> str:
    """Join words as ``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def layers_by_name(layers: Iterable[int]) -> str:
    """Join layers by index: ```layers.0` and `layers.2```."""
    return join_words([f"`layers.{layer}`" for layer in layers])


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks by number: ``rank 1``, or ``ranks 1 and 2``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {join_words([str(rank) for rank in ranks])}"


def gradients(diverged: Evidence, names: Sequence[str]) -> str:
    """Return subject and verb for a sentence about these gradients: ``the gradient of `a` is`` or ``all gradients are``."""
    if len(names) == 1:
        return f"the gradient of `{names[0]}` is"
    if set(names) >= set(diverged.updated):
        return "all gradients are"
    return f"the gradients of {tensors(names)} are"


def rows_of_tensor(masks: Mapping[str, npt.NDArray[np.bool_]]) -> str:
    """Describe the elements in a mask: ``rows 2 to 3 of `a```, or ```a` (5 of 8 elements), `b` and parts of 3 more tensors``.

    A tensor with rows comes last if all tensors are named, because ``row 2 of `a` and `b``` could also mean a row of `b`. Else it
    comes first, because ```b`, row 1 of `a` and 2 more tensors`` could also mean a row of these tensors.
    """
    are_full = all(mask.all() for mask in list(masks.values())[_NAMED:])
    rest = "{} more tensors" if are_full else "parts of {} more tensors"
    words = [_rows(name, mask) for name, mask in masks.items()]
    are_all_named = len(words) <= _NAMED + 1
    num_named = len(words) if are_all_named else _NAMED
    named = sorted(words[:num_named], key=lambda each: each.startswith("row") == are_all_named)
    return _name_some(named + words[num_named:], rest)


def _rows(name: str, mask: npt.NDArray[np.bool_]) -> str:
    if mask.all():
        return f"`{name}`"
    along = mask.reshape(mask.shape[0], -1)
    rows = np.flatnonzero(along.any(axis=1))
    if not along[rows].all() or len(rows) != rows[-1] - rows[0] + 1:
        return f"`{name}` ({int(mask.sum())} of {mask.size} elements)"
    return f"row {rows[0]} of `{name}`" if len(rows) == 1 else f"rows {rows[0]} to {rows[-1]} of `{name}`"


def count_description(evidence: Evidence, ratio: float) -> str:
    """Return a clause about the meaning of the number `ratio`: ``, the number of dp ranks``. Empty if it has no known meaning."""
    for number, words in evidence.counts.items():
        if number > 1 and ratio in (number, 1 / number):
            return f", the number of {words}" if ratio > 1 else f", one over the number of {words}"
    return next((f", {words}" for factor, words in evidence.fractions.items() if isclose(factor, ratio, rel_tol=RATIO)), "")
