"""Slots for tensors with other placements than their parameter, such as gradients that DTensor propagated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from equivcheck.training.read import State, pieces_of, placed_as
from equivcheck.worlds.trace.trace import Piece, Slot


def own_slots(slots: Sequence[Slot], tensors: Sequence[torch.Tensor | None], place: Callable[[Piece], Piece]) -> list[Slot]:
    """Return a slot per tensor: the parameter's slot, or a new slot if a DTensor has other placements.

    `place` moves a piece from a local parameter to its position in the full one.
    """
    return [_own_slot(slot, tensor, place) for slot, tensor in zip(slots, tensors, strict=True)]


def _own_slot(slot: Slot, tensor: torch.Tensor | None, place: Callable[[Piece], Piece]) -> Slot:
    if not isinstance(tensor, DTensor) or _has_same_placements(slot.parameter, tensor):
        return slot
    names = dict.fromkeys(piece.name for piece in slot.pieces)
    return Slot(parameter=tensor, pieces=tuple(place(piece) for name in names for piece in pieces_of(name, tensor)))


def _has_same_placements(parameter: torch.Tensor, tensor: DTensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    return parameter.placements == tensor.placements and parameter.device_mesh == tensor.device_mesh


def reduce_partials(state: State) -> State:
    """Reduce partial DTensors in optimizer state.

    Every rank of the mesh must call this, even if it holds no elements, because the reduction is a collective.
    """
    return {
        parameter: {key: placed_as(parameter, value) if _is_partial(value) else value for key, value in values.items()}
        for parameter, values in state.items()
    }


def _is_partial(value: object) -> bool:
    return isinstance(value, DTensor) and any(isinstance(placement, Partial) for placement in value.placements)


@contextlib.contextmanager
def in_place_of_parameters(module: nn.Module, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Temporarily replace a module's parameters by other tensors, in the same order and shapes.

    DTensors are swapped as whole parameters because their placements may differ. For plain parameters only the data is swapped.
    """
    parameters = list(module.parameters())
    kept = [(parameter, parameter.data) for parameter in parameters if not isinstance(parameter, DTensor)]
    others = {id(parameter): nn.Parameter(tensor.detach()) for parameter, tensor in zip(parameters, tensors, strict=True)}
    replaced = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        if isinstance(parameter, DTensor)
    ]
    try:
        for parameter, _ in kept:
            parameter.data = others[id(parameter)].data
        for owner, name, parameter in replaced:
            owner.register_parameter(name, others[id(parameter)])
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data
        for owner, name, parameter in replaced:
            owner.register_parameter(name, parameter)
