"""Supervisor of a campaign: it starts workers, keeps their findings, replaces workers that end, and leaves no process behind."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from equivcheck.campaign.events import Event, Listener, NodeWorks, Started, Summary, Ticked
from equivcheck.campaign.findings.example import is_shrunk
from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.kept_findings import KeptFindings, Shrinkers
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.tally import Tally
from equivcheck.campaign.workers.crew import CampaignWorkers, LocalWorkers, Worker
from equivcheck.campaign.workers.messages import (
    Broken,
    Checked,
    CheckOne,
    Control,
    Done,
    Found,
    Fuzz,
    InDoubt,
    Lost,
    MayShrink,
    NodeLost,
    Progress,
    Ready,
    Spent,
    TakeOver,
)
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.worlds.workers.link import Stop
from equivcheck.worlds.workers.supervision import Interruption

_MOST_FALSE_STARTS = 2
"""Maximum consecutive processes that may end before their first check. More of them are not a coincidence."""
_STOP_SECONDS = 1.0
"""Seconds that workers have to finish their check after an interruption."""
_QUIET_SECONDS, _FAILED_SECONDS = 3.0, 17.0
"""Seconds after the campaign's time at which workers are stopped: without failures, and while findings are shrunk and explained.
"""


def fuzz(
    plan: Plan, store: FindingStore, listeners: Sequence[Listener] = (), crew: CampaignWorkers[Any] | None = None
) -> Summary:
    """Check generated cases until the plan's time is up, and store the failures.

    By default, workers run on this machine; `crew` replaces them. SIGINT or SIGTERM ends the campaign early with a summary; a
    second signal raises `KeyboardInterrupt`. Raises `StoreFailed` if the store cannot be written at the start. If it cannot be
    written later on, findings are only in the summary.
    """
    store.require_writable()
    with Interruption() as interruption:
        return _Campaign(plan, store, listeners, interruption, crew or LocalWorkers()).run()


class _Campaign:
    def __init__(
        self,
        plan: Plan,
        store: FindingStore,
        listeners: Sequence[Listener],
        interruption: Interruption,
        crew: CampaignWorkers[Any],
    ) -> None:
        self._plan, self._store, self._listeners, self._interruption = plan, store, listeners, interruption
        self._crew, self._nodes = crew, NodeWorks(crew.nodes)
        self._ready: list[Worker] = []
        self._drawing: list[Worker] = []
        self._waiting = deque[Worker]()
        self._start: float | None = None
        self._end = 0.0
        self._stop_at: float | None = None
        self._tally = Tally()
        self._checked = Counter[int]()
        self._findings = KeptFindings(store)
        self._num_cut_off = 0
        self._in_doubt: dict[tuple[int, int], CaseVerdict] = {}
        self._shrinkers = Shrinkers()
        self._broken = ""
        self._false_starts = 0
        self._control: Control | None = None

    def run(self) -> Summary:
        self._tell(Started(plan=self._plan, nodes=self._nodes.so_far(0.0)))
        with self._crew as crew:
            for number in range(self._plan.num_workers):
                crew.start(self._plan, (number, 0))
            while crew.workers or self._waiting:
                self._turn()
        self._findings.try_again()
        seconds = self._seconds
        summary = Summary(
            plan=self._plan,
            seconds=seconds,
            tally=self._tally,
            findings=self._findings.all,
            store=self._store.path,
            interrupted=self._interruption.requested,
            broken=self._broken,
            unkept=self._findings.unkept,
            control=self._control,
            num_cut_off=self._num_cut_off,
            nodes=self._nodes.so_far(seconds),
        )
        self._tell(summary)
        return summary

    def _turn(self) -> None:
        for worker, message in self._crew.messages():
            self._obey(worker, message)
        while self._waiting and (self._crew.has_room or self._over):
            self._employ(self._waiting.popleft())
        # If workers do not end by themselves, they are stopped. Workers with failures get more time to shrink and explain them.
        has_failed = len(self._findings) or self._in_doubt or any(worker.suspect for worker in self._crew.workers)
        is_overdue = self._seconds >= self._plan.seconds + (_FAILED_SECONDS if has_failed else _QUIET_SECONDS)
        if (self._interruption.requested or self._broken or is_overdue) and self._stop_at is None:
            self._stop_at = time.monotonic() + _STOP_SECONDS
            for worker in self._crew.workers:
                worker.send(Stop())
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            for worker in list(self._crew.workers):
                self._num_cut_off += not worker.done
                self._done(worker)
                self._crew.remove(worker)
                self._keep_unchecked(worker.suspect or self._in_doubt.get(worker.place))
        seconds = self._seconds
        nodes = self._nodes.so_far(seconds)
        self._tell(Ticked(seconds=seconds, tally=self._tally, num_findings=len(self._findings), nodes=nodes))

    @property
    def _seconds(self) -> float:
        """Seconds since the clock started. The clock stops when the last worker has ended."""
        if self._start is None:
            return 0.0
        at_work = any(not worker.done for worker in self._crew.workers)
        return (time.monotonic() if at_work else self._end) - self._start

    @property
    def _over(self) -> bool:
        return self._stop_at is not None or self._seconds >= self._plan.seconds

    def _obey(self, worker: Worker, message: Any) -> None:
        if isinstance(message, Progress):
            num_checks = message.tally.num_checks
            self._tally.merge(message.tally)
            self._checked[worker.place[0]] += num_checks
            self._nodes.count(worker.node, num_checks)
        elif isinstance(message, Found):
            self._keep(message.verdict)
            if message.asks:
                is_first = self._shrinkers.claim(fingerprint(message.verdict), worker.place)
                worker.send(MayShrink(yes=is_first and not self._over))
        elif isinstance(message, InDoubt):
            self._note_doubt(worker, message.verdict)
        elif isinstance(message, Control):
            self._control = message
        elif isinstance(message, Ready) and worker.suspect is not None:
            worker.send(CheckOne(case=worker.suspect.case, beyond=bool(worker.suspect.beyond)))
        elif isinstance(message, Ready):
            self._false_starts = 0
            self._ready.append(worker)
            self._begin_ready()
        elif isinstance(message, Checked):
            self._checked_again(worker, message)
        elif isinstance(message, Done | Spent):
            self._done(worker, message)
        elif isinstance(message, Broken):
            self._done(worker)
            self._broken = self._broken or f"{message.summary}\n{message.trace}"
        elif isinstance(message, Lost):
            self._lost(worker, message)
        elif isinstance(message, NodeLost):
            self._lost_with_node(worker, message)

    def _done(self, worker: Worker, last_word: Done | Spent | None = None) -> None:
        # A spent worker has stopped early. It is replaced unless that has happened already.
        is_to_be_replaced = isinstance(last_word, Spent) and not worker.done
        worker.done = True
        self._end = time.monotonic()
        for workers in (self._ready, self._drawing):
            if worker in workers:
                workers.remove(worker)
        if is_to_be_replaced:
            self._crew.remove(worker)
            self._employ(worker)

    def _begin_ready(self) -> None:
        # The clock starts when all first workers are ready. Workers that replace others begin at once.
        if self._start is None and self._ready and len(self._ready) == len(self._crew.workers):
            self._start = time.monotonic()
        if self._start is not None:
            for worker in self._ready:
                worker.send(Fuzz(seconds=self._plan.seconds - self._seconds, num_checks=self._checks_left(worker)))
            self._drawing += self._ready
            self._ready.clear()
            # A drawing worker shrinks the findings of lost machines.
            while self._drawing and (mark := self._shrinkers.take(self._drawing[0].place)):
                self._drawing[0].send(TakeOver(verdict=self._findings.verdict(mark)))

    def _checks_left(self, worker: Worker) -> float:
        number, _ = worker.place
        return self._plan.checks_of(number) - self._checked[number]

    def _keep(self, verdict: CaseVerdict) -> None:
        finding = self._findings.keep(verdict)
        if finding is not None:
            self._tell(finding)

    def _lost(self, worker: Worker, lost: Lost) -> None:
        verdict = lost.verdict
        self._note_doubt(worker, None)
        self._false_starts += verdict is None
        if self._false_starts > _MOST_FALSE_STARTS:
            self._broken = self._broken or f"a worker ended before its first check\n{lost.printed}"
        self._done(worker)
        # The case is checked again, then another process takes the worker's place.
        if verdict is None and self._stop_at is None and not self._broken:
            self._employ(worker, worker.suspect)
        elif verdict is None or self._stop_at is not None:
            self._keep_unchecked(worker.suspect or verdict)
        elif worker.suspect is not None and fingerprint(worker.suspect) == fingerprint(verdict):
            self._fails_again(worker, verdict, lost.seconds)
        else:  # for the first time, or in another way than before, as when somebody kills one process after the other
            self._employ(worker, verdict)

    def _lost_with_node(self, worker: Worker, lost: NodeLost) -> None:
        """Replace a worker: immediately if it has a suspect or the control, else when there is room.

        A lost machine says nothing about the case that was being checked there.
        """
        was_done, suspect = worker.done, worker.suspect or self._in_doubt.pop(worker.place, None)
        self._done(worker)
        if self._nodes.lose(lost.name, self._seconds):
            self._tell(lost)
        if was_done:
            return
        for mark in self._shrinkers.of(worker.place):
            if not is_shrunk(self._findings.verdict(mark)):
                self._shrinkers.leave(mark)
        if self._nodes.all_lost:
            self._broken = self._broken or f"all cluster nodes are lost; the last was {lost.name}: {lost.why}"
        has_control = worker.place[0] == 0 and self._plan.controls is not None and self._control is None
        if self._stop_at is not None or self._broken:
            self._keep_unchecked(suspect)
        elif suspect is not None or has_control:
            self._employ(worker, suspect)
        else:
            self._waiting.append(worker)
        self._begin_ready()

    def _checked_again(self, worker: Worker, checked: Checked) -> None:
        self._done(worker)
        worker.suspect = None
        if checked.verdict.outcome.is_finding:
            self._fails_again(worker, checked.verdict, checked.seconds)
        else:
            self._tally.not_repeated += 1
            self._employ(worker)

    def _fails_again(self, worker: Worker, verdict: CaseVerdict, seconds: float) -> None:
        self._tally.add(verdict, seconds)
        self._tally.fingerprints[fingerprint(verdict)] += 1
        self._keep(verdict)
        self._employ(worker)

    def _note_doubt(self, worker: Worker, verdict: CaseVerdict | None) -> None:
        """Remember an unconfirmed failure, so that it is not lost if the campaign ends first."""
        self._in_doubt.pop(worker.place, None)
        if verdict is not None:
            self._in_doubt[worker.place] = verdict

    def _keep_unchecked(self, suspect: CaseVerdict | None) -> None:
        """Keep a suspect if the campaign ends before it is checked again."""
        if suspect is not None:
            self._keep(replace(suspect, reason=f"{suspect.reason} (not checked again: the campaign ended first)"))

    def _employ(self, before: Worker, suspect: CaseVerdict | None = None) -> None:
        """Replace a process. The new one checks the suspect again, even if the time is up, or draws cases."""
        number, incarnation = before.place
        if suspect is not None or not (self._over or self._broken or self._checks_left(before) <= 0):
            plan = self._plan if suspect is None else self._plan.with_more_time()
            self._crew.start(plan, (number, incarnation + 1), suspect)

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)
