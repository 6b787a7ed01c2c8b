"""Roles for tensors in a batch: tokens, labels, masks, positions. A role decides how examples are cut out, padded and packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from equivcheck.arrangements.usage import invalid
from equivcheck.system.choice import PrintableEnum


class Role(PrintableEnum):
    """How a tensor is cut, padded and packed.

    A ROW tensor has one item for each row; all others have shape (rows, positions, ...).
    """

    TOKENS = "tokens"
    LABELS = "labels"
    MASK = "mask"
    LOSS_MASK = "loss_mask"
    POSITIONS = "positions"
    TOKEN = "token"
    """Any other value for each position, such as a weight. Padded with zeros."""
    ROW = "row"
    """A value for each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One tensor in a batch."""

    path: tuple[Any, ...]
    """Keys and indices that lead to the tensor in the batch."""
    role: Role
    """How the tensor is cut, padded and packed."""

    @property
    def name(self) -> str:
        """Tensor name in messages: keys and indices, separated by dots."""
        return _name(self.path)

    @property
    def has_row_labels(self) -> bool:
        """Whether the field has labels that do not belong to tokens one by one, such as a class or a translation for each row."""
        return self.role is Role.ROW and str(self.path[-1] if self.path else "").lower() in _NAMES[Role.LABELS]


_NAMES = {
    Role.POSITIONS: ("position_ids", "positions", "pos"),
    Role.LABELS: ("label", "labels", "target", "targets", "lm_labels", "shift_labels"),
    Role.MASK: ("attention_mask", "padding_mask", "mask", "input_mask"),
}
_ENDS = {Role.POSITIONS: "_position_ids", Role.LABELS: "_labels", Role.MASK: "_attention_mask"}
"""Ends of names in batches with several rows for an example, such as ``chosen_labels``."""
_OF_LOSS = ("loss", "completion", "response", "label", "action")


def fields_of(batch: Any, given: Mapping[str, str], ignore_index: int) -> tuple[Field, ...]:
    """Find each tensor's role from the given roles, names, shapes and values.

    Raises `UsageError` if a role is not clear, or if tensors differ in their numbers of rows.
    """
    found = [(path, tensor) for path, tensor in tensors_in(batch) if tensor.dim()]
    if not found:
        raise invalid("batch", "none of its tensors has a dim for rows", "tensors whose first dim is the rows")
    for path, tensor in found:
        if len(tensor) != len(found[0][1]):
            (first, rows), name = (_name(found[0][0]), len(found[0][1])), _name(path)
            raise invalid("batch", f"{first!r} has {rows} rows and {name!r} has {len(tensor)}", "tensors with the same first dim")
    unknown = sorted({*given} - {_name(path) for path, _ in found})
    if unknown:
        names = ", ".join(_name(path) for path, _ in found)
        raise invalid(f"fields {unknown[0]!r}", "the batch has no such tensor", f"one of {names}")
    length = _length(found, given)
    roles: dict[tuple[Any, ...], Role] = {}
    tokens: torch.Tensor | None = None
    for path, tensor in found:
        if _name(path) in given:
            role = _role(_name(path), given[_name(path)])
        else:
            role = _guess(path, tensor, length, tokens, ignore_index)
        roles[path] = role
        tokens = tensor if role is Role.TOKENS and tokens is None else tokens
    return tuple(Field(path=path, role=role) for path, role in roles.items())


def _role(name: str, value: str) -> Role:
    if value not in [role.value for role in Role]:
        raise invalid(f"fields {name}={value!r}", "there is no such role", f"one of {', '.join(role.value for role in Role)}")
    return Role(value)


def _length(found: list[tuple[tuple[Any, ...], torch.Tensor]], given: Mapping[str, str]) -> int | None:
    """Return the number of positions in the first tensor with tokens; None if there are no tokens."""
    for number, (path, tensor) in enumerate(found):
        role = given.get(_name(path))
        is_named = _is_token_name(path, is_first=not number)
        if role == Role.TOKENS.value or (role is None and tensor.dim() == 2 and _is_integer(tensor) and is_named):
            return tensor.shape[1]
    return None


def _is_token_name(path: tuple[Any, ...], *, is_first: bool) -> bool:
    if not path or not isinstance(path[-1], str):
        return is_first  # integers after other inputs are targets, such as several labels for an image
    name = path[-1].lower()
    return name.endswith("ids") or "token" in name or name in {"input", "inputs", "x", "src"}


def _guess(
    path: tuple[Any, ...], tensor: torch.Tensor, length: int | None, tokens: torch.Tensor | None, ignore_index: int
) -> Role:
    if length is None or tensor.dim() < 2 or tensor.shape[1] != length:
        return Role.ROW
    name = str(path[-1]).lower() if path else ""
    by_name = next((role for role, names in _NAMES.items() if name in names or name.endswith(_ENDS[role])), None)
    if by_name is not None:
        return by_name
    if name.endswith("mask") and any(word in name for word in _OF_LOSS):
        return Role.LOSS_MASK
    if not _is_integer(tensor) or tensor.dim() > 2:
        return Role.TOKEN
    if tokens is None or name.endswith("ids"):
        return Role.TOKENS
    return Role.TOKEN if isinstance(path[-1], str) else _role_by_values(path, tensor, tokens, ignore_index)


def _role_by_values(path: tuple[Any, ...], tensor: torch.Tensor, tokens: torch.Tensor, ignore_index: int) -> Role:
    """Return the role by values, for integers without a name."""
    counted = tensor != ignore_index
    if tensor.max() <= 1 and tensor.min() >= 0 and tokens.max() > 1:
        return Role.MASK
    is_target = path[-1] == 1  # of a pair (inputs, targets)
    if is_target or not bool(counted.all()) or any(_agrees(tensor, tokens, counted, shift=shift) for shift in (0, 1)):
        return Role.LABELS
    if torch.equal(tensor, torch.arange(tensor.shape[1]).expand_as(tensor)):
        return Role.POSITIONS
    name = _name(path)
    raise invalid(
        f"batch {name!r}",
        f"its role is not clear from its name, its shape {tuple(tensor.shape)} and its values",
        f"fields={{{name!r}: ...}} with one of {', '.join(role.value for role in Role)}",
    )


def _agrees(labels: torch.Tensor, tokens: torch.Tensor, counted: torch.Tensor, *, shift: int = 0) -> bool:
    """Whether counted labels are the tokens, `shift` positions later."""
    end = labels.shape[1] - shift
    return bool((labels[:, :end] == tokens[:, shift:])[counted[:, :end]].all())


def is_shifted_by_model(tokens: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> bool:
    """Whether each label stands at its own token's position, so that the model or the loss shifts labels."""
    return _agrees(labels, tokens, labels != ignore_index)


def tensors_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], torch.Tensor]]:
    """Return all tensors in nested dicts, tuples and lists, each with its path."""
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if isinstance(value, Mapping):
        rows = list(value.items())
    elif isinstance(value, (tuple, list)):
        rows = list(enumerate(value))
    else:
        return []
    return [found for key, part in rows for found in tensors_in(part, (*path, key))]


def unsplit_lists(batch: Any, fields: Sequence[Field]) -> list[str]:
    """Return the names of a batch's lists and tuples that contain no tensors, such as lists of texts.

    Such lists cannot be split into examples. Returns no names if the user's functions take the batch apart.
    """
    if not fields or not isinstance(batch, Mapping):
        return []
    return [str(key) for key, value in batch.items() if isinstance(value, (list, tuple)) and not tensors_in(value)]


def with_tensors(value: Any, tensors: Mapping[tuple[Any, ...], torch.Tensor], path: tuple[Any, ...] = ()) -> Any:
    """Return a copy of nested dicts, tuples and lists, with other tensors at the paths in `tensors`."""
    if isinstance(value, torch.Tensor):
        return tensors.get(path, value)
    if isinstance(value, Mapping):
        parts = {key: with_tensors(part, tensors, (*path, key)) for key, part in value.items()}
        return parts if type(value) is dict else _like(value, parts)
    if isinstance(value, (tuple, list)):
        parts_of = [with_tensors(part, tensors, (*path, number)) for number, part in enumerate(value)]
        return type(value)(*parts_of) if hasattr(value, "_fields") else type(value)(parts_of)
    return value


def _like(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    """Keep a mapping's class, such as transformers' batches have. Falls back to a dict."""
    try:
        return type(value)(parts)  # type: ignore[call-arg]
    except Exception:
        return parts


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
