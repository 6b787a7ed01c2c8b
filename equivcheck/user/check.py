"""`check_training`: compare a user's parallel training with one device."""

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
    from equivcheck.user.batch_splits.splits import BatchSplits
    from equivcheck.user.resuming.restart import Restart
    from equivcheck.user.task import Loss, TrainStep
    from equivcheck.user.traces.cuts import Cuts
    from equivcheck.user.trainers.protocol import Trainer
    from equivcheck.user.verdict import UserVerdict
    from equivcheck.worlds.ranks import Ranks
    from equivcheck.worlds.world import World


def check_training(  # noqa: PLR0913 - one for each thing that users bring, all by keyword
    *,
    model: nn.Module | Callable[[], nn.Module],
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module | None] | None = None,
    mesh: Mapping[str, int],
    batches: Iterable[Any],
    loss: Loss,
    optimizer: Callable[[list[Any]], Any],
    trainer: Trainer | None = None,
    name: str = "",
    reduction: str = "mean",
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    step: TrainStep | None = None,
    rank_step: TrainStep | None = None,
    data_axes: Sequence[str] | None = None,
    shard: Callable[[Any, DeviceMesh], Any] | None = None,
    also: Callable[[nn.Module, Any], Mapping[str, Any]] | None = None,
    full_tensors: Callable[[nn.Module], Mapping[str, torch.Tensor]] | None = None,
    cuts: Cuts | None = None,
    dtype: torch.dtype | None = torch.float64,
    precision: LowPrecision | MixedPrecision | None = None,
    keep_dtype: bool = False,
    dropout_masks: bool = False,
    resume: Restart | None = None,
    batch_splits: bool | BatchSplits = False,
    seed: int = 0,
    world: str | Ranks | World = "sim",
    schedule_seed: int = 0,
    deadline: float = 60.0,
    explain: bool = True,
) -> UserVerdict:
    """Check whether a parallel training computes the same losses, gradients and parameters as one device.

    The training runs on one device and on all ranks. Further runs on one device measure the tolerance. The verdict compares
    each step's values and buffers, then the final optimizer state::

        verdict = check_training(
            model=lambda: nn.Linear(4, 2),
            parallelize=lambda model, mesh: DistributedDataParallel(model),
            mesh={"dp": 2},
            batches=[(torch.randn(8, 4), torch.randn(8, 2))],
            loss=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
        verdict.assert_equivalent()

    If a rank fails, the verdict says so. An exception in the single-device run is raised unchanged. In world
    ``torchrun`` every process calls this function: rank 0 sends its arguments to all, and all return its verdict.

    :param model: A function that builds the same model at each call, or a module. Each run trains a copy of the module.
    :param parallelize: Called on each rank as ``parallelize(model, mesh)``. Returns the module to train, or None if it changes
        the model in place. Required, unless you pass a `trainer`.
    :param mesh: Axis names and sizes, outermost first.
    :param batches: One entry per step: a pair ``(inputs, targets)``, or a list of such microbatches. Each rank gets an equal part
        of the rows (dim 0).
    :param loss: Called as ``loss(outputs, targets)``. Returns the mean over the rows, or their sum with ``reduction="sum"``.
    :param optimizer: Called with a list of parameters. If its argument has the name ``named_parameters``, the list has pairs
        ``(name, parameter)``. Returns an optimizer. For your own `step` it may return several, in a list, tuple, dict or object.
    :param trainer: An adapter for a trainer that owns backward, clipping and updates; see `equivcheck.Trainer`. It takes the
        place of `parallelize`, `step` and `rank_step`.
    :param name: Name of this training, for the first line of the verdict.
    :param reduction: How `loss` combines rows: ``"mean"`` or ``"sum"``. A sum is multiplied by the number of data ranks before
        backward, because data ranks average gradients.
    :param scheduler: Called with the optimizer. Its ``step()`` runs after each training step. Not with a framework's trainer.
    :param step: Called as ``step(model, batch, optimizer, loss)`` instead of the built-in forward, backward and update. Returns
        the loss, or a dict of named numbers and tensors with ``loss`` among them. Losses are averaged over data ranks; all other
        values must be the same on every rank that returns them. If `step`, `rank_step` or `loss` has a parameter ``mesh``, it
        gets the mesh on ranks, and None on one device.
    :param rank_step: Replaces `step` on ranks. Ranks with the same rows must return the same loss, or None.
    :param data_axes: Axes whose ranks get different rows. By default the axes named dp, ddp, fsdp, data, replicate,
        shard, dp_replicate or dp_shard.
    :param shard: Called as ``shard(batch, mesh)`` on each rank. Returns the part of the batch for this rank.
    :param also: Called as ``also(model, optimizer)`` after each step. Returns further objects to compare, by name: tensors,
        numbers, dicts, or objects with a ``state_dict()``.
    :param full_tensors: Called with the module on each rank. Returns full tensors by name, for plain shards that `cuts` cannot
        describe.
    :param cuts: Layout of parameters that are plain shards, neither DTensor nor FSDP: ``{name: ((dim, axis), ...)}``. A name may
        be an `fnmatch` pattern; the first match counts. Shards are chunks as `torch.chunk` makes them, split along outer axes
        first. If ranks split each component of a fused dim, add the number of components, ``(dim, axis, 3)``, or their sizes.
    :param dtype: Model and batches are converted to this type. None leaves them unchanged.
    :param precision: Low precision that ranks use. One device then rounds at the same points. Pass a `MixedPrecision` for an FSDP
        policy, or a `LowPrecision` for autocast. Autocast needs `dtype=torch.float32` or None. If you pass `step`, it must enter
        autocast itself.
    :param keep_dtype: Replace casts to float32 in the model's code by casts to float64, on one device and on ranks.
    :param dropout_masks: Draw the masks of `torch.nn.Dropout` (1d, 2d, 3d) for all rows, and give each rank its part.
    :param resume: A `Restart`: ranks save a checkpoint, start again, load it and train on.
    :param batch_splits: If True, check again with up to eight other splits of the batches over data ranks, such as 1 and n - 1
        rows, or a rank without labels. Needs your own `step`; pass lists of microbatches if `step` takes such lists. Pass
        a `BatchSplits` instead of True if the default splits do not fit your batches.
    :param seed: Seed for torch, numpy and random before each call of `model`, for dropout masks, and for the single-device run.
    :param world: ``"sim"``, ``"gloo"``, ``"torchrun"``, or ranks that are already running.
    :param schedule_seed: Seed for the order in which simulated ranks take turns.
    :param deadline: Seconds after which ranks count as hung, if they are idle or compute without communicating.
    :param explain: Search for the cause of a divergence when the verdict is first read. No search takes place under `precision`.
    :raises UsageError: An argument is not valid, or two runs on one device differ.
    """
    # Imported here because they import DTensor: `from equivcheck import check_training` stays as fast as `import torch`.
    from equivcheck.user.judging import check_task
    from equivcheck.user.randomness import require_masks
    from equivcheck.user.task import Task, data_axes_of, loss_axes_of, mesh_of, steps_of, with_mesh
    from equivcheck.user.traces.cuts import require_cuts

    step, rank_step, parallelize = steps_of(trainer, step, rank_step, parallelize, scheduler)
    axes = mesh_of(mesh)
    row_axes = data_axes_of(axes, data_axes, user_shards=shard is not None)
    task = Task(
        name=name,
        model=partial(copy.deepcopy, model) if isinstance(model, nn.Module) else model,
        parallelize=parallelize,
        mesh=axes,
        batches=tuple(batches),
        loss=with_mesh(loss, None),
        reduction=reduction,
        optimizer=optimizer,
        scheduler=scheduler,
        step=with_mesh(step, None),
        rank_step=with_mesh(rank_step or step, None),
        data_axes=row_axes,
        loss_axes=loss_axes_of(axes, row_axes, knows_rows=shard is None or data_axes is not None),
        shard=shard,
        also=also,
        full_tensors=full_tensors,
        cuts=require_cuts(cuts, [name for name, _ in axes]),
        dtype=dtype,
        precision=precision,
        keep_dtype=keep_dtype,
        mask_shapes=require_masks(dropout_masks),
        resume=resume,
        seed=seed,
        trainer=trainer,
    )
    check = partial(check_task, world=world, schedule_seed=schedule_seed, deadline=deadline, explain=explain)
    if batch_splits:
        from equivcheck.user.batch_splits.splits import BatchSplits, check_splits

        return check_splits(task, batch_splits if isinstance(batch_splits, BatchSplits) else BatchSplits(), world, check)
    return check(task)
