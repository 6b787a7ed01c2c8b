"""Worker processes as their supervisor sees them, and single checks in a process of their own.

If such a process dies, this gives a verdict.
"""

from __future__ import annotations

import time

from equivcheck.campaign.plan import Check, Plan, explaining_check
from equivcheck.campaign.workers.messages import Broken, Checked, CheckOne
from equivcheck.campaign.workers.recorder import Recorder
from equivcheck.checking.kinds import verdict_on
from equivcheck.errors import EquivCheckError, UsageError
from equivcheck.layouts.base.execution.compile_time import all_compile_seconds
from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome
from equivcheck.scenario.case import Checkable
from equivcheck.worlds.failure import Failure, FailureKind, RankReport, RankState
from equivcheck.worlds.patience import Patience, cpu_seconds_of_family
from equivcheck.worlds.workers.process import Ended, WorkerProcess

START_SECONDS = 120.0
"""Seconds for imports on a cold disk or a busy machine, in addition to the time for a check."""


class CheckingProcess(WorkerProcess):
    """A worker process that draws and checks cases.

    `place` has the worker's number, and how many processes this worker had before. If `suspect` is given, the process only checks
    the case in this verdict again, because an earlier process died or hung in its check.
    """

    def __init__(self, plan: Plan, place: tuple[int, int], suspect: CaseVerdict | None = None) -> None:
        self.place, self.suspect, self.node = place, suspect, ""
        self.done = False
        self._plan = plan
        self._recorder = Recorder.create()
        super().__init__("equivcheck.campaign.workers.serving", (plan, place), self._recorder.fd)
        self._begin()

    @property
    def seconds_since_begun(self) -> float:
        """Seconds since the process began its last check."""
        return time.monotonic() - self._begun

    @property
    def is_stuck(self) -> bool:
        """Whether the current check has used up its time, `allowed_seconds`."""
        if self._recorder.num_begun != self._last_count:
            self._begin()
        if not self._patience.exhausted():
            return False
        if self.allowed_seconds > self._patience.limit:  # reading the current case is only for workers that seem to be stuck
            self._watch(self.allowed_seconds)
            return False
        return True

    def _begin(self) -> None:
        self._last_count, self._begun = self._recorder.num_begun, time.monotonic()
        self._watch(self._plan.stuck_seconds)

    def _watch(self, limit: float) -> None:
        self._patience = Patience(limit, lambda: cpu_seconds_of_family(self.pid))

    @property
    def allowed_seconds(self) -> float:
        """Seconds that the current check may take. Before the first check, they include the process's start."""
        if not self._recorder.num_begun:
            return self._plan.stuck_seconds + START_SECONDS
        case = self._recorder.last_case()
        return self._plan.stuck_seconds + (all_compile_seconds(case) if case else 0.0)

    def death(self) -> CaseVerdict | None:
        """Return a verdict CRASHED on the case during which the process died; None if it had not begun a check."""
        how = f"the process that simulated the ranks {self.how_it_ended()}"
        return self._verdict(Outcome.CRASHED, FailureKind.DIED, RankState.DIED, how)

    def hang(self) -> CaseVerdict | None:
        """Kill the stuck process, and return a verdict HUNG on its case, with its stacks.

        Returns None if it had not begun a check.
        """
        self.print_stacks()
        self.kill()
        how = f"the check did not end: {self._patience.exhausted()}"
        return self._verdict(Outcome.HUNG, FailureKind.TIMEOUT, RankState.RUNNING, how)

    def _verdict(self, outcome: Outcome, kind: FailureKind, state: RankState, how: str) -> CaseVerdict | None:
        case = self._recorder.last_case()
        if case is None:
            return None
        # All ranks met the same end, so only the first report has the process's last output.
        stacks = (self.printed(), *[""] * (case.num_ranks - 1))
        reports = tuple(RankReport(rank=rank, state=state, error=how, stack=stack) for rank, stack in enumerate(stacks))
        return verdict_on(
            case,
            outcome=outcome,
            world=self._plan.world,
            reason=how,
            beyond=why_unsupported(case) or "",
            failure=Failure(kind=kind, summary=how, reports=reports),
        )

    def close(self) -> None:
        """Kill the process if it still runs, and free its shared memory."""
        super().close()
        self._recorder.close()


_POLL_SECONDS = 1.0
"""Seconds between checks for a stuck process."""


class CheckerFailed(EquivCheckError):
    """The checker itself could not run. This says nothing about the checked case."""


def check_isolated(
    case: Checkable, *, world: str, deadline: float, beyond: bool = False, check: Check = explaining_check
) -> CaseVerdict:
    """Check a case in a new process, and diagnose a failure. If the process dies or hangs, the verdict says so.

    `beyond` ignores torch's known limits. Raises `CheckerFailed` if the checker itself fails, and `UsageError` like `check`.
    """
    plan = Plan(num_checks=1, seed=0, world=world, deadline=deadline, stuck_seconds=2 * deadline + START_SECONDS, check=check)
    worker = CheckingProcess(plan, (0, 0))
    try:
        worker.send(CheckOne(case=case, beyond=beyond))
        return _verdict(worker)
    finally:
        worker.close()


def _verdict(worker: CheckingProcess) -> CaseVerdict:
    while not worker.is_stuck:
        if not worker.poll(_POLL_SECONDS):
            continue
        message = worker.receive()
        if isinstance(message, Checked):
            return message.verdict
        if isinstance(message, Broken):
            raise UsageError(message.summary) if message.is_usage else CheckerFailed(message.summary)
        if isinstance(message, Ended):
            verdict = worker.death()
            break
    else:
        verdict = worker.hang()
    if verdict is None:
        raise CheckerFailed(f"the check's process ended before the check began: {worker.printed().strip()[-500:]}")
    return verdict
