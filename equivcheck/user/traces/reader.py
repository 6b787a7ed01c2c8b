"""Reads the tensors that a rank, or the single device, holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial

from equivcheck.layouts.base.local_tensors import local_tensor_piece
from equivcheck.layouts.parallelisms.fsdp1.flat_parameters import flat_slots
from equivcheck.training.read import State, canonical_name, piece_of, pieces_of, redistribute_like, snapshot, state_slots
from equivcheck.user.batches import as_real
from equivcheck.user.traces.buffers import StepBuffers, has_buffers
from equivcheck.user.traces.cuts import ShardBoxes
from equivcheck.user.traces.names import TensorNames
from equivcheck.user.usage import invalid
from equivcheck.worlds.trace.trace import Piece, Slot, Snapshot

Place = Callable[[Piece], tuple[Piece, ...]]
"""Function that moves a piece of a local parameter to its position in the full parameter. The result may be several pieces."""


def own_slots(slots: Sequence[Slot], tensors: Sequence[torch.Tensor | None], place: Place) -> list[Slot]:
    """Return a `Slot`, with the local elements' positions, for each tensor in `tensors`, such as a parameter's gradient.

    A DTensor with other placements than its parameter gets a new slot. All other tensors get the slots of their parameters.
    """
    own = list(slots)
    for index, (slot, tensor) in enumerate(zip(slots, tensors, strict=True)):
        parameter = slot.parameter
        if isinstance(tensor, DTensor) and not (
            isinstance(parameter, DTensor)
            and parameter.placements == tensor.placements
            and parameter.device_mesh == tensor.device_mesh
        ):
            names = dict.fromkeys(piece.name for piece in slot.pieces)
            found = (piece for name in names for piece in pieces_of(name, tensor))
            own[index] = Slot(parameter=tensor, pieces=tuple(chain.from_iterable(map(place, found))))
    return own


def reduce_partials(state: State) -> State:
    """Return optimizer state in which partial DTensors are reduced.

    Every rank of the mesh must call this, even if it holds no elements, because the reduction is a collective.
    """
    reduced: dict[torch.Tensor, dict[str, Any]] = {}
    for parameter, values in state.items():
        reduced[parameter] = dict(values)
        for key, value in values.items():
            if isinstance(value, DTensor) and any(isinstance(placement, Partial) for placement in value.placements):
                reduced[parameter][key] = redistribute_like(parameter, value)
    return reduced


@contextlib.contextmanager
def in_place_of_parameters(module: nn.Module, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside the context, a module's parameters are replaced by `tensors`, in the same order and shapes.

    Each DTensor parameter is replaced by a new parameter, because the tensor's placements may differ. A plain parameter stays the
    same object, but gets the tensor's data.
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


FullTensors = Callable[[nn.Module], Mapping[str, torch.Tensor]]
"""Function from a module to its full tensors by name. Every rank calls it, so it may communicate."""


class Reader:
    """Reads a rank's parameters, gradients, optimizer state and buffers, with their positions in full tensors.

    Plain tensors count as replicated. DTensors and FSDP1 parameters know their positions. For other shards the user passes
    `cuts` or `full_tensors`. The function `full_tensors` gathers only parameters. To gather gradients or state, the reader puts
    them in the parameters' place during the call.
    """

    def __init__(
        self, names: TensorNames, module: nn.Module, full_tensors: FullTensors | None = None, boxes: ShardBoxes | None = None
    ) -> None:
        self.names, self.module, self.full_tensors = names, module, full_tensors
        self._place = _unmoved if boxes is None else boxes.place
        self._is_flat = any(isinstance(unit, FullyShardedDataParallel) for unit in module.modules())
        self._known: dict[str, torch.Tensor] = {}
        self._slots: tuple[Slot, ...] = ()
        self._gathered_names: set[str] = set()
        self._step_buffers: StepBuffers | None = None
        self.slots()

    def parameters(self) -> Snapshot:
        """Return the values that the rank's parameters have now."""
        return self._read_each(lambda parameter: parameter)

    def gradients(self, parameters: Collection[int] | None = None) -> Snapshot:
        """Return the current gradients.

        `parameters` selects parameters by id; all other gradients are recorded as missing. None selects all.
        """
        if parameters is None:
            return self._read_each(lambda parameter: parameter.grad)
        return self._read_each(lambda parameter: parameter.grad if id(parameter) in parameters else None, is_in_step=True)

    def known_parameters(self) -> set[int]:
        """Return the ids of the parameters that the module has between steps.

        Within a step, FSDP2 replaces them by unsharded parameters, which have other ids.
        """
        return {id(slot.parameter) for slot in self._slots}

    def state(self, optimizers: Sequence[torch.optim.Optimizer]) -> Snapshot:
        """Return the state of all optimizers. If an optimizer wraps another one, the inner optimizer's state is returned.

        If the user passes `full_tensors`, tensors with their parameter's shape are gathered. Other entries are read if the
        parameter's name is known.
        """
        state: dict[torch.Tensor, dict[str, Any]] = {}
        for optimizer in optimizers:
            for parameter, values in optimizer.state.items():
                state.setdefault(parameter, {}).update(_members(values))
        if self.full_tensors is None:
            found = state_slots(reduce_partials(state), self.slots())
            return _snapshot_at([slot for slot, _ in found], [tensor for _, tensor in found], place=self._place)
        parameters = list(self.module.parameters())
        named = {parameter: name for name, parameter in self.names.parameters(self.module)}
        rows: list[tuple[str, torch.Tensor | None]] = []
        for key in sorted({key for values in state.values() for key in values}):
            values = [state.get(parameter, {}).get(key) for parameter in parameters]
            fitting = [
                value if isinstance(value, torch.Tensor) and value.shape == parameter.shape else None
                for value, parameter in zip(values, parameters, strict=True)
            ]
            if any(value is not None for value in fitting):
                gathered = self._gather(list(zip(parameters, fitting, strict=True)))
                rows += [(f"{name}/{key}", full) for name, full in gathered if full is not None]
            else:
                held = [(named.get(parameter), value) for parameter, value in zip(parameters, values, strict=True)]
                known = [(name, value) for name, value in held if name in self._gathered_names and value is not None]
                rows += [(f"{name}/{key}", torch.as_tensor(value)) for name, value in known]
        return _snapshot_of(rows)

    def buffers(self) -> Snapshot:
        """Return the values that the rank's buffers have now."""
        return _snapshot_of([(name, as_real(buffer)) for name, buffer in self.names.buffers(self.module)], local_tensor_piece)

    def step_buffers(self) -> Snapshot | None:
        """Return the current values of the buffers that existed at the first call; None if there were none."""
        if self._step_buffers is None:
            self._step_buffers = StepBuffers(self.names.buffer_owners(self.module) if has_buffers(self.module) else ())
        return self._step_buffers.read()

    def _read_each(self, part: Callable[[torch.Tensor], torch.Tensor | None], *, is_in_step: bool = False) -> Snapshot:
        if self.full_tensors is not None:
            return _snapshot_of(self._gather([(parameter, part(parameter)) for parameter in self.module.parameters()]))
        slots = self._slots if is_in_step else self.slots()
        tensors = [part(slot.parameter) for slot in slots]
        return _snapshot_at(slots, tensors, self._pieces, self._place)

    def pieces_of_parameter(self, name: str, tensor: torch.Tensor) -> tuple[Piece, ...]:
        """Return the positions of a parameter's local tensor in the full tensor.

        Raises `UsageError` if the local shape contradicts `cuts`.
        """
        return pieces_of(name, tensor) if isinstance(tensor, DTensor) else self._place(piece_of(name, tensor))

    def slots(self) -> tuple[Slot, ...]:
        """Return a `Slot` for each parameter: the parameter with its position. A replaced parameter gets a new slot.

        `DistributedDataParallel` over tensor parallelism temporarily replaces shards by other tensors. Meanwhile the slots stay
        unchanged.
        """
        found = self._known | dict(self.names.parameters(self.module))
        if found.keys() != self._known.keys() or any(self._known[name] is not parameter for name, parameter in found.items()):
            self._known = found
            slots = flat_slots(self.module) if self._is_flat else tuple(map(_slot, found, found.values()))
            placed = (tuple(chain.from_iterable(map(self._place, slot.pieces))) for slot in slots)
            self._slots = tuple(replace(slot, pieces=pieces) for slot, pieces in zip(slots, placed, strict=True))
            self._pieces = tuple(piece for slot in self._slots for piece in slot.pieces)
        return self._slots

    def _gather(self, parts: Sequence[tuple[nn.Parameter, torch.Tensor | None]]) -> list[tuple[str, torch.Tensor | None]]:
        """Gather tensors by putting them in the place of parameters.

        A full tensor is missing if all its parts are missing.
        """
        assert self.full_tensors is not None, "asked for only where the user has given it"
        given = [torch.full_like(parameter.data, float("nan")) if part is None else part for parameter, part in parts]
        with in_place_of_parameters(self.module, given):
            gathered = self.full_tensors(self.module)
            if not (isinstance(gathered, Mapping) and all(isinstance(value, torch.Tensor) for value in gathered.values())):
                raise invalid(
                    "full_tensors", f"it returned a value of type {type(gathered).__name__}", "a dict of tensors by name"
                )
            copies = {canonical_name(name): value.detach().clone() for name, value in gathered.items()}
        self._gathered_names = set(copies)
        some_absent = any(part is None for _, part in parts)
        return [(name, None if some_absent and bool(full.isnan().all()) else full) for name, full in copies.items()]


def _unmoved(piece: Piece) -> tuple[Piece, ...]:
    return (piece,)


def _members(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield optimizer state by key.

    A list, such as LBFGS keeps, gives one key per member. Values that are None are left out.
    """
    for key, value in values.items():
        if isinstance(value, (list, tuple)):
            yield from _members({f"{key}.{index}": member for index, member in enumerate(value)})
        elif value is not None:
            yield key, value


def join_snapshots(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Combine snapshots of the same tensors. Each tensor's values come from the last snapshot with values for it."""
    *others, last = snapshots
    if not others:
        return last
    rows: dict[str, list[tuple[Piece, bool, bool, str, Any]]] = {}
    for each in snapshots:
        found: dict[str, list[tuple[Piece, bool, bool, str, Any]]] = {}
        ends = np.cumsum([piece.numel if fits else 0 for piece, fits in zip(each.pieces, each.fits, strict=True)])
        parts = np.split(each.values, ends[:-1]) if len(ends) else []
        for row in zip(each.pieces, each.present, each.fits, each.dtypes, parts, strict=True):
            found.setdefault(row[0].name, []).append(row)
        rows |= {name: own for name, own in found.items() if name not in rows or any(row[1] for row in own)}
    if not rows:
        return last
    pieces, present, fits, dtypes, values = zip(*(row for own in rows.values() for row in own), strict=True)
    same = next((each.pieces for each in snapshots if each.pieces == pieces), pieces)
    return Snapshot(pieces=same, present=present, fits=fits, dtypes=dtypes, values=np.concatenate(values))


def _slot(name: str, parameter: torch.Tensor) -> Slot:
    pieces = pieces_of(name, parameter) if isinstance(parameter, DTensor) else (local_tensor_piece(name, parameter),)
    return Slot(parameter=parameter, pieces=pieces)


def _snapshot_of(
    rows: Sequence[tuple[str, torch.Tensor | None]], piece: Callable[[str, torch.Tensor], Piece] = piece_of
) -> Snapshot:
    held = [(name, torch.empty(0) if tensor is None else tensor) for name, tensor in rows]
    slots = [Slot(parameter=tensor, pieces=(piece(name, tensor),)) for name, tensor in held]
    return _snapshot_at(slots, [tensor for _, tensor in rows])


def _snapshot_at(
    slots: Sequence[Slot],
    tensors: Sequence[torch.Tensor | None],
    pieces: tuple[Piece, ...] | None = None,
    place: Place = _unmoved,
) -> Snapshot:
    """Read tensors at the slots' positions. `pieces` are cached because they repeat at every step."""
    own = own_slots(slots, tensors, place)
    if pieces is None or any(one is not other for one, other in zip(own, slots, strict=True)):
        pieces = tuple(piece for slot in own for piece in slot.pieces)
    return snapshot(own, pieces, tensors)
