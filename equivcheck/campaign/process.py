"""A worker of a campaign as its supervisor sees it: watched by the checks that it begins, its end read as a verdict."""

from __future__ import annotations

import time

from equivcheck.campaign.plan import Plan
from equivcheck.campaign.recorder import Recorder
from equivcheck.checking.kinds import verdict_on
from equivcheck.layouts.base.execution.compile_time import all_compile_seconds
from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome
from equivcheck.scenario.case import Case
from equivcheck.worlds.failure import Failure, FailureKind, RankReport, RankState
from equivcheck.worlds.patience import Patience, cpu_seconds_of_family
from equivcheck.worlds.workers.process import WorkerProcess

START_SECONDS = 120.0
"""Allowance for imports, on a cold disk or a busy machine, on top of the limit for a check."""


class CheckingProcess(WorkerProcess):
    """One process; `place` is the worker's number and how many processes it has had before.

    It draws cases, or checks again alone what ended the process before it: `suspect`, the verdict on that.
    """

    def __init__(self, plan: Plan, place: tuple[int, int], suspect: CaseVerdict | None = None) -> None:
        self.place, self.suspect, self.node = place, suspect, ""
        self.done = False
        self._plan = plan
        self._recorder = Recorder.create()
        super().__init__("equivcheck.campaign.serving", (plan, place), self._recorder.fd)
        self._begin()

    @property
    def seconds_since_begun(self) -> float:
        """How long ago its last check was first seen to have begun."""
        return time.monotonic() - self._begun

    @property
    def is_stuck(self) -> bool:
        """Whether it has not begun a check for longer than any may take."""
        if self._recorder.num_begun != self._last_count:
            self._begin()
        if not self._patience.exhausted():
            return False
        if self.allowed_seconds > self._patience.limit:  # reading back what is checked is for those who seem to be stuck
            self._watch(self.allowed_seconds)
            return False
        return True

    def _begin(self) -> None:
        """Begin to wait for the end of a check."""
        self._last_count, self._begun = self._recorder.num_begun, time.monotonic()
        self._watch(self._plan.stuck_seconds)

    def _watch(self, limit: float) -> None:
        self._patience = Patience(limit, lambda: cpu_seconds_of_family(self.pid))

    @property
    def allowed_seconds(self) -> float:
        """Seconds that what it began last may take; before its first check, also to start."""
        if not self._recorder.num_begun:
            return self._plan.stuck_seconds + START_SECONDS
        case = self._recorder.last()
        return self._plan.stuck_seconds + (all_compile_seconds(case) if case else 0.0)

    def death(self) -> CaseVerdict | None:
        """The verdict on the case during which it died; None if it had begun none."""
        how = f"the process that simulated the ranks {self.how_it_ended()}"
        return self._verdict(Outcome.CRASHED, FailureKind.DIED, RankState.DIED, how)

    def hang(self) -> CaseVerdict | None:
        """The verdict on the case in which it is stuck, with its stacks; it is killed. None if it had begun none."""
        self.print_stacks()
        self.kill()
        how = f"the check did not end: {self._patience.exhausted()}"
        return self._verdict(Outcome.HUNG, FailureKind.TIMEOUT, RankState.RUNNING, how)

    def _verdict(self, outcome: Outcome, kind: FailureKind, state: RankState, how: str) -> CaseVerdict | None:
        case = self._recorder.last()
        if case is None:
            return None
        return verdict_on(
            case,
            outcome=outcome,
            world=self._plan.world,
            reason=how,
            beyond=why_unsupported(case) or "",
            failure=Failure(kind=kind, summary=how, reports=self._reports(case, state, how)),
        )

    def _reports(self, case: Case, state: RankState, how: str) -> tuple[RankReport, ...]:
        """All ranks met the same end; what the process printed last is told once."""
        return tuple(
            RankReport(rank=rank, state=state, error=how, stack="" if rank else self.printed()) for rank in range(case.num_ranks)
        )

    def close(self) -> None:
        """Kill it if need be and let go of everything."""
        super().close()
        self._recorder.close()
