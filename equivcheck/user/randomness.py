"""Makes random numbers reproducible: seeded generators, and dropout masks that are split over ranks like data.

If each rank drew its own masks, it would drop other elements than one device. A mask here depends only on the seed, the module
name and the call number, so all ranks draw the same one and take their rows from it.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from equivcheck.user.precision.autograd_private import in_backward
from equivcheck.user.usage import invalid

Shape = tuple[int, ...]
MASKED = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Modules with masks. All except `nn.Dropout` drop whole channels."""


@dataclass(slots=True)
class MaskShapes:
    """Shapes of the dropout modules' inputs, as one device sees them with full batches.

    Ranks draw masks in these shapes, and each rank uses its own part.
    """

    seen: dict[tuple[str, int], Shape] = field(default_factory=dict)
    """Shape of the input, by module name and call number."""


@dataclass(slots=True)
class RowShard:
    """The part of the rows with which a model is called. Rows are divided into equal parts."""

    number: int = 0
    """Number of the part, from 0."""
    count: int = 1
    """How many parts there are."""
    in_turn: bool = False
    """Whether the model is called with all parts, one after the other."""


@contextlib.contextmanager
def seed_generators(seed: int) -> Iterator[None]:
    """Inside the context, torch, numpy and random are seeded. Afterwards, their state is restored.

    Simulated ranks are threads and share these generators. Code in this context must not communicate, because another rank could
    run then.
    """
    torch_state, numpy_state, state = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(state)


def require_masks(wanted: object) -> MaskShapes | None:
    """Check the argument `dropout_masks`. Raises `UsageError` if it is not a bool."""
    if not isinstance(wanted, bool):
        raise invalid(f"dropout_masks {wanted!r:.100}", "it is not a bool", "True or False")
    return MaskShapes() if wanted else None


class Masked:
    """Replacement for a dropout module's forward. It draws the mask for all rows, and uses the part for the current rows."""

    def __init__(self, module: nn.Module, name: str, seed: int, shapes: MaskShapes, cut: RowShard) -> None:
        self._module, self._name, self._seed, self._shapes, self.cut = module, name, seed, shapes, cut
        self._calls = 0

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Multiply inputs by the scaled mask."""
        rate = float(self._module.p)  # type: ignore[arg-type]
        if not self._module.training or rate == 0:
            return inputs
        if not in_backward():  # activation checkpointing recomputes with the last mask
            self._calls += 1
        mask = self._mask(tuple(inputs.shape), rate)
        kept = mask.to(inputs.dtype) / (1 - rate) if rate < 1 else torch.zeros_like(mask, dtype=inputs.dtype)
        return inputs * (_distribute_like(kept, inputs) if isinstance(inputs, DTensor) else kept)

    def _mask(self, shape: Shape, rate: float) -> torch.Tensor:
        """Mask for inputs of this shape, True for kept elements."""
        cut, call = self.cut, self._calls - 1
        index, number = divmod(call, cut.count) if cut.in_turn else (call, cut.number)
        if cut.count == 1:
            self._shapes.seen.setdefault((self._name, index), shape)
        full = self._shapes.seen.get((self._name, index), shape)
        drawn = full if type(self._module) is nn.Dropout else (*full[:2], *(1 for _ in full[2:]))
        mask = _draw(drawn, rate, self._seed, self._name, index)
        if shape == full:
            return mask
        dim = next((dim for dim, (all_, own) in enumerate(zip(full, shape, strict=False)) if all_ != own), 0)
        if len(shape) != len(full) or (*full[:dim], full[dim] // cut.count, *full[dim + 1 :]) != shape:
            name = f"{type(self._module).__name__} {self._name!r}"
            why = f"{name} has inputs {list(shape)} on a rank and {list(full)} on one device"
            raise invalid(
                "dropout_masks True",
                why,
                f"inputs split into {cut.count} equal parts along one dim, or DTensors. Otherwise use p=0 or eval()",
            )
        return mask.chunk(cut.count, dim)[number] if mask.shape[dim] == full[dim] else mask


def mask_dropout(model: nn.Module, seed: int, shapes: MaskShapes, cut: RowShard) -> None:
    """Replace the forward of every dropout module in a model. The new one draws the mask for all rows."""
    for name, module in model.named_modules():
        if isinstance(module, MASKED):
            module.forward = Masked(module, name, seed, shapes, cut)  # type: ignore[assignment]


def set_row_shard(model: nn.Module, number: int, count: int) -> None:
    """Make a model's dropout modules use part `number` of their masks, whose rows are divided into `count` equal parts."""
    for module in model.modules():
        if isinstance(module.forward, Masked):
            module.forward.cut = RowShard(number, count)


def _draw(shape: Shape, rate: float, seed: int, name: str, index: int) -> torch.Tensor:
    # Not hash(), because that differs between processes.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}/{index}".encode()))
    return torch.rand(shape, generator=generator, dtype=torch.float64) >= rate


def _distribute_like(mask: torch.Tensor, inputs: DTensor) -> torch.Tensor:
    """The mask as a DTensor with the inputs' placements."""
    mesh, own = inputs.device_mesh, mask.expand(inputs.shape)
    coordinate: Sequence[int] = mesh.get_coordinate() or ()
    for index, size, placement in zip(coordinate, mesh.shape, inputs.placements, strict=True):
        if isinstance(placement, Shard):
            parts = own.chunk(size, placement.dim)
            own = parts[index] if index < len(parts) else own.narrow(placement.dim, 0, 0)
    return DTensor.from_local(
        own.contiguous(), mesh, inputs.placements, run_check=False, shape=inputs.shape, stride=inputs.stride()
    )
