"""Searches for a smaller case: Hypothesis proposes cases, then single changes are tried one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.campaign.findings.size import size_of
from equivcheck.campaign.shrinking.simpler import Change, changes_for, simpler_by
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome
from equivcheck.worlds.work_clock import WorkClock

DRAWING_SHARE = 0.6
"""Share of the time after which Hypothesis stops. The rest is left for single changes."""


def _seconds_waited(verdict: CaseVerdict) -> float:
    """Return how long a hang waited: its ranks compute nothing until they are stopped."""
    return verdict.seconds if verdict.outcome is Outcome.HUNG else 0.0


class Judge(Protocol):
    """Protocol for the function that checks cases during shrinking."""

    def __call__(self, case: Any, /, *, coarse: bool) -> CaseVerdict:
        """Return the verdict; `coarse` has the meaning it has in `equivcheck.check`."""


def same_fingerprint(first: CaseVerdict) -> Callable[[CaseVerdict], bool]:
    """Return a function that says whether a verdict is about the same failure as `first`."""
    mark = fingerprint(first)
    return lambda verdict: verdict.outcome.is_finding and fingerprint(verdict) == mark


class Shrinking:
    """Search for a smaller case with the same failure, limited to `seconds` of work (`WorkClock`).

    Hypothesis proposes cases, and callers pass their verdicts to `offer`. `finish` then tries single changes to the smallest
    case. Coarse checks do not measure rounding noise, and are faster (see `equivcheck.check`). Smaller cases get coarse checks if
    such a check also finds the failure in the original case. The final case gets a full check.
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
        """Whether the search was stopped before it had tried all simpler cases."""
        self.coarse = first.outcome is Outcome.DIVERGED and same(judge(first.case, coarse=True))

    @property
    def first_verdict(self) -> CaseVerdict:
        """Verdict on the case at the start of the search."""
        return self._found[0]

    @property
    def best(self) -> CaseVerdict:
        """Verdict on the smallest case found so far."""
        return self._found[-1]

    @property
    def is_drawn_out(self) -> bool:
        """Whether checking the cases that Hypothesis proposes has used up its share of the search's time."""
        return self._clock.seconds > self._seconds * DRAWING_SHARE

    @property
    def _is_over(self) -> bool:
        return self._clock.seconds > self._seconds or self._stopped()

    def offer(self, verdict: CaseVerdict) -> bool:
        """Keep the verdict on a case proposed by Hypothesis if the case fails in the same way and is smaller than `best`.

        Returns whether the case fails in the same way.
        """
        self._clock.wait(_seconds_waited(verdict))
        if not self._same(verdict):
            return False
        if size_of(verdict.case) < size_of(self.best.case):
            self._found.append(verdict)
        return True

    def finish(self) -> CaseVerdict:
        """Try single changes until none gives a smaller case.

        Returns the verdict on the smallest case that a full check confirms.
        """
        self._go_back_to_what_holds()
        self._descend()
        if not self._go_back_to_what_holds():
            self.coarse = False
            self._descend()
        return self.best

    def _descend(self) -> None:
        while sum(map(self._improve, changes_for(self.best.case))):
            pass

    def _go_back_to_what_holds(self) -> bool:
        """Drop cases that only the coarse check saw. Returns True if there were none."""
        before = len(self._found)
        while self.coarse and len(self._found) > 1:
            verdict = self._judge(self.best.case, coarse=False)
            if self._same(verdict):
                self._found[-1] = verdict
                break
            self._found.pop()
        return len(self._found) == before

    def _improve(self, kind: Change[Any]) -> bool:
        before = self.best
        while self._survives_one(kind):
            pass
        return self.best is not before

    def _survives_one(self, kind: Change[Any]) -> bool:
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
