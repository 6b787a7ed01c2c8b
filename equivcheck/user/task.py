"""What users bring: a training of their own, and how they spread it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler

from equivcheck.errors import UsageError
from equivcheck.scenario import LowPrecision, MixedPrecision
from equivcheck.user.randomness.masks import MaskShapes

DATA_AXES = ("dp", "ddp", "fsdp", "data", "replicate", "shard", "dp_replicate", "dp_shard")
"""Axes whose ranks see different rows, by their usual names."""
OTHER_AXES = ("tp", "pp", "sp", "cp", "ep", "model", "pipe", "tensor", "sequence", "context", "expert")
"""Axes whose ranks see the same rows, by their usual names."""
REDUCTIONS = ("mean", "sum")
"""What a loss may do with the rows of a batch."""

Loss = Callable[[Any, Any], torch.Tensor]
"""The loss of outputs and targets."""
TrainStep = Callable[[nn.Module, Any, torch.optim.Optimizer, Loss], Any]
"""Trains a module on one batch and returns the loss (a tensor or a number), or None on a rank that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The arguments of `check_training`, checked."""

    model: Callable[[], nn.Module]
    """Builds the model."""
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module | None]
    """Spreads it over a mesh."""
    mesh: tuple[tuple[str, int], ...]
    """Names and sizes of the axes, outermost first."""
    batches: tuple[Any, ...]
    """One a step: a pair of inputs and targets, or a list of such microbatches."""
    loss: Loss
    """Of outputs and targets."""
    reduction: str
    """One of `REDUCTIONS`."""
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    """Of parameters."""
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None
    """Of an optimizer; None for a constant rate."""
    step: TrainStep | None
    """Of one device; None for the usual one."""
    rank_step: TrainStep | None
    """Of a rank; None for the usual one."""
    data_axes: tuple[str, ...]
    """Axes along which rows are cut."""
    shard: Callable[[Any, DeviceMesh], Any] | None
    """A rank's part of a batch; None for the usual one."""
    full_tensors: Callable[[nn.Module], Mapping[str, torch.Tensor]] | None
    """Whole tensors of a module by name; None where what parameters are, or `cuts`, says it."""
    cuts: dict[str, tuple[tuple[int, str], ...]] | None
    """Of plain shards by name: dims, and the axis along which each is cut; None where there are none."""
    dtype: torch.dtype | None
    """What parameters and batches are converted to; None for nothing."""
    precision: LowPrecision | MixedPrecision | None
    """What ranks round to fewer digits, and one device alike; None for nothing."""
    keep_dtype: bool
    """Whether what asks for float32 gets `dtype`."""
    mask_shapes: MaskShapes | None
    """Where dropout is by masks, what it was seen to drop out of."""
    seed: int
    """Seeds torch, numpy and random before each call of `model`."""

    def __post_init__(self) -> None:
        for name in ("model", "parallelize", "loss", "optimizer"):
            if not callable(getattr(self, name)):
                raise UsageError(f"check_training: {name} is {getattr(self, name)!r}; allowed: a callable")
        for name in ("scheduler", "step", "rank_step", "shard", "full_tensors"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise UsageError(f"check_training: {name} is {getattr(self, name)!r}; allowed: a callable or None")
        if self.cuts is not None and self.full_tensors is not None:
            raise UsageError("check_training: cuts and full_tensors both say what shards are of the whole; allowed: one of them")
        if self.reduction not in REDUCTIONS:
            raise UsageError(f"check_training: reduction is {self.reduction!r}; allowed: {', '.join(REDUCTIONS)}")
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise UsageError(f"check_training: dtype is {self.dtype!r}; allowed: a floating-point torch.dtype or None")
        if not self.batches:
            raise UsageError("check_training: batches is empty; allowed: at least one, each a step's")

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Of the mesh."""
        return tuple(name for name, _ in self.mesh)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the mesh."""
        return tuple(size for _, size in self.mesh)

    @property
    def num_ranks(self) -> int:
        """Of the mesh."""
        return math.prod(self.shape)

    @property
    def num_data_ranks(self) -> int:
        """Parts that rows are cut into."""
        return math.prod(size for name, size in self.mesh if name in self.data_axes)

    @property
    def callables(self) -> dict[str, object]:
        """What was brought to be called, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if callable(getattr(self, field.name))}


def mesh_of(mesh: Any) -> tuple[tuple[str, int], ...]:
    """The axes of a mesh as users give it. Raises `UsageError`."""
    allowed = 'a dict of axis sizes such as {"dp": 2, "tp": 2}'
    if not isinstance(mesh, Mapping) or not mesh:
        raise UsageError(f"check_training: mesh is {mesh!r}; allowed: {allowed}")
    for name, size in mesh.items():
        if not isinstance(name, str) or isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"check_training: mesh has {name!r}: {size!r}; allowed: {allowed}, each at least 1")
    return tuple(mesh.items())


def data_axes_of(mesh: tuple[tuple[str, int], ...], given: Sequence[str] | None, *, by_hand: bool) -> tuple[str, ...]:
    """The axes along which rows are cut; names decide unless they are given, or the user cuts `by_hand`. Raises `UsageError`."""
    names = tuple(name for name, _ in mesh)
    if given is not None:
        unknown = [name for name in given if name not in names]
        if isinstance(given, str) or unknown:
            raise UsageError(f"check_training: data_axes is {given!r}; allowed: a tuple of axes of the mesh, {', '.join(names)}")
        return tuple(given)
    for name in names:
        if name not in DATA_AXES + OTHER_AXES and not by_hand:
            raise UsageError(f"check_training: axis {name!r} of the mesh may cut the batch or not; say so by data_axes=(...)")
    return tuple(name for name in names if name in DATA_AXES)
