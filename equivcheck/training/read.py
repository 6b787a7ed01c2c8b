"""Read local values: parameters, gradients, optimizer state and buffers on a rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from equivcheck.worlds.trace.trace import Piece, Slot, Snapshot

WRAPPER_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""Prefixes added to parameter names by wrappers."""


State = Mapping[torch.Tensor, Mapping[str, Any]]
"""Optimizer state by parameter and key."""


class Mesh(Protocol):
    """Attributes of `DeviceMesh` that determine which elements of a DTensor a rank has."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Return the axis names."""

    def size(self, mesh_dim: int, /) -> int:
        """Return the number of ranks along one axis."""

    def get_coordinate(self) -> Sequence[int] | None:
        """Return this rank's index along each axis; None if the mesh does not contain the rank."""


def canonical_name(name: str) -> str:
    """Return a parameter's name without the prefixes that wrappers such as DDP add."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def default_slots(model: nn.Module) -> tuple[Slot, ...]:
    """Return a `Slot` for each distinct parameter in a model: the parameter, and the positions of this rank's elements."""
    return tuple(
        Slot(parameter=parameter, pieces=(piece_of(canonical_name(name), parameter),))
        for name, parameter in model.named_parameters()
    )


def piece_of(name: str, tensor: torch.Tensor) -> Piece:
    """Return which elements of the full tensor this rank has, according to a DTensor's placements.

    A plain tensor is itself the full tensor.
    """
    if not isinstance(tensor, DTensor):
        return Piece(name=name, shape=tuple(tensor.shape))
    return box_of(name, tuple(tensor.shape), tensor.device_mesh, tensor.placements)


def pieces_of(name: str, tensor: torch.Tensor) -> tuple[Piece, ...]:
    """Return which elements of the full tensor this rank has, as one or more boxes.

    A parameter has several boxes if it packs several weights and tensor parallelism shards each weight. An example is one
    parameter for the gate and up projections.
    """
    dim, count = _packing(tensor)
    if count == 1:
        return (piece_of(name, tensor),)
    assert isinstance(tensor, DTensor), "plain tensors are whole"
    shape = tuple(tensor.shape)
    part = shape[dim] // count  # torch refuses sizes that it does not divide
    box = box_of(name, (*shape[:dim], part, *shape[dim + 1 :]), tensor.device_mesh, tensor.placements)
    starts = [(*box.start[:dim], number * part + box.start[dim], *box.start[dim + 1 :]) for number in range(count)]
    return tuple(replace(box, shape=shape, start=start) for start in starts)


def _packing(tensor: torch.Tensor) -> tuple[int, int]:
    """Return dim and number of packed parts. A strided shard has packed parts unless later mesh axes explain its split factor."""
    placements: Sequence[Any] = tensor.placements if isinstance(tensor, DTensor) else ()
    for axis, placement in enumerate(placements):
        # The class is private to torch, so it is recognized by name.
        if type(placement).__name__ == "_StridedShard":
            mesh: DeviceMesh = tensor.device_mesh  # type: ignore[attr-defined]
            same = [other for other in range(axis + 1, mesh.ndim) if getattr(placements[other], "dim", None) == placement.dim]
            count = placement.split_factor // math.prod(map(mesh.size, same))
            if count > 1:
                return placement.dim % tensor.dim(), count
    return 0, 1


def in_order_of_pieces(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local elements, flattened, in the order of the boxes from `pieces_of`.

    If a parameter packs several weights, the elements are reordered so that each weight's elements are consecutive.
    """
    dim, count = _packing(tensor)
    if count == 1:
        return local.reshape(-1)
    parts: torch.Tensor = local.unflatten(dim, (count, -1))  # type: ignore[no-untyped-call]
    return parts.movedim(dim, 0).reshape(-1)


def box_of(name: str, shape: tuple[int, ...], mesh: Mesh, placements: Sequence[Placement]) -> Piece:
    """Return which elements of a tensor with this full shape and these placements lie on this rank.

    The box follows the rule of `torch.chunk`. It is computed without DTensor, because the check must be independent of DTensor.
    """
    start, size = [0] * len(shape), list(shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank reads only tensors of meshes that it is part of"
    for axis in _sharding_order(placements):
        dim = placements[axis].dim  # type: ignore[attr-defined]
        chunk = -(-size[dim] // mesh.size(axis))
        offset = min(coordinate[axis] * chunk, size[dim])
        start[dim], size[dim] = start[dim] + offset, min(chunk, size[dim] - offset)
    return Piece(name=name, shape=shape, start=tuple(start), size=tuple(size))


def _sharding_order(placements: Sequence[Placement]) -> list[int]:
    """Return mesh axes in the order in which they split the tensor.

    A strided shard (FSDP over TP) splits after the later axes.
    """
    plain = [axis for axis, placement in enumerate(placements) if type(placement) is Shard]
    strided = [axis for axis, placement in enumerate(placements) if type(placement).__name__ == "_StridedShard"]
    return plain + strided[::-1]


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's local elements. A partial DTensor is reduced over ranks first."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        whole = [Replicate() if isinstance(placement, Partial) else placement for placement in tensor.placements]
        tensor = tensor.redistribute(placements=whole)
    with torch.no_grad():  # otherwise DTensor dispatches a detach(), and wraps the local tensor in an autograd function
        return tensor.to_local().detach()


def redistribute_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Redistribute a parameter's gradient or optimizer state to the parameter's placements. This is a collective call.

    The placements can differ because sharding propagation chooses those of a gradient, and momentum is placed like the gradient.
    Plain tensors, and tensors with another shape or mesh, are returned unchanged.
    """
    if not (isinstance(parameter, DTensor) and isinstance(tensor, DTensor)):
        return tensor
    fits = tensor.shape == parameter.shape and tensor.device_mesh == parameter.device_mesh
    if not fits or tensor.placements == parameter.placements:
        return tensor
    placed: torch.Tensor = tensor.detach().redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return placed


def snapshot(slots: Sequence[Slot], pieces: tuple[Piece, ...], tensors: Iterable[torch.Tensor | None]) -> Snapshot:
    """Copy the local values of `tensors`, which has one tensor for each `Slot`, such as the slot's parameter or its gradient.

    A missing tensor is None. `pieces` contains the pieces from all `slots`, in the same order.
    """
    present: list[bool] = []
    fits: list[bool] = []
    dtypes: list[str] = []
    flat: list[torch.Tensor] = []
    for slot, tensor in zip(slots, tensors, strict=True):
        count = len(slot.pieces)
        placed = None if tensor is None else redistribute_like(slot.parameter, tensor)
        local = None if placed is None else local_values(placed)
        fit = local is not None and local.numel() == sum(piece.numel for piece in slot.pieces)
        present += [local is not None] * count
        fits += [fit] * count
        dtypes += ["" if local is None else str(local.dtype).removeprefix("torch.")] * count
        if placed is not None and local is not None and fit:
            flat.append(local.reshape(-1) if count == 1 else in_order_of_pieces(placed, local))
    values = torch.cat(flat) if flat else torch.empty(0)
    numbers = (values.float() if values.dtype is torch.bfloat16 else values).numpy()  # NumPy has no bfloat16
    return Snapshot(pieces=pieces, present=tuple(present), fits=tuple(fits), dtypes=tuple(dtypes), values=numbers)


def full_snapshot(slots: Sequence[Slot], tensors: Iterable[torch.Tensor | None]) -> Snapshot:
    """Call `full_tensor()` on the DTensors in `tensors`, and copy the full values.

    A tensor that is missing on any rank is left out, because the collective `full_tensor()` would hang. Packed parameters are
    left out, because each contains several weights.
    """
    named = [
        (slot.pieces[0].name, tensor)
        for slot, tensor in zip(slots, tensors, strict=True)
        if slot.pieces[0].shape == tuple(slot.parameter.shape)
    ]
    own = {name: isinstance(tensor, DTensor) for name, tensor in named}
    everybody: list[dict[str, bool]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    full = {
        name: tensor.detach().full_tensor()  # type: ignore[attr-defined]
        for name, tensor in named
        if isinstance(tensor, DTensor) and all(other.get(name, True) for other in everybody)
    }
    whole = [Slot(parameter=tensor, pieces=(Piece(name=name, shape=tuple(tensor.shape)),)) for name, tensor in full.items()]
    return snapshot(whole, tuple(slot.pieces[0] for slot in whole), full.values())


def state_snapshot(state: State, slots: Sequence[Slot]) -> Snapshot:
    """Copy this rank's optimizer state.

    A tensor with its parameter's shape has the parameter's placement; all other tensors count as replicated. If this rank has
    no elements of a parameter, the parameter's state is left out.
    """
    # All ranks redistribute, because those without elements must join the collectives too.
    placed = {
        parameter: {
            key: redistribute_like(parameter, value) if isinstance(value, torch.Tensor) else value
            for key, value in values.items()
        }
        for parameter, values in state.items()
    }
    found = state_slots(placed, slots)
    named = [slot for slot, _ in found]
    return snapshot(named, tuple(piece for slot in named for piece in slot.pieces), [tensor for _, tensor in found])


def state_slots(state: State, slots: Sequence[Slot]) -> list[tuple[Slot, torch.Tensor]]:
    """Return each tensor in the optimizer state, paired with a `Slot` for its position.

    Its pieces are named ``parameter/key``.
    """
    found: list[tuple[Slot, torch.Tensor]] = []
    for slot in slots:
        for key, value in state.get(slot.parameter, {}).items():
            found += _state_slots(slot, key, value if isinstance(value, torch.Tensor) else torch.tensor(value))
    return found


def _state_slots(slot: Slot, key: str, tensor: torch.Tensor) -> list[tuple[Slot, torch.Tensor]]:
    held = [piece for piece in slot.pieces if piece.name and piece.numel]
    if tensor.shape == slot.parameter.shape:
        pieces = tuple(replace(piece, name=f"{piece.name}/{key}" if piece.name else "") for piece in slot.pieces)
        return [(Slot(parameter=slot.parameter, pieces=pieces), tensor)] if held else []
    names = dict.fromkeys(piece.name for piece in held)
    return [(Slot(parameter=slot.parameter, pieces=pieces_of(f"{name}/{key}", tensor)), tensor) for name in names]


def buffer_snapshot(model: nn.Module) -> Snapshot:
    """Copy the local values in a model's buffers."""
    slots = buffer_slots(model)
    return snapshot(slots, tuple(piece for slot in slots for piece in slot.pieces), [slot.parameter for slot in slots])


def buffer_slots(model: nn.Module) -> list[Slot]:
    """Return a `Slot` for each buffer in a model, with the elements that this rank has."""
    named = ((canonical_name(name), buffer) for name, buffer in model.named_buffers())
    return [Slot(parameter=buffer, pieces=(piece_of(name, buffer),)) for name, buffer in named]
