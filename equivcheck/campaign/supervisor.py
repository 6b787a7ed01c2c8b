"""The campaign: starts workers, keeps what they find, replaces those that die, and leaves no process behind."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from equivcheck.campaign.events import Event, KeptFinding, Listener, Started, Summary, Ticked
from equivcheck.campaign.messages import Broken, Checked, CheckOne, Control, Done, Found, Fuzz, MayShrink, Progress, Ready, Spent
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.process import CheckingProcess
from equivcheck.campaign.tally import Tally
from equivcheck.findings.finding import StoreFailed
from equivcheck.findings.fingerprint import fingerprint
from equivcheck.findings.size import size_of
from equivcheck.findings.store import FindingStore, Kept, says_more
from equivcheck.verdict.description import failed
from equivcheck.verdict.verdict import Verdict
from equivcheck.workers.link import Stop
from equivcheck.workers.process import Ended
from equivcheck.workers.supervision import Interruption, Pool, Stuck

_MOST_FALSE_STARTS = 2
"""Processes in a row that may end before their first check; then it is no accident."""
_STOP_SECONDS = 1.0
"""How long workers may take to finish their check after an interruption."""


def fuzz(plan: Plan, store: FindingStore, listeners: Sequence[Listener] = ()) -> Summary:
    """Check generated scenarios until the plan's time is up and keep what fails.

    SIGINT and SIGTERM end it early, with a summary; a second one raises `KeyboardInterrupt`. Raises `StoreFailed` when findings
    could not be kept from the start; what cannot be kept later is in the summary alone.
    """
    store.require_writable()
    with Interruption() as interruption:
        return _Campaign(plan, store, listeners, interruption).run()


class _Campaign:
    def __init__(self, plan: Plan, store: FindingStore, listeners: Sequence[Listener], interruption: Interruption) -> None:
        self._plan, self._store, self._listeners, self._interruption = plan, store, listeners, interruption
        self._pool = Pool[CheckingProcess]()
        self._ready: list[CheckingProcess] = []
        self._start: float | None = None
        self._end = 0.0
        self._stop_at: float | None = None
        self._tally = Tally()
        self._checked = Counter[int]()
        self._findings: dict[str, KeptFinding] = {}
        self._shrinking: set[str] = set()
        self._broken = self._unkept = ""
        self._false_starts = 0
        self._control: Control | None = None

    def run(self) -> Summary:
        self._tell(Started(plan=self._plan))
        with self._pool as pool:
            for number in range(self._plan.num_workers):
                pool.workers.append(CheckingProcess(self._plan, (number, 0)))
            while pool.workers:
                self._turn()
        self._store_unkept()
        return self._summary()

    def _turn(self) -> None:
        for worker, message in self._pool.messages():
            self._obey(worker, message)
        if (self._interruption.requested or self._broken) and self._stop_at is None:
            self._stop()
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            for worker in list(self._pool.workers):
                self._done(worker)
                worker.kill()
                self._remove(worker)
                self._keep_unchecked(worker.suspect)
        self._tell(Ticked(seconds=self._seconds, tally=self._tally, num_findings=len(self._findings)))

    @property
    def _seconds(self) -> float:
        """Since the start of the clock; once no worker is at work, until the last one was done."""
        if self._start is None:
            return 0.0
        at_work = any(not worker.done for worker in self._pool.workers)
        return (time.monotonic() if at_work else self._end) - self._start

    @property
    def _over(self) -> bool:
        return self._stop_at is not None or self._seconds >= self._plan.seconds

    def _obey(self, worker: CheckingProcess, message: Any) -> None:
        if isinstance(message, Progress):
            self._tally.merge(message.tally)
            self._checked[worker.place[0]] += message.tally.num_checks
        elif isinstance(message, Found):
            self._keep(message.verdict)
            if message.asks:
                self._answer(worker, fingerprint(message.verdict))
        elif isinstance(message, Control):
            self._control = message
        elif isinstance(message, Ready) and worker.suspect is not None:
            worker.send(CheckOne(scenario=worker.suspect.scenario, beyond=bool(worker.suspect.beyond)))
        elif isinstance(message, Ready):
            self._begin(worker)
        elif isinstance(message, Checked):
            self._checked_again(worker, message.verdict)
        elif isinstance(message, Done | Spent):
            self._done(worker, message)
        elif isinstance(message, Broken):
            self._done(worker)
            self._broken = self._broken or f"{message.summary}\n{message.trace}"
        elif isinstance(message, Stuck):
            self._lost(worker, worker.hang())
        elif isinstance(message, Ended) and worker.done:
            self._remove(worker)
        elif isinstance(message, Ended):
            self._lost(worker, worker.death())

    def _done(self, worker: CheckingProcess, last_word: Done | Spent | None = None) -> None:
        """The worker has said all; one that is spent has drawn until then, unless another is in its place already."""
        is_to_be_replaced = isinstance(last_word, Spent) and not worker.done
        worker.done = True
        self._end = time.monotonic()
        if is_to_be_replaced:
            worker.kill()
            self._remove(worker)
            self._employ(worker)

    def _begin(self, worker: CheckingProcess) -> None:
        """The clock starts when all of the first workers are ready; those that replace others begin at once."""
        self._false_starts = 0
        self._ready.append(worker)
        if self._start is None and len(self._ready) == self._plan.num_workers:
            self._start = time.monotonic()
        if self._start is not None:
            for other in self._ready:
                other.send(Fuzz(seconds=self._plan.seconds - self._seconds, num_checks=self._checks_left(other)))
            self._ready.clear()

    def _checks_left(self, worker: CheckingProcess) -> float:
        number, _ = worker.place
        return self._plan.checks_of(number) - self._checked[number]

    def _answer(self, worker: CheckingProcess, mark: str) -> None:
        worker.send(MayShrink(yes=mark not in self._shrinking and not self._over))
        self._shrinking.add(mark)

    def _keep(self, verdict: Verdict) -> None:
        mark = fingerprint(verdict)
        kept = self._stored(verdict)
        before = self._findings.get(mark)
        if before is not None:
            adds = says_more(before.verdict, verdict)
            if not adds and size_of(before.verdict.scenario) <= size_of(verdict.scenario):
                return
            kept = before.kept if (adds or kept is Kept.SMALLER) and kept is not Kept.UNKEPT else kept
        self._findings[mark] = KeptFinding(fingerprint=mark, path=self._store.folder(mark), verdict=verdict, kept=kept)
        self._tell(self._findings[mark])

    def _stored(self, verdict: Verdict) -> Kept:
        try:
            return self._store.keep(verdict)
        except StoreFailed as error:
            self._unkept = str(error)
        except Exception as error:
            self._unkept = failed("keeping a finding", error)
        return Kept.UNKEPT

    def _store_unkept(self) -> None:
        """At the end try once more to keep what could not be kept when it was found."""
        self._unkept = ""
        for mark, finding in self._findings.items():
            if finding.kept is Kept.UNKEPT:
                self._findings[mark] = replace(finding, kept=self._stored(finding.verdict))

    def _lost(self, worker: CheckingProcess, verdict: Verdict | None) -> None:
        """A worker died or was killed for being stuck: its scenario is checked again, and then another takes its place."""
        self._false_starts += verdict is None
        if self._false_starts > _MOST_FALSE_STARTS:
            self._broken = self._broken or f"a worker ended before its first check\n{worker.printed()}"
        self._done(worker)
        self._remove(worker)
        if verdict is None and self._stop_at is None and not self._broken:
            self._employ(worker, worker.suspect)
        elif verdict is None or self._stop_at is not None:
            self._keep_unchecked(worker.suspect or verdict)
        elif worker.suspect is not None and fingerprint(worker.suspect) == fingerprint(verdict):
            self._fails_again(worker, verdict)
        else:  # for the first time, or in another way than before, as when somebody kills one process after the other
            self._employ(worker, verdict)

    def _checked_again(self, worker: CheckingProcess, verdict: Verdict) -> None:
        """Alone, what had ended a worker has come to an end."""
        self._done(worker)
        worker.suspect = None
        if verdict.outcome.is_finding:
            self._fails_again(worker, verdict)
        else:
            self._tally.not_repeated += 1
            self._employ(worker)

    def _fails_again(self, worker: CheckingProcess, verdict: Verdict) -> None:
        """A finding: a scenario that ends its process, or fails, each time."""
        self._tally.add(verdict, worker.seconds_since_begun)
        self._tally.fingerprints[fingerprint(verdict)] += 1
        self._keep(verdict)
        self._employ(worker)

    def _keep_unchecked(self, suspect: Verdict | None) -> None:
        """Lose nothing where a campaign ends before it has checked again what ended a worker."""
        if suspect is not None:
            self._keep(replace(suspect, reason=f"{suspect.reason} (not checked again: the campaign was over first)"))

    def _employ(self, before: CheckingProcess, suspect: Verdict | None = None) -> None:
        """A process in the place of another: to check again what ended that one, even if the time is up, or to draw."""
        number, incarnation = before.place
        if suspect is not None or not (self._over or self._broken or self._checks_left(before) <= 0):
            plan = self._plan if suspect is None else self._plan.with_more_time()
            self._pool.workers.append(CheckingProcess(plan, (number, incarnation + 1), suspect))

    def _remove(self, worker: CheckingProcess) -> None:
        with contextlib.suppress(ValueError):
            self._ready.remove(worker)
        if worker.done:
            worker.end_within(_STOP_SECONDS)
        self._pool.remove(worker)

    def _stop(self) -> None:
        self._stop_at = time.monotonic() + _STOP_SECONDS
        for worker in self._pool.workers:
            worker.send(Stop())

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)

    def _summary(self) -> Summary:
        summary = Summary(
            plan=self._plan,
            seconds=self._seconds,
            tally=self._tally,
            findings=tuple(self._findings.values()),
            store=self._store.path,
            interrupted=self._interruption.requested,
            broken=self._broken,
            unkept=self._unkept,
            control=self._control,
        )
        self._tell(summary)
        return summary
