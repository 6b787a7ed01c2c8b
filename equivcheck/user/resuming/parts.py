"""Divides a training with a checkpoint into two parts, and checks the argument `resume`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from equivcheck.user.resuming.restart import Checkpointing, Restart
from equivcheck.user.task import Task, data_axes_of, loss_axes_of, mesh_of
from equivcheck.user.usage import invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a training: some of its steps, and the checkpoints before and after them."""

    first_step: int = 0
    """Number of the first step in this part."""
    load: Checkpointing | None = None
    """Function for loading the checkpoint before the first step; None if there is no checkpoint."""
    save: Checkpointing | None = None
    """Function for saving the checkpoint after the last step; None if there is no checkpoint."""
    folder: Path = Path()
    """Folder with the checkpoint."""


WHOLE = Part()
"""A training without a checkpoint."""


def first_part(task: Task) -> Task:
    """Return the training up to the checkpoint."""
    return replace(task, batches=task.batches[: _restart(task).after], resume=None)


def second_part(task: Task) -> Task:
    """Return the training after the checkpoint."""
    resume = _restart(task)
    task = replace(task, batches=task.batches[resume.after :], parallelize=resume.parallelize or task.parallelize, resume=None)
    if resume.mesh is None:
        return task
    mesh = mesh_of(resume.mesh)
    if resume.data_axes is None and {name for name, _ in mesh} == set(task.axis_names):
        return replace(task, mesh=mesh)
    axes = data_axes_of(mesh, resume.data_axes, user_shards=task.shard is not None)
    knows_rows = task.shard is None or resume.data_axes is not None
    return replace(task, mesh=mesh, data_axes=axes, loss_axes=loss_axes_of(mesh, axes, knows_rows=knows_rows))


def require_restart(task: Task) -> None:
    """Check the argument `resume`. Raises `UsageError` if it is not valid, or contradicts the other arguments."""
    resume: Any = task.resume
    if resume is None:
        return
    if not isinstance(resume, Restart):
        raise invalid(f"resume {resume!r:.100}", "it is not a Restart", "Restart(after=..., save=..., load=...) or None")
    steps, after = len(task.batches), resume.after
    if isinstance(after, bool) or not isinstance(after, int) or not 0 < after < steps:
        expected = f"a number from 1 to {steps - 1}, because there are {steps} batches" if steps > 1 else "two batches or more"
        raise invalid(f"resume.after {after!r:.100}", "each part of the training needs a step", expected)
    for name in ("save", "load"):
        if not callable(getattr(resume, name)):
            raise invalid(f"resume.{name} {getattr(resume, name)!r:.100}", "it is not callable", "a function")
    if resume.parallelize is not None and not callable(resume.parallelize):
        raise invalid(f"resume.parallelize {resume.parallelize!r:.100}", "it is not callable", "a function or None")
    if resume.data_axes is not None and resume.mesh is None:
        raise invalid("resume.data_axes without resume.mesh", "it names axes of that mesh", "both, or neither")
    if task.precision is not None and (resume.mesh, resume.parallelize) != (None, None):
        why = "one device rounds like one layout, and cannot change that at the checkpoint"
        raise invalid("precision with resume.mesh or resume.parallelize", why, "precision=None, or the same layout in both parts")
    if task.cuts is not None and resume.mesh is not None:
        raise invalid("cuts with resume.mesh", "cuts name axes of the first mesh", "full_tensors, or the same mesh in both parts")
    if task.mask_shapes is not None:
        why = "the masks depend on the number of calls, and a new model starts to count again"
        raise invalid("dropout_masks with resume", why, "dropout_masks=False, and p=0 or masks in the batches")


def _restart(task: Task) -> Restart:
    assert task.resume is not None, "a training without a checkpoint has one part"
    return task.resume
