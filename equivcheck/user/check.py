"""`check_training`: a user's training and how they spread it, one verdict."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler

from equivcheck.composition.running import RanksResult
from equivcheck.errors import UsageError
from equivcheck.oracle.judge import judge, judge_failure
from equivcheck.scenario import LowPrecision, MixedPrecision
from equivcheck.tally import record
from equivcheck.user.batches import require_parts
from equivcheck.user.case import UserCase
from equivcheck.user.evidence import missing_evidence
from equivcheck.user.notes import notes_on
from equivcheck.user.precision.advice import on_narrowing, on_precision
from equivcheck.user.precision.kept import require_kept
from equivcheck.user.precision.policy import in_words, require_precision
from equivcheck.user.precision.run import RoundedRun, casting_of, exact_task
from equivcheck.user.randomness.masks import require_masks
from equivcheck.user.reference import SingleDeviceRun
from equivcheck.user.running import members_of, run_on
from equivcheck.user.task import Loss, Task, TrainStep, data_axes_of, mesh_of
from equivcheck.user.traces.cuts import Cuts, require_cuts
from equivcheck.user.verdict import UserVerdict
from equivcheck.verdict.sentences import sentence
from equivcheck.verdict.verdict import Outcome
from equivcheck.worlds.failure import Failure
from equivcheck.worlds.pool import on_first_rank
from equivcheck.worlds.ranks import Ranks
from equivcheck.worlds.state.keeper import StateKeeper, kept_state
from equivcheck.worlds.world import World, without_cover

NAME = "check_training"
"""What stands for a layout where checks are counted."""


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
    place = without_cover(world)
    with kept_state(StateKeeper()):  # the run on one device is a user's code, too
        return on_first_rank(place, lambda: _checked(task, place, schedule_seed, deadline, explain=explain))


def _checked(task: Task, world: str | Ranks, schedule_seed: int, deadline: float, *, explain: bool) -> UserVerdict:
    started = time.perf_counter()
    require_parts(task)
    require_precision(task)
    require_kept(task)
    members = members_of(task, world)
    original = SingleDeviceRun(task if task.precision is None else exact_task(task))
    in_short = str(original.precision).removeprefix("torch.") if task.precision is None else in_words(task)
    verdict = UserVerdict(outcome=Outcome.EQUIVALENT, mesh=task.mesh, world=members.name, precision=in_short)
    left, ran = run_on(members, task, schedule_seed, deadline)
    verdict = replace(verdict, world=ran.name, notes=notes_on(task, left, members, ran))
    if isinstance(left, Failure):
        _raise_usage(left)
        verdict = judge_failure(verdict, left)
        if explain:
            from equivcheck.user.diagnosis.told import with_types  # here, as most trainings are right

            verdict = with_types(verdict, task)
    else:
        run = original if task.precision is None else RoundedRun(task, original, casting_of(left.values))
        verdict = _judged(verdict, run, RanksResult(run=left), explain=explain and task.precision is None)
        advice = (*on_narrowing(run), *on_precision(task, left.values, verdict.outcome))
        verdict = replace(verdict, notes=(*verdict.notes, *advice))
    record(NAME, verdict.world, verdict.outcome.value)
    return replace(verdict, seconds=time.perf_counter() - started)


def _judged(verdict: UserVerdict, original: SingleDeviceRun, result: RanksResult, *, explain: bool) -> UserVerdict:
    brought = UserCase(original, result.run.values)
    verdict, doubt = judge(verdict, brought.case(), result)
    verdict = replace(verdict, unread=brought.unread, measures=brought.measures(result.run.calls))
    if verdict.divergence is not None:
        from equivcheck.user.diagnosis.told import with_cause  # here, as most trainings are right

        hinted = replace(verdict, hint=brought.hint(verdict.divergence))
        return with_cause(hinted, original, brought.confirming_reference, result.run.values) if explain else hinted
    other = brought.other_settings
    if other is not None:
        return replace(verdict, outcome=Outcome.DIVERGED, reason=sentence(other), divergence=other)
    missing = missing_evidence(original.task, changes_parameters=original.changes_parameters)
    if original.task.precision is not None and verdict.outcome is Outcome.EQUIVALENT:
        missing = missing or brought.apart_in_parts
    if verdict.outcome is Outcome.EQUIVALENT and missing:
        return replace(verdict, outcome=Outcome.INCONCLUSIVE, reason=missing)
    if doubt is not None and doubt.step:
        return replace(verdict, reason=f"{verdict.reason}; before step {doubt.step} all agrees")
    return verdict


def _raise_usage(failure: Failure) -> None:
    """What a rank finds wrong with an argument is no failure of the training."""
    for report in failure.reports:
        kind, _, text = report.error.partition(": ")
        if kind.endswith(UsageError.__name__) and text.startswith(f"{NAME}: "):
            raise UsageError(text) from None
