"""Values and failures on gloo ranks."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch._dynamo
import torch.distributed as dist

from equivcheck.errors import UsageError
from equivcheck.worlds.failure import Failure, FailureKind, RanksFailed, RankState
from equivcheck.worlds.gloo.world import GlooRanks
from support.processes import end_soon
from unit.worlds.gloo import programs


def failure(ranks: GlooRanks, program: Callable[..., Any], *arguments: Any, deadline: float = 30.0) -> Failure:
    """A program's failure, after a check for working ranks."""
    with pytest.raises(RanksFailed) as caught:
        ranks.run(program, *arguments, deadline=deadline)
    assert ranks.run(programs.place).values == ((0, 2), (1, 2))
    return caught.value.failure


def states(found: Failure) -> tuple[RankState, ...]:
    """Each rank's state."""
    assert [report.rank for report in found.reports] == [0, 1]
    return tuple(report.state for report in found.reports)


def test_values_come_in_rank_order(ranks: GlooRanks) -> None:
    """The n-th value is the return value of rank n."""
    assert ranks.run(programs.place).values == ((0, 2), (1, 2))


def test_ranks_communicate(ranks: GlooRanks) -> None:
    """Collectives reach all ranks, and arrays of any size travel unchanged in both directions."""
    weights = np.arange(300_000.0)
    for value in ranks.run(programs.ranks_sum, weights).values:
        np.testing.assert_array_equal(value, 3 * weights)


def test_processes_are_kept(ranks: GlooRanks) -> None:
    """Successful runs share processes, and a mesh from one serves the next."""
    before = ranks.run(programs.process).values
    losses = {ranks.run(programs.train_fully_sharded).values for _ in range(2)}
    assert len(losses) == 1
    assert ranks.run(programs.process).values == before


def test_random_numbers_repeat(ranks: GlooRanks) -> None:
    """Every run starts with the same random state; ranks have different ones."""
    first, second = ranks.run(programs.random_number).values, ranks.run(programs.random_number).values
    assert first == second
    assert first[0] != first[1]


def test_ranks_are_set_up(ranks: GlooRanks) -> None:
    """A rank computes with one thread and communicates over the loopback interface."""
    assert set(ranks.run(programs.environment).values) == {(1, "lo")}


def test_one_rank_raises(ranks: GlooRanks) -> None:
    """The report names the rank that raised with its traceback, and the other with its pending collective."""
    found = failure(ranks, programs.raise_on, (1,))
    assert (found.kind, found.summary) == (FailureKind.RAISED, "rank 1 raised ValueError: boom on 1")
    assert states(found) == (RankState.WAITING, RankState.RAISED)
    assert found.reports[0].pending == "barrier"
    assert found.reports[1].error == "ValueError: boom on 1"
    assert "in raise_on" in found.reports[1].stack


def test_all_ranks_raise(ranks: GlooRanks) -> None:
    """If ranks raise equal errors, the lowest is named, whichever came first."""
    found = failure(ranks, programs.raise_on, (0, 1))
    assert found.summary == "rank 0 raised ValueError: boom on 2"
    assert states(found) == (RankState.RAISED, RankState.RAISED)


def test_sys_exit_is_an_exception(ranks: GlooRanks) -> None:
    """An interpreter exit counts as raised; the process lives."""
    assert failure(ranks, programs.sys_exit).summary == "rank 0 raised SystemExit: 3"


def test_a_rank_exits(ranks: GlooRanks) -> None:
    """A process ending itself is reported with its exit code, even if other ranks raise because of it."""
    found = failure(ranks, programs.leave_on, 1, 3)
    assert (found.kind, found.summary) == (FailureKind.DIED, "rank 1 exited with code 3")
    assert found.reports[1].state is RankState.DIED


def test_a_rank_is_killed(ranks: GlooRanks) -> None:
    """A rank killed during a run fails that run, and the report names the signal."""
    victim = ranks.run(programs.process).values[0]
    threading.Timer(0.2, os.kill, (victim, signal.SIGKILL)).start()
    found = failure(ranks, programs.hang_on, 0)
    assert (found.kind, found.summary) == (FailureKind.DIED, "rank 0 killed by SIGKILL")
    assert ranks.run(programs.process).values[0] != victim


def test_a_rank_crashes(ranks: GlooRanks) -> None:
    """A fatal signal leaves the Python stack in the dead rank's report."""
    found = failure(ranks, programs.segfault_on, 0)
    assert found.summary == "rank 0 killed by SIGSEGV"
    assert "segfault_on" in found.reports[0].stack


def test_an_idle_rank_is_killed(ranks: GlooRanks) -> None:
    """A rank that died between two runs affects no verdict."""
    victim = ranks.run(programs.process).values[1]
    os.kill(victim, signal.SIGKILL)
    assert end_soon(victim)
    assert ranks.run(programs.place).values == ((0, 2), (1, 2))


def test_a_hang_is_a_timeout(ranks: GlooRanks) -> None:
    """At the deadline every rank's stack is recorded, from the program's first function to the innermost."""
    found = failure(ranks, programs.hang_on, 1, deadline=0.5)
    assert found.kind is FailureKind.TIMEOUT
    assert found.summary == "idle for 0.5 s: rank 0 waiting in all_reduce, rank 1 running in sleep_forever"
    assert states(found) == (RankState.WAITING, RankState.RUNNING)
    assert "in sleep_forever" in found.reports[1].stack
    assert all(report.stack.splitlines()[0].endswith("in hang_on") for report in found.reports)


def test_an_endless_computation_is_a_timeout(ranks: GlooRanks) -> None:
    """A rank that computes forever counts as running."""
    found = failure(ranks, programs.spin, deadline=0.3)
    assert states(found) == (RankState.RUNNING, RankState.RUNNING)
    assert "in spin" in found.reports[0].stack


@pytest.mark.slow
def test_a_stopped_rank_is_a_timeout(ranks: GlooRanks) -> None:
    """A process that cannot write its stack does not block its owner, even if its message exceeds a socket buffer."""
    os.kill(ranks.run(programs.process).values[1], signal.SIGSTOP)
    found = failure(ranks, programs.ranks_sum, np.ones(1_000_000), deadline=0.3)
    assert found.kind is FailureKind.TIMEOUT
    assert found.reports[1].stack == ""


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (programs.make_lock, "TypeError: the program returned a value that cannot be pickled: TypeError: cannot pickle"),
        (programs.make_unreadable, "ValueError: the program returned a value that cannot be read: invalid literal"),
    ],
)
def test_values_that_cannot_travel(ranks: GlooRanks, program: Callable[[], Any], text: str) -> None:
    """A value lost in pickling is an error in its program."""
    assert failure(ranks, program).summary.startswith(f"rank 0 raised {text}")


def test_programs_that_cannot_travel(ranks: GlooRanks) -> None:
    """A program or argument without a working pickle is refused before anything is sent."""
    before = ranks.run(programs.process).values
    with pytest.raises(UsageError, match="cannot be pickled"):
        ranks.run(programs.raise_on, threading.Lock())
    assert ranks.run(programs.process).values == before


def test_code_travels_that_ranks_cannot_import(ranks: GlooRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may be a local function, a closure, or part of the main script."""
    offset = 3
    assert ranks.run(lambda: dist.get_rank() + offset).values == (3, 4)
    assert ranks.run(lambda: torch._dynamo.config.verbose).values == (False, False)
    monkeypatch.setattr(programs.place, "__module__", "__main__")
    assert ranks.run(programs.place).values == ((0, 2), (1, 2))


@pytest.mark.parametrize("name", ["absent", "nowhere.absent"])
def test_code_travels_from_modules_that_only_the_owner_finds(
    ranks: GlooRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """A program may be in a module loaded from a file, as pytest loads tests, and refer to other names there."""
    file = tmp_path / "absent.py"
    file.write_text("class Point:\n    x = 3\n\ndef doubled():\n    return 2 * Point.x\n")
    if name != "absent":
        monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert ranks.run(module.doubled).values == (6, 6)
    assert not cloudpickle.list_registry_pickle_by_value()


def test_a_program_that_ranks_cannot_import(ranks: GlooRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in a module unknown to ranks is an error with advice."""
    module = type(os)("only_here")
    exec("def program(): pass", module.__dict__)
    monkeypatch.setitem(__import__("sys").modules, "only_here", module)
    found = failure(ranks, module.program)
    assert found.summary == "rank 0 raised ModuleNotFoundError: No module named 'only_here'"
    assert "so their modules must be on sys.path" in found.reports[0].stack


def test_ranks_have_the_environment_of_their_owner(ranks: GlooRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks get the environment at each run, even if they were started before, but keep their own rank variables."""
    monkeypatch.setenv("RANK", "7")
    for value in ("1", "2"):
        monkeypatch.setenv("EQUIVCHECK_TEST", value)
        assert ranks.run(lambda: (os.environ["EQUIVCHECK_TEST"], os.environ["RANK"])).values == ((value, "0"), (value, "1"))
    monkeypatch.delenv("EQUIVCHECK_TEST")
    assert ranks.run(lambda: "EQUIVCHECK_TEST" in os.environ).values == (False, False)


def test_ranks_have_what_torchrun_sets(ranks: GlooRanks) -> None:
    """Libraries that read the environment find rank and world size, and a store at the master's address."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert ranks.run(lambda: [os.environ[name] for name in names]).values == (
        ["0", "0", "2", "2", "127.0.0.1"],
        ["1", "1", "2", "2", "127.0.0.1"],
    )

    def reaches_store() -> bool:
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        dist.barrier()
        with socket.create_connection(address):
            return True

    assert ranks.run(reaches_store).values == (True, True)


def test_no_ranks_at_all() -> None:
    """A world needs a rank."""
    with pytest.raises(UsageError, match="size 0 is not valid"):
        GlooRanks(0)
