"""A worker seen from its supervisor: started, watched, asked for its stacks, killed, and its death read as a verdict."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from multiprocessing.connection import Connection, Pipe
from typing import Any

from equivcheck.campaign.plan import Plan
from equivcheck.campaign.recorder import Recorder
from equivcheck.campaign.starting import Process, end_within, how_it_ended, kill, start
from equivcheck.campaign.worker import STACK_SIGNAL
from equivcheck.layouts.execution.compile_time import all_compile_seconds
from equivcheck.scenario import Scenario
from equivcheck.verdict.verdict import Outcome, Verdict
from equivcheck.worlds.failure import Failure, FailureKind, RankReport, RankState

_TAIL = 8000
"""Bytes of what a worker printed last that are kept."""
_STACK_SECONDS = 0.5
"""How long a stuck worker gets to write its stacks."""


class WorkerProcess:
    """One process; `place` is the worker's number and how many processes it has had before."""

    def __init__(self, plan: Plan, place: tuple[int, int]) -> None:
        self.place = place
        self.done = False
        self._plan = plan
        self._recorder = Recorder.create()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - kept open until `close`
        self.link, self._process = self._start()
        self._last_count, self._last_time = 0, time.monotonic()
        self.send((plan, place))

    def _start(self) -> tuple[Connection, Process]:
        ours, its = Pipe()
        with its:
            process = start("equivcheck.campaign.worker", (its.fileno(), self._recorder.fd), self._output)
        return ours, process

    def send(self, message: object) -> None:
        """Say something; to a worker that has died it is lost, which shows when it is read from."""
        with contextlib.suppress(OSError):
            self.link.send(message)

    def receive(self) -> Any:
        """Its next message; raises `EOFError` when it has ended."""
        try:
            return self.link.recv()
        except OSError as error:
            raise EOFError(str(error)) from error

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
        return self.idle_seconds > self._plan.stuck_seconds and self.idle_seconds > self.patience

    @property
    def patience(self) -> float:
        """Seconds that what it began last may take."""
        scenario = self._recorder.last()
        return self._plan.stuck_seconds + (all_compile_seconds(scenario) if scenario else 0.0)

    def death(self) -> Verdict | None:
        """The verdict on the scenario during which it died; None if it had begun none."""
        how = f"the process that simulated the ranks {how_it_ended(self._process)}"
        return self._verdict(Outcome.CRASHED, FailureKind.DIED, RankState.DIED, how)

    def hang(self) -> Verdict | None:
        """The verdict on the scenario in which it is stuck, with its stacks; it is killed. None if it had begun none."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(STACK_SIGNAL)
            time.sleep(_STACK_SECONDS)
        self.kill()
        how = f"the check did not end within {self.patience:.0f} s"
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
            failure=Failure(kind=kind, summary=how, reports=self._reports(scenario, state, how)),
        )

    def _reports(self, scenario: Scenario, state: RankState, how: str) -> tuple[RankReport, ...]:
        """All ranks met the same end; what the process printed last is told once."""
        return tuple(
            RankReport(rank=rank, state=state, error=how, stack="" if rank else self.printed())
            for rank in range(scenario.layout.mesh.num_ranks)
        )

    def printed(self) -> str:
        """What it printed last."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), _TAIL, max(0, size - _TAIL)).decode(errors="replace")

    def kill_after(self, seconds: float) -> None:
        """Wait for its end, and end it if that takes too long."""
        end_within(self._process, seconds)

    def kill(self) -> None:
        """End it and what it started, at once."""
        kill(self._process)

    def close(self) -> None:
        """Kill it if need be and let go of everything."""
        if self._process.returncode is None:
            self.kill()
        self.link.close()
        self._recorder.close()
        self._output.close()
