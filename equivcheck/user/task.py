"""`Task`: the arguments of `check_training`, after they were checked."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler

from equivcheck.errors import did_you_mean
from equivcheck.scenario import LowPrecision, MixedPrecision
from equivcheck.user.randomness import MaskShapes
from equivcheck.user.resuming.restart import Restart
from equivcheck.user.traces.cuts import Cuts
from equivcheck.user.trainers.protocol import Trainer
from equivcheck.user.usage import invalid, require_call

DATA_AXES = ("dp", "ddp", "fsdp", "data", "replicate", "shard", "dp_replicate", "dp_shard")
"""Usual names for mesh axes whose ranks get different rows."""
OTHER_AXES = ("tp", "pp", "sp", "cp", "ep", "model", "pipe", "tensor", "sequence", "context", "expert")
"""Usual names for mesh axes whose ranks get the same rows."""
POSITION_AXES = ("cp", "sp", "context", "sequence")
"""Usual names for mesh axes whose ranks may return the loss over their own positions."""
NAMED_PARAMETERS = "named_parameters"
"""Name of an `optimizer`'s parameter, if it takes pairs of name and parameter."""
_STEP = ("model", "batch", "optimizer", "loss")
CALLS: dict[str, tuple[str, ...]] = {
    "model": (),
    "parallelize": ("model", "mesh"),
    "loss": ("outputs", "targets"),
    "optimizer": ("parameters",),
    "scheduler": ("optimizer",),
    "step": _STEP,
    "rank_step": _STEP,
    "shard": ("batch", "mesh"),
    "full_tensors": ("module",),
    "also": ("model", "optimizer"),
}
"""Arguments of each function that users bring."""
REQUIRED = ("model", "parallelize", "loss", "optimizer")
"""Functions without a default."""
REDUCTIONS = ("mean", "sum")
"""Ways to combine losses over rows: the mean over the rows in a batch, or their sum."""

Loss = Callable[[Any, Any], torch.Tensor]
"""A function ``loss(outputs, targets)``. Returns a tensor with one element."""
TrainStep = Callable[[nn.Module, Any, torch.optim.Optimizer, Loss], Any]
"""A function ``step(model, batch, optimizer, loss)``. Trains on one batch.

It returns the loss as a tensor or a number, None on a rank without a loss, or a dict of named values with ``loss`` among them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The arguments of `check_training`, after they were checked."""

    model: Callable[[], nn.Module]
    """Function for building the model."""
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module | None]
    """Function for parallelizing a model over a mesh."""
    mesh: tuple[tuple[str, int], ...]
    """Axis names and sizes, outermost first."""
    batches: tuple[Any, ...]
    """For each step: a pair of inputs and targets, or a list of such microbatches."""
    loss: Loss
    """Loss function, called with outputs and targets."""
    reduction: str = "mean"
    """Whether the loss is a ``mean`` over rows, or a ``sum``."""
    optimizer: Callable[[list[Any]], Any]
    """Called with a list of parameters, or of pairs (see `takes_names`). Returns an optimizer, or several in a list, dict or
    object.
    """
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    """Called with the optimizer, returns a scheduler; None for a constant learning rate."""
    step: TrainStep | None = None
    """The user's step on one device; None for the built-in step."""
    rank_step: TrainStep | None = None
    """The user's step on a rank; None for the built-in step."""
    data_axes: tuple[str, ...]
    """Axes along which rows are split."""
    loss_axes: tuple[str, ...]
    """Axes whose ranks have the same rows, so that they must return the same loss."""
    shard: Callable[[Any, DeviceMesh], Any] | None = None
    """Function that returns a rank's part of a batch; None if each rank gets an equal part of the rows."""
    also: Callable[[nn.Module, Any], Mapping[str, Any]] | None = None
    """Called with the module and the optimizer, returns further objects to compare by name; None if there are none."""
    full_tensors: Callable[[nn.Module], Mapping[str, torch.Tensor]] | None = None
    """Called with a module, returns its full tensors by name; None if the positions of shards are known."""
    cuts: Cuts | None = None
    """For each parameter name: the dims that are sharded, with their axes. None if there are no plain shards."""
    dtype: torch.dtype | None
    """Element type to which parameters and batches are converted; None to leave them unchanged."""
    precision: LowPrecision | MixedPrecision | None = None
    """Low precision in which ranks and the single-device run compute; None if they round to none."""
    keep_dtype: bool = False
    """Whether the model gets `dtype` if it asks for float32."""
    mask_shapes: MaskShapes | None = None
    """Input shapes of dropout modules on one device; None if `dropout_masks` is False."""
    resume: Restart | None = None
    """A checkpoint in the middle of the training; None if there is none."""
    seed: int
    """Seed for torch, numpy and random before each call of `model`."""
    name: str = ""
    """Name in the verdict's first line; may be empty."""
    trainer: Trainer | None = None
    """Adapter for training on ranks, instead of `parallelize` and `rank_step`; None if there is none."""
    rank_optimizer: Callable[..., Any] | None = None
    """Replaces `optimizer` on ranks; None for `optimizer` itself."""

    def __post_init__(self) -> None:
        if num_required(self.optimizer) > 1:
            why = f"it requires {num_required(self.optimizer)} arguments"
            expected = f"a function of one argument: parameters, or {NAMED_PARAMETERS} for pairs of name and parameter"
            raise invalid("optimizer", why, expected)
        for name, arguments in CALLS.items():
            function, is_optional = getattr(self, name), name not in REQUIRED
            if function is not None or not is_optional:
                require_call(name, function, arguments, is_optional=is_optional)
        if self.cuts is not None and self.full_tensors is not None:
            raise invalid("cuts together with full_tensors", "both describe plain shards", "only one of them")
        if not isinstance(self.name, str):
            raise invalid(f"name {self.name!r:.100}", "it is not text", "a string")
        if self.reduction not in REDUCTIONS:
            raise invalid(f"reduction {self.reduction!r}", "it does not exist", " or ".join(REDUCTIONS))
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise invalid(f"dtype {self.dtype!r}", "it is not a floating-point type", "a type such as torch.float64, or None")
        if not self.batches:
            raise invalid("batches []", "it is empty", "a batch for each step, at least one")

    def with_new_optimizers(self, act: Callable[[Any], None]) -> Task:
        """Return a task whose function `optimizer` calls `act` with each new optimizer."""

        def build(parameters: list[Any]) -> Any:
            optimizer = self.optimizer(parameters)
            act(optimizer)
            return optimizer

        # The wrapper has the user's signature, which may ask for named parameters.
        return replace(self, optimizer=functools.update_wrapper(build, self.optimizer, updated=()))

    @property
    def reads_unclipped(self) -> bool:
        """Whether gradients are compared before clipping. If False, the gradients that the optimizer gets are compared."""
        return self.trainer is not None and self.trainer.gradients_are == "unclipped"

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
        """How many parts each batch's rows are split into."""
        return math.prod(size for name, size in self.mesh if name in self.data_axes)

    @property
    def loss_scale(self) -> float:
        """Factor by which a rank's loss is multiplied before backward.

        Sums need it because data ranks average their gradients.
        """
        return float(self.num_data_ranks) if self.reduction == "sum" else 1.0


def steps_of(
    trainer: Trainer | None, step: TrainStep | None, rank_step: TrainStep | None, parallelize: Any, scheduler: Any
) -> tuple[TrainStep | None, TrainStep | None, Any]:
    """Return the step on one device, the step on ranks, and `parallelize`. A trainer replaces the last two."""
    if trainer is None:
        if parallelize is None:
            raise invalid("parallelize", "it is missing", "a function parallelize(model, mesh), or trainer=")
        return step, rank_step, parallelize
    given = {"parallelize": parallelize, "step": step, "rank_step": rank_step}
    for name, value in given.items():
        if value is not None:
            raise invalid(f"{name} together with trainer", "the trainer takes its place", "only one of them")
    if scheduler is not None and hasattr(trainer, "tried"):
        # A user's own trainer may step a schedule. The frameworks' adapters do not, so one device would differ from their ranks.
        why = f"{type(trainer).__name__} trains with a constant learning rate"
        raise invalid("scheduler together with trainer", why, "a training without scheduler")
    return trainer.reference_step(), None, leave_unchanged  # a trainer wraps the model by itself


def leave_unchanged(model: nn.Module, mesh: DeviceMesh) -> None:
    """Change nothing. This replaces `parallelize` if a trainer distributes the model."""


def takes_names(optimizer: Callable[..., Any]) -> bool:
    """Whether the function's first parameter is called ``named_parameters``. Then it gets pairs of name and parameter."""
    return next(iter(_parameters(optimizer)), None) == NAMED_PARAMETERS


def num_required(function: Callable[..., Any]) -> int:
    """Return how many positional arguments a function requires; 1 if its signature is unknown."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = _parameters(function)
    return sum(each.kind in positional and each.default is each.empty for each in given.values()) if given else 1


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # not callable, or a function in C without a signature
        return {}


def with_mesh(function: Any, mesh: DeviceMesh | None) -> Any:
    """Return the function with `mesh` bound to its parameter ``mesh``.

    A function without this parameter, or with a default other than None, stays unchanged.
    """
    parameter = _parameters(function).get("mesh")
    if parameter is None or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        return function
    has_value = parameter.default is not None and parameter.default is not parameter.empty
    return function if has_value else partial(function, mesh=mesh)


def loss_axes_of(mesh: tuple[tuple[str, int], ...], data_axes: Sequence[str], *, knows_rows: bool) -> tuple[str, ...]:
    """Return the axes whose ranks get the same rows, and must return the same loss.

    If `knows_rows` is False, returns no axes, because the user's `shard` decides which rows a rank gets.
    """
    return tuple(name for name, _ in mesh if knows_rows and name not in (*data_axes, *POSITION_AXES))


def mesh_of(mesh: Any) -> tuple[tuple[str, int], ...]:
    """Check the argument `mesh`, and return it as pairs of axis name and size.

    Raises `UsageError` if it is not a dict of sizes.
    """
    why = "" if isinstance(mesh, Mapping) and mesh else "it is empty or not a dict"
    for name, size in mesh.items() if not why else ():
        if not isinstance(name, str) or isinstance(size, bool) or not isinstance(size, int) or size < 1:
            why = f"axis {name!r} has size {size!r}"
    if why:
        expected = 'a dict of axis sizes, each at least 1, such as {"dp": 2, "tp": 2}'
        raise invalid(f"mesh {mesh!r}", why, expected)
    return tuple(mesh.items())


def data_axes_of(mesh: tuple[tuple[str, int], ...], given: Sequence[str] | None, *, user_shards: bool) -> tuple[str, ...]:
    """Return the axes whose ranks get different rows.

    These are the axes in `given`, if there are any. Otherwise axis names decide. Unknown names raise `UsageError`, unless the
    user passes `shard` (`user_shards`).
    """
    names = tuple(name for name, _ in mesh)
    if given is not None:
        is_text = isinstance(given, str)
        unknown = [name for name in given if name not in names]
        if is_text or unknown:
            why = "it is a string" if is_text else f"the mesh has no axis {unknown[0]!r}"
            hint = "" if is_text else did_you_mean(str(unknown[0]), names)
            raise invalid(f"data_axes {given!r}", why, f"a tuple of axis names from {', '.join(names)}", hint=hint)
        return tuple(given)
    for name in names:
        if name not in DATA_AXES + OTHER_AXES and not user_shards:
            why = "its name does not show whether its ranks get different rows"
            expected = "data_axes=(...) with the axes that split the batch"
            raise invalid(f"mesh axis {name!r} without data_axes", why, expected, hint=did_you_mean(name, DATA_AXES + OTHER_AXES))
    return tuple(name for name in names if name in DATA_AXES)
