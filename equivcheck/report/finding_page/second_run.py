"""Runs a scenario's ranks once more, and compares all their values with the single-device run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from equivcheck.errors import EquivCheckError
from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.layouts.composition.running import RanksResult, Runner, world_for
from equivcheck.oracle.comparison.assemble import Assembled, Assembler
from equivcheck.oracle.comparison.compare import compare, errors_of, snapshots_of
from equivcheck.oracle.reference.noise import Expected
from equivcheck.oracle.reference.reference import ReferenceRun
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.scenario import Scenario
from equivcheck.training.setup import Setup
from equivcheck.worlds.call import Call
from equivcheck.worlds.failure import Failure, RanksFailed
from equivcheck.worlds.patience import Patience, cpu_seconds_of_family
from equivcheck.worlds.trace.differences import Divergence, Phase
from equivcheck.worlds.trace.moments import moments, moments_of_steps
from equivcheck.worlds.trace.tensors import Vector
from equivcheck.worlds.trace.trace import Snapshot
from equivcheck.worlds.workers.link import SupervisorLink
from equivcheck.worlds.workers.process import Ended, WorkerProcess

Alter = Callable[[Setup], None]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Compared:
    """Values at one compared point in training, on one device and on the ranks."""

    expected: Expected
    """Values from the single-device run, with tolerances."""
    snapshots: tuple[Snapshot, ...]
    """Each rank's local values."""
    assembled: Assembled
    """Full tensors, assembled from the ranks' values. A loss is the mean over the ranks that have a loss."""
    errors: Vector
    """Each tensor's error, relative to tolerance."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SecondRun:
    """Values for the page, from running the ranks once more."""

    moments: tuple[Compared, ...] = ()
    """Values at each compared point in training; empty if the ranks left no values."""
    divergences: tuple[Divergence, ...] = ()
    """All differences from the single-device run, in order."""
    calls: tuple[tuple[Call, ...], ...] = ()
    """Each rank's collective calls; empty if the world does not record them."""
    failure: Failure | None = None
    """How the ranks failed; None if all finished."""
    note: str = ""
    """Reason why values are missing, or why this run does not show the verdict's difference. Otherwise empty."""


def run_once_more(verdict: Verdict, alter: Alter | None = None, deadline: float = 60.0) -> SecondRun:
    """Run the ranks again in `sim`, which records calls. If `sim` does not show the failure, run them in the verdict's world.

    If a bug was planted for the verdict, it must be passed as `alter`. If the ranks cannot run, the result has only a note.
    """
    scenario = verdict.scenario
    reason = why_unsupported(scenario, beyond=bool(verdict.beyond))
    if reason is not None:
        return SecondRun(note=f"this page has no drawings: {reason}")
    again = SecondRun()
    for world in dict.fromkeys((world_for(scenario, "sim"), verdict.world)):
        try:
            again = _run(scenario, Runner(world=world, deadline=deadline, alter=alter))
        except EquivCheckError as error:
            return SecondRun(note=f"this page has no drawings: {error}")
        if _shows_as_much(verdict, again):
            return again
    return replace(again, note=again.note or _otherwise(again))


def _run(scenario: Scenario, runner: Runner) -> SecondRun:
    try:
        result = runner.run(scenario)
    except RanksFailed as error:
        return SecondRun(failure=error.failure, calls=error.calls)
    reference = ReferenceRun.of(scenario).confirming_reference()
    if not reference.moments:
        return SecondRun(calls=result.run.calls, note="the single-device run has no values to compare with")
    return SecondRun(
        moments=tuple(_compared(reference.moments, result)),
        divergences=compare(reference, result.run.values, result.before).divergences,
        calls=result.run.calls,
    )


def _compared(expected: tuple[Expected, ...], result: RanksResult) -> list[Compared]:
    found = [*moments_of_steps(result.before), *zip(*map(moments, result.run.values), strict=True)]
    assembler, compared = Assembler(), []
    for each, ranks in zip(expected, found, strict=True):
        assembled = assembler.assemble(each, snapshots_of(list(ranks), each.phase))
        errors, _ = errors_of(each, assembled)
        snapshots = tuple(moment.snapshot for moment in ranks)
        compared.append(Compared(expected=each, snapshots=snapshots, assembled=assembled, errors=errors))
    return compared


def _shows_as_much(verdict: Verdict, again: SecondRun) -> bool:
    """Whether the run shows the verdict's difference or failure."""
    if verdict.failure is not None:
        return again.failure is not None
    is_wrong = verdict.outcome in {Outcome.DIVERGED, Outcome.KNOWN} and verdict.divergence is not None
    return again.failure is None and (bool(again.divergences) or not is_wrong)


def _otherwise(again: SecondRun) -> str:
    if again.failure is not None:
        return f"the drawings show a second run, in which the ranks failed: {again.failure.summary}"
    return "the drawings show a second run, in which no value differs"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step's loss and errors, for a row in a table."""

    step: int
    """Step, from 0."""
    expected_loss: float
    """Loss in the single-device run."""
    loss: float
    """Mean loss over the ranks with a loss."""
    errors: dict[Phase, float]
    """Largest error in each phase (loss, gradient, update), relative to tolerance."""


def step_rows(moments: Sequence[Compared]) -> list[StepRow]:
    """Return each step's loss and errors. Optimizer state and buffers belong to the last step."""
    losses: dict[int, tuple[float, float]] = {}
    errors: dict[int, dict[Phase, float]] = {}
    for moment in moments:
        expected = moment.expected
        if expected.phase is Phase.LOSS:
            losses[expected.step] = float(expected.values[0]), float(moment.assembled.values[0])
        found = errors.setdefault(expected.step, {})
        worst = float("inf") if moment.assembled.misfits else float(moment.errors.max(initial=0.0))
        found[expected.phase] = max(worst, found.get(expected.phase, 0.0))
    return [StepRow(step=step, expected_loss=loss[0], loss=loss[1], errors=errors[step]) for step, loss in sorted(losses.items())]


def phases_of(rows: Sequence[StepRow]) -> list[Phase]:
    """Return the phases with a value in any step, in training order."""
    return [phase for phase in Phase if any(phase in row.errors for row in rows)]


_START_SECONDS = 120.0
"""Seconds for the process to start, in addition to the time of two runs: on simulated ranks, and in the verdict's world if
simulated ranks show nothing."""
_POLL_SECONDS = 1.0


def run_isolated(verdict: Verdict, deadline: float) -> SecondRun:
    """Call `run_once_more` in a new process. If the process dies or never ends, the result has only a note."""
    worker = WorkerProcess(__name__, (verdict, deadline))
    patience = Patience(_START_SECONDS + 2 * deadline, lambda: cpu_seconds_of_family(worker.pid))
    try:
        while not worker.poll(_POLL_SECONDS):
            if patience.exhausted():
                return SecondRun(note="this page has no drawings: the second run did not end")
        answer = worker.receive()
        if isinstance(answer, Ended):
            return SecondRun(note=f"this page has no drawings: the process of the second run {worker.how_it_ended()}")
        assert isinstance(answer, SecondRun)
        return answer
    finally:
        worker.close()


def main(fd: int) -> None:
    """Run a verdict's ranks for the caller at the other end of the socket `fd`, and send it the result."""
    link = SupervisorLink(fd)
    verdict, deadline = link.task
    link.send(run_once_more(verdict, deadline=deadline))
