"""The form of a user's batches, and functions to put rows together in this form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from equivcheck.arrangements.collating import require_packed
from equivcheck.arrangements.fields import Field, Role, fields_of, is_shifted_by_model, tensors_in, with_tensors
from equivcheck.arrangements.rows import Example, Packing, Rows, Side
from equivcheck.arrangements.usage import invalid


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Format:
    """Structure of a user's batches, with the role of each tensor."""

    batch: Any
    """Batch from the user."""
    fields: tuple[Field, ...]
    """Tensors in the batch, with their roles."""
    pad_id: int
    """Token used for padding."""
    ignore_index: int
    """Label that does not count in the loss."""
    packing: Packing | Callable[[list[Any]], Any] | None
    """How documents are packed; a function gets a list of examples in the batch's form, without the dim for rows."""
    default_side: Side = Side.RIGHT
    """Side on which the user's own batch is padded."""
    collate: Callable[[list[Any]], Any] | None = None
    """User's function that puts examples together to a batch; None if the batch is taken apart by roles."""

    @property
    def has_tokens(self) -> bool:
        """Whether rows have positions, so that they can be padded."""
        return any(field.role is Role.TOKENS for field in self.fields)

    @property
    def is_shifted_by_model(self) -> bool:
        """Whether labels stand at their own tokens' positions, so that the model or the loss shifts them."""
        tokens, labels = self.field_with(Role.TOKENS), self.field_with(Role.LABELS)
        if tokens is None or labels is None:
            return tokens is not None
        return is_shifted_by_model(self.tensor(tokens), self.tensor(labels), self.ignore_index)

    def field_with(self, role: Role) -> Field | None:
        """Return the first field with this role; None if no field has it."""
        return next((field for field in self.fields if field.role is role), None)

    def tensor(self, field: Field) -> torch.Tensor:
        """Return a field's tensor in the user's batch."""
        return dict(tensors_in(self.batch))[field.path]

    def example(self, values: Mapping[Field, torch.Tensor]) -> Example:
        """Build an example from its values, and count its labels."""
        tokens, labels, mask = (self.field_with(role) for role in (Role.TOKENS, Role.LABELS, Role.LOSS_MASK))
        length = 1 if tokens is None else len(values[tokens])
        counted = torch.ones(length, dtype=torch.bool)
        if labels is not None:
            counted = values[labels] != self.ignore_index
        if mask is not None:
            counted = counted & (values[mask] != 0)
        num_labels = int(counted.sum())
        own_labels = next((value for field, value in values.items() if field.has_row_labels and value.dim()), None)
        if own_labels is not None and labels is None and mask is None:
            counted = own_labels.flatten() != self.ignore_index
            num_labels = int(counted.sum())
        elif tokens is not None and self.is_shifted_by_model:
            counted = counted[1:]
        scalars = [value for field, value in values.items() if field.role is Role.ROW and not value.dim()]
        numbers = [value for value in scalars if value.is_floating_point()]  # integers are classes
        weight = float(numbers[0]) if numbers else 1.0
        return Example(values=values, length=length, num_counted=int(counted.sum()), num_labels=num_labels, weight=weight)

    def with_tokens(self, example: Example, token: int) -> Example:
        """Return the example with all tokens except the last replaced by `token`."""
        values = dict(example.values)
        for field, value in example.values.items():
            if field.role is Role.TOKENS:
                values[field] = torch.cat([torch.full_like(value[:-1], token), value[-1:]])
        return replace(example, values=values)

    def halves(self, example: Example) -> tuple[Example, Example] | None:
        """Split the counted labels over two copies.

        One copy ignores the first, third, fifth label and so on, the other copy the rest. None if the example has fewer than two
        counted labels.
        """
        field = self.field_with(Role.LABELS) or self.field_with(Role.LOSS_MASK)
        if field is None or example.num_counted < 2:
            return None
        ignored = self._filler(field)
        counted = torch.nonzero(example.values[field] != ignored).flatten().tolist()
        found = []
        for start in (0, 1):
            value = example.values[field].clone()
            value[[position for number, position in enumerate(counted) if number % 2 == start]] = ignored
            found.append(self.example({**example.values, field: value}))
        return (found[0], found[1]) if all(each.num_counted for each in found) else None

    def without_first_label(self, example: Example) -> Example:
        """Return the example with the label at the first position ignored."""
        return self.example({field: self._part(field, example, is_first=False) for field in self.fields})

    def without_labels(self, example: Example) -> Example:
        """Return the example with all labels ignored."""
        values = {
            field: torch.full_like(value, self._filler(field)) if field.role in (Role.LABELS, Role.LOSS_MASK) else value
            for field, value in example.values.items()
        }
        return self.example(values)

    def microbatch(self, given: Rows) -> Any:
        """Build a batch in the user's form from a microbatch's rows."""
        if self.collate is not None:
            return self.collate([example.value for example in given.examples])
        if given.is_packed and callable(self.packing):
            packed = self.packing([self._one(example) for example in given.examples])
            tokens = self.field_with(Role.TOKENS)
            if tokens is not None:
                require_packed(packed, tokens.path, [example.values[tokens] for example in given.examples])
            return packed
        tensors = {field.path: self._tensor(field, given) for field in self.fields}
        batch = with_tensors(self.batch, tensors)
        return self._with_documents(batch, given) if given.is_packed else batch

    def _filler(self, field: Field) -> int:
        """Return the value at a position that does not count."""
        return {Role.TOKENS: self.pad_id, Role.LABELS: self.ignore_index}.get(field.role, 0)

    def _one(self, example: Example) -> Any:
        """Return an example like the user's batch, without the dim for rows and without positions."""
        found = with_tensors(self.batch, {field.path: value for field, value in example.values.items()})
        if isinstance(found, Mapping):
            dropped = {field.path[0] for field in self.fields if field.role in (Role.POSITIONS, Role.MASK)}
            return {key: value for key, value in found.items() if key not in dropped}
        return found

    def _tensor(self, field: Field, given: Rows) -> torch.Tensor:
        if field.role is Role.ROW:
            return torch.stack([row[0].values[field] for row in given.rows])
        return torch.stack([self._padded(field, row, given) for row in given.rows])

    def _padded(self, field: Field, row: Sequence[Example], given: Rows) -> torch.Tensor:
        parts = [self._part(field, example, is_first=not number) for number, example in enumerate(row)]
        value = torch.cat(parts)
        fill = self._filler(field) if field.role is not Role.TOKENS or given.pad_id is None else given.pad_id
        padding = value.new_full((given.length - len(value), *value.shape[1:]), fill)
        return torch.cat([padding, value] if given.side is Side.LEFT else [value, padding])

    def _part(self, field: Field, example: Example, *, is_first: bool) -> torch.Tensor:
        """Return an example's values in a row. A label that the model would predict from the document before does not count."""
        value = example.values[field]
        if is_first or not self.is_shifted_by_model or field.role not in (Role.LABELS, Role.LOSS_MASK):
            return value
        value = value.clone()
        value[0] = self._filler(field)
        return value

    def _with_documents(self, batch: Any, given: Rows) -> Any:
        """Return a packed batch with its documents' boundaries."""
        assert isinstance(self.packing, Packing), "rows are packed only if the user says how"
        if self.packing is Packing.POSITION_IDS:
            dropped = {field.path[0] for field in self.fields if field.role is Role.MASK}
            batch = {key: value for key, value in batch.items() if key not in dropped}
            return batch | {"position_ids": _per_row(given, lambda _, example: torch.arange(example.length))}
        if self.packing is Packing.DOCUMENT_IDS:
            return batch | {"document_ids": _per_row(given, lambda number, example: torch.full((example.length,), number))}
        lengths = [example.length for row in given.rows for example in row]
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return batch | {"cu_seqlens": ends, "max_seqlen": max(lengths)}


def _per_row(given: Rows, value: Callable[[int, Example], torch.Tensor]) -> torch.Tensor:
    """Return one integer for each position. Padding continues as one more document."""
    rows = []
    for row in given.rows:
        parts = [value(number, example) for number, example in enumerate(row)]
        rest = given.length - sum(map(len, parts))
        padding = replace(row[0], length=rest)
        rows.append(torch.cat([*parts, value(len(row), padding)]))
    return torch.stack(rows)


def format_of(
    batch: Any,
    *,
    fields: Mapping[str, str],
    pad_id: int,
    ignore_index: int,
    packing: str | Callable[[list[Any]], Any] | None,
) -> Format:
    """Find the roles and the padding in a user's batch. Raises `UsageError` if it cannot be taken apart.

    `fields` gives the roles of tensors by name, if they cannot be recognized. For the other arguments, see `Format`.
    """
    kind: Any = packing
    if isinstance(packing, str):
        if packing not in [each.value for each in Packing]:
            values = ", ".join(each.value for each in Packing)
            raise invalid(f"packing {packing!r}", "it does not exist", f"{values}, a collate function, or None")
        kind = Packing(packing)
    found = Format(
        batch=batch, fields=fields_of(batch, fields, ignore_index), pad_id=pad_id, ignore_index=ignore_index, packing=kind
    )
    if packing is not None and not found.has_tokens:
        raise invalid(f"packing {packing!r}", "the batch has no tokens, so rows cannot be packed", "None")
    if isinstance(kind, Packing) and not isinstance(batch, dict):
        why = f"the batch is a {type(batch).__name__}"
        raise invalid(f"packing {packing!r}", why, "a dict as batch, or a collate function as packing")
    return replace(found, default_side=_side(found))


def _side(given: Format) -> Side:
    mask = given.field_with(Role.MASK)
    if mask is None:
        return Side.RIGHT
    values = given.tensor(mask) != 0
    return Side.LEFT if bool((~values[:, 0]).any() and values[:, -1].all()) else Side.RIGHT
