"""Take a batch apart into examples without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from equivcheck.arrangements.fields import Role
from equivcheck.arrangements.format import Format
from equivcheck.arrangements.rows import Example
from equivcheck.arrangements.usage import invalid


def examples_of(given: Format) -> tuple[Example, ...]:
    """Take a batch apart into examples without padding, one for each row.

    If all rows have equal lengths, rows are cut to different lengths, because equal lengths hide many mistakes.
    """
    num_rows = len(given.tensor(given.fields[0]))
    spans = [_span(given, row) for row in range(num_rows)]
    is_cut = given.has_tokens and num_rows > 1 and len({end - start for start, end in spans}) == 1
    if is_cut:
        spans = [(start, _cut(given, row, start, end, num_rows)) for row, (start, end) in enumerate(spans)]
    found = [_row(given, row, *span) for row, span in enumerate(spans)]
    start, end = spans[-1]
    if is_cut and len({example.num_counted for example in found}) == 1 and found[-1].num_counted > 1:
        found[-1] = _row(given, num_rows - 1, start, end - 1)
    return tuple(found)


def _row(given: Format, row: int, start: int, end: int) -> Example:
    rows = {field: given.tensor(field)[row].clone() for field in given.fields}
    return given.example({field: row if field.role is Role.ROW else row[start:end] for field, row in rows.items()})


def _span(given: Format, row: int) -> tuple[int, int]:
    """Return start and end of a row without padding."""
    if not given.has_tokens:
        return 0, 1
    tokens, masks = given.field_with(Role.TOKENS), [field for field in given.fields if field.role is Role.MASK]
    assert tokens is not None
    if not masks:
        return 0, given.tensor(tokens).shape[1]
    ends = []
    for mask in masks:
        kept = torch.nonzero(given.tensor(mask)[row] != 0).flatten().tolist()
        if not kept or kept != list(range(kept[0], kept[-1] + 1)):
            raise invalid(f"batch {mask.name!r}", f"row {row} has a 0 between ones", "padding on one side only")
        ends.append((kept[0], kept[-1] + 1))
    return min(start for start, _ in ends), max(end for _, end in ends)


def _cut(given: Format, row: int, start: int, end: int, num_rows: int) -> int:
    """Return a new end for a row. Rows get different lengths and different numbers of counted labels, at least two."""
    order = (row * 2) % num_rows if num_rows % 2 else (row * 2) % num_rows + (row * 2) // num_rows
    wanted = end - round((end - start) * 0.75 * order / max(num_rows, 2))
    labels = given.field_with(Role.LABELS)
    if labels is None:
        return max(wanted, start + 3 if end - start >= 3 else end)
    counted = torch.nonzero(given.tensor(labels)[row, start:end] != given.ignore_index).flatten().tolist()
    counted = [position for position in counted if position] if given.is_shifted_by_model else counted
    least = start + counted[min(1, len(counted) - 1)] + 1 if counted else end
    return max(wanted, least)


def opaque_examples(batch: Any, examples: Callable[[Any], Sequence[Any]], weight: Callable[[Any], float] | None) -> list[Example]:
    """Take a batch apart with the user's functions `examples` and `weight`.

    Raises `UsageError` if `examples` does not return a sequence.
    """
    found = examples(batch)
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise invalid("examples", f"it returned a value of type {type(found).__name__}", "a list of examples")
    weights = [1.0 if weight is None else float(weight(each)) for each in found]
    rows = zip(found, weights, strict=True)
    return [Example(values={}, length=1, num_counted=1, num_labels=1, weight=own, value=each) for each, own in rows]
