"""The search for a smaller case that shows one fault: Hypothesis proposes, then single changes are tried, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.campaign.findings.size import size_of
from equivcheck.campaign.shrinking.simpler import Kind, kinds_of_changes, simpler_by
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome
from equivcheck.worlds.work_clock import WorkClock

DRAWING_SHARE = 0.6
"""Part of the time after which Hypothesis is stopped, so that some is left for single changes."""


def _seconds_waited(verdict: CaseVerdict) -> float:
    """Ranks that hang compute nothing, and take the time until somebody gives them up."""
    return verdict.seconds if verdict.outcome is Outcome.HUNG else 0.0


class Judge(Protocol):
    """What checks a case while one shrinks."""

    def __call__(self, case: Any, /, *, coarse: bool) -> CaseVerdict:
        """The verdict; with `coarse` as `equivcheck.check` has it."""


def same_fingerprint(first: CaseVerdict) -> Callable[[CaseVerdict], bool]:
    """What tells whether a verdict is of the same fault as another."""
    mark = fingerprint(first)
    return lambda verdict: verdict.outcome.is_finding and fingerprint(verdict) == mark


class Shrinking:
    """One search, for so many seconds of work (`WorkClock`).

    Verdicts of Hypothesis's proposals are offered to it as they come; `finish` does the rest.
    Judging is coarse where that sees the fault in the case to begin with; what is kept in the end is judged in full.
    """

    def __init__(
        self,
        first: CaseVerdict,
        judge: Judge,
        *,
        same: Callable[[CaseVerdict], bool],
        seconds: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._judge, self._same, self._stopped = judge, same, stopped
        self._found = [first]
        self._seconds, self._clock = seconds, WorkClock()
        self.was_stopped = False
        """Whether it was stopped before it had tried every simpler case."""
        self.coarse = first.outcome is Outcome.DIVERGED and same(judge(first.case, coarse=True))

    @property
    def first(self) -> CaseVerdict:
        """What was found to begin with, which was judged in full."""
        return self._found[0]

    @property
    def best(self) -> CaseVerdict:
        """The smallest so far."""
        return self._found[-1]

    @property
    def is_drawn_out(self) -> bool:
        """Whether Hypothesis has had its part of the time."""
        return self._clock.seconds > self._seconds * DRAWING_SHARE

    @property
    def _is_over(self) -> bool:
        return self._clock.seconds > self._seconds or self._stopped()

    def offer(self, verdict: CaseVerdict) -> bool:
        """Whether the verdict is of the same fault; if it is a smaller example, it is remembered."""
        self._clock.wait(_seconds_waited(verdict))
        if not self._same(verdict):
            return False
        if size_of(verdict.case) < size_of(self.best.case):
            self._found.append(verdict)
        return True

    def finish(self) -> CaseVerdict:
        """Try what is simpler by one change until nothing is; the smallest verdict that holds in full."""
        self._go_back_to_what_holds()
        self._descend()
        if not self._go_back_to_what_holds():
            self.coarse = False
            self._descend()
        return self.best

    def _descend(self) -> None:
        while sum(map(self._improve, kinds_of_changes(self.best.case))):
            pass

    def _go_back_to_what_holds(self) -> bool:
        """Drop what only the coarse judgement found; whether that was nothing. The first of all was judged in full."""
        before = len(self._found)
        while self.coarse and len(self._found) > 1:
            verdict = self._judge(self.best.case, coarse=False)
            if self._same(verdict):
                self._found[-1] = verdict
                break
            self._found.pop()
        return len(self._found) == before

    def _improve(self, kind: Kind[Any]) -> bool:
        """Make changes of one kind as long as the fault survives one; whether it has survived any."""
        before = self.best
        while self._survives_one(kind):
            pass
        return self.best is not before

    def _survives_one(self, kind: Kind[Any]) -> bool:
        for case in simpler_by(kind, self.best.case, beyond=bool(self.best.beyond)):
            if self._is_over:
                self.was_stopped = self._stopped()
                return False
            verdict = self._judge(case, coarse=self.coarse)
            self._clock.wait(_seconds_waited(verdict))
            if self._same(verdict):
                self._found.append(verdict)
                return True
        return False
