"""Finds names and positions for the tensors that a user's script trains. The script passes no model to us."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial

from equivcheck.layouts.parallelisms.fsdp1.flat_parameters import flat_slots
from equivcheck.recording.adapters.megatron import gradient_of
from equivcheck.recording.exact import hash_parts
from equivcheck.recording.signs import signs_of
from equivcheck.recording.sketch import sketch_parts
from equivcheck.recording.trace import Entry, Moment
from equivcheck.training.read import canonical_name, in_order_of_pieces, pieces_of
from equivcheck.worlds.trace.trace import Piece, Slot

T = TypeVar("T", bound=torch.Tensor)
Row = tuple[tuple[Piece, ...], torch.Tensor]
"""A tensor, and the positions of its local elements in order."""


def find_root(parameters: Collection[torch.Tensor]) -> nn.Module | None:
    """Search this process for the outermost module that owns all `parameters`; None if no module owns them all."""
    wanted = set(map(id, parameters))
    # Not `isinstance`, which asks proxies for the class of objects that may be gone.
    modules = (each for each in gc.get_objects() if issubclass(type(each), nn.Module))
    owners = [each for each in modules if wanted <= _parameter_ids(each)]
    inner = {id(child) for owner in owners for child in owner.children()}
    return next((owner for owner in owners if id(owner) not in inner), None)


def _parameter_ids(module: nn.Module) -> set[int]:
    """Return a module's parameter ids.

    Empty if the module cannot list them, for example because its constructor has not finished.
    """
    try:
        return set(map(id, nn.Module.parameters(module)))
    except Exception:  # a living module of other code may raise anything
        return set()


def slots_of(root: nn.Module, prefix: str = "") -> tuple[Slot, ...]:
    """Return a slot (parameter with its position) for each parameter of `root`. Shared parameters have one slot.

    Names are those in the model without wrappers such as DDP, with `prefix` before them.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in root.modules()):
        found = flat_slots(root)
        return tuple(replace(slot, pieces=tuple(_renamed(piece, prefix, "") for piece in slot.pieces)) for slot in found)
    named = _unwrapped(nn.Module.named_parameters(root), root)
    return tuple(Slot(parameter=parameter, pieces=pieces_of(prefix + name, parameter)) for name, parameter in named)


def buffers_of(root: nn.Module, prefix: str = "") -> list[Row]:
    """Return each buffer of `root` with its position.

    Names are those in the model without wrappers such as DDP, with `prefix` before them.
    """
    return [(pieces_of(prefix + name, buffer), buffer) for name, buffer in _unwrapped(nn.Module.named_buffers(root), root)]


def modules_of(root: nn.Module, prefix: str = "") -> dict[int, str]:
    """Return the name of each module in `root`, with `prefix` before it. Keys are the modules' ids.

    A wrapper such as DDP has its inner module's name.
    """
    unwrapped = _wrapped_prefix(root)
    named = ((f"{name}." if name else "", module) for name, module in root.named_modules())
    own = (("" if unwrapped.startswith(name) else name.removeprefix(unwrapped), module) for name, module in named)
    return {id(module): prefix + canonical_name(name).removesuffix(".") for name, module in own}


def _unwrapped(named: Iterable[tuple[str, T]], root: nn.Module) -> Iterator[tuple[str, T]]:
    prefix = _wrapped_prefix(root)
    return ((canonical_name(name.removeprefix(prefix)), tensor) for name, tensor in named)


def _wrapped_prefix(module: nn.Module) -> str:
    """Prefix that wrappers add, such as DistributedDataParallel and compiled modules: they have one child and nothing else."""
    prefix = ""
    while (names := list(dict(module.named_children()))) in (["module"], ["_orig_mod"]) and not module._parameters:
        module, prefix = module.get_submodule(names[0]), f"{prefix}{names[0]}."
    return prefix


def move_parameters(rows: Iterable[tuple[Row, float]], choice: int) -> None:
    """Multiply each element by 1 + eps or 1 - eps, in place. `rows` are pairs (tensor, eps).

    The sign depends only on `choice` and the element's index in the full tensor, so replicas stay equal.
    """
    for (pieces, tensor), eps in rows:
        local = local_of(tensor)
        signs = torch.cat([torch.from_numpy(signs_of(piece, choice)) for piece in pieces])
        local.mul_((1.0 + eps * signs.to(local)).view_as(local))


def gradients_of(slots: Sequence[Slot]) -> list[Row]:
    """Return the gradients of the slots' parameters, with their positions. Parameters without a gradient are left out."""
    found = [(slot, gradient_of(slot.parameter)) for slot in slots]
    return [(_pieces_like(slot, gradient), gradient) for slot, gradient in found if gradient is not None]


def _pieces_like(slot: Slot, tensor: torch.Tensor) -> tuple[Piece, ...]:
    """Return a gradient's or state tensor's positions: the parameter's, unless the tensor has its own placements."""
    parameter = slot.parameter
    if isinstance(tensor, DTensor) and isinstance(parameter, DTensor) and tensor.placements != parameter.placements:
        return pieces_of(slot.pieces[0].name, tensor)
    return slot.pieces


def state_of(optimizer: torch.optim.Optimizer, slots: Sequence[Slot]) -> list[Row]:
    """Return the optimizer's state tensors that have the same shape as their parameter. Their names are ``parameter/key``."""
    rows = []
    for slot in slots:
        for key, value in optimizer.state.get(slot.parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == slot.parameter.shape:
                pieces = _pieces_like(slot, value)
                rows.append((tuple(_renamed(piece, "", f"/{key}") for piece in pieces), value))
    return rows


def _renamed(piece: Piece, prefix: str, suffix: str) -> Piece:
    return replace(piece, name=f"{prefix}{piece.name}{suffix}") if piece.name else piece  # padding has no name


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's local elements, without gradient tracking. They share storage with the tensor unless it is sparse."""
    local: torch.Tensor = tensor.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    return local if local.layout is torch.strided else local.to_dense()


def local_loss(loss: torch.Tensor) -> torch.Tensor:
    """Copy this rank's loss without communication.

    If the loss is a DTensor with partial sums, this rank's partial sum is multiplied by the number of ranks. The mean over all
    ranks' copies is then the loss.
    """
    local = local_of(loss).clone()
    if isinstance(loss, DTensor):
        for axis, placement in enumerate(loss.placements):
            local *= loss.device_mesh.size(axis) if placement == Partial("sum") else 1
    return local


def entries_of(moment: Moment, rows: Sequence[Row], *, exactly: bool = False) -> Iterator[Entry]:
    """Yield a sketch for each tensor's local elements, recorded at `moment`.

    With `exactly`, entries also have exact hashes, and integer tensors are included. Padding and complex tensors are left out.
    """
    parts: list[tuple[Piece, torch.Tensor, tuple[int, ...] | None]] = []
    for pieces, tensor in rows:
        addends = _addends_of(tensor)
        local = local_of(tensor)
        local = in_order_of_pieces(tensor, local) if isinstance(tensor, DTensor) else local.reshape(-1)
        if local.numel() != sum(piece.numel for piece in pieces):
            continue  # a tensor in another form, such as an unsharded gradient: the comparison finds it missing
        for piece, values in zip(pieces, torch.split(local, [piece.numel for piece in pieces]), strict=True):
            is_known = values.is_floating_point() or (exactly and not values.is_complex())
            if piece.name and values.numel() and is_known:
                parts.append((piece, values, addends))
    for device in dict.fromkeys(values.device for _, values, _ in parts):
        own = [each for each in parts if each[1].device == device]
        sketches = sketch_parts([(piece, values) for piece, values, _ in own])
        hashes = hash_parts([(piece, values) for piece, values, _ in own]) if exactly else [None] * len(own)
        for (piece, values, addends), sketch, exact in zip(own, sketches, hashes, strict=True):
            dtype = str(values.dtype).removeprefix("torch.")
            yield Entry(moment=moment, piece=piece, dtype=dtype, sketch=sketch, exact=exact, addends=addends)


def _addends_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return ranks whose local tensors add up to the full tensor.

    None without partial placements; empty if some partial placements are not sums.
    """
    placements: Sequence[Any] = tensor.placements if isinstance(tensor, DTensor) else ()
    partial = [placement for placement in placements if isinstance(placement, Partial)]
    if not partial:
        return None
    if any(type(placement) is not Partial or placement.reduce_op != "sum" for placement in partial):
        return ()
    mesh: DeviceMesh = tensor.device_mesh  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank reads only tensors of meshes that it is part of"
    own = (slice(None) if placement in partial else index for placement, index in zip(placements, coordinate, strict=True))
    return tuple(mesh.mesh[tuple(own)].flatten().tolist())
