"""The second run in its own process, because some findings end their process."""

from __future__ import annotations

from equivcheck.oracle.verdict.verdict import Verdict
from equivcheck.report.finding_page.second_run import SecondRun, run_once_more
from equivcheck.worlds.patience import Patience, cpu_seconds_of_family
from equivcheck.worlds.workers.link import Link
from equivcheck.worlds.workers.process import Ended, WorkerProcess

_START_SECONDS = 120.0
"""Allowance for the process's start, on top of two runs: in sim, and in the verdict's world if sim shows nothing."""
_POLL_SECONDS = 1.0


def run_isolated(verdict: Verdict, deadline: float) -> SecondRun:
    """Call `run_once_more` in a new process. If the process dies or never ends, the result is a note."""
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
    """Run the verdict's ranks."""
    link = Link(fd)
    verdict, deadline = link.task
    link.send(run_once_more(verdict, deadline=deadline))
