"""`Task`: the checked arguments of `check_training`."""

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
"""Usual names for mesh axes whose ranks get different rows."""
OTHER_AXES = ("tp", "pp", "sp", "cp", "ep", "model", "pipe", "tensor", "sequence", "context", "expert")
"""Usual names for mesh axes whose ranks get the same rows."""
REDUCTIONS = ("mean", "sum")
"""Ways in which a loss may combine the rows of a batch."""

Loss = Callable[[Any, Any], torch.Tensor]
"""A function ``loss(outputs, targets)`` that returns a tensor with one element."""
TrainStep = Callable[[nn.Module, Any, torch.optim.Optimizer, Loss], Any]
"""A function ``step(model, batch, optimizer, loss)`` that trains on one batch.

It returns the loss as a tensor or a number, or None on a rank without a loss.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The checked arguments of `check_training`."""

    model: Callable[[], nn.Module]
    """Function that builds the model."""
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module | None]
    """Function that parallelizes a model over a mesh."""
    mesh: tuple[tuple[str, int], ...]
    """Axis names and sizes, outermost first."""
    batches: tuple[Any, ...]
    """One entry per step: a pair of inputs and targets, or a list of such microbatches."""
    loss: Loss
    """Function of outputs and targets."""
    reduction: str
    """One of `REDUCTIONS`."""
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    """Function of a list of parameters."""
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None
    """Function of the optimizer; None for a constant learning rate."""
    step: TrainStep | None
    """The user's step on one device; None for the built-in step."""
    rank_step: TrainStep | None
    """The user's step on a rank; None for the built-in step."""
    data_axes: tuple[str, ...]
    """Axes along which rows are split."""
    shard: Callable[[Any, DeviceMesh], Any] | None
    """Function that returns a rank's part of a batch; None for an equal part of the rows."""
    full_tensors: Callable[[nn.Module], Mapping[str, torch.Tensor]] | None
    """Function that returns a module's full tensors by name; None if placements or `cuts` are known."""
    cuts: dict[str, tuple[tuple[int, str], ...]] | None
    """For plain shards by parameter name: pairs of dim and axis. None if there are no plain shards."""
    dtype: torch.dtype | None
    """Element type for parameters and batches; None to leave them unchanged."""
    precision: LowPrecision | MixedPrecision | None
    """Lower precision that ranks and the single-device run round to; None for no rounding."""
    keep_dtype: bool
    """Whether requests for float32 get `dtype` instead."""
    mask_shapes: MaskShapes | None
    """Shapes of the dropout masks on one device; None without `dropout_masks`."""
    seed: int
    """Seed for torch, numpy and random before each call of `model`."""

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
        """Names of the mesh axes."""
        return tuple(name for name, _ in self.mesh)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return tuple(size for _, size in self.mesh)

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.shape)

    @property
    def num_data_ranks(self) -> int:
        """Number of parts that rows are split into."""
        return math.prod(size for name, size in self.mesh if name in self.data_axes)

    @property
    def callables(self) -> dict[str, object]:
        """All callable arguments by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if callable(getattr(self, field.name))}


def mesh_of(mesh: Any) -> tuple[tuple[str, int], ...]:
    """Return the mesh axes as pairs of name and size. Raises `UsageError` if `mesh` is not a dict of sizes."""
    allowed = 'a dict of axis sizes such as {"dp": 2, "tp": 2}'
    if not isinstance(mesh, Mapping) or not mesh:
        raise UsageError(f"check_training: mesh is {mesh!r}; allowed: {allowed}")
    for name, size in mesh.items():
        if not isinstance(name, str) or isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"check_training: mesh has {name!r}: {size!r}; allowed: {allowed}, each at least 1")
    return tuple(mesh.items())


def data_axes_of(mesh: tuple[tuple[str, int], ...], given: Sequence[str] | None, *, by_hand: bool) -> tuple[str, ...]:
    """Return the axes along which rows are split.

    The user's `given` axes win. Otherwise axis names decide, and unknown names raise `UsageError` unless the user shards batches.
    """
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
