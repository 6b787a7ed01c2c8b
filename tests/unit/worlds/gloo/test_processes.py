"""No process outlives its owner, however the owner ends."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import psutil
import pytest

from equivcheck.checking.check import check
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.quality.doctor import smallest_scenario
from equivcheck.scenario import DDP
from equivcheck.worlds.failure import RanksDidNotStart, RanksFailed
from equivcheck.worlds.gloo import fork_server, world
from equivcheck.worlds.gloo.channel import Channel
from equivcheck.worlds.gloo.fork_server import EARLY_START, FORK_SERVER, ForkServer
from equivcheck.worlds.gloo.world import GlooRanks
from equivcheck.worlds.processes.spawn import run_spawned
from support.processes import end_soon
from unit.worlds.gloo import programs

OPENING = """
import os, sys, time
from equivcheck.worlds.gloo.world import GlooRanks
ranks = GlooRanks(2)
workers = ranks.run(os.getpid).values
from equivcheck.worlds.gloo.fork_server import FORK_SERVER
started = ranks.run(os.spawnlp, os.P_NOWAIT, "sleep", "sleep", "1000").values
print(FORK_SERVER._process.pid, *workers, *started, flush=True)
"""
HANG = "ranks.run(time.sleep, 1000)\n"


def start(body: str) -> tuple[subprocess.Popen[str], list[int]]:
    """An owner in its own process, and its child processes."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OPENING + body],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    return owner, [int(pid) for pid in owner.stdout.readline().split()]


def test_close_ends_ranks(ranks: GlooRanks) -> None:
    """After closing no rank and no child of a rank is left; closing again is allowed."""
    ranks.run(programs.place)
    other = GlooRanks(3)
    pids = (*other.run(programs.process).values, *other.run(programs.start_sleeper).values)
    other.close()
    other.close()
    assert end_soon(*pids)
    assert ranks.run(programs.place).values == ((0, 2), (1, 2))


def test_ranks_start_with_the_modules_that_their_owner_has_imported(ranks: GlooRanks) -> None:
    """The fork server imports that code once, and still has one thread."""
    assert "equivcheck.layouts.composition.program" in sys.modules
    with GlooRanks(1) as other:
        assert other.run(programs.is_imported, "equivcheck.layouts.composition.program").values == (True,)
        assert FORK_SERVER._process is not None
        assert psutil.Process(FORK_SERVER._process.pid).num_threads() == 1


@pytest.mark.slow
def test_what_compilers_import_is_imported_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks forked after a compilation inherit its imports, from a process that still has one thread."""
    imported, threads = [], []
    for is_prepared in (False, True):
        monkeypatch.setattr(world, "FORK_SERVER", server := ForkServer())
        with GlooRanks(2) as ranks:
            if is_prepared:
                ranks.prepare_to_compile()
            imported.append(max(ranks.run(programs.imported_by_compiling).values))
            assert server._process is not None
            threads.append(psutil.Process(server._process.pid).num_threads())
    assert threads == [1, 1]
    assert imported[0] > 100
    assert imported[1] < 10


def test_an_early_start_serves_the_first_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked from the process started in the background, which ends with its last user."""
    monkeypatch.setattr(world, "FORK_SERVER", server := ForkServer())
    with server.started_early():
        for thread in threading.enumerate():
            if thread.name == EARLY_START:
                thread.join()
        process = server._process
        assert process is not None
        with GlooRanks(1) as other:
            other.run(programs.process)
        assert server._process is process
        assert process.poll() is None
    assert process.poll() is not None


def test_close_can_be_undone(ranks: GlooRanks) -> None:
    """Closed ranks start again at the next run."""
    with GlooRanks(1) as other:
        first = other.run(programs.process).values
        other.close()
        assert other.run(programs.process).values != first


def test_forgotten_ranks_end(ranks: GlooRanks) -> None:
    """Ranks without references are closed."""
    other = GlooRanks(1)
    pids = other.run(programs.process).values
    del other
    assert end_soon(*pids)


def test_a_killed_fork_server_is_replaced(ranks: GlooRanks) -> None:
    """Ranks die with their fork server, and the next run starts another one."""
    pids = ranks.run(programs.process).values
    process = FORK_SERVER._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert end_soon(*pids)
    assert ranks.run(programs.place).values == ((0, 2), (1, 2))


def lose(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Kill the first rank of the next worlds as soon as it is forked."""
    fork, lost = world._fork, itertools.count()

    def fork_and_kill() -> tuple[int, Channel]:
        pid, channel = fork()
        if next(lost) % 2 == 1 and next(kills) < times:
            os.kill(pid, signal.SIGKILL)
        return pid, channel

    kills = itertools.count()
    monkeypatch.setattr(world, "_fork", fork_and_kill)


def test_ranks_of_which_one_is_lost_at_the_start_are_started_again(ranks: GlooRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is killed before it has joined has no effect, two times in a row."""
    with GlooRanks(2) as other:
        lose(monkeypatch, 2)
        assert other.run(programs.place).values == ((0, 2), (1, 2))


def test_ranks_that_are_lost_again_and_again_do_not_start(ranks: GlooRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few attempts one line names the rank and its end, and the next run may succeed."""
    with GlooRanks(2) as other:
        lose(monkeypatch, 3)
        with pytest.raises(RanksDidNotStart) as caught:
            other.run(programs.place)
        assert str(caught.value) == "the gloo ranks could not form a process group: rank 1 killed by SIGKILL (tried 3 times)"
        assert other.run(programs.place).values == ((0, 2), (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "why"),
    [
        ("import os; os.kill(os.getpid(), 9)", "the process at the other end closed the channel"),
        ("raise OSError('no disk')", "OSError: no disk"),
    ],
)
def test_a_fork_server_that_is_lost_at_its_start_is_started_again(
    ranks: GlooRanks, monkeypatch: pytest.MonkeyPatch, first: str, why: str
) -> None:
    """A server that ends during imports is restarted a few times; then one line says why."""
    pids = ranks.run(programs.process).values
    command, starts = fork_server._command, itertools.count(1)
    monkeypatch.setattr(fork_server, "_command", lambda fd: first if next(starts) < 6 else command(fd))
    process = FORK_SERVER._process
    assert process is not None
    process.kill()
    assert end_soon(*pids)
    with pytest.raises(RanksDidNotStart) as caught:
        ranks.run(programs.place)
    assert str(caught.value) == f"the fork server of the gloo ranks ended while it started: {why} (tried 3 times)"
    assert ranks.run(programs.place).values == ((0, 2), (1, 2))


def test_a_check_that_loses_a_rank_is_made_again(ranks: GlooRanks, tmp_path: Path) -> None:
    """A rank that was killed once says nothing about the scenario; one that dies again is a verdict."""
    scenario = smallest_scenario(DDP)
    once, always = (partial(programs.kill_rank, first_only=first_only) for first_only in (tmp_path / "killed", None))
    assert check(scenario, world="gloo", alter=once).outcome is Outcome.EQUIVALENT
    assert (tmp_path / "killed").exists()
    verdict = check(scenario, world="gloo", alter=always)
    assert (verdict.outcome, verdict.reason) == (Outcome.CRASHED, "rank 1 killed by SIGKILL")


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (signal.SIGKILL, -signal.SIGKILL),
        pytest.param(signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, -signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_nothing_outlives_an_owner_that_is_killed(sent: signal.Signals, code: int) -> None:
    """Fork server, ranks and their children end with their owner, however suddenly, and print nothing."""
    owner, pids = start(HANG)
    assert len(pids) == 5
    owner.send_signal(sent)
    errors = owner.communicate(timeout=600)[1]
    assert owner.returncode == code
    assert end_soon(*pids)
    assert "KeyboardInterrupt" in errors if sent is signal.SIGINT else errors == ""


STARTING = {
    "a fork server": """
from equivcheck.worlds.gloo import fork_server, world
command = fork_server._command
fork_server._command = lambda fd: command(fd).replace("from equivcheck.worlds", "import unit.worlds.gloo.endless_import #")
world.GlooRanks(2).run(print)
""",
    "a spawned rank": """
from equivcheck.worlds.processes import spawn
command = spawn._command
spawn._command = lambda fd: command(fd).replace("from equivcheck.worlds", "import unit.worlds.gloo.endless_import #")
spawn.run_spawned(print, size=1)
""",
    "a worker": """
from equivcheck.worlds.workers.process import WorkerProcess
WorkerProcess("unit.worlds.gloo.endless_import", None).receive()
""",
    "a command": """
import os, sys
from equivcheck.system.commands import run
run([sys.executable, "-c", "import unit.worlds.gloo.endless_import"], seconds=None, environment=os.environ)
""",
}


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("what", STARTING)
def test_what_is_starting_ends_with_its_owner(tmp_path: Path, what: str, sent: signal.Signals) -> None:
    """A process that is still importing, and so does not listen yet, ends too."""
    told = tmp_path / "pid"
    os.mkfifo(told)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "EQUIVCHECK_TEST_PID": str(told)}
    owner = subprocess.Popen([sys.executable, "-c", STARTING[what]], env=environment, stderr=subprocess.DEVNULL)
    pid = int(told.read_text())
    owner.send_signal(sent)
    owner.wait(30)
    assert end_soon(pid)


def test_ctrl_c_leaves_usable_ranks() -> None:
    """An interrupted run raises KeyboardInterrupt, and the next one works on new processes."""
    owner, pids = start(
        "import signal, threading\n"
        "timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))\n"
        "try:\n    timer.start()\n    ranks.run(time.sleep, 1000)\n"
        "except KeyboardInterrupt:\n    print(len(set(ranks.run(os.getpid).values) - set(workers)))\n"
    )
    assert owner.communicate(timeout=600) == ("2\n", "")
    assert end_soon(*pids)


@pytest.mark.slow
def test_a_forked_copy_of_the_owner_leaves_its_ranks_alone() -> None:
    """A forked child neither ends nor uses its parent's ranks, and does not keep them alive."""
    owner, pids = start(
        "if os.fork() == 0:\n"
        "    mine = ranks.run(os.getpid).values\n"
        "    print(set(mine) & set(workers), flush=True)\n"
        "    sys.exit()\n"
        "os.wait()\n"
        "print(ranks.run(os.getpid).values == workers, flush=True)\n"
    )
    assert owner.communicate(timeout=600) == ("set()\nTrue\n", "")
    assert end_soon(*pids)


def test_a_main_script_without_a_guard_runs_once(tmp_path: os.PathLike[str]) -> None:
    """Ranks never import the main script."""
    script = os.path.join(tmp_path, "script.py")
    with open(script, "w") as file:
        file.write(OPENING)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600, check=True)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1
    assert end_soon(*map(int, done.stdout.split()))


@pytest.mark.slow
def test_fresh_processes() -> None:
    """The benchmark's baseline starts processes for one run, with the same values and failures."""
    assert run_spawned(programs.place, size=2).values == ((0, 2), (1, 2))
    with pytest.raises(RanksFailed, match="rank 0 raised ValueError: boom on 1"):
        run_spawned(programs.raise_on, (0,), size=1)
