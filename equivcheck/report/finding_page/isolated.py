"""The run that is drawn, in a process of its own: some findings end theirs."""

from __future__ import annotations

from equivcheck.oracle.verdict.verdict import Verdict
from equivcheck.report.finding_page.second_run import SecondRun, run_once_more
from equivcheck.worlds.patience import Patience, cpu_seconds_of_family
from equivcheck.worlds.workers.link import Link
from equivcheck.worlds.workers.process import Ended, WorkerProcess

_START_SECONDS = 120.0
"""For the start of the process, beside two runs of the ranks, in another world where the first shows nothing."""
_POLL_SECONDS = 1.0


def run_isolated(verdict: Verdict, deadline: float) -> SecondRun:
    """The same as `run_once_more`; the death of the process, or a run that never ends, is a note."""
    worker = WorkerProcess(__name__, (verdict, deadline))
    patience = Patience(_START_SECONDS + 2 * deadline, lambda: cpu_seconds_of_family(worker.pid))
    try:
        while not worker.poll(_POLL_SECONDS):
            if patience.exhausted():
                return SecondRun(note="nothing is drawn here: the run did not end")
        answer = worker.receive()
        if isinstance(answer, Ended):
            return SecondRun(note=f"nothing is drawn here: the process of the run {worker.how_it_ended()}")
        assert isinstance(answer, SecondRun)
        return answer
    finally:
        worker.close()


def main(fd: int) -> None:
    """Run the verdict that is asked for."""
    link = Link(fd)
    verdict, deadline = link.task
    link.send(run_once_more(verdict, deadline=deadline))
