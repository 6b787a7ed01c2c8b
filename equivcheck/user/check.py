"""`check_training`: a user's training and how they spread it, one verdict."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim.lr_scheduler import LRScheduler

    from equivcheck.scenario import LowPrecision, MixedPrecision
    from equivcheck.user.task import Loss, TrainStep
    from equivcheck.user.traces.cuts import Cuts
    from equivcheck.user.verdict import UserVerdict
    from equivcheck.worlds.ranks import Ranks
    from equivcheck.worlds.world import World


def check_training(  # noqa: PLR0913 - one for each thing that users bring, all by keyword
    *,
    model: nn.Module | Callable[[], nn.Module],
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module | None],
    mesh: Mapping[str, int],
    batches: Iterable[Any],
    loss: Loss,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    reduction: str = "mean",
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    step: TrainStep | None = None,
    rank_step: TrainStep | None = None,
    data_axes: Sequence[str] | None = None,
    shard: Callable[[Any, DeviceMesh], Any] | None = None,
    full_tensors: Callable[[nn.Module], Mapping[str, torch.Tensor]] | None = None,
    cuts: Cuts | None = None,
    dtype: torch.dtype | None = torch.float64,
    precision: LowPrecision | MixedPrecision | None = None,
    keep_dtype: bool = False,
    dropout_masks: bool = False,
    seed: int = 0,
    world: str | Ranks | World = "sim",
    schedule_seed: int = 0,
    deadline: float = 60.0,
    explain: bool = True,
) -> UserVerdict:
    """Say whether a training spread over ranks computes what one device computes: loss, gradients, parameters at every step.

    `model` builds the same model at each call: torch, numpy and random are seeded; a module is copied. ``parallelize(model,
    mesh)`` returns what is called, or None where it changes the model in place; `mesh` gives the sizes of the named axes. Each of
    `batches` is a step's ``(inputs, targets)``, or a list of microbatches; a rank gets its equal part of the rows (dim 0) over
    `data_axes` (default: those named dp, fsdp, replicate, shard ...), or what ``shard(batch, mesh)`` returns. `loss` takes
    outputs and targets and is the mean over their rows, which data ranks average; with ``reduction="sum"`` it sums, and is
    multiplied by the number of data ranks before backward, as they average gradients. `optimizer` takes a list of parameters,
    `scheduler` the optimizer.

    ``step(model, batch, optimizer, loss)`` replaces forward, backward and update and returns the loss; `rank_step` does so on
    ranks alone, where it may return None. Of parameters that are shards, but neither DTensors nor those of FSDP, ``cuts={name:
    ((dim, axis), ...)}`` says how they lie (names may be patterns, the first that fits counts; parts are those of `torch.chunk`,
    by outer axes first), or ``full_tensors(module)`` returns whole tensors by name. Model and batches are converted to `dtype`;
    None leaves them as they are, with tolerances to match. `precision` says what ranks round to fewer digits, so that one device
    rounds alike: a `LowPrecision` for autocast (around forward and loss where there is no `step`), a `MixedPrecision` for the
    policy of FSDP. `keep_dtype` gives float64 to all that asks for float32, on one device and on ranks. `dropout_masks` draws the
    masks of `torch.nn.Dropout` (1d, 2d, 3d) for all rows, of which each rank gets its part. Ranks that are idle, or compute
    without communicating, for `deadline` seconds count as hung. Where ranks diverge, the verdict says why and where, as far as
    can be found out; not so with ``explain=False``, which is faster, and under `precision`.

    In world ``torchrun`` every process of the world calls this; what rank 0 passes is sent to all, that process judges, and all
    return what it finds.

    Failures of the ranks are verdicts. Raises `UsageError` for arguments that make no sense, and for a model or training that is
    not the same each time; what the run on one device raises is left as it is.
    """
    # Imported at the call, because DTensor comes with them: defining a training takes no longer than importing torch.
    from equivcheck.user.judging import check_task
    from equivcheck.user.randomness.masks import require_masks
    from equivcheck.user.task import Task, data_axes_of, mesh_of
    from equivcheck.user.traces.cuts import require_cuts

    axes = mesh_of(mesh)
    task = Task(
        model=partial(copy.deepcopy, model) if isinstance(model, nn.Module) else model,
        parallelize=parallelize,
        mesh=axes,
        batches=tuple(batches),
        loss=loss,
        reduction=reduction,
        optimizer=optimizer,
        scheduler=scheduler,
        step=step,
        rank_step=rank_step or step,
        data_axes=data_axes_of(axes, data_axes, by_hand=shard is not None),
        shard=shard,
        full_tensors=full_tensors,
        cuts=require_cuts(cuts, [name for name, _ in axes]),
        dtype=dtype,
        precision=precision,
        keep_dtype=keep_dtype,
        mask_shapes=require_masks(dropout_masks),
        seed=seed,
    )
    return check_task(task, world, schedule_seed, deadline, explain=explain)
