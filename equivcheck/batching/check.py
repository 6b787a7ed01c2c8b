"""`check_batching`: compare a training step over the same examples, batched in other ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.batching.verdict import BatchingVerdict
    from equivcheck.user.task import Loss
    from equivcheck.worlds.ranks import Ranks
    from equivcheck.worlds.world import World


def check_batching(  # noqa: PLR0913 - one for each thing that users bring, all by keyword
    *,
    model: nn.Module | Callable[[], nn.Module],
    step: Callable[..., Any],
    batch: Any,
    optimizer: Callable[[list[Any]], Any] | None = None,
    loss: Loss | None = None,
    evaluate: Callable[[nn.Module, list[Any]], Any] | None = None,
    name: str = "",
    normaliser: str | None = None,
    window: int | None = None,
    microbatches: str = "any",
    microbatch_loss: Sequence[str] = (),
    packing: str | Callable[[list[Any]], Any] | None = None,
    padding_side: Sequence[str] = ("right",),
    pad_id: int = 0,
    ignore_index: int = -100,
    fields: Mapping[str, str] | None = None,
    examples: Callable[[Any], Sequence[Any]] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    weight: Callable[[Any], float] | None = None,
    dtype: torch.dtype | None = torch.float64,
    keep_dtype: bool = False,
    seed: int = 0,
    explain: bool = True,
    mesh: Mapping[str, int] | None = None,
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module | None] | None = None,
    rank_step: Callable[..., Any] | None = None,
    data_axes: Sequence[str] | None = None,
    world: str | Ranks | World = "sim",
    schedule_seed: int = 0,
    deadline: float = 60.0,
) -> BatchingVerdict:
    """Check whether a training step computes the same gradients if its examples are batched in another way.

    The batch is taken apart into examples, its rows. They are split over microbatches, padded and packed in other ways. Each such
    arrangement trains one step from the same parameters. Gradients and parameters must equal those of the whole batch in one
    microbatch, except for rounding errors, whose size is measured in further runs::

        verdict = check_batching(
            model=build,
            batch={"input_ids": tokens, "labels": labels},
            step=step,  # called as step(model, microbatches, optimizer, loss)
            normaliser="token",
        )
        verdict.assert_equivalent()

    Rows with equal lengths are cut to unequal ones, because equal lengths hide many mistakes.

    :param model: A function that builds the same model at each call, or a module, which each run copies.
    :param step: Called as ``step(model, microbatches, optimizer, loss)`` with a list of batches like `batch`. Trains
        one step on them. It may return the loss, which is then compared, too, or None.
    :param batch: Tensors in dicts, tuples or lists, with rows as their first dim: at least two rows. The verdict says how each
        tensor was read.
    :param optimizer: Called with a list of parameters. By default SGD with learning rate 0.1.
    :param loss: Passed to `step`.
    :param evaluate: Called as ``evaluate(model, batches)``. Returns the loss over all batches; it must not depend on the split.
    :param name: Name of the step in the verdict's first line.
    :param normaliser: How `step` weighs examples: ``"token"`` for the mean over all counted tokens, ``"sequence"`` for the mean
        over examples, each the mean over its tokens, ``"none"`` for the sum over tokens. By default arrangements are compared
        with each other only, and the verdict says which normaliser fits.
    :param window: Number of microbatches that `step` accumulates for one update. A call with fewer microbatches stands for the
        last, shorter update.
    :param microbatches: ``"even"`` if `step` needs the same number of rows in each microbatch, else ``"any"``.
    :param microbatch_loss: Loss terms computed from all rows in a microbatch together, under any names, such as ``("router",)``.
        Rows in one microbatch then stay together.
    :param packing: How documents in one row are marked: ``"position_ids"``, ``"cu_seqlens"``, ``"document_ids"``, or a function
        that gets a list of examples and returns a batch. None if rows are never packed.
    :param padding_side: Sides on which rows may be padded, from ``"right"`` and ``"left"``.
    :param pad_id: Token in padding.
    :param ignore_index: Label without a loss.
    :param fields: Roles, if names and values do not show them, such as ``{"2": "loss_mask"}``: one of
        tokens, labels, mask, loss_mask, positions, token (any other value for each position), row (a value for each row).
    :param examples: Called as ``examples(batch)`` if the batch cannot be taken apart by rows, such as pairs of answers. Returns a
        list of examples, which are only split and reordered.
    :param collate: Called as ``collate(examples)``. Returns a batch. Needed with `examples`.
    :param weight: Called as ``weight(example)``. Returns its weight in the loss, by default 1.
    :param dtype: Model and batches are converted to this type. None leaves them unchanged.
    :param keep_dtype: If the model's code casts to float32, cast to float64 instead.
    :param seed: Seed for torch, numpy and random before `model` is called.
    :param explain: Search for the cause if an arrangement differs.
    :param mesh: Axis names and sizes. The examples are then also distributed over ranks, in up to eight ways.
    :param parallelize: Called on each rank as ``parallelize(model, mesh)``, as in `check_training`. Needed with `mesh`.
    :param rank_step: Replaces `step` on ranks. It gets the microbatches for this rank; all ranks get equally many.
    :param data_axes: Axes whose ranks get different rows, by default those with usual names, as in `check_training`.
    :param world: ``"sim"``, ``"gloo"``, or ranks that are already running.
    :param schedule_seed: Order in which simulated ranks take turns.
    :param deadline: Seconds after which ranks count as hung, if they are idle or compute without communicating.
    :raises UsageError: An argument is not valid, the batch cannot be taken apart, or the step draws random numbers.
    """
    # Imported here because they import DTensor: `from equivcheck import check_batching` stays as fast as `import torch`.
    from equivcheck.batching.judging import check_step
    from equivcheck.batching.step import Step

    return check_step(
        Step(
            model=model,
            step=step,
            batch=batch,
            optimizer=optimizer,
            loss=loss,
            evaluate=evaluate,
            name=name,
            normaliser=normaliser,
            window=window,
            microbatches=microbatches,
            microbatch_loss=tuple(microbatch_loss),
            packing=packing,
            padding_side=tuple(padding_side),
            pad_id=pad_id,
            ignore_index=ignore_index,
            fields=dict(fields or {}),
            examples=examples,
            collate=collate,
            weight=weight,
            dtype=dtype,
            keep_dtype=keep_dtype,
            seed=seed,
            explain=explain,
            mesh=mesh,
            parallelize=parallelize,
            rank_step=rank_step,
            data_axes=None if data_axes is None else tuple(data_axes),
            world=world,
            schedule_seed=schedule_seed,
            deadline=deadline,
        )
    )
