"""Runs a user's training on a world's ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from equivcheck.errors import UsageError
from equivcheck.layouts.base.execution.compile_time import COMPILE_SECONDS
from equivcheck.layouts.composition.running import PROCESSES, THREADS, require_shared
from equivcheck.oracle.verdict.description import shorten_to_line
from equivcheck.system.temporary_folder import temporary_folder
from equivcheck.user.frames import place_lines
from equivcheck.user.messages.rank_logs import quiet_ranks
from equivcheck.user.ranks import process_trace, rank_trace
from equivcheck.user.resuming.parts import WHOLE, Part, first_part, second_part
from equivcheck.user.task import Task
from equivcheck.user.traces.settings import UserTrace
from equivcheck.user.trainers.recording import trainer_trace
from equivcheck.user.usage import invalid
from equivcheck.worlds.failure import Failure, RankReport, RanksFailed
from equivcheck.worlds.pool import WORLDS_WITH_DATA, ranks
from equivcheck.worlds.ranks import Ranks, Run, rerun_if_died
from equivcheck.worlds.sim.ownership import SHARED, UsedByOtherRank
from equivcheck.worlds.sim.stand_ins.compiling import REFUSAL

OWN_MESH = (
    'world="gloo", or a mesh that each rank keeps for itself: `step`, `rank_step` and `loss` get it if they have a parameter '
    "`mesh`, and `parallelize` can store it in the model"
)
"""Ways to give each rank its own mesh."""


def members_of(task: Task, world: str | Ranks) -> Ranks:
    """Return the ranks in a world, after checking that they can run the training.

    Raises `UsageError` if the mesh has another number of ranks, if collectives transfer no data (world ``fake``), or if an
    argument cannot be copied to the ranks.
    """
    if isinstance(world, Ranks) and world.size != task.num_ranks:
        raise invalid("world", f"it has {world.size} ranks", f"{task.num_ranks} ranks, as in the mesh")
    members = world if isinstance(world, Ranks) else ranks(world, task.num_ranks)
    if not members.has_data:
        raise invalid(
            f"world {members.name!r}", "its collectives transfer no data to compare", f"one of {', '.join(WORLDS_WITH_DATA)}"
        )
    if members.has_copies:
        _require_copyable(task, members.name)
    return members


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """Result of running a training on ranks."""

    left: Run | Failure
    """All ranks' traces, or how ranks failed."""
    members: Ranks
    """The ranks that ran. If there was a checkpoint, those after it."""
    notes: tuple[str, ...]
    """Notes for the verdict, about warnings from torch."""
    before: tuple[UserTrace, ...] = ()
    """Each rank's trace before the checkpoint; empty if there is none, or if ranks failed before it."""


def run_training(members: Ranks, task: Task, schedule_seed: int, deadline: float) -> TrainingRun:
    """Run a training on ranks. If it resumes from a checkpoint, new ranks run the steps after it."""
    resume = task.resume
    if resume is None:
        return _run_on(members, task, schedule_seed, deadline, WHOLE)
    second = second_part(task)
    others = members_of(second, members if second.num_ranks == members.size else members.name)
    with temporary_folder() as folder:
        require_shared(folder, members, deadline)
        part = Part(save=resume.save, folder=Path(folder))
        before = _run_on(members, first_part(task), schedule_seed, deadline, part)
        if isinstance(before.left, Failure):
            return before
        part = Part(first_step=resume.after, load=resume.load, folder=Path(folder))
        after = _run_on(others, second, schedule_seed, deadline, part)
        return replace(after, before=before.left.values, notes=tuple(dict.fromkeys((*before.notes, *after.notes))))


def _run_on(members: Ranks, task: Task, schedule_seed: int, deadline: float, part: Part) -> TrainingRun:
    """Run one part of a training.

    Simulated ranks are threads and refuse compiled functions. Such a training runs again in local processes.
    """
    program = trainer_trace if task.trainer is not None else process_trace if members.has_copies else rank_trace
    try:
        with quiet_ranks() as notes:
            run = rerun_if_died(lambda: members.run(program, task, part, schedule_seed=schedule_seed, deadline=deadline))
        return TrainingRun(left=run, members=members, notes=tuple(notes))
    except RanksFailed as error:
        failure = error.failure
    culprit = failure.culprit
    if culprit is not None and UsedByOtherRank.__name__ in culprit.error:
        raise _other_ranks_mesh(culprit)
    compiles = culprit is not None and REFUSAL in culprit.error
    if members.name != THREADS or not compiles:
        return TrainingRun(left=failure, members=members, notes=tuple(notes))
    return _run_on(members_of(task, PROCESSES), task, schedule_seed, deadline + COMPILE_SECONDS, part)


def _other_ranks_mesh(culprit: RankReport) -> UsageError:
    """Return an error about a rank that uses another rank's mesh or group, with the line in the user's code."""
    place = "".join(f" ({line})" for line in place_lines(culprit.stack)[:1])
    what = f"rank {culprit.rank} used a device mesh or process group of another rank{place}"
    return invalid(f"world {THREADS!r}", f"{what}, because {SHARED}", OWN_MESH)


def _require_copyable(task: Task, world: str) -> None:
    from equivcheck.worlds.gloo.request import pickle_copy

    resume = task.resume
    given = {field.name: getattr(task, field.name) for field in fields(task)}
    given |= {} if resume is None else {f"resume.{field.name}": getattr(resume, field.name) for field in fields(resume)}
    for name, value in given.items():
        if not callable(value):
            continue
        try:
            pickle_copy(value)
        except Exception as error:
            why = f"it cannot be copied to other processes ({shorten_to_line(str(error))})"
            expected = 'a function whose variables can be pickled, or world="sim"'
            raise invalid(f"{name} {value!r:.100} in world {world!r}", why, expected) from None
