"""A worker of a campaign as its supervisor sees it: watched by the checks that it begins, its end read as a verdict."""

from __future__ import annotations

import time

from equivcheck.campaign.plan import Plan
from equivcheck.campaign.recorder import Recorder
from equivcheck.composition.limits import why_unsupported
from equivcheck.layouts.execution.compile_time import all_compile_seconds
from equivcheck.scenario import Scenario
from equivcheck.verdict.verdict import Outcome, Verdict
from equivcheck.workers.process import WorkerProcess
from equivcheck.worlds.failure import Failure, FailureKind, RankReport, RankState

START_SECONDS = 120.0
"""Allowance for imports, on a cold disk or a busy machine, on top of the limit for a check."""


class CheckingProcess(WorkerProcess):
    """One process; `place` is the worker's number and how many processes it has had before."""

    def __init__(self, plan: Plan, place: tuple[int, int]) -> None:
        self.place = place
        self.done = False
        self._plan = plan
        self._recorder = Recorder.create()
        self._last_count, self._last_time = 0, time.monotonic()
        super().__init__("equivcheck.campaign.worker", (plan, place), self._recorder.fd)

    @property
    def idle_seconds(self) -> float:
        """How long it has not begun a check."""
        if self._recorder.num_begun != self._last_count:
            self._last_count, self._last_time = self._recorder.num_begun, time.monotonic()
        return time.monotonic() - self._last_time

    @property
    def is_stuck(self) -> bool:
        """Whether it has not begun a check for longer than any may take."""
        # Reading back what is checked costs more than a look at the clock.
        return self.idle_seconds > self._plan.stuck_seconds and self.idle_seconds > self.allowed_seconds

    @property
    def allowed_seconds(self) -> float:
        """Seconds that what it began last may take; before its first check, also to start."""
        if not self._recorder.num_begun:
            return self._plan.stuck_seconds + START_SECONDS
        scenario = self._recorder.last()
        return self._plan.stuck_seconds + (all_compile_seconds(scenario) if scenario else 0.0)

    def death(self) -> Verdict | None:
        """The verdict on the scenario during which it died; None if it had begun none."""
        how = f"the process that simulated the ranks {self.how_it_ended()}"
        return self._verdict(Outcome.CRASHED, FailureKind.DIED, RankState.DIED, how)

    def hang(self) -> Verdict | None:
        """The verdict on the scenario in which it is stuck, with its stacks; it is killed. None if it had begun none."""
        self.print_stacks()
        self.kill()
        how = f"the check did not end within {self.allowed_seconds:.0f} s"
        return self._verdict(Outcome.HUNG, FailureKind.TIMEOUT, RankState.RUNNING, how)

    def _verdict(self, outcome: Outcome, kind: FailureKind, state: RankState, how: str) -> Verdict | None:
        scenario = self._recorder.last()
        if scenario is None:
            return None
        return Verdict(
            outcome=outcome,
            scenario=scenario,
            world=self._plan.world,
            reason=how,
            beyond=why_unsupported(scenario) or "",
            failure=Failure(kind=kind, summary=how, reports=self._reports(scenario, state, how)),
        )

    def _reports(self, scenario: Scenario, state: RankState, how: str) -> tuple[RankReport, ...]:
        """All ranks met the same end; what the process printed last is told once."""
        return tuple(
            RankReport(rank=rank, state=state, error=how, stack="" if rank else self.printed())
            for rank in range(scenario.layout.mesh.num_ranks)
        )

    def close(self) -> None:
        """Kill it if need be and let go of everything."""
        super().close()
        self._recorder.close()
