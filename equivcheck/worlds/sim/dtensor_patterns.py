"""Shapes of results that follow from those of arguments: what was traced for some sizes serves all; private, tried on torch 2.13.

Optimizers do some ten elementwise operations on each parameter, and for each new width DTensor would trace every one of them on
fake tensors. Where all tensors of an operation have one shape, so has its result: what was traced says which of the arguments the
result is like, and of which element type.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

PARTICULAR = object()
"""Stands for an answer that does not follow from the shapes of the arguments."""

_ON_LISTS = ("_foreach_", "_fused_")
"""What the names of operations begin with that treat tensors of several lists together, place by place."""
_LIKE_THEIR_ARGUMENT = ("copy_", "detach", "empty_like", "fill_", "full_like", "ones_like", "zero_", "zeros_like")
"""Operations whose result has the shape of the argument though torch has not marked them as elementwise."""


@dataclass(frozen=True, slots=True)
class _Like:
    """A tensor as one of the arguments, of an element type of its own."""

    number: int | None
    """Which of the arguments' shapes it has; None for a tensor without dims."""
    kind: type[Any]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Pattern:
    """The arguments of an operation with numbers in place of shapes."""

    key: Hashable
    """Equal for arguments that differ in sizes alone."""
    shapes: tuple[tuple[int, ...], ...]
    """By number."""

    def general(self, answer: Any) -> Any:
        """An answer without sizes, or `PARTICULAR`."""
        if answer is None:
            return None
        if _is_tensor(answer):
            return self._like(answer)
        parts = [self.general(each) for each in answer]
        return PARTICULAR if PARTICULAR in parts else type(answer)(parts)

    def answer(self, general: Any) -> Any:
        """What `general` made of the answer, for the sizes of these arguments."""
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
    """The pattern of an operation's arguments; None where its result may be of another shape than they are."""
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
    """What is said of tensors among arguments, in lists of them as well."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif hasattr(value, "tensor_meta"):
            yield value.tensor_meta


def _is_usual(meta: Any) -> bool:
    """Whether a tensor has elements, which lie in memory one after the other."""
    return _is_tensor(meta) and 0 not in meta.shape and tuple(meta.stride) == _contiguous(tuple(meta.shape))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides) if shape else ()


def _agree(values: Sequence[Any], *, on_lists: bool) -> bool:
    """Whether tensors that an operation treats together have one shape; those without dims go with any."""
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
