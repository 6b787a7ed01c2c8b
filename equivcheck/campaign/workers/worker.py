"""A campaign's worker: it draws, checks, counts and shrinks cases until it is stopped."""

from __future__ import annotations

import itertools
import math
import threading
import time
from functools import partial
from typing import Any, Protocol

from equivcheck.campaign.batches import EndBatch, FaultShown, batch_seed, run_batch
from equivcheck.campaign.control import ControlRun, choose_control
from equivcheck.campaign.findings.example import mark_not_shrunk, unmark_not_shrunk
from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.campaign.findings.size import Size, size_of
from equivcheck.campaign.plan import Plan, oracle_check
from equivcheck.campaign.selection.avoidance import Avoidance, Candidate, avoiding_all
from equivcheck.campaign.selection.novelty import Selection
from equivcheck.campaign.selection.programs import ProgramSelection
from equivcheck.campaign.shrinking.search import Shrinking, same_fingerprint
from equivcheck.campaign.tally import Tally
from equivcheck.campaign.workers.messages import Found, InDoubt, MayShrink, Progress, TakeOver
from equivcheck.campaign.workers.process import CheckerFailed, check_isolated
from equivcheck.campaign.workers.recorder import Recorder
from equivcheck.campaign.workers.turns import Turns
from equivcheck.checking.confirm import CONFIRMING, CONFIRMING_SECONDS, confirmed_by, may_be_confirmed
from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome
from equivcheck.scenario.case import Checkable
from equivcheck.worlds.sim.interruption import abandoned_threads
from equivcheck.worlds.work_clock import WorkClock

REPORT_SECONDS = 0.2
"""Seconds between two count messages."""
_LATE_SHARE = 0.15
"""Last share of a campaign's time. In it, an uncaught control is checked first."""
_CONTROL_SECONDS = 2.0
"""Seconds after the campaign's time in which the control may still begin a check."""


class Supervisor(Protocol):
    """Protocol for the supervisor, as a worker sees it."""

    stopped: threading.Event
    """Event: the worker must end after its current check."""

    def send(self, message: object, /) -> None:
        """Send a message to the supervisor."""

    def next(self) -> Any:
        """Wait for the next message from the supervisor, and return it."""

    def pending(self) -> list[Any]:
        """Return the messages received so far, without waiting."""


class CheckerBroke(BaseException):
    """The checker itself raised an exception. It derives from `BaseException`, because Hypothesis would shrink an `Exception`."""


class Worker:
    """Draws and checks cases for one worker of a campaign, inside its process.

    `place` has the worker's number, and how many processes this worker had before. Both change the seeds, so each process draws
    other cases.
    """

    def __init__(self, plan: Plan, place: tuple[int, int], link: Supervisor, recorder: Recorder) -> None:
        self._plan, self._place, self._link, self._recorder = plan, place, link, recorder
        self._until, self._late, self._checks_left = 0.0, 0.0, math.inf
        self._tally, self._reported = Tally(), 0.0
        self._turns = Turns(plan, place[0])
        self._source = self._turns.next()
        self._selections = {beyond: Selection(plan.expected_seconds) for beyond in (False, True)}
        self._programs = ProgramSelection()
        self._avoidance, self._avoids = Avoidance(), False
        self._smallest: dict[str, Size] = {}
        self._taken_over: list[CaseVerdict] = []
        self._shrinking: Shrinking | None = None
        self._control = choose_control(plan) if place[0] == 0 else None
        self._clock = WorkClock()

    def fuzz(self, seconds: float, num_checks: float) -> None:
        """Draw and check cases for `seconds`, or until `num_checks` are done or the supervisor stops the worker."""
        self._clock, self._checks_left = WorkClock(), num_checks
        self._until = time.monotonic() + seconds
        self._late = self._until - seconds * _LATE_SHARE if seconds < math.inf else math.inf
        for number in itertools.count():
            # Findings whose workers were lost with their machines are shrunk here.
            self._taken_over += [message.verdict for message in self._link.pending()]
            while self._taken_over:
                verdict = unmark_not_shrunk(self._taken_over.pop())
                self._smallest[fingerprint(verdict)] = size_of(verdict.case)
                self._begin_shrinking(verdict)
                self._end_shrinking()
            run_batch(self._source.strategy, batch_seed(self._plan.seed, *self._place, number), self._take)
            self._end_shrinking()
            if self._over or self._checks_left <= 0:
                break
            if self._control is not None:
                self._control.draw()
            self._source = self._turns.next()
        # A control that was not caught in time goes on for some seconds, because the run proves nothing without it.
        while (control := self._control) is not None and not self._ends:
            control.draw()
            if control.is_over or time.monotonic() >= self._until + _CONTROL_SECONDS:
                self._link.send(control.result)
                self._control = None
            elif control.has_waiting:
                self._step_control(control)
        self._report()

    def check(self, case: Checkable, *, coarse: bool = False, beyond: bool = False) -> CaseVerdict:
        """Record a case for the supervisor, and check it. `coarse` and `beyond` are options of `equivcheck.check`."""
        self._recorder.begin(case)
        return self._asked(case, coarse=coarse, beyond=beyond)

    def _asked(self, case: Checkable, **options: Any) -> CaseVerdict:
        try:
            return self._plan.check(case, **{"world": self._plan.world, "deadline": self._plan.deadline, **options})
        except Exception as error:
            raise CheckerBroke(case) from error

    def _step_control(self, control: ControlRun) -> None:
        def check(case: Checkable, alter: Any) -> CaseVerdict:
            self._recorder.beat()
            return self._asked(case, alter=alter)

        control.step(check)
        if control.is_over:
            self._link.send(control.result)
            self._control = None

    @property
    def is_spent(self) -> bool:
        """Whether this process must end, because a rank still runs in it and cannot be stopped.

        This rank may disturb later checks, so their findings would prove nothing.
        """
        return bool(abandoned_threads())

    @property
    def _ends(self) -> bool:
        return self._link.stopped.is_set() or self.is_spent

    @property
    def _over(self) -> bool:
        return self._ends or time.monotonic() >= self._until

    def _take(self, case: Checkable) -> None:
        if self._over or (self._shrinking.is_drawn_out if self._shrinking else self._checks_left <= 0):
            raise EndBatch
        is_late = time.monotonic() >= self._late
        if self._control is not None and self._control.is_due(self._clock.seconds, is_late=is_late):
            self._step_control(self._control)
        elif self._control is not None and is_late and self._shrinking is None and not self._control.has_waiting:
            raise EndBatch  # it draws between batches
        candidate = self._candidate(case)
        if candidate is None:
            self._recorder.beat()
            self._report_if_due()
            return
        start = time.monotonic()
        coarse = self._shrinking is not None and self._shrinking.coarse
        verdict = self.check(candidate.case, coarse=coarse, beyond=self._source.beyond)
        seconds = time.monotonic() - start
        if self._shrinking is not None:
            self._tally.num_shrinking += 1
        elif self._holds(verdict):
            self._turns.count(candidate.case)
            self._tally.add(verdict, seconds, decided=candidate.issues_decided_by(verdict), avoided=candidate.avoided)
            if not verdict.beyond:
                self._avoidance.count(candidate, verdict)
                self._checks_left -= 1
        else:
            self._tally.not_repeated += 1
            return
        self._report_if_due()
        if verdict.outcome.is_finding and self._to_be_shrunk(verdict):
            raise FaultShown  # only here, because Hypothesis tells faults apart by the line that raises

    def _candidate(self, case: Checkable) -> Candidate | None:
        """Return the case to check in place of a drawn case; None if the drawn case is not worth a check."""
        beyond = self._source.beyond
        if self._shrinking is not None:
            # While a case that avoids known issues is shrunk, smaller cases avoid them too.
            return avoiding_all(case) if self._avoids and not beyond else Candidate(case=case)
        candidate: Candidate | None = Candidate(case=case)
        if not beyond:
            candidate = self._avoidance.candidate(case)
            self._avoids = candidate is not None and bool(candidate.avoided)
        if candidate is None:
            return None
        may_be_known = bool(candidate.could_show)
        if self._turns.is_of_programs:
            is_wanted = self._programs.wants(candidate.case, may_be_known=may_be_known)
        else:
            # In a batch beyond torch's limits, only cases beyond a limit are checked.
            is_meant = not beyond or why_unsupported(candidate.case) is not None
            is_wanted = is_meant and self._selections[beyond].wants(candidate.case, may_be_known=may_be_known)
        return candidate if is_wanted else None

    def _holds(self, verdict: CaseVerdict) -> bool:
        """Confirm a new crash or hang in a fresh process with twice the time."""
        if verdict.outcome not in (Outcome.CRASHED, Outcome.HUNG) or fingerprint(verdict) in self._smallest:
            return True
        plan = self._plan.with_more_time()
        self._recorder.beat()
        self._link.send(InDoubt(verdict=verdict))
        try:
            again = check_isolated(
                verdict.case, world=plan.world, deadline=plan.deadline, beyond=bool(verdict.beyond), check=plan.check
            )
        except CheckerFailed as error:
            raise CheckerBroke(verdict.case) from error
        finally:
            self._link.send(InDoubt(verdict=None))
        return again.outcome.is_finding

    def _to_be_shrunk(self, verdict: CaseVerdict) -> bool:
        try:
            if self._shrinking is None and self._is_new(verdict):
                # The supervisor lets one worker shrink each finding. It may send findings of lost workers before its answer.
                while isinstance(answer := self._link.next(), TakeOver):
                    self._taken_over.append(answer.verdict)
                assert isinstance(answer, MayShrink), answer
                if answer.yes:
                    self._begin_shrinking(verdict)
            return self._shrinking is not None and self._shrinking.offer(verdict)
        except Exception as error:
            self._send(verdict.with_unfinished("shrinking", error))
            self._shrinking = None
            return False

    def _begin_shrinking(self, verdict: CaseVerdict) -> None:
        def judge(case: Checkable, *, coarse: bool) -> CaseVerdict:
            self._tally.num_shrinking += 1
            return self.check(case, coarse=coarse, beyond=bool(verdict.beyond))

        same, seconds = same_fingerprint(verdict), self._plan.shrink_seconds
        try:
            self._shrinking = Shrinking(verdict, judge, same=same, seconds=seconds, stopped=lambda: self._over)
        except Exception as error:
            self._send(verdict.with_unfinished("shrinking", error))

    def _is_new(self, verdict: CaseVerdict) -> bool:
        """Whether this worker sees the fault for the first time.

        Sends the first case, and later smaller cases, to the supervisor.
        """
        mark, size = fingerprint(verdict), size_of(verdict.case)
        self._tally.fingerprints[mark] += 1
        first = mark not in self._smallest
        if first or size < self._smallest[mark]:
            self._smallest[mark] = size
            self._link.send(Found(verdict=mark_not_shrunk(verdict), asks=first))
        return first

    def _end_shrinking(self) -> None:
        if self._shrinking is None:
            return
        search, self._shrinking = self._shrinking, None
        try:
            best = search.finish()
        except Exception as error:
            best = search.first_verdict.with_unfinished("shrinking", error)
        if search.was_stopped:
            best = mark_not_shrunk(best)
        self._send(best)  # before the diagnosis, which takes longer and may be interrupted
        examined = best
        # Cases beyond torch's limits get no diagnosis.
        if not (best.beyond or self._ends or self._plan.check is not oracle_check):
            from equivcheck.diagnosis.explain import explained

            self._recorder.begin(best.case)
            examined = explained(best, world=self._plan.world, deadline=self._plan.deadline)
        if self._plan.confirm and not self._ends and may_be_confirmed(examined):
            self._tally.num_shrinking += 1
            deadline = min(self._plan.deadline, CONFIRMING_SECONDS)
            again = partial(self._plan.check, best.case, world=CONFIRMING, deadline=deadline, beyond=bool(best.beyond))
            examined = confirmed_by(examined, again)
        if examined is not best:
            self._send(examined)

    def _send(self, best: CaseVerdict) -> None:
        self._smallest[fingerprint(best)] = size_of(best.case)
        self._link.send(Found(verdict=best))

    def _report_if_due(self) -> None:
        if time.monotonic() - self._reported >= REPORT_SECONDS:
            self._report()

    def _report(self) -> None:
        self._link.send(Progress(tally=self._tally))
        self._tally, self._reported = Tally(), time.monotonic()
