"""Finds which parameter an optimizer's tensor copies. Megatron, apex and DeepSpeed update float32 copies of the parameters.

A copy holds its parameter's values with more digits. If no attribute refers to a copy, the parameter with equal values is
searched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from operator import itemgetter

import torch
from torch.distributed.tensor import DTensor

from equivcheck.errors import UsageError
from equivcheck.recording.exact import hash_parts
from equivcheck.recording.tensors import local_of
from equivcheck.worlds.trace.trace import Piece, Slot

_Key = tuple[int, torch.dtype, int]
"""Key for a tensor's content: element count, dtype, and exact hash over the bits."""
Values = Callable[[Slot], torch.Tensor]
"""Function that returns the values with which a parameter is compared."""


def values_of(slot: Slot) -> torch.Tensor:
    """Return a parameter's local elements as a one-dimensional tensor."""
    return local_of(slot.parameter).reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """An optimizer's own copies of parameters, such as float32 master weights."""

    slots: tuple[Slot, ...] = ()
    """The copies. Each has its elements' positions in the model's parameters."""
    unsure: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    """Pairs (copy, parameter) that may be wrong: several parameters have the same values, so copies were assigned to them in
    order.
    """

    def require_equal(self) -> None:
        """After an update, check that the copies in `unsure` were assigned to the right parameters.

        Each copy must equal its parameter, up to rounding. Raises `UsageError` if a copy has other values.
        """
        for copy, parameter in self.unsure:
            found, expected = copy.reshape(-1).to(torch.float64), parameter.reshape(-1).to(torch.float64)
            if not torch.allclose(found, expected, rtol=2 * torch.finfo(parameter.dtype).eps, atol=0.0):
                raise UsageError(
                    f"the optimizer's copy of a parameter with shape {tuple(parameter.shape)} is not valid: several parameters "
                    "have the same initial values, so it is not clear which one it copies. Expected an attribute main_param "
                    "with the copy, on each parameter of the model."
                )


def find_copies(tensors: Sequence[torch.Tensor], slots: Sequence[Slot], values: Values = values_of) -> Copies:
    """Before an optimizer's first step, find the parameter of which each tensor in `tensors` is a copy.

    `slots` are the parameters, and `values` returns a parameter's values. The result leaves out tensors that are no copy.
    """
    marked = dict(_marked(tensors, slots))
    left = [tensor for tensor in tensors if id(tensor) not in marked and tensor.is_floating_point()]
    taken = {id(slot.parameter) for slot in marked.values()}
    equal, unsure = _with_equal_values(left, [slot for slot in slots if id(slot.parameter) not in taken], values)
    found = {id(tensor): _copy_slot(tensor, marked[id(tensor)], values) for tensor in tensors if id(tensor) in marked}
    found |= {id(tensor): replace(slot, parameter=tensor) for tensor, slot in equal}
    for tensor in left:
        pieces = () if id(tensor) in found else _pieces_of_flat(tensor, slots, values)
        if pieces:
            found[id(tensor)] = Slot(parameter=tensor, pieces=pieces)
    return Copies(slots=tuple(found.values()), unsure=tuple(unsure))


def _marked(tensors: Sequence[torch.Tensor], slots: Sequence[Slot]) -> Iterator[tuple[int, Slot]]:
    """Yield the copies that Megatron's attributes refer to, each as an index with its parameter's slot."""
    wanted = {id(tensor): tensor for tensor in tensors}
    for slot in slots:
        main = getattr(slot.parameter, "main_param", None)
        if id(main) in wanted:
            yield id(main), slot
    owners = {id(slot.parameter): slot for slot in slots}
    for tensor in tensors:
        if (owner := id(getattr(tensor, "model_param", None))) in owners:
            yield id(tensor), owners[owner]


def _copy_slot(copy: torch.Tensor, slot: Slot, values: Values) -> Slot:
    """Return a slot for a copy. The copy may have only some consecutive elements, as in Megatron's distributed optimizer."""
    rounded = local_of(copy).reshape(-1).to(slot.parameter.dtype)
    parameter = values(slot).to(rounded.device)
    count = len(rounded)
    if count == len(parameter):
        return replace(slot, parameter=copy)
    starts = (parameter[: max(len(parameter) - count + 1, 0)] == rounded[:1]).nonzero().flatten().tolist()
    found = [start for start in starts if torch.equal(parameter[start : start + count], rounded)]
    if len(found) != 1 or len(slot.pieces) != 1 or slot.pieces[0].run is not None:
        raise UsageError(
            f"the optimizer's copy of {slot.pieces[0].name!r} is not valid: its place in the parameter is found "
            f"by comparing values, and {len(found)} places have the same {count} values. Expected exactly one place."
        )
    return Slot(parameter=copy, pieces=(replace(slot.pieces[0], run=(found[0], count)),))


def _with_equal_values(
    tensors: Sequence[torch.Tensor], slots: Sequence[Slot], values: Values
) -> tuple[list[tuple[torch.Tensor, Slot]], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return pairs of tensors and parameters that have equal values after rounding.

    The second list contains the pairs that were chosen by order only.
    """
    by_key: dict[_Key, list[Slot]] = {}
    for slot in slots if tensors else ():
        by_key.setdefault(_key(values(slot), slot.parameter.dtype), []).append(slot)
    dtypes = dict.fromkeys(dtype for _, dtype, _ in by_key)
    groups: dict[_Key, list[torch.Tensor]] = {}
    for tensor in tensors:
        for key in [key for dtype in dtypes if (key := _key(local_of(tensor), dtype)) in by_key][:1]:
            groups.setdefault(key, []).append(tensor)
    pairs, unsure = [], []
    for key, group in groups.items():
        if len(group) == len(by_key[key]):
            own = list(zip(group, by_key[key], strict=True))
            pairs += own
            unsure += [(local_of(tensor), local_of(slot.parameter)) for tensor, slot in own] if len(own) > 1 else []
    return pairs, unsure


def _key(local: torch.Tensor, dtype: torch.dtype) -> _Key:
    flat = local.reshape(-1).to(dtype)
    (exact,) = hash_parts([(Piece(name="", shape=(len(flat),)), flat)])
    return len(flat), dtype, exact.in_place


def _pieces_of_flat(copy: torch.Tensor, slots: Sequence[Slot], values: Values) -> tuple[Piece, ...]:
    """Return positions for a flat tensor that copies several parameters, or this rank's equal part of them.

    Empty if it is no such copy.

    Parameters are in the order of the storage that they share, or in the model's order.
    """
    may_be_flat = copy.dim() == 1 and len(copy) > 0 and not isinstance(copy, DTensor)
    found = [
        pieces
        for places, total in (_flat_layouts(slots) if may_be_flat else ())
        if total % len(copy) == 0
        for first in range(0, total, len(copy))
        if (pieces := _pieces_if_equal(copy.detach(), first, places, values))
    ]
    return found[0] if len(found) == 1 else ()


def _flat_layouts(slots: Sequence[Slot]) -> Iterator[tuple[list[tuple[int, Slot]], int]]:
    """Yield flat tensors that parameters may form: each parameter with its offset, and the total size."""
    plain = [slot for slot in slots if len(slot.pieces) == 1 and slot.pieces[0].run is None]
    shared: dict[tuple[int, torch.dtype], list[Slot]] = {}
    for slot in plain:
        local = local_of(slot.parameter)
        shared.setdefault((local.untyped_storage().data_ptr(), local.dtype), []).append(slot)
    for own in shared.values():
        local = local_of(own[0].parameter)
        if len(own) > 1:
            places = sorted((int(local_of(slot.parameter).storage_offset()), number) for number, slot in enumerate(own))
            yield [(offset, own[number]) for offset, number in places], local.untyped_storage().nbytes() // local.element_size()
    if len(shared) > 1:
        offset, in_order = 0, []
        for slot in plain:
            in_order.append((offset, slot))
            offset += local_of(slot.parameter).numel()
        yield in_order, offset


def _pieces_if_equal(copy: torch.Tensor, first: int, places: Sequence[tuple[int, Slot]], values: Values) -> tuple[Piece, ...]:
    """Return positions in a flat tensor from `first` on if `copy` has the same values; otherwise an empty tuple."""
    pieces, end = [], first
    start = max(bisect_right(places, first, key=itemgetter(0)) - 1, 0)
    for offset, slot in takewhile(lambda place: place[0] < first + len(copy), islice(places, start, None)):
        parameter = values(slot).to(copy.device)
        low, high = max(offset, first), min(offset + len(parameter), first + len(copy))
        if low < high:
            if not torch.equal(copy[low - first : high - first].to(parameter.dtype), parameter[low - offset : high - offset]):
                return ()
            pieces += [Piece(name="", shape=(low - end,))] if low > end else []
            pieces.append(replace(slot.pieces[0], run=(low - offset, high - low)))
            end = high
    rest = first + len(copy) - end
    return (*pieces, Piece(name="", shape=(rest,))) if rest and pieces else tuple(pieces)
