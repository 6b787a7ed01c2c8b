"""Run a user's training on a world's ranks."""

from __future__ import annotations

from dataclasses import fields

from equivcheck.layouts.base.execution.compile_time import COMPILE_SECONDS
from equivcheck.layouts.composition.running import PROCESSES, THREADS
from equivcheck.oracle.verdict.description import shorten_to_line
from equivcheck.user.rank_logs import quiet_ranks
from equivcheck.user.ranks import process_trace, rank_trace
from equivcheck.user.task import Task
from equivcheck.user.usage import invalid
from equivcheck.worlds.failure import Failure, RanksFailed
from equivcheck.worlds.pool import WORLDS_WITH_DATA, ranks
from equivcheck.worlds.ranks import Ranks, Run, rerun_if_died
from equivcheck.worlds.sim.stand_ins.compiling import REFUSAL


def members_of(task: Task, world: str | Ranks) -> Ranks:
    """Return the ranks for a training.

    Raises `UsageError` if their number differs from the mesh, if the world transfers no data, or if an argument cannot be copied.
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


def run_on(members: Ranks, task: Task, schedule_seed: int, deadline: float) -> tuple[Run | Failure, Ranks, list[str]]:
    """Run the training; return the result or the failure, the ranks that ran it, and notes about torch's warnings.

    Simulated ranks are threads and refuse compiled functions. Such a training runs again in local processes.
    """
    program = process_trace if members.has_copies else rank_trace
    try:
        with quiet_ranks() as notes:
            run = rerun_if_died(lambda: members.run(program, task, schedule_seed=schedule_seed, deadline=deadline))
        return run, members, notes
    except RanksFailed as error:
        failure = error.failure
    compiles = failure.culprit is not None and REFUSAL in failure.culprit.error
    if members.name != THREADS or not compiles:
        return failure, members, notes
    return run_on(members_of(task, PROCESSES), task, schedule_seed, deadline + COMPILE_SECONDS)


def _require_copyable(task: Task, world: str) -> None:
    from equivcheck.worlds.gloo.request import pickle_copy

    for name in (field.name for field in fields(task) if callable(getattr(task, field.name))):
        value = getattr(task, name)
        try:
            pickle_copy(value)
        except Exception as error:
            why = f"it cannot be copied to other processes ({shorten_to_line(str(error))})"
            expected = 'a function whose variables can be pickled, or world="sim"'
            raise invalid(f"{name} {value!r:.100} in world {world!r}", why, expected) from None
