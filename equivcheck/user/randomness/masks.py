"""Masks of dropout as data: drawn for all rows from the seed, each rank with its own part of them.

Ranks that draw by themselves drop other elements than one device does. A mask that depends on nothing but the seed, the name of
its module and how often that was called is the same everywhere, and is cut as the rows are.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from equivcheck.errors import UsageError
from equivcheck.user.precision.autograd_private import in_backward

Shape = tuple[int, ...]
MASKED = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Modules that get masks; all but the first drop whole channels."""


@dataclass(slots=True)
class MaskShapes:
    """What one device, on whole batches, was seen to drop out of."""

    seen: dict[tuple[str, int], Shape] = field(default_factory=dict)
    """By the name of the module, and which of its calls it was."""


@dataclass(slots=True)
class Cut:
    """Which part of the rows a model is called with."""

    number: int = 0
    """Of the part."""
    count: int = 1
    """Of parts."""
    in_turn: bool = False
    """Whether all parts come, one call after the other."""


def require_masks(wanted: object) -> MaskShapes | None:
    """Raises `UsageError` for what is neither yes nor no."""
    if not isinstance(wanted, bool):
        raise UsageError(f"check_training: dropout_masks is {wanted!r:.100}; allowed: True, False")
    return MaskShapes() if wanted else None


class Masked:
    """The forward of a module that drops out."""

    def __init__(self, module: nn.Module, name: str, seed: int, shapes: MaskShapes, cut: Cut) -> None:
        self._module, self._name, self._seed, self._shapes, self.cut = module, name, seed, shapes, cut
        self._calls = 0

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs times the mask, scaled as dropout is."""
        rate = float(self._module.p)  # type: ignore[arg-type]
        if not self._module.training or rate == 0:
            return inputs
        if not in_backward():  # activation checkpointing asks for the last mask once more
            self._calls += 1
        mask = self._mask(tuple(inputs.shape), rate)
        kept = mask.to(inputs.dtype) / (1 - rate) if rate < 1 else torch.zeros_like(mask, dtype=inputs.dtype)
        return inputs * (_placed(kept, inputs) if isinstance(inputs, DTensor) else kept)

    def _mask(self, shape: Shape, rate: float) -> torch.Tensor:
        """For inputs of a shape, true where they are kept."""
        cut, call = self.cut, self._calls - 1
        index, number = divmod(call, cut.count) if cut.in_turn else (call, cut.number)
        if cut.count == 1:
            self._shapes.seen.setdefault((self._name, index), shape)
        whole = self._shapes.seen.get((self._name, index), shape)
        mask = _drawn(whole if type(self._module) is nn.Dropout else _of_channels(whole), rate, self._seed, self._name, index)
        if shape == whole:
            return mask
        dim = next((dim for dim, (all_, own) in enumerate(zip(whole, shape, strict=False)) if all_ != own), 0)
        if len(shape) != len(whole) or _with(whole, dim, whole[dim] // cut.count) != shape:
            raise UsageError(
                f"check_training: {type(self._module).__name__} {self._name!r} has {list(shape)} on a rank and {list(whole)} on "
                f"one device; allowed with dropout_masks: 1/{cut.count} of one dim, or DTensors; else p=0 or eval()"
            )
        return mask.chunk(cut.count, dim)[number] if mask.shape[dim] == whole[dim] else mask


def mask_dropout(model: nn.Module, seed: int, shapes: MaskShapes, cut: Cut) -> None:
    """Let every module that drops out do so by masks."""
    for name, module in model.named_modules():
        if isinstance(module, MASKED):
            module.forward = Masked(module, name, seed, shapes, cut)  # type: ignore[assignment]


def cut_masks(model: nn.Module, number: int, count: int) -> None:
    """Say which part of the rows a model is called with from now on; without masks nothing."""
    for module in model.modules():
        if isinstance(module.forward, Masked):
            module.forward.cut = Cut(number, count)


def _drawn(shape: Shape, rate: float, seed: int, name: str, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}/{index}".encode()))
    return torch.rand(shape, generator=generator, dtype=torch.float64) >= rate


def _of_channels(shape: Shape) -> Shape:
    return (*shape[:2], *(1 for _ in shape[2:]))


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _placed(mask: torch.Tensor, inputs: DTensor) -> torch.Tensor:
    """The mask as a DTensor that lies as another does."""
    mesh, own = inputs.device_mesh, mask.expand(inputs.shape)
    coordinate: Sequence[int] = mesh.get_coordinate() or ()
    for index, size, placement in zip(coordinate, mesh.shape, inputs.placements, strict=True):
        if isinstance(placement, Shard):
            parts = own.chunk(size, placement.dim)
            own = parts[index] if index < len(parts) else own.narrow(placement.dim, 0, 0)
    return DTensor.from_local(
        own.contiguous(), mesh, inputs.placements, run_check=False, shape=inputs.shape, stride=inputs.stride()
    )
