"""What ranks do: redistribute tensors and hand back NumPy arrays. Importable, so that ranks that are processes find it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from redistribution import model
from redistribution.cases import Held, Placement, Placements, Redistribution, Start
from redistribution.model import Array

NAMES = {False: ("a", "b", "c"), True: ("x", "y", "z")}
"""Of axes, by whether the mesh has been flattened: torch takes meshes of the same names and ranks for one."""

_kept = threading.local()


@dataclass(slots=True, kw_only=True)
class Result:
    """What one redistribution left on one rank."""

    before: Array | None = None
    """The rank's part before."""
    after: Array | None = None
    """The rank's part afterwards."""
    gradient: Array | None = None
    """Of its part before."""
    error: str = ""
    """``Type: message`` if something raised."""


def redistribute(cases: Sequence[Redistribution]) -> list[Result]:
    """Each case's result; what one raises is its result, so the world need not be built anew."""
    return [_redistribute(case) for case in cases]


def _redistribute(case: Redistribution) -> Result:
    result, mesh = Result(), mesh_of(case)
    with _noted(result):
        coordinate = tuple(mesh.get_coordinate())
        leaf, source = _start(case, mesh, coordinate)
        result.before = _array(source.to_local())
        local = _moved(case, source)
        result.after = _array(local)
        local.backward(torch.tensor(model.weight_part(case, coordinate)))
        gradient = leaf.grad
        result.gradient = _array(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    return result


@contextlib.contextmanager
def _noted(result: Result) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"


def mesh_of(case: Redistribution) -> DeviceMesh:
    """The case's mesh, made at first use and kept with its world."""
    meshes: dict[Any, DeviceMesh] = _kept.__dict__.setdefault("meshes", {})
    key = (case.mesh, case.order, case.flattened)
    if key not in meshes:
        ranks = torch.empty(case.mesh, dtype=torch.int)
        for rank, coordinate in enumerate(case.coordinates()):
            ranks[coordinate] = rank
        names = NAMES[case.flattened][: len(case.mesh)]
        meshes[key] = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        for count in range(2, len(names) + 1) if case.flattened else ():
            for axes in itertools.combinations(names, count):
                meshes[key][axes]._flatten()
    return meshes[key]


def placed(placements: Placements) -> list[Any]:
    """As torch names them."""
    return [_placed(placement) for placement in placements]


def _placed(placement: Placement) -> Any:
    if placement.held is Held.SHARD:
        return Shard(placement.dim)
    if placement.held is Held.STRIDED:
        return _StridedShard(placement.dim, split_factor=placement.split)
    return Partial(placement.op) if placement.held is Held.PARTIAL else Replicate()


def _start(case: Redistribution, mesh: DeviceMesh, coordinate: tuple[int, ...]) -> tuple[torch.Tensor, DTensor]:
    """What gradients are asked of, and the tensor that is redistributed."""
    if case.start is Start.DISTRIBUTED:
        whole = torch.tensor(model.addend(case, coordinate))
        distributed = distribute_tensor(whole, mesh, placed(case.source)).requires_grad_()
        return distributed, distributed
    local = _laid_out(case, torch.tensor(model.source_part(case, coordinate))).requires_grad_()
    stride = _laid_out(case, torch.empty(case.shape)).stride()
    return local, DTensor.from_local(
        local, mesh, placed(case.source), run_check=False, shape=torch.Size(case.shape), stride=stride
    )


def _laid_out(case: Redistribution, tensor: torch.Tensor) -> torch.Tensor:
    dims = tuple(reversed(range(tensor.dim())))
    return tensor.permute(dims).contiguous().permute(dims) if case.transposed else tensor


def _moved(case: Redistribution, source: DTensor) -> torch.Tensor:
    """The rank's part afterwards."""
    given = _gradients(case) if any(case.pending) else None
    if case.whole:
        return source.full_tensor(grad_placements=given)
    moved = source.redistribute(placements=placed(case.target), async_op=case.asynchronous)
    if tuple(moved.shape) != case.shape or list(moved.placements) != placed(case.target):
        raise AssertionError(f"it lies as {moved.placements} of {moved.shape}")
    return moved.to_local(grad_placements=given)


def _gradients(case: Redistribution) -> list[Any]:
    """How the gradient of the rank's part lies; that of an addend is the same for all ranks that have addends."""
    kept = [Placement() if each.held is Held.PARTIAL else each for each in case.target]
    return [Partial() if pending else _placed(each) for pending, each in zip(case.pending, kept, strict=True)]


def _array(tensor: torch.Tensor) -> Array:
    return tensor.detach().clone().numpy()
