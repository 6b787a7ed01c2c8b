"""Campaigns whose processes are killed and stopped, and whose disk goes and comes back, by a fixed schedule."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from chaos import planted
from equivcheck.campaign.events import Event, Summary, Ticked
from equivcheck.campaign.findings.finding import load_finding
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.supervisor import fuzz
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.worlds.workers.fork_server import current_server, forked_workers
from equivcheck.worlds.workers.process import worker_environment

CACHE_OF_TORCH = "torchinductor_"
"""A folder that torch makes where temporary files lie, and keeps."""
TEMPLATE_OF_TORCH = ["_remote_module_non_scriptable.py"]
"""What lies in one that older versions make where they are imported, and remove unless they are killed."""

Blow = Callable[[list[psutil.Process], Path], bool]
"""Does something to the workers of a campaign, or to the folder of its findings; whether it could, else it is tried again."""


def take_store(_workers: list[psutil.Process], store: Path) -> bool:
    """Nothing can be kept there any more."""
    store.rename(store.with_suffix(".away"))
    store.touch()
    return True


def give_store_back(_workers: list[psutil.Process], store: Path) -> bool:
    """As it was."""
    store.unlink()
    store.with_suffix(".away").rename(store)
    return True


def kill_worker(workers: list[psutil.Process], _store: Path) -> bool:
    """As the kernel does when memory runs out; not one that has been stopped, which is to be noticed."""
    going = [worker for worker in workers if worker.status() != psutil.STATUS_STOPPED]
    for worker in going[:1]:
        worker.kill()
    return bool(going)


def stop_worker(workers: list[psutil.Process], _store: Path) -> bool:
    """It never goes on by itself: the one that has computed most, as one that has just started may take its time."""
    worker = max(workers, key=lambda each: each.cpu_times().user, default=None)
    if worker is not None:
        worker.suspend()
    return worker is not None


def kill_descendant(workers: list[psutil.Process], _store: Path) -> bool:
    """Of a worker with ranks that are processes: the youngest is a rank."""
    descendants = [each for worker in workers for each in worker.children(recursive=True)]
    for each in descendants[-1:]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended by itself meanwhile
            each.kill()
    return bool(descendants)


def kill_fork_server(workers: list[psutil.Process], _store: Path) -> bool:
    """From which ranks are forked."""
    servers = [each for worker in workers for each in worker.children()]
    for each in servers[:1]:
        each.kill()
    return bool(servers)


class Chaos:
    """Listens to a campaign, and strikes when so many checks have been done."""

    def __init__(self, schedule: dict[int, Blow], store: Path) -> None:
        self._left, self._store = dict(sorted(schedule.items())), store
        self.struck: list[str] = []

    def __call__(self, event: Event) -> None:
        """Strike if it is time to."""
        if isinstance(event, Ticked) and self._left and event.tally.num_checks >= (number := next(iter(self._left))):
            strike = self._left[number]
            if strike(running_workers(), self._store):
                self.struck.append(self._left.pop(number).__name__)


def running_workers() -> list[psutil.Process]:
    """Children of the process that they were forked from, or of this one where they are not forked."""
    server = current_server()
    parent = psutil.Process(None if server is None else server.pid)
    return [each for each in parent.children() if each.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of temporary files, of all processes of a test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    tempfile.tempdir = None


def campaign(store: Path, world: str, chaos: Chaos, num_checks: int) -> Summary:
    """Two workers that check real scenarios under such a schedule, forked as those of the usual check are."""
    plan = Plan(
        num_checks=num_checks,
        seed=0,
        num_workers=2,
        world=world,
        deadline=4.0,
        stuck_seconds=6.0,
        shrink_seconds=5.0,
        confirm=False,
        strategy=planted.some_scenarios,
        check=planted.check,
    )
    with forked_workers("equivcheck.campaign.workers.warming", worker_environment()):
        return fuzz(plan, FindingStore(store), [chaos])


def is_of_torch(path: Path) -> bool:
    """Whether torch has made a folder, and not removed it."""
    return path.name.startswith(CACHE_OF_TORCH) or (path.is_dir() and os.listdir(path) == TEMPLATE_OF_TORCH)


SCHEDULES: dict[str, dict[int, Blow]] = {
    "sim": {1: take_store, 5: kill_worker, 20: stop_worker, 30: kill_worker, 35: give_store_back},
    "gloo": {2: kill_fork_server, 6: kill_descendant, 10: kill_worker, 14: kill_descendant},
}


@pytest.mark.slow
@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_campaign_whose_processes_are_killed_finds_what_is_wrong_and_nothing_else(
    tmp_path: Path, temporary: Path, world: str
) -> None:
    """Every finding that is kept is the planted fault, that one is kept, and neither processes nor files are left."""
    store = tmp_path / "findings"
    chaos = Chaos(SCHEDULES[world], store)
    before = set(psutil.Process().children(recursive=True))
    summary = campaign(store, world, chaos, num_checks=40)
    assert not summary.broken
    assert chaos.struck == [blow.__name__ for blow in SCHEDULES[world].values()]
    assert summary.findings
    for finding in summary.findings:
        assert finding.verdict.outcome is Outcome.DIVERGED, finding.verdict.describe()
        assert planted.is_faulty(finding.verdict.scenario)
        assert load_finding(finding.path).verdict == finding.verdict
    assert not set(psutil.Process().children(recursive=True)) - before
    assert [each for each in temporary.iterdir() if not is_of_torch(each)] == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
