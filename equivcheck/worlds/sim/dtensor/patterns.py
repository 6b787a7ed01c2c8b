"""Reuses result shapes that DTensor traced for other sizes. Private torch API, tested with torch 2.13.

Optimizers run about ten elementwise operations on each parameter, and DTensor would trace each one on fake tensors for each new
width. If all tensors of an operation have one shape, the result has it too. A trace then shows which argument the result
resembles and its element type.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

PARTICULAR = object()
"""Marks a result that does not follow from the argument shapes."""

_ON_LISTS = ("_foreach_", "_fused_")
"""Name prefixes for operations that combine tensor lists element by element."""
_LIKE_THEIR_ARGUMENT = ("copy_", "detach", "empty_like", "fill_", "full_like", "ones_like", "zero_", "zeros_like")
"""Operations whose result has the argument's shape, although torch does not tag them as pointwise."""


@dataclass(frozen=True, slots=True)
class _Like:
    """A result with an argument's shape and its own element type."""

    number: int | None
    """Number of the argument's shape; None for a tensor without dims."""
    kind: type[Any]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Pattern:
    """An operation and its arguments, with symbols in place of sizes.

    A traced result can then be reused if only the sizes differ.
    """

    key: Hashable
    """Cache key. It is equal for arguments that differ only in their sizes."""
    shapes: tuple[tuple[int, ...], ...]
    """The distinct shapes among the arguments. In `key`, each shape is replaced by its index here."""

    def general(self, answer: Any) -> Any:
        """Replace sizes with symbols in `answer`, a traced result, so that it can be cached.

        Returns `PARTICULAR` if a tensor in the result is not contiguous, or has a shape that no argument has.
        """
        if answer is None:
            return None
        if _is_tensor(answer):
            return self._like(answer)
        parts = [self.general(each) for each in answer]
        return PARTICULAR if PARTICULAR in parts else type(answer)(parts)

    def answer(self, general: Any) -> Any:
        """Return a cached result with this pattern's sizes in place of symbols. The method `general` made it for the cache."""
        if general is None:
            return None
        if not isinstance(general, _Like):
            return type(general)(map(self.answer, general))
        shape = () if general.number is None else self.shapes[general.number]
        return general.kind(torch.Size(shape), _contiguous(shape), general.dtype)

    def _like(self, meta: Any) -> Any:
        shape = tuple(meta.shape)
        if tuple(meta.stride) != _contiguous(shape) or (shape and shape not in self.shapes):
            return PARTICULAR
        return _Like(self.shapes.index(shape) if shape else None, type(meta), meta.dtype)


def pattern_of(schema: Any) -> Pattern | None:
    """Return the pattern for an operation and its arguments.

    None if the result for these sizes does not determine the results for other sizes.
    """
    name = schema.op._schema.name.partition("::")[2]
    on_lists = name.startswith(_ON_LISTS)
    if not (on_lists or name in _LIKE_THEIR_ARGUMENT or _is_elementwise(schema.op)):
        return None
    values = (*schema.args_schema, *schema.kwargs_schema.values())
    if not all(map(_is_usual, _tensors(values))) or not _agree(values, on_lists=on_lists):
        return None
    shapes: dict[tuple[int, ...], int] = {}
    arguments = tuple(_without_sizes(value, shapes) for value in schema.args_schema)
    options = tuple((name, _without_sizes(value, shapes)) for name, value in schema.kwargs_schema.items())
    key = (schema.op, torch.get_default_dtype(), arguments, options)
    try:
        hash(key)
    except TypeError:
        return None
    return Pattern(key, tuple(shapes))


def _is_elementwise(op: Any) -> bool:
    return torch.Tag.pointwise in op.tags and torch.Tag.inplace_view not in op.tags


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "stride") and hasattr(value, "dtype")


def _tensors(values: Sequence[Any]) -> Iterator[Any]:
    """Yield the metadata of all tensors among the arguments, also in lists."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif hasattr(value, "tensor_meta"):
            yield value.tensor_meta


def _is_usual(meta: Any) -> bool:
    """Whether a tensor is contiguous and not empty."""
    return _is_tensor(meta) and 0 not in meta.shape and tuple(meta.stride) == _contiguous(tuple(meta.shape))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides) if shape else ()


def _agree(values: Sequence[Any], *, on_lists: bool) -> bool:
    """Whether tensors that an operation combines have one shape; tensors without dims match any shape."""
    lists = [value for value in values if isinstance(value, (list, tuple)) and value]
    alone = {tuple(meta.shape) for meta in _tensors([value for value in values if not isinstance(value, (list, tuple))])} - {()}
    if not on_lists:
        return len(alone) == 1 and not any(True for _ in _tensors(lists))
    together = zip(*(list(_tensors(value)) for value in lists if any(True for _ in _tensors(value))), strict=False)
    return not alone and all(len({tuple(meta.shape) for meta in metas} - {()}) <= 1 for metas in together)


def _without_sizes(value: Any, shapes: dict[tuple[int, ...], int]) -> Hashable:
    if isinstance(value, (list, tuple)):
        return (type(value), *(_without_sizes(part, shapes) for part in value))
    if not hasattr(value, "tensor_meta"):
        return (float,) if isinstance(value, float) else (type(value), value)
    meta = value.tensor_meta
    shape = tuple(meta.shape)
    number = shapes.setdefault(shape, len(shapes)) if shape else None
    return (type(value), number, len(shape), meta.dtype)
