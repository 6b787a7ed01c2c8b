"""Checks a training again with its batches split over data ranks in other ways: unevenly, padded, a rank without labels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from equivcheck.arrangements.arrangement import Arrangement, Constraints, Kind, rows_of
from equivcheck.arrangements.distributions import distributions
from equivcheck.arrangements.examples import examples_of
from equivcheck.arrangements.format import Format, format_of
from equivcheck.arrangements.rows import Example
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.user.batches import part_number
from equivcheck.user.task import Task, TrainStep
from equivcheck.user.usage import invalid
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.pool import LOCAL_WORLDS
from equivcheck.worlds.ranks import Ranks
from equivcheck.worlds.world import World

_ANY = Constraints(window=None, needs_even=False, has_microbatch_terms=False, sides=())
_NUM_MORE = 3
"""Number of data ranks in the split that uses more than two ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplits:
    """Options for `check_training(batch_splits=...)`, which splits your batches in other ways.

    Pass it if the defaults do not fit.
    """

    pad_id: int = 0
    """Token id in padding."""
    ignore_index: int = -100
    """Label that does not count in the loss."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Roles of tensors in a batch, such as ``loss_mask``; see `check_batching`."""
    only: tuple[str, ...] = ()
    """Names of the splits to check, as in verdicts. Empty for all."""


def check_splits(task: Task, given: BatchSplits, world: str | Ranks | World, check: Callable[[Task], UserVerdict]) -> UserVerdict:
    """Check a training with its batches as given, then with each other split, until an outcome is not EQUIVALENT.

    If `given.only` names splits, only these are checked.
    """
    _require_splittable(task)
    tasks = dict(_tasks(task, given, can_grow=world in LOCAL_WORLDS))
    if not tasks:
        raise invalid(
            "batch_splits",
            f"a batch has fewer rows than the mesh has data ranks ({task.num_data_ranks})",
            "a row for each data rank",
        )
    unknown = [name for name in given.only if name not in tasks]
    if unknown:
        raise invalid(f"batch_splits {unknown[0]!r}", "these batches have no such split", f"names from {'; '.join(tasks)}")
    verdict = None if given.only else check(task)
    if verdict is not None and verdict.outcome is not Outcome.EQUIVALENT:
        return verdict
    chosen = given.only or tuple(tasks)
    for name in chosen:
        found = check(tasks[name])
        if found.outcome is not Outcome.EQUIVALENT:
            notes = (note for note in found.notes if not note.startswith("losses were not compared"))
            return replace(found, split=name, notes=(*notes, _ABOUT_LOSSES, _ABOUT_CAUSE))
        verdict = verdict or found
    assert verdict is not None, "every batch has a split"
    return replace(verdict, notes=(*verdict.notes, f"split in other ways, the batches give the same: {'; '.join(chosen)}"))


_ABOUT_LOSSES = "losses of other splits are not compared, because each rank may return the loss of its own rows"
_ABOUT_CAUSE = "if your step weighs tokens or rows wrongly, `check_batching(mesh=, parallelize=, rank_step=)` says how"


def _require_splittable(task: Task) -> None:
    refused = {
        "shard": task.shard,
        "trainer": task.trainer,
        "precision": task.precision,
        "dropout_masks": task.mask_shapes,
        "resume": task.resume,
    }
    for name, value in refused.items():
        if value is not None:
            raise invalid(
                f"batch_splits together with {name}", "both decide which rows a rank gets in a step", "only one of them"
            )
    if task.step is None or task.rank_step is None:
        why = "the built-in step averages the ranks' means, so rows in an uneven split weigh differently"
        raise invalid("batch_splits without step", why, "step=fn with a function that divides by the tokens or rows on all ranks")
    if task.num_data_ranks < 2:
        raise invalid("batch_splits", "the mesh has one data rank", "a data axis with at least two ranks")


def _tasks(task: Task, given: BatchSplits, *, can_grow: bool) -> Iterator[tuple[str, Task]]:
    """Yield the training with each split, by name."""
    yield from _tasks_on(task, given, "")
    axes = [name for name in task.axis_names if name in task.data_axes]
    if can_grow and task.num_data_ranks != _NUM_MORE and len(axes) == 1:
        mesh = tuple((name, _NUM_MORE if name in axes else size) for name, size in task.mesh)
        for name, found in _tasks_on(replace(task, mesh=mesh), given, f", on {_NUM_MORE} ranks"):
            if name.startswith(_PLAIN):
                yield name, found


_PLAIN = "rows split over ranks, on"


def _tasks_on(task: Task, given: BatchSplits, suffix: str) -> Iterator[tuple[str, Task]]:
    taken_apart = [_taken_apart(batch, given) for batch in task.batches]
    found = [_splits(format_, examples, task.num_data_ranks) for format_, examples in taken_apart]
    for name in found[0]:
        if not all(name in each for each in found):
            continue
        splits = [each[name] for each in found]
        are_lists = [_has_microbatches(batch) for batch in task.batches]
        if not all(are_lists) and any(len(own) > 1 for split in splits for own in split.ranks):
            continue  # the user's step takes one microbatch
        rows = zip(taken_apart, splits, are_lists, strict=True)
        batches = tuple(_both(format_, examples, split, is_list=is_list) for (format_, examples), split, is_list in rows)
        yield name + suffix, _split_task(task, batches)


def _taken_apart(batch: Any, given: BatchSplits) -> tuple[Format, tuple[Example, ...]]:
    microbatches = batch if _has_microbatches(batch) else [batch]
    formats = [
        format_of(each, fields=given.fields, pad_id=given.pad_id, ignore_index=given.ignore_index, packing=None)
        for each in microbatches
    ]
    return formats[0], tuple(example for each in formats for example in examples_of(each))


def _has_microbatches(batch: Any) -> bool:
    return isinstance(batch, list) and bool(batch) and not any(isinstance(each, torch.Tensor) for each in batch)


def _splits(given: Format, examples: Sequence[Example], num_ranks: int) -> dict[str, Arrangement]:
    return {each.name: each for each in distributions(given, examples, _ANY, num_ranks) if each.kind is Kind.RANKS}


def _both(given: Format, examples: Sequence[Example], split: Arrangement, *, is_list: bool) -> dict[str, Any]:
    """Return the batch for one device, and the parts for ranks."""
    all_rows = (*examples, *([given.without_labels(examples[0])] if split.has_blank else []))
    whole = given.microbatch(rows_of(given, all_rows))
    parts = [[given.microbatch(rows) for rows in own] for own in split.ranks]
    return {_WHOLE: [whole], _RANKS: parts} if is_list else {_WHOLE: whole, _RANKS: [own[0] for own in parts]}


_WHOLE, _RANKS = "whole", "ranks"


def _split_task(task: Task, batches: tuple[dict[str, Any], ...]) -> Task:
    assert task.step is not None
    assert task.rank_step is not None
    return replace(
        task,
        batches=batches,
        step=_without_loss(task.step, _WHOLE),
        rank_step=_without_loss(task.rank_step, None),
        shard=partial(_own_part, task),
    )


def _own_part(task: Task, batch: dict[str, Any], mesh: DeviceMesh) -> Any:
    return batch[_RANKS][part_number(task, mesh)]


def _without_loss(step: TrainStep, key: str | None) -> TrainStep:
    """Return the step on one part of a batch, changed to return no loss, because ranks may return the loss of their own rows."""

    @functools.wraps(step)
    def take_step(model: nn.Module, batch: Any, optimizer: Any, loss: Any, **keywords: Any) -> Any:
        found = step(model, batch if key is None else batch[key], optimizer, loss, **keywords)
        return {name: value for name, value in found.items() if name != "loss"} if isinstance(found, Mapping) else None

    return take_step
